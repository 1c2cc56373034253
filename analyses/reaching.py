"""At which budget does a baseline do as well as a treatment does at its own? By monotone interpolation over budgets.

The number comes from the sample means: isotonic regression makes them fall with the budget, and between two budgets a
line on the logarithm of the budget joins them (of what is positive also on its own logarithm: it falls by factors, and
a straight line would lie above it). The smallest budget that reaches the treatment counts.

Its interval is a test turned round: a budget belongs to it where the interval of `intervals` cannot tell the baseline
there from the treatment, sample by sample. So it covers as often as that one does, and nothing is resampled, which with
eight samples holds the truth too rarely. Budgets between two that belong belong as well.

Of what a single prompt can dominate, such as KL, means tell nothing: there each sample has a budget of its own, and
their median counts, between two of them (`intervals.of_medians`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

from perturbkv.analyses import intervals
from perturbkv.analyses.arithmetic import ratio
from perturbkv.analyses.intervals import Interval, Kind, Scalar
from perturbkv.analyses.reading import Floats

LEAST_BUDGETS = 5
"""Fewer leave too much to the lines between them."""
_CANDIDATES = 401
"""Budgets that are tried, evenly on the logarithm."""
_SMALLEST = 1e-12
"""Of what falls by factors: less is rounding."""


@dataclass(frozen=True)
class Reached:
    """The budget at which a baseline does as well as a treatment.

    Attributes:
        value: that budget; infinite where the largest measured does not, 0 where the smallest does better already.
        interval: its interval; an end is infinite, or 0, where the measured budgets do not show it. None: one sample.
    """

    value: float
    interval: Scalar

    @property
    def told(self) -> bool:
        """Whether it lies among the budgets measured, and its interval leaves some of them out."""
        return 0 < self.value < np.inf and not self._anywhere

    @property
    def _anywhere(self) -> bool:
        return self.interval is not None and self.interval.low == 0 and self.interval.high == np.inf

    @property
    def beyond(self) -> str:
        """On which side of the budgets measured it lies: `above`, `below`; `both` where nothing tells; else empty."""
        return "" if self.told else "both" if self._anywhere else "above" if self.value else "below"


def reached(budgets: Floats, baseline: Floats, treatment: Floats, kind: Kind) -> Reached:
    """Where the baseline's loss comes down to the treatment's.

    Args:
        budgets: (budget,) rising.
        baseline: (sample, budget) what is lost at each, the less the better.
        treatment: (sample,) what the treatment loses at its own budget.
        kind: of the comparison: on a logarithm a ratio of means, else a mean of differences.
    """
    value = _crossing(budgets, baseline.mean(axis=0), treatment.mean(), kind.log)
    tried = np.geomspace(budgets[0], budgets[-1], _CANDIDATES)
    band = intervals.band(_contrast(_weights(budgets, tried), baseline, treatment, kind.log), len(baseline), kind)
    if band is None:
        return Reached(value, None)
    equal = 1.0 if kind.log else 0.0
    low, high = _ends(tried, band.high < equal, band.low > equal)
    return Reached(value, Interval(min(low, value), max(high, value), band.kind))


def reached_by_half(budgets: Floats, baseline: Floats, treatment: Floats) -> Reached:
    """The same of something positive, as the median over samples of each one's own budget."""
    own = np.array([_crossing(budgets, *one, log=True) for one in zip(baseline, treatment, strict=True)])
    band = intervals.of_medians(own[:, None])
    middle = float(np.sort(own)[(len(own) - 1) // 2])  # of an even number the lower one: no more than is saved
    if band is None:
        return Reached(middle, None)
    one = band.at(0)
    return Reached(middle, Interval(min(one.low, budgets[-1]), max(one.high, budgets[0]), one.kind))


def _crossing(budgets: Floats, losses: Floats, level: float, log: bool) -> float:
    """The smallest budget at which the falling curve through the losses (budget,) is down at the level."""
    curve = _scaled(isotonic_regression(losses, increasing=False).x, log)
    aim = _scaled(np.asarray(level), log)
    if curve[-1] > aim:
        return float("inf")
    place = int(np.argmax(curve <= aim))
    if place == 0:
        return float(budgets[0]) if curve[0] == aim else 0.0
    share = (curve[place - 1] - aim) / (curve[place - 1] - curve[place])
    return float(budgets[place - 1] * (budgets[place] / budgets[place - 1]) ** share)


def _weights(budgets: Floats, tried: Floats) -> Floats:
    """(tried, budget) how much each measured budget counts at a tried one: the two beside it, by their logarithms."""
    places = np.log(budgets)
    return np.stack([np.interp(np.log(tried), places, one) for one in np.eye(len(budgets))], axis=1)


def _contrast(between: Floats, baseline: Floats, treatment: Floats, log: bool) -> Callable[[Floats], Floats]:
    """Treatment against baseline at each tried budget, of samples weighted (row, sample): (row, tried)."""

    def contrast(weights: Floats) -> Floats:
        level, curve = (weights @ treatment)[:, None], _scaled(weights @ baseline, log) @ between.T
        return np.asarray(ratio(level, np.exp(curve)) if log else level - curve)

    return contrast


def _ends(tried: Floats, ahead: np.ndarray, behind: np.ndarray) -> tuple[float, float]:
    """Ends of what lies behind the budgets at which the treatment is ahead for sure, and before those where it is not.

    Open, 0 or infinite, where no tried budget is on that side.
    """
    first = int(np.argmin(ahead))  # the first at which it is not surely ahead
    last = len(tried) - 1 - int(np.argmin(behind[::-1]))
    low = 0.0 if first == 0 and not ahead[0] else float(tried[-1] if ahead.all() else tried[first - 1])
    high = np.inf if last == len(tried) - 1 and not behind[-1] else float(tried[0] if behind.all() else tried[last + 1])
    return low, high


def _scaled(values: Floats, log: bool) -> Floats:
    return np.log(np.maximum(values, _SMALLEST)) if log else values
