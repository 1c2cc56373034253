"""One method over its budgets: KL of the next token, and where it passes the thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.budget.budget_axis import Axis
from perturbkv.analyses.measurements import Floats, values
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.crossings import Contest, Crossing, contest, crossing
from perturbkv.analyses.stats.intervals import Band
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.selections import STAGED
from perturbkv.trace import Trace

ANALYSIS = "cliff"


@dataclass(frozen=True)
class Cliff:
    """One method over its budgets, smallest first.

    Attributes:
        name: what tells it from the others.
        configs: its configurations.
        budgets: (budget,) as the user gave them: all entries, or all shares.
        held: (budget,) entries that the cache holds over those of the full cache; NaN where the trace does not tell.
        held_bytes: (budget,) mean bytes of the evicted caches, stored in 16 bits or fewer; NaN likewise.
        median: (budget,) of KL(full ‖ evicted) of the next token over samples, nat; `median_interval` of it.
        mean: (budget,) over samples, most of which single prompts can make.
        unstaged: (budget,) prompts in which stage 1 takes no entry in any head, where the method has a stage 1.
        crossings: one per threshold.
        contests: against the first method, one per threshold; empty of the first.
    """

    name: str
    configs: tuple[EvictionConfig, ...]
    budgets: Floats
    held: Floats
    held_bytes: Floats
    median: Floats
    median_interval: Band
    mean: Floats
    unstaged: NDArray[np.int64]
    crossings: tuple[Crossing, ...]
    contests: tuple[Contest, ...]

    def at(self, budget: float, quantity: Floats) -> float:
        """What a (budget,) quantity is at a budget among those measured, by a line on both logarithms; else NaN."""
        if not self.budgets[0] <= budget <= self.budgets[-1]:
            return float("nan")
        return float(np.exp(np.interp(np.log(budget), np.log(self.budgets), np.log(quantity))))

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        passed = [self._crossing(one) for one in self.crossings]
        return {**vars(self), "crossings": passed, "contests": [one.to_dict() for one in self.contests]}

    def _crossing(self, one: Crossing) -> dict[str, Any]:
        told = one.to_dict(self.budgets[0], self.budgets[-1])
        return {**told, "held": self.at(one.value, self.held), "held_bytes": self.at(one.value, self.held_bytes)}


def method_cliff(
    trace: Trace, name: str, own: Axis, baseline: Axis, each: Floats, thresholds: tuple[float, ...]
) -> Cliff:
    """One method; `each` is (sample, config)."""
    curves, against = each[:, list(own.places)], each[:, list(baseline.places)]
    contests = [] if own is baseline else [
        contest((baseline.at, own.at), (against, curves), threshold) for threshold in thresholds
    ]  # fmt: skip
    return Cliff(
        name=name,
        configs=own.configs,
        budgets=own.at,
        held=own.held,
        held_bytes=_bytes(trace)[list(own.places)],
        median=np.median(curves, axis=0),
        median_interval=intervals.of_medians(curves),
        mean=curves.mean(axis=0),
        unstaged=_unstaged(trace, own),
        crossings=tuple(crossing(own.at, curves, threshold) for threshold in thresholds),
        contests=tuple(contests),
    )


def _bytes(trace: Trace) -> Floats:
    """(config,) mean bytes over samples; NaN where the trace does not tell."""
    if "held_bytes" not in trace.arrays:
        return np.full(len(trace.run.configs), np.nan)
    return np.asarray(values(trace, "held_bytes", ANALYSIS).mean(axis=0))


def _unstaged(trace: Trace, own: Axis) -> NDArray[np.int64]:
    """(budget,) prompts of which a method that has two stages takes nothing in its first."""
    taken = values(trace, "stage1_count", ANALYSIS)[:, list(own.places)].max(axis=(2, 3))
    staged = np.array([config.selection.name in STAGED for config in own.configs])
    return np.asarray(((taken == 0) & staged).sum(axis=0), dtype=np.int64)
