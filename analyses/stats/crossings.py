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
from perturbkv.analyses.stats.intervals import Interval, OptionalInterval

_SMALLEST = 1e-12
"""Least KL in nat: less is rounding."""


@record
class Crossing(Record):
    """The budget from which on the median over samples stays below a threshold.

    Attributes:
        value: that budget; 0 where the median is below it at every budget measured, infinite where it is not even at
            the largest.
        mean: the same budget of the mean over samples, without an interval.
        measured: the smallest and the largest budget.
        entries: whether budgets are entries; else shares of the prompt.
    """

    threshold: float = column("KL", unit="nat", heading="#KL below,\nnat", text=lambda kl, _: f"{kl:g}")
    value: float
    interval: OptionalInterval = column(
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
        """True where `value` lies within the measured budgets."""
        return 0 < self.value < inf

    @derived(key="value")
    def known_value(self) -> float:
        """The budget from which on the median stays below; null beyond those measured."""
        return self.value if self.known else nan

    @derived(key="mean")
    def known_mean(self) -> float:
        """The budget from which on the mean over samples stays below; null beyond those measured."""
        return self.mean if 0 < self.mean < inf else nan

    @derived()
    def beyond(self) -> str:
        """Text in place of a budget that is not known: `below 0.005` or `above 0.4`; empty where it is known."""
        return self._beyond_text(self.value)

    @derived()
    def mean_beyond(self) -> str:
        """Text on the mean: `below 0.005` or `above 0.4`; empty where its budget is known."""
        return self._beyond_text(self.mean)

    @derived(heading="#from\nbudget", json=False)
    def budget(self) -> str:
        """Budget from which on the median stays below; > and <: beyond those measured, *: it passes more than once."""
        mark = "*" if self.passes > 1 else ""
        return mark + self._budget_text(self.value) + text.interval_text(
            self.interval, lambda end: self._budget_text(end).replace(" ", ""), " ")  # fmt: skip

    @derived(heading="#by the\nmean", json=False)
    def mean_budget(self) -> str:
        """Budget from which on the mean over samples stays below; one sample can dominate it."""
        return self._budget_text(self.mean)

    @derived(heading="#cache\nMB", json=False)
    def megabytes(self) -> str:
        """Mean megabytes of the cache at that budget."""
        return "–" if isnan(self.cache_bytes) else f"{self.cache_bytes / 1e6:.3g}"

    def _beyond_text(self, value: float) -> str:
        """Return the side of a budget outside the measured budgets, 'above 0.4'; empty for a known budget."""
        return {0.0: f"below {self.measured[0]:g}", inf: f"above {self.measured[1]:g}"}.get(value, "")

    def _budget_text(self, value: float) -> str:
        """Return a budget as text, with its side if outside the measured budgets: `< 0.005`, `> 0.4`."""
        smallest, largest = map(self._format, self.measured)
        return {0.0: f"< {smallest}", inf: f"> {largest}"}.get(value) or self._format(value)

    def _format(self, value: float) -> str:
        """Return a budget as text: '1,024' entries or '0.05' of the prompt."""
        return f"{value:,.0f}" if self.entries else f"{value:.2g}"


def crossing(budgets: Floats, each: Floats, threshold: float) -> Crossing:
    """Return where the median of (sample, budget) KL in nat passes the threshold; `budgets` (budget,) rise."""
    median, band = np.median(each, axis=0), intervals.of_medians(each)
    interval = None
    if band is not None:
        low, high = first_crossing(budgets, band.low, threshold), last_crossing(budgets, band.high, threshold)
        interval = Interval(low, high, band.kind)
    return Crossing(
        threshold=threshold,
        value=last_crossing(budgets, median, threshold),
        interval=interval,
        mean=last_crossing(budgets, each.mean(axis=0), threshold),
        passes=int(((median[:-1] >= threshold) & (median[1:] < threshold)).sum()),
        measured=(float(budgets[0]), float(budgets[-1])),
    )


def last_crossing(budgets: Floats, curve: Floats, threshold: float) -> float:
    """Return the budget from which on a curve (budget,) stays below the threshold; 0 for all, infinity for none."""
    above = np.flatnonzero(curve >= threshold)
    if not len(above):
        return 0.0
    index = int(above[-1])
    return inf if index == len(budgets) - 1 else _interpolated_crossing(budgets, curve, index, threshold)


def first_crossing(budgets: Floats, curve: Floats, threshold: float) -> float:
    """Return the smallest budget with a curve (budget,) below the threshold; 0 if the first is, infinity for none."""
    below = np.flatnonzero(curve < threshold)
    if not len(below):
        return inf
    index = int(below[0]) - 1
    return 0.0 if index < 0 else _interpolated_crossing(budgets, curve, index, threshold)


def _interpolated_crossing(budgets: Floats, curve: Floats, index: int, threshold: float) -> float:
    """Return the budget at which the curve crosses the threshold, between the budgets at `index` and `index` + 1."""
    high, low = np.log(np.maximum(curve[index : index + 2], _SMALLEST))
    share = (high - np.log(threshold)) / (high - low)
    return float(budgets[index] * (budgets[index + 1] / budgets[index]) ** share)


@record
class CrossingRatio(Record):
    """The ratio of the budgets at which a treatment and its baseline pass a threshold, sample by sample."""

    threshold: float = column("KL", unit="nat")
    limits: tuple[float, float] = column(
        "least and largest that the median over samples can be; 0 and null where nothing is known"
    )
    interval: OptionalInterval = column("of the median; an end is 0 or null where the budgets do not show it")
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
        ends = text.interval_text(self.interval, lambda end: f"{end:.2f}" if 0 < end < inf else "…", " ")
        if not isnan(self.ratio):
            return f"{self.ratio:.2f}{ends}"
        known = {
            (True, True): f"{least:.2f} to {most:.2f}{ends}",
            (True, False): f"≥ {least:.2f}{ends}",
            (False, True): f"≤ {most:.2f}{ends}",
        }
        return known.get((least > 0, most < inf), "?")


def crossing_ratio(budgets: tuple[Floats, Floats], each: tuple[Floats, Floats], threshold: float) -> CrossingRatio:
    """Return the ratio of treatment's to baseline's crossing: `budgets` and (sample, budget) KL, the baseline's first.

    A sample whose crossing lies beyond the budgets measured counts with all that its ratio can be.
    """
    baseline, treatment = (_crossing_limits(*curves, threshold) for curves in zip(budgets, each, strict=True))
    with np.errstate(divide="ignore"):
        least, most = treatment[0] / baseline[1], treatment[1] / baseline[0]  # least over largest, largest over least
    low, high = intervals.of_median(least), intervals.of_median(most)
    interval = None if low is None or high is None else Interval(low.low, high.high, low.kind)
    limits = (_median_ratio(least), _median_ratio(most))
    return CrossingRatio(threshold, limits, interval, int((least == most).sum()), len(least))


def _crossing_limits(budgets: Floats, curves: Floats, threshold: float) -> tuple[Floats, Floats]:
    """Return the least and largest possible crossing of each (sample, budget) curve; both equal if it is known."""
    crossings = np.array([last_crossing(budgets, curve, threshold) for curve in curves])
    return np.where(crossings == inf, budgets[-1], crossings), np.where(crossings == 0, budgets[0], crossings)


def _median_ratio(ratios: Floats) -> float:
    """Return the median of (sample,) ratios; of an even number the geometric mean of the middle two."""
    ordered = np.sort(ratios)
    low, high = ordered[(len(ratios) - 1) // 2], ordered[len(ratios) // 2]
    return float(high if np.isinf(high) else np.sqrt(low * high))
