"""How much cache can go? Last-layer drift, KL and top-1 agreement against the budget (paper, figure 3c)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import intervals
from perturbkv.analyses.arithmetic import plain, ratio
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.intervals import POSITIVE, Band, Interval
from perturbkv.analyses.layers import distances
from perturbkv.analyses.naming import short
from perturbkv.analyses.pairing import sweeps
from perturbkv.analyses.reading import Floats, at_step, held_shares, kept_share, values
from perturbkv.configs.budget import Budget
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


@dataclass(frozen=True)
class Budgets:
    """Curves of several selections.

    Attributes:
        curves: one per selection and setting.
        distance: of the drift: l1, l2 or cosine.
        kl_floor: median KL with everything kept, in nats: rounding.
        step: decode step looked at.
        identity: of the run.
    """

    curves: tuple[BudgetCurve, ...]
    distance: str
    kl_floor: float
    step: int
    identity: RunIdentity

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        document: dict[str, Any] = plain(
            {
                "distance": self.distance,
                "step": self.step,
                "kl_noise_floor": self.kl_floor,
                "curves": [{**vars(curve), "budgets": curve.budgets} for curve in self.curves],
            }
        )
        return document


def summarise(trace: Trace, sides: list[str], distance: str = "l1", step: int = 0) -> Budgets:
    """One curve per side (a selection, a policy, or policy:selection) and setting.

    Raises TraceError where the trace holds no configuration of a side, and as `layers.summarise`.
    """
    held = at_step(trace, ANALYSIS, step)
    found = [places for side in sides for places in sweeps(held.run, side)]
    measured = {
        "drift": distances(held, distance, ANALYSIS, step)[:, :, -1],
        "kl": values(held, "logit_kl", ANALYSIS, step),
        "top1": values(held, "top1_agreement", ANALYSIS, step),
    }
    names = _names(held, found)
    curves = tuple(_curve(held, name, places, measured) for name, places in zip(names, found, strict=True))
    shown = [config for curve in curves for config in curve.configs]
    floor = float(np.median(values(held, "logit_kl_noise_floor", ANALYSIS, step)))
    return Budgets(curves, distance, floor, step, identity(trace, shown, step))


def _names(trace: Trace, found: list[list[int]]) -> list[str]:
    """What tells the curves apart, the budget left out."""
    firsts = [trace.run.configs[places[0]] for places in found]
    return [name or first.selection.name for name, first in zip(short(firsts, "budget"), firsts, strict=True)]


def _curve(trace: Trace, name: str, places: list[int], measured: dict[str, Floats]) -> BudgetCurve:
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
