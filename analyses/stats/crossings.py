"""At which budget does a falling curve pass a threshold for good? By lines between what was measured, never beyond.

Budgets and KL are joined by lines on both logarithms, as both fall by factors. From the largest budget down, the curve
has passed where it first is at the threshold or above: a curve that dips below it earlier is not yet safe there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose
from typing import Any

import numpy as np

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import Interval, Scalar

_SMALLEST = 1e-12
"""Of KL in nat: less is rounding."""


@dataclass(frozen=True)
class Crossing:
    """Where the median over samples passes a threshold.

    Attributes:
        threshold: nat.
        value: the budget from which on the median stays below; 0 where it does at every budget measured, infinite where
            the largest does not do.
        interval: budgets of which the median's interval cannot tell on which side they lie; an end is 0 or infinite
            where the budgets measured do not show it. None of one sample.
        mean: the same of the mean over samples, without an interval.
        passes: how often the median comes down through the threshold; more than once and `value` is the last.
    """

    threshold: float
    value: float
    interval: Scalar
    mean: float
    passes: int

    @property
    def told(self) -> bool:
        """Whether it lies among the budgets measured."""
        return 0 < self.value < np.inf

    def to_dict(self, smallest: float, largest: float) -> dict[str, Any]:
        """Everything a reader needs, not yet plain; ends that were not measured become `below` or `above`."""
        where = {0.0: f"below {smallest:g}", np.inf: f"above {largest:g}"}
        told = {name: getattr(self, name) for name in ("value", "mean")}
        return {
            **vars(self),
            **{name: float("nan") if budget in where else budget for name, budget in told.items()},
            "beyond": where.get(self.value, ""),
            "mean_beyond": where.get(self.mean, ""),
        }


def crossing(budgets: Floats, each: Floats, threshold: float) -> Crossing:
    """Where the median of `each` (sample, budget), in nat, passes the threshold; `budgets` (budget,) rise."""
    median, band = np.median(each, axis=0), intervals.of_medians(each)
    ends = None if band is None else Interval(first(budgets, band.low, threshold), last(budgets, band.high, threshold),
                                              band.kind)  # fmt: skip
    return Crossing(
        threshold=threshold,
        value=last(budgets, median, threshold),
        interval=ends,
        mean=last(budgets, each.mean(axis=0), threshold),
        passes=int(((median[:-1] >= threshold) & (median[1:] < threshold)).sum()),
    )


def last(budgets: Floats, curve: Floats, threshold: float) -> float:
    """The budget from which on a curve (budget,) stays below the threshold: 0 if everywhere, infinite if nowhere."""
    above = np.flatnonzero(curve >= threshold)
    if not len(above):
        return 0.0
    place = int(above[-1])
    return float("inf") if place == len(budgets) - 1 else _between(budgets, curve, place, threshold)


def first(budgets: Floats, curve: Floats, threshold: float) -> float:
    """The budget at which a curve (budget,) first is below the threshold: 0 if at the smallest, infinite if nowhere."""
    below = np.flatnonzero(curve < threshold)
    if not len(below):
        return float("inf")
    place = int(below[0]) - 1
    return 0.0 if place < 0 else _between(budgets, curve, place, threshold)


def _between(budgets: Floats, curve: Floats, place: int, threshold: float) -> float:
    """Where the line from a budget at the threshold or above to the next, below it, passes."""
    high, low = np.log(np.maximum(curve[place : place + 2], _SMALLEST))
    share = (high - np.log(threshold)) / (high - low)
    return float(budgets[place] * (budgets[place + 1] / budgets[place]) ** share)


@dataclass(frozen=True)
class Contest:
    """The budget at which a treatment passes a threshold over the one at which the baseline does, prompt by prompt.

    Attributes:
        threshold: nat.
        limits: least and largest that the median over prompts of each one's own ratio can be: the same where the
            budgets measured show it; 0 and infinite where they show nothing.
        interval: of the median; an end is 0 or infinite where they do not show it. None of one sample.
        told: prompts of which both budgets lie among those measured.
        prompts: all of them.
    """

    threshold: float
    limits: tuple[float, float]
    interval: Scalar
    told: int
    prompts: int

    @property
    def ratio(self) -> float:
        """The median; NaN where it is not known."""
        least, most = self.limits
        return most if 0 < most < np.inf and isclose(least, most) else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        return {**vars(self), "ratio": self.ratio}


def contest(budgets: tuple[Floats, Floats], each: tuple[Floats, Floats], threshold: float) -> Contest:
    """The treatment's crossing over the baseline's: `budgets` and (sample, budget) KL of baseline and treatment.

    A prompt whose crossing lies beyond the budgets measured counts with all that its ratio can be.
    """
    baseline, treatment = (_reach(own, curves, threshold) for own, curves in zip(budgets, each, strict=True))
    with np.errstate(divide="ignore"):
        least, most = treatment[0] / baseline[1], treatment[1] / baseline[0]
    bands = [intervals.of_medians(side) for side in (least, most)]
    ends = None if bands[0] is None or bands[1] is None else Interval(float(bands[0].low), float(bands[1].high),
                                                                      bands[0].kind)  # fmt: skip
    return Contest(threshold, (_middle(least), _middle(most)), ends, int((least == most).sum()), len(least))


def _reach(budgets: Floats, curves: Floats, threshold: float) -> tuple[Floats, Floats]:
    """(sample,) least and largest that each sample's crossing can be: the same where it lies among the budgets."""
    own = np.array([last(budgets, curve, threshold) for curve in curves])
    return np.where(own == np.inf, budgets[-1], own), np.where(own == 0, budgets[0], own)


def _middle(ratios: Floats) -> float:
    """The median of (sample,) ratios: of two middle ones their geometric mean."""
    ordered = np.sort(ratios)
    low, high = ordered[(len(ratios) - 1) // 2], ordered[len(ratios) // 2]
    return float(high if np.isinf(high) else np.sqrt(low * high))
