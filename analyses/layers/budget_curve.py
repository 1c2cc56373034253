"""One selection over its budgets: last-layer drift, KL and top-1 agreement (paper, figure 3c)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats, held_shares, kept_share
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import POSITIVE, Band, Interval
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace

ANALYSIS = "layers --budgets"


@dataclass(frozen=True)
class BudgetCurve:
    """One selection over its budgets, smallest first.

    Attributes:
        name: selection, and whatever tells the curve from the others.
        configs: its configurations.
        kept: (budget,) mean share of the prompt's entries kept, in (0, 1].
        medians: quantity -> (budget,) over samples: last-layer drift, KL(full ‖ evicted) in nats; and `top1`, the
            share of samples whose next token is the full run's.
        means: the same as means over samples, most of which a single prompt can make.
        held: (budget,) entries that the cache holds over those of the full cache; NaN where the trace does not tell.
        intervals: of the medians and of the share, for each budget; None for one sample.
        mean_intervals: of the means.
        cliff: the neighbouring budgets between which the median KL rises most per halving of the budget; None where it
            rises nowhere, or for one budget.
    """

    name: str
    configs: tuple[EvictionConfig, ...]
    kept: Floats
    held: Floats
    medians: dict[str, Floats]
    means: dict[str, Floats]
    intervals: dict[str, Band]
    mean_intervals: dict[str, Band]
    cliff: tuple[Budget, Budget] | None

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """(budget,) as the user gave them."""
        return tuple(config.budget for config in self.configs)


def curve(trace: Trace, name: str, places: list[int], measured: dict[str, Floats]) -> BudgetCurve:
    """The curve of the configurations at `places`; `measured`: quantity -> (sample, config). Raises TraceError."""
    kept = np.array([kept_share(trace, place, ANALYSIS) for place in places])
    rising = np.argsort(kept, kind="stable")
    ordered = [places[index] for index in rising]
    over = {quantity: array[:, ordered] for quantity, array in measured.items()}
    configs = tuple(trace.run.configs[place] for place in ordered)
    means = {quantity: array.mean(axis=0) for quantity, array in over.items()}
    medians = {quantity: np.median(over[quantity], axis=0) for quantity in ("drift", "kl")} | {"top1": means["top1"]}
    agreeing = _agreeing(over["top1"] > 0)
    return BudgetCurve(
        name=name,
        configs=configs,
        kept=kept[rising],
        held=held_shares(trace, ANALYSIS)[ordered],
        medians=medians,
        means=means,
        intervals={quantity: intervals.of_medians(over[quantity]) for quantity in ("drift", "kl")} | {"top1": agreeing},
        mean_intervals={quantity: _of_means(over[quantity]) for quantity in ("drift", "kl")} | {"top1": agreeing},
        cliff=_cliff([config.budget for config in configs], kept[rising], medians["kl"]),
    )


def _of_means(array: Floats) -> Band:
    return intervals.band(lambda weights: weights @ array, len(array), POSITIVE)


def _agreeing(same: NDArray[np.bool_]) -> Band:
    """The exact interval of each budget's share of samples with the same token."""
    found = [interval for interval in map(intervals.of_samples, same.T) if interval]
    if not found:
        return None
    return Interval(np.array([one.low for one in found]), np.array([one.high for one in found]))


def _cliff(budgets: list[Budget], kept: Floats, kl: Floats) -> tuple[Budget, Budget] | None:
    """Where KL rises most per halving of the kept share."""
    if len(budgets) < 2:
        return None
    rise = np.asarray(ratio(kl[:-1] - kl[1:], np.log2(kept[1:] / kept[:-1])))
    if not (rise > 0).any():
        return None
    place = int(np.nanargmax(rise))
    return budgets[place + 1], budgets[place]
