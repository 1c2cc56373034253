"""Threshold crossings: the budget from which on a falling curve stays below a threshold, between measured budgets.

Budgets and KL are joined by lines on both logarithms, as both fall by factors. From the largest budget down, the curve
has passed where it first is at the threshold or above: a curve that dips below it earlier is not yet safe there.
"""

from __future__ import annotations

from dataclasses import KW_ONLY
from math import inf, isclose, isnan, nan

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import Interval, Scalar

_SMALLEST = 1e-12
"""Of KL in nat: less is rounding."""
_MEGABYTE = 1e6


def _plain(value: float, _: Scalar = None) -> str:
    return f"{value:g}"


@record
class Crossing(Record):
    """The budget from which on the median over samples stays below a threshold.

    Attributes:
        value: that budget; 0 where the median is below at every budget measured, infinite where it is not at the
            largest.
        mean: likewise of the mean over samples, without an interval.
        measured: the smallest and the largest budget.
        entries: whether budgets are entries; else shares of the prompt.
    """

    threshold: float = column("KL", unit="nat", heading="#KL below,\nnat", text=_plain)
    value: float
    interval: Scalar = column(
        "budgets at which the median's interval holds the threshold; low 0: below those measured, high null: above"
    )
    mean: float
    passes: int = column("how often the median comes down through the threshold; the last time counts")
    measured: tuple[float, float]
    _: KW_ONLY
    entries: bool = False
    cache_share: float = column(
        "entries of the cache over those of the full cache at `value`", key="held", heading="#cache\nshare",
        default=nan,
    )  # fmt: skip
    cache_bytes: float = column("mean bytes of the cache at `value`", key="held_bytes", default=nan)

    @property
    def known(self) -> bool:
        """Whether it lies among the budgets measured."""
        return 0 < self.value < inf

    @derived(key="value")
    def known_value(self) -> float:
        """The budget from which on the median stays below; null beyond those measured."""
        return self.value if self.known else nan

    @derived(key="mean")
    def known_mean(self) -> float:
        """The budget from which on the mean over samples stays below; null likewise."""
        return self.mean if 0 < self.mean < inf else nan

    @derived()
    def beyond(self) -> str:
        """Where no budget is known: `below 0.005` or `above 0.4`; else empty."""
        return self._beyond(self.value)

    @derived()
    def mean_beyond(self) -> str:
        """The same of the mean."""
        return self._beyond(self.mean)

    @derived(heading="#from\nbudget", json=False)
    def budget(self) -> str:
        """Budget from which on the median stays below; > and <: beyond those measured, *: it passes more than once."""
        mark = "*" if self.passes > 1 else ""
        return mark + self._sign(self.value) + text.ends(self.interval, self._end, " ")

    @derived(heading="#by the\nmean", json=False)
    def mean_budget(self) -> str:
        """Budget from which on the mean over samples stays below; one sample can dominate it."""
        return self._sign(self.mean)

    @derived(heading="#cache\nMB", json=False)
    def megabytes(self) -> str:
        """Mean megabytes of the cache at that budget."""
        return "–" if isnan(self.cache_bytes) else f"{self.cache_bytes / _MEGABYTE:.3g}"

    def _beyond(self, value: float) -> str:
        return {0.0: f"below {self.measured[0]:g}", inf: f"above {self.measured[1]:g}"}.get(value, "")

    def _sign(self, value: float) -> str:
        beyond = {0.0: f"< {self._written(self.measured[0])}", inf: f"> {self._written(self.measured[1])}"}
        return beyond.get(value) or self._written(value)

    def _end(self, end: float) -> str:
        return self._sign(end).replace(" ", "")

    def _written(self, value: float) -> str:
        return f"{value:,.0f}" if self.entries else f"{value:.2g}"


def crossing(budgets: Floats, each: Floats, threshold: float) -> Crossing:
    """Return where the median of `each` (sample, budget), in nat, passes the threshold; `budgets` (budget,) rise."""
    median, band = np.median(each, axis=0), intervals.of_medians(each)
    ends = None if band is None else Interval(first(budgets, band.low, threshold), last(budgets, band.high, threshold),
                                              band.kind)  # fmt: skip
    return Crossing(
        threshold=threshold,
        value=last(budgets, median, threshold),
        interval=ends,
        mean=last(budgets, each.mean(axis=0), threshold),
        passes=int(((median[:-1] >= threshold) & (median[1:] < threshold)).sum()),
        measured=(float(budgets[0]), float(budgets[-1])),
    )


def last(budgets: Floats, curve: Floats, threshold: float) -> float:
    """Return the budget from which on a curve (budget,) stays below the threshold: 0: everywhere, infinite: nowhere."""
    above = np.flatnonzero(curve >= threshold)
    if not len(above):
        return 0.0
    index = int(above[-1])
    return inf if index == len(budgets) - 1 else _between(budgets, curve, index, threshold)


def first(budgets: Floats, curve: Floats, threshold: float) -> float:
    """Return the budget at which a curve (budget,) first is below the threshold; 0: the smallest, infinite: nowhere."""
    below = np.flatnonzero(curve < threshold)
    if not len(below):
        return inf
    index = int(below[0]) - 1
    return 0.0 if index < 0 else _between(budgets, curve, index, threshold)


def _between(budgets: Floats, curve: Floats, index: int, threshold: float) -> float:
    """Return where the line from a budget at the threshold or above to the next, below it, passes."""
    high, low = np.log(np.maximum(curve[index : index + 2], _SMALLEST))
    share = (high - np.log(threshold)) / (high - low)
    return float(budgets[index] * (budgets[index + 1] / budgets[index]) ** share)


@record
class CrossingRatio(Record):
    """The budget at which a treatment passes a threshold over the one at which the baseline does, sample by sample."""

    threshold: float = column("KL", unit="nat")
    limits: tuple[float, float] = column(
        "least and largest that the median over samples can be; 0 and null where nothing is known"
    )
    interval: Scalar = column("of the median; an end is 0 or null where the budgets do not show it")
    known: int = column("samples of which both budgets are known", heading="#both\nknown")
    samples: int = column("all of them", key="prompts")

    @derived()
    def ratio(self) -> float:
        """The method's budget over the first one's in the median sample; null where it is not known."""
        least, most = self.limits
        return most if 0 < most < inf and isclose(least, most) else nan

    @derived(heading="#over the\nfirst's", json=False)
    def over_first(self) -> str:
        """Budget over the first method's, median over samples of each one's own ratio; … is an end not measured."""
        least, most = self.limits
        ends = text.ends(self.interval, lambda end: f"{end:.2f}" if 0 < end < inf else "…", " ")
        if not isnan(self.ratio):
            return f"{self.ratio:.2f}{ends}"
        known = {
            (True, True): f"{least:.2f} to {most:.2f}{ends}",
            (True, False): f"≥ {least:.2f}{ends}",
            (False, True): f"≤ {most:.2f}{ends}",
        }
        return known.get((least > 0, most < inf), "?")


def crossing_ratio(budgets: tuple[Floats, Floats], each: tuple[Floats, Floats], threshold: float) -> CrossingRatio:
    """Return the treatment's crossing over the baseline's: `budgets` and (sample, budget) KL of both, baseline first.

    A sample whose crossing lies beyond the budgets measured counts with all that its ratio can be.
    """
    baseline, treatment = (_limits(own, curves, threshold) for own, curves in zip(budgets, each, strict=True))
    with np.errstate(divide="ignore"):
        least, most = treatment[0] / baseline[1], treatment[1] / baseline[0]
    bands = [intervals.of_medians(side) for side in (least, most)]
    ends = None if bands[0] is None or bands[1] is None else Interval(float(bands[0].low), float(bands[1].high),
                                                                      bands[0].kind)  # fmt: skip
    return CrossingRatio(threshold, (_middle(least), _middle(most)), ends, int((least == most).sum()), len(least))


def _limits(budgets: Floats, curves: Floats, threshold: float) -> tuple[Floats, Floats]:
    """Return (sample,) least and largest possible crossings: the same where it lies among the budgets."""
    own = np.array([last(budgets, curve, threshold) for curve in curves])
    return np.where(own == inf, budgets[-1], own), np.where(own == 0, budgets[0], own)


def _middle(ratios: Floats) -> float:
    """Return the median of (sample,) ratios: of two middle ones their geometric mean."""
    ordered = np.sort(ratios)
    low, high = ordered[(len(ratios) - 1) // 2], ordered[len(ratios) // 2]
    return float(high if np.isinf(high) else np.sqrt(low * high))
