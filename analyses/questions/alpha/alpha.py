"""What is a share of stage 1 worth that each layer, or each head, has of its own? (Paper, figure 7, and left open.).

What was chosen on which samples, and what it brings: all that tables and figures show.

The tables of chosen α: what choosing brings, at each α, by layer, and what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.pairing import common
from perturbkv.analyses.questions.alpha import alpha_rows
from perturbkv.analyses.questions.alpha.alpha_choice import PAPER, Chosen, Fold, Sweep, choose, sweep, tables, unstable
from perturbkv.analyses.questions.alpha.alpha_choice import folds as parted
from perturbkv.analyses.questions.alpha.alpha_rows import NAMES, OTHERS, Measured, Point, Row, curve, measured, rows
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import Scalar
from perturbkv.analyses.text import Case, compared, over, percent, same, sentence
from perturbkv.configs.alpha_table import GLOBAL, HEAD, LAYER, AlphaTable
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace


@dataclass(frozen=True, repr=False)
class Choices:
    """What was chosen, and what it brings.

    Attributes:
        identity: which run this is.
        sweep: what every head loses at each α.
        folds: which samples were judged together, by what was chosen on the others.
        rows: isolated, each choice against the paper's α and against one α for all heads.
        curve: one α for all heads.
        chosen: on all samples: (layer, head) which α of the sweep.
        shares: the same as files hold it, by `global`, `layer`, `head`.
        unstable: of each level the share of layers or kept sets whose choice differs between folds.
        measured: what comes out, where each fold was run with its choice; None where it was not.
    """

    identity: RunIdentity
    sweep: Sweep
    folds: tuple[Fold, ...]
    rows: tuple[Row, ...]
    curve: tuple[Point, ...]
    chosen: Chosen
    shares: Mapping[str, AlphaTable]
    unstable: Mapping[str, float]
    measured: Measured | None

    @property
    def finest(self) -> str:
        """The finest level at which α was chosen: `head`, or `layer` where all its heads share a kept set."""
        return HEAD if HEAD in self.chosen else LAYER

    def row(self, by: str, chosen_on: str = OTHERS) -> Row:
        """The row of a level."""
        return next(row for row in self.rows if (row.name, row.chosen_on) == (NAMES[by], chosen_on))


_ON = {OTHERS: "other samples", "same": "the same: flatters", "": "–"}
_ROWS = (
    "", "chosen on", f"#Σ over that\nof α = {PAPER}", "#median head\nover it", "#heads\nbetter",
    "#Σ over one\nfor all heads",
)  # fmt: skip
_CURVE = ("α", f"#Σ over that of α = {PAPER}", "#layers\nthat choose it", "#heads\nthat choose it")
_LAYERS = ("layer", "#α of\nthe layer", "#α of its heads: least,\nmedian, largest", "#heads\nat 0", "#heads\nat 1")
_MEASURED = (
    "", "#KL,\nmedian, nat", f"#mean KL over\nthat of α = {PAPER}", "#samples\nlower", "#mean KL over\none for all",
    "#drift", "#propagated\nΣ",
)  # fmt: skip


def alpha_tables(result: Choices) -> list[Table | str]:
    """All of a result."""
    setting = common(result.sweep.configs, "policy", "selection", "alpha")
    shown: list[Table | str] = [
        Table(f"{setting}: isolated L1 of all heads", _ROWS, list(map(_row, result.rows))),
        _stability(result),
        Table("one α for all heads; who chooses it, on all samples", _CURVE, _curve(result)),
    ]
    if result.measured is not None:
        shown.append(Table("what comes out, chosen on other samples", _MEASURED, _measured(result)))
    return [*shown, Table("what is chosen on all samples, by layer", _LAYERS, _by_layer(result))]


def alpha_notes(result: Choices) -> str:
    """What rows and columns mean."""
    folds = f"{len(result.folds)} folds"
    said = (
        f"{text.about_intervals(result.identity.samples)} α is chosen from those of the trace by the least Σ "
        f"isolated L1 over the samples of all folds but one, and judged on that one's ({folds}); intervals hold the "
        "choices fixed. What is chosen on the very samples that it is judged on flatters; the files that are written "
        "hold such a choice, for other samples. Ties go to the α nearest the paper's. "
        f"{text.about_floor(result.rows[0].over_paper.floor_relative_median)}"
    )
    if result.measured is not None:
        said += (
            " Drift after the last layer and propagated Σ: over those of α = 0.25. Every fold's samples were run with "
            "what the others chose; composed and measured isolated L1 differ by at most "
            f"{result.measured.off:.1e} of the head's largest."
        )
    return said


def _row(row: Row) -> list[str]:
    paper, fixed = row.over_paper, row.over_fixed
    return [
        row.name,
        _ON[row.chosen_on],
        _ratio(paper.sum_ratio, paper.sum_ratio_interval),
        _ratio(paper.median_ratio, paper.median_ratio_interval),
        _share(paper.better_share, paper.better_share_interval, paper.sum_ratio, paper.sum_ratio_interval),
        _ratio(fixed.sum_ratio, fixed.sum_ratio_interval, digits=3),
    ]


def _ratio(value: float, interval: Scalar, digits: int = 2) -> str:
    """'1' of what is held against itself."""
    return "1" if same(value, interval) else text.decimal(value, interval, digits, apart="\n")


def _share(share: float, interval: Scalar, ratio: float, band: Scalar) -> str:
    """Nothing of what is held against itself."""
    return "–" if same(ratio, band) else text.percent(share, interval, "\n")


def _stability(result: Choices) -> str:
    """How much of the choice is not the same in all folds."""
    what = {GLOBAL: "of the one for all heads", LAYER: "of the layers", HEAD: "of the kept sets"}
    told = [f"{text.percent(share)} {what[by]}" for by, share in result.unstable.items() if by != GLOBAL]
    fixed = sorted({float(result.sweep.alphas[part.chosen[GLOBAL][0, 0]]) for part in result.folds})
    chosen = " or ".join(f"{alpha:g}" for alpha in fixed)
    return f"the choice differs between folds in {' and '.join(told)}; the one for all heads is {chosen}"


def _curve(result: Choices) -> list[list[str]]:
    return [
        [
            f"{one.alpha:g}",
            "1" if same(one.ratio, one.interval) else text.decimal(one.ratio, one.interval, digits=3),
            text.percent(one.layers),
            "–" if one.heads is None else text.percent(one.heads),
        ]
        for one in result.curve
    ]


def _by_layer(result: Choices) -> list[list[str]]:
    """A row per layer of the finest choice."""
    finest = result.sweep.alphas[result.chosen[result.finest]]
    of_layer = result.sweep.alphas[result.chosen[LAYER][:, 0]]
    return [
        [
            str(layer),
            f"{own:g}",
            ", ".join(f"{end:g}" for end in (shares.min(), np.median(shares), shares.max())),
            text.percent(float((shares == 0).mean())),
            text.percent(float((shares == 1).mean())),
        ]
        for layer, own, shares in zip(result.sweep.layers, of_layer, finest, strict=True)
    ]


def _measured(result: Choices) -> list[list[str]]:
    assert result.measured is not None
    return [
        [
            {NAMES[GLOBAL]: "one for all"}.get(one.name, one.name),
            text.significant(one.kl_median, one.kl_median_interval),
            _ratio(one.kl, one.kl_interval),
            _share(one.kl_lower, one.kl_lower_interval, one.kl, one.kl_interval),
            _ratio(one.kl_over_fixed, one.kl_over_fixed_interval),
            _ratio(one.drift, one.drift_interval),
            _ratio(one.propagated, one.propagated_interval),
        ]
        for one in result.measured.outcomes
    ]


@dataclass(frozen=True, repr=False)
class Alpha(Choices, Result):
    """What choosing α brings: `sweep`, `folds`, `rows`, `curve`, `chosen`, `shares`, `unstable`, `measured`.

    `folds[…].distinct` are the configurations with which a fold's samples are run, `shares["head"]` is the table that
    heads choose on all samples.
    """

    def conclusion(self) -> str:
        """What the finest choice is worth against one α for all, and that one against the paper's; then in KL."""
        finest, name = self.row(self.finest), f"α chosen {NAMES[self.finest]}"
        own: Case = ("", finest.over_fixed.sum_ratio, finest.over_fixed.sum_ratio_interval)
        kind = self.row(GLOBAL).over_paper
        fixed = compared("that one", f"α = {PAPER}", [("", kind.sum_ratio, kind.sum_ratio_interval)])
        said = f"{compared(name, 'one for all heads', [own])}, and {fixed}"
        return sentence(f"{said} (isolated, on other samples; {over(self.identity.samples)}){self._in_kl()}", "α")

    def _in_kl(self) -> str:
        if self.measured is None:
            return ""
        (one,) = (one for one in self.measured.outcomes if one.name == NAMES[self.finest])
        told = percent(one.kl_lower, one.kl_lower_interval)
        chosen = f"α chosen {NAMES[self.finest]}"
        return f"; the KL of {chosen} is lower than that of α = {PAPER} in {told} of the samples"

    def tables(self) -> list[Table | str]:
        """What choosing brings, at each α, by layer, and what comes out."""
        return alpha_tables(self)

    def notes(self) -> str:
        """What rows and columns mean."""
        return alpha_notes(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "configs": [self.sweep.baseline, *self.sweep.configs],
                "samples": self.sweep.samples,
                "heads_per_kept_set": self.sweep.group,
                "rows": [row.to_dict() for row in self.rows],
                "curve": [vars(point) for point in self.curve],
                "chosen": {by: table.to_document() for by, table in self.shares.items()},
                "differ_between_folds": self.unstable,
                "folds": [_fold_dict(part, self.sweep) for part in self.folds],
                "measured": None if self.measured is None else alpha_rows.to_dict(self.measured),
            }
        )
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per α, layer and head: mean isolated L1 over samples, and 1 where the head chose it on all of them."""
        mean, finest = self.sweep.moved.mean(axis=0), self.chosen[self.finest]
        return [
            {
                **columns_of(config), "alpha": float(self.sweep.alphas[place]), "layer": layer, "head": head,
                "perturbation": float(mean[place, row, head]), "chosen": int(finest[row, head] == place),
            }
            for place, config in enumerate(self.sweep.configs)
            for row, layer in enumerate(self.sweep.layers)
            for head in range(mean.shape[-1])
        ]  # fmt: skip


def alpha(trace: Trace, folds: int | None = None, of_folds: Iterable[Trace] = ()) -> Alpha:
    """Choose α for all heads, per layer and per head on some samples, and judge it on others (METHOD: Select).

    Chosen is what has the least Σ isolated L1 over the samples of all folds but one, from the α of the trace; judged
    are that one's. Isolated, a head's kept set depends on its own α alone, so that every choice is composed exactly.

    Args:
        trace: `attention` and `two-stage` at several α, 0.25 among them, of one policy, budget and granularity.
        folds: K; None: 4, and of fewer than eight samples leave-one-out.
        of_folds: a trace per fold of its samples at `Alpha.folds[…].distinct`, for KL and drift; none: these are left
            out.

    Raises TraceError where the trace lacks something of that or has fewer than four complete samples, budgets change
    with α, or the folds' traces are not of these folds; ConfigError for fewer folds than two, or more than samples.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> pk.alpha(trace).chosen["head"].shape
        (2, 2)
    """
    found = sweep(trace)
    parts, traces = parted(found, folds), list(of_folds)
    if any(not isinstance(one, Trace) for one in traces):
        msg = "expected traces of folds, as pk.read_trace or pk.measure give them"
        raise TraceError(msg)
    whole = choose(found, np.ones(len(found.samples), dtype=bool))
    return Alpha(
        identity=found.identity,
        sweep=found,
        folds=parts,
        rows=rows(found, parts, whole),
        curve=curve(found, whole),
        chosen=whole,
        shares=tables(found, whole),
        unstable={by: unstable(found, parts, by) for by in whole},
        measured=measured(found, parts, traces) if traces else None,
    )


def _fold_dict(part: Fold, found: Sweep) -> dict[str, Any]:
    chosen = tables(found, part.chosen)
    return {"samples": part.samples, "chosen": {by: table.to_document() for by, table in chosen.items()}}
