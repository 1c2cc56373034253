"""What is a share of stage 1 worth that each layer, or each head, has of its own? (Paper, figure 7, and left open.)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.questions.alpha import alpha_rows, alpha_tables
from perturbkv.analyses.questions.alpha.alpha_choice import Fold, choose, tables, unstable
from perturbkv.analyses.questions.alpha.alpha_choice import folds as parted
from perturbkv.analyses.questions.alpha.alpha_parts import Choices
from perturbkv.analyses.questions.alpha.alpha_rows import measured
from perturbkv.analyses.questions.alpha.alpha_rows_part import NAMES, curve, rows
from perturbkv.analyses.questions.alpha.alpha_sweep import PAPER, Sweep, sweep
from perturbkv.analyses.result import Result
from perturbkv.analyses.sentences import Case, compared, over, sentence
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.text import percent
from perturbkv.configs.alpha_table import GLOBAL
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace


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
        return alpha_tables.of(self)

    def notes(self) -> str:
        """What rows and columns mean."""
        return alpha_tables.notes(self)

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
