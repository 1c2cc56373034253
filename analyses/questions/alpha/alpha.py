"""The gain of choosing stage 1's share α per layer or per head (paper, figure 7, and left open)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, column, derived, record, table
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.pairing import common
from perturbkv.analyses.questions.alpha.alpha_choice import (
    PAPER,
    Chosen,
    ChosenShares,
    Fold,
    Sweep,
    choose,
    shares_for_json,
    sweep,
    tables,
    unstable_share,
)
from perturbkv.analyses.questions.alpha.alpha_choice import folds as split_folds
from perturbkv.analyses.questions.alpha.alpha_rows import (
    NAMES,
    OTHERS,
    SAME,
    FoldOutcomes,
    Point,
    Row,
    curve,
    rows,
    summarise_folds,
)
from perturbkv.analyses.result import Result
from perturbkv.analyses.text import comparison, percent, sample_note, sentence
from perturbkv.configs.alpha_table import GLOBAL, HEAD, LAYER, AlphaTable
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Part
from perturbkv.errors import TraceError
from perturbkv.trace import Trace


@record
class Alpha(Result):
    """Choices of stage 1's share α, made on some samples and judged on others.

    `folds[…].distinct` are the configurations with which a fold's samples are run, `shares["head"]` is the table of the
    α that each head chooses on all samples.

    Attributes:
        identity: of the run.
        sweep: the loss of every head at each α.
        chosen: choices on all samples: level (`global`, `layer`, `head`) -> (layer, head) index along the sweep's α.
        shares: the same choices as tables, which files hold.
    """

    SECTION: ClassVar[str] = "question alpha"
    SHOWN: ClassVar[tuple[str, ...]] = (
        "over_paper_sum_ratio",
        "over_paper_median_ratio",
        "over_paper_better_share",
        "over_fixed_sum_ratio",
    )
    FIRST: ClassVar[str] = "α"

    identity: RunIdentity
    sweep: Sweep
    rows: tuple[Row, ...] = column("attention, α = 0.25, each choice on other samples, and on the same ones")
    curve: tuple[Point, ...] = column("one α for all heads")
    chosen: Chosen
    shares: Mapping[str, AlphaTable]
    unstable: Mapping[str, float] = column(
        "global, layer, head → share of layers or kept sets whose choice is not the same in all folds",
        key="differ_between_folds",
    )
    folds: tuple[Fold, ...] = column("sample i is judged in fold i mod K")
    measured: FoldOutcomes | None = column(
        "outcomes where each fold is run with what the others chose; null: it was not"
    )

    @derived()
    def configs(self) -> list[EvictionConfig]:
        """Attention, then two-stage at each α."""
        return [self.sweep.baseline, *self.sweep.configs]

    @derived()
    def samples(self) -> list[str]:
        """Names of the complete samples."""
        return list(self.sweep.samples)

    @derived()
    def heads_per_kept_set(self) -> int:
        """Query heads that have one α, as they share a kept set."""
        return self.sweep.heads_per_set

    @derived(key="chosen")
    def chosen_shares(self) -> dict[str, ChosenShares]:
        """Choices made on all samples, by global, layer and head."""
        return shares_for_json(self.shares)

    @property
    def finest(self) -> str:
        """The finest level at which α was chosen: `head`, or `layer` where all its heads share a kept set."""
        return HEAD if HEAD in self.chosen else LAYER

    def row(self, level: str, chosen_on: str = OTHERS) -> Row:
        """Return the row of the α chosen at a level; `chosen_on`: other samples than judged, or the same."""
        return next(row for row in self.rows if (row.name, row.chosen_on) == (NAMES[level], chosen_on))

    def conclusion(self) -> str:
        """Return the finest choice's gain over one α for all heads, that α's gain over the paper's, and the KL."""
        finest, name = self.row(self.finest), f"α chosen {NAMES[self.finest]}"
        fixed = comparison("that one", f"α = {PAPER}", [self.row(GLOBAL).over_paper.case()])
        clauses = f"{comparison(name, 'one for all heads', [finest.over_fixed.case()])}, and {fixed}"
        note = f"isolated, on other samples; {sample_note(self.identity.samples)}"
        return sentence(f"{clauses} ({note}){self._kl_clause()}", "α")

    def title(self) -> str:
        """Return the table's title: the compared choices of α, and the choices that all configurations share."""
        setting = common(self.sweep.configs, "policy", "selection", "alpha")
        return f"isolated L1 of all heads, {len(self.folds)} folds: {setting}"

    def lines(self) -> Sequence[Line]:
        """Return a line per way of choosing α: judged on other samples, then on the same samples."""
        judged, same = ([Line(row.name, (row,)) for row in self.rows if (row.chosen_on == SAME) == on] for on in (0, 1))
        return [*judged, Line("chosen on the same:", ()), *same]

    def caveats(self) -> Sequence[str]:
        """Return notes on samples for choosing and for judging, and on differences between the folds' choices."""
        units = {LAYER: "of the layers", HEAD: "of the kept sets"}
        shares = " and ".join(
            f"{percent(self.unstable[level])} {unit}" for level, unit in units.items() if level in self.unstable
        )
        return [
            "Chosen on all folds but one, judged on that one; on the same it flatters.",
            f"The folds' choices differ in {shares}.",
        ]

    def details(self) -> Sequence[Part]:
        """Return the best α for all heads, the curve over α, outcomes of the folds' runs, and notes."""
        alphas = sorted({float(self.sweep.alphas[fold.chosen[GLOBAL][0, 0]]) for fold in self.folds})
        points = [Line(f"{point.alpha:g}", (point,)) for point in self.curve]
        return [
            f"The α chosen for all heads is {' or '.join(f'{alpha:g}' for alpha in alphas)}.",
            table(
                "one α for all heads; who chooses it, on all samples", points, ("ratio", "layers", "heads"), self.FIRST
            ),
            *self._outcome_table(),
            "α is chosen from those of the trace by the least sum of isolated L1; intervals hold the choices fixed. "
            "The files that are written hold a choice made on all samples, for others. Ties go to the α nearest the "
            "paper's.",
            text.noise_floor_note(self.rows[0].over_paper.floor_relative_median),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per α, layer and head: mean isolated L1 over samples, and 1 in `chosen` where it is chosen."""
        mean, finest = self.sweep.loss.mean(axis=0), self.chosen[self.finest]
        return [
            {
                **config_columns(config), "alpha": float(self.sweep.alphas[index]), "layer": layer, "head": head,
                "perturbation": float(mean[index, row, head]), "chosen": int(finest[row, head] == index),
            }
            for index, config in enumerate(self.sweep.configs)
            for row, layer in enumerate(self.sweep.layers)
            for head in range(mean.shape[-1])
        ]  # fmt: skip

    def _kl_clause(self) -> str:
        """Return a clause on the share of samples in which the finest choice has a lower KL than the paper's α."""
        if self.measured is None:
            return ""
        (outcome,) = (one for one in self.measured.outcomes if one.name == NAMES[self.finest])
        share = percent(outcome.kl_lower, outcome.kl_lower_interval)
        chosen = f"α chosen {NAMES[self.finest]}"
        return f"; the KL of {chosen} is lower than that of α = {PAPER} in {share} of the samples"

    def _outcome_table(self) -> list[Part]:
        """Return the table of the folds' outcomes and a note on composed L1; empty if the folds were not run."""
        if self.measured is None:
            return []
        lines = [Line(outcome.name, (outcome,)) for outcome in self.measured.outcomes]
        names = ("kl_median", "kl", "kl_lower", "kl_over_fixed", "drift", "propagated")
        return [
            table("run with what was chosen on other samples", lines, names, self.FIRST),
            f"Drift and propagated sum are over those of α = {PAPER}. Composed and measured isolated L1 differ by at "
            f"most {self.measured.composition_error:.1e} of the head's largest.",
        ]


def alpha(trace: Trace, folds: int | None = None, of_folds: Iterable[Trace] = ()) -> Alpha:
    """Choose α for all heads, per layer and per head on some samples, and judge it on others (METHOD: Select).

    The choice is the trace's α with the least Σ isolated L1 over the samples of all folds but one; it is judged on that
    one. A head's isolated L1 depends on its own α alone, so that the L1 of every choice is composed exactly.

    Args:
        trace: `attention` and `two-stage` at several α, 0.25 among them, of one policy, budget and granularity.
        folds: K; None: 4, and of fewer than eight samples leave-one-out.
        of_folds: a trace per fold of its samples at `Alpha.folds[…].distinct`, for KL and drift; empty: without these.

    Raises TraceError where the trace lacks these configurations or has fewer than four complete samples, budgets change
    with α, or the folds' traces are not of these folds; ConfigError for fewer folds than two, or more than samples.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> pk.alpha(trace).chosen["head"].shape
        (2, 2)
    """
    swept = sweep(trace)
    split, traces = split_folds(swept, folds), list(of_folds)
    if any(not isinstance(one, Trace) for one in traces):
        raise TraceError("expected traces of folds, as pk.read_trace or pk.measure give them")
    whole = choose(swept, np.ones(len(swept.samples), dtype=bool))
    return Alpha(
        identity=swept.identity,
        sweep=swept,
        folds=split,
        rows=rows(swept, split, whole),
        curve=curve(swept, whole),
        chosen=whole,
        shares=tables(swept, whole),
        unstable={level: unstable_share(swept, split, level) for level in whole},
        measured=summarise_folds(swept, split, traces) if traces else None,
    )
