"""How sure is a number that was measured on a few samples? The one place where intervals are made.

A share of samples has the exact interval of Clopper and Pearson (1934). Everything else is a statistic of weighted
means over samples: leaving out one sample at a time gives its standard error (the jackknife: Efron, 1982), and
Student's t widens it. Results of real prompts are skewed, and a few prompts weigh more than all others together; with
n − 1 degrees of freedom eight samples cover a ratio of sums in 82 to 90 % of draws, not in 95 %. So the degrees of
freedom are those of `Kind`, taken from a simulation on real samples (`docs/scripts/coverage.py`) to cover at least
92 %. Nothing is drawn at random: the same trace always gives the same interval.

A standard error needs samples that differ. Where all n samples of a mean with limits are alike, or all but one lie at a
limit, they say of the others only that these are rarer than 1 − 0.025^(1/n): such a share may lie at the far limit. Of
samples that are all 1, or all 0, this is the exact interval of a share of samples; of correlations the same on [−1, 1].

Of differences of which at least half are 0 the others are rare, and the few that were drawn say too little of how far
they go: there an end that does not leave out 0 lies further out by that same share of the farthest sample on its side.

The interval of a mean over several data sets, whose samples were drawn apart from each other.

The samples of one data set say nothing of those of another, so the data sets are strata: the squared distances from
each data set's mean to the ends of its own interval add up, each end for itself (MOVER, the method of variance
estimates recovery: Zou and Donner, Statistics in Medicine 27, 2008). Nothing is pooled: a data set in which all samples
are alike keeps the room that its own interval leaves for others, and one of few samples stays as unsure as it is. Of a
single data set this is the interval of `intervals.of_mean`.

A mean over prompts with its interval and the number of prompts that it is of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

from perturbkv.analyses.stats.arithmetic import ratio

LEVEL = 0.95
MEDIAN_LEVEL = 0.92
COVERED = 0.92
"""Share of intervals that hold what they are of, at least: what the simulation found of those that promise `LEVEL`."""
"""Two order statistics cover a median with a few levels only: the narrowest of at least this is taken."""
LEAST = 5
"""Fewer samples give a range, from the least to the largest single sample, and no interval."""
_MOST_TIE = 0.5
"""Share of differences of 0 from which on the others are rare."""
_ROUNDING = 1e-12
"""Weights such as 1/6 do not sum to 1 exactly: a share this near to 0 or 1 is one."""

Floats = NDArray[np.float64]
End = TypeVar("End", float, Floats)


@dataclass(frozen=True)
class Interval(Generic[End]):
    """Where a number lies; of an array of numbers both ends are arrays, which `at` takes apart.

    Attributes:
        low, high: its ends.
        kind: `interval` (95 %; of medians `median_level`), or `range`: the least and the largest single sample, of
            fewer than five; the number itself is of all together, and can lie outside (a median of heads' sums).
    """

    low: End
    high: End
    kind: str = "interval"

    def at(self, place: int) -> Interval[float]:
        """Return one number's interval out of those of an array."""
        return Interval(float(np.asarray(self.low)[place]), float(np.asarray(self.high)[place]), self.kind)


Scalar = Interval[float] | None
Band = Interval[Floats] | None


@dataclass(frozen=True)
class Kind:
    """What sort of number an interval is made for.

    Attributes:
        freedom: degrees of freedom of Student's t, per sample; never fewer than 1.
        log: whether it is made on the logarithm: for what is positive, has no upper end and is skewed.
        limits: least and largest value that the number can have; where both are finite it is a mean over samples.
        heads: how many heads each sample's share is of; 0 where the number is no share of heads. The shares can be
            the same in all samples seen: they never count for more than so many independent heads would.
        rare: whether it is of differences, of which most can be 0.
    """

    freedom: float
    log: bool = False
    limits: tuple[float, float] = (-np.inf, np.inf)
    heads: int = 0
    rare: bool = False

    def degrees(self, samples: float) -> float:
        """Student's degrees of freedom for so many samples."""
        return max(1.0, min(self.freedom * samples, samples - 1.0))


RATIO = Kind(7 / 32, log=True, limits=(0, np.inf))
"""A ratio of sums over samples, or a median of such ratios."""
POSITIVE = Kind(3 / 16, log=True, limits=(0, np.inf))
"""A mean of something positive that a single sample can dominate: drift, KL."""
CORRELATION = Kind(3 / 8, limits=(-1, 1))
"""A mean of rank correlations, one of each sample."""


def difference_of(width: float) -> Kind:
    """Return a mean of differences between two scores that lie at most `width` apart."""
    return Kind(3 / 8, limits=(-width, width), rare=True)


DIFFERENCE = difference_of(1)
"""A mean of differences between two scores in [0, 1]."""


def share_of(heads: int) -> Kind:
    """Return a mean over samples of each sample's share of `heads` heads."""
    return Kind(3 / 8, limits=(0, 1), heads=heads)


def rare_share_of(heads: int) -> Kind:
    """Return the same of a share near 0 or 1, which single samples leave: how many heads have σ > 0.5."""
    return Kind(3 / 16, limits=(0, 1), heads=heads)


def of_samples(hits: NDArray[np.bool_]) -> Scalar:
    """Return the exact interval of the share of samples that hit (Clopper–Pearson); None for fewer than two samples."""
    count, found = len(hits), int(np.sum(hits))
    if count < 2:
        return None
    tail = (1 - LEVEL) / 2
    low = float(special.betaincinv(found, count - found + 1, tail)) if found else 0.0
    high = float(special.betaincinv(found + 1, count - found, 1 - tail)) if found < count else 1.0
    return Interval(low, high)


def of_mean(per_sample: Floats, kind: Kind) -> Scalar:
    """Return the interval of the mean over samples of (sample,) values; samples that are NaN are left out."""
    held = per_sample[~np.isnan(per_sample)]
    return scalar(lambda weights: weights @ held, len(held), kind)


def of_medians(per_sample: Floats) -> Band:
    """Return the interval of the median over samples of (sample, …) values: two of them, whatever their distribution.

    The k-th least and the k-th largest, with the largest k that covers the median in 92 % of draws (of eight samples
    the second and the seventh: 93 %). It holds where means of a few skewed values have no interval worth reading.
    """
    count = len(per_sample)
    if count < 2:
        return None
    ordered = np.sort(per_sample, axis=0)
    if count < LEAST:
        return Interval(ordered[0], ordered[-1], "range")
    place = len(_median_levels(count)) - 1
    return Interval(ordered[place], ordered[-1 - place])


def median_level(samples: int) -> float:
    """How often the interval of `of_medians` holds the median, exactly, of so many samples of a continuous value."""
    return float(_median_levels(samples)[-1])


def _median_levels(samples: int) -> Floats:
    """Coverage of the k-th least to the k-th largest, k = 1, 2, …, as far as it is at least `MEDIAN_LEVEL`."""
    tails = accumulate(math.comb(samples, count) for count in range(samples // 2))
    inside = np.array([1 - 2 * (tail / 2**samples) for tail in tails])
    return np.asarray(inside[inside >= MEDIAN_LEVEL])


def scalar(statistic: Callable[[Floats], Floats], samples: int, kind: Kind, deciding: float | None = None) -> Scalar:
    """Return the interval of one number: `statistic` gives one value per row of weights. None where there is none."""
    found = band(statistic, samples, kind, deciding)
    if found is None or np.isnan([found.low, found.high]).any():
        return None
    return Interval(float(found.low), float(found.high), found.kind)


def band(statistic: Callable[[Floats], Floats], samples: int, kind: Kind, deciding: float | None = None) -> Band:
    """Return the interval of each number of an array, over samples; None for a single sample.

    NaN where a number has none.

    `statistic` maps weights (row, sample), each row summing to 1, to values (row, …): means over samples are then
    matrix products. `deciding`: as of how many samples the number is as unsure, where that is fewer than there are.
    """
    if samples < 2:
        return None
    single = np.eye(samples)
    if samples < LEAST:
        each = statistic(single)
        return Interval(each.min(axis=0), each.max(axis=0), "range")
    value = statistic(np.full((1, samples), 1 / samples))[0]
    low, high = jackknife(value, statistic((1 - single) / (samples - 1)), kind, deciding)
    return Interval(low, high)


def jackknife(value: Floats, left_out: Floats, kind: Kind, deciding: float | None = None) -> tuple[Floats, Floats]:
    """Ends of the interval of `value` (…) from what it is without each sample (sample, …).

    On the scale of `kind`; where that is not defined, because a value is 0, on the plain one.
    """
    count = len(left_out)
    sure = deciding or count
    reach = special.stdtrit(kind.degrees(sure), (1 + LEVEL) / 2)  # Student's t: what `stats.t.ppf` asks in the end
    plain = reach * np.sqrt(_variance(left_out) + _of_heads(value, count, kind))
    low, high = value - plain, value + plain
    if kind.log:
        usable = (value > 0) & (left_out > 0).all(axis=0)
        safe, others = np.where(usable, value, 1.0), np.where(usable, left_out, 1.0)
        factor = np.exp(np.minimum(reach * np.sqrt(_variance(np.log(others))), 700))
        low, high = np.where(usable, safe / factor, low), np.where(usable, safe * factor, high)
    low, high = np.clip(low, *kind.limits), np.clip(high, *kind.limits)
    return _open_ends(value, low, high, left_out, kind, sure) if np.isfinite(kind.limits).all() else (low, high)


def _variance(left_out: Floats) -> Floats:
    """Return (…) squared standard error by the jackknife."""
    count = len(left_out)
    return np.asarray((count - 1) / count * ((left_out - left_out.mean(axis=0)) ** 2).sum(axis=0))


def _of_heads(value: Floats, samples: int, kind: Kind) -> Floats:
    """Return the variance of the share that so many independent heads would show."""
    share = np.clip(value, 0, 1)
    return np.asarray(share * (1 - share) / (samples * kind.heads)) if kind.heads else np.zeros_like(value)


def _open_ends(
    value: Floats, low: Floats, high: Floats, left_out: Floats, kind: Kind, deciding: float
) -> tuple[Floats, Floats]:
    """Ends as far out as the share of samples that so many alike ones leave room for."""
    count, (least, most) = len(left_out), kind.limits
    rest = 1 - ((1 - LEVEL) / 2) ** (1 / deciding)
    each = count * value - (count - 1) * left_out  # the samples that the mean is of
    alike = np.zeros_like(value) if kind.heads else 1.0 * (np.ptp(each, axis=0) < count * _ROUNDING)
    unsure = [np.maximum(alike, _alone(np.abs(each - limit), count)) for limit in kind.limits]
    farther = _farther(low, high, each, rest) if kind.rare else (0.0, 0.0)
    low = low - np.maximum(unsure[1] * (low - value + rest * (value - least)), farther[0])
    high = high + np.maximum(unsure[0] * (value + rest * (most - value) - high), farther[1])
    return _snapped(np.maximum(low, least), least), _snapped(np.minimum(high, most), most)


def _farther(low: Floats, high: Floats, each: Floats, rest: float) -> tuple[Floats, Floats]:
    """By how much ends of a mean of rare differences (sample, …) lie further out; by nothing where they leave out 0."""
    size = np.abs(each).max(axis=0)
    rare = (np.abs(each) <= len(each) * _ROUNDING * size).mean(axis=0) >= _MOST_TIE
    mean, least, most = each.mean(axis=0), np.minimum(each.min(axis=0), 0), np.maximum(each.max(axis=0), 0)
    return rest * np.where(rare & (low <= 0), mean - least, 0), rest * np.where(rare & (high >= 0), most - mean, 0)


def _alone(distance: Floats, count: int) -> Floats:
    """Return (…) 1 where at most one of the samples (sample, …) departs, 0 where two depart equally far, or more do."""
    departing = np.where(distance < count * _ROUNDING, 0, distance)
    squares = (departing**2).sum(axis=0)
    effective = departing.sum(axis=0) ** 2 / np.where(squares > 0, squares, 1)  # k equal departures: k
    return np.asarray(np.clip(2 - effective, 0, 1))


def _snapped(end: Floats, limit: float) -> Floats:
    """Return the end, exactly at the limit where rounding alone keeps it away."""
    return np.where(np.abs(end - limit) <= _ROUNDING, limit, end)


def stratified_mean(strata: Sequence[Floats]) -> float:
    """Return the mean over data sets of each one's mean over its (sample,) values: every data set counts the same."""
    return float(np.mean([one.mean() for one in strata]))


def of_stratified_mean(strata: Sequence[Floats], kind: Kind) -> Scalar:
    """Return the interval of `mean`; each stratum holds the (sample,) values of one data set.

    A range where one of them has fewer than five samples: the mean of all least to the mean of all largest samples, or
    ends of intervals. None where one has a single sample.
    """
    each = [of_mean(one, kind) for one in strata]
    known = [one for one in each if one is not None]
    if len(known) < len(each):
        return None
    lows, highs = (np.array([getattr(one, end) for one in known]) for end in ("low", "high"))
    if any(one.kind == "range" for one in known):
        return Interval(float(lows.mean()), float(highs.mean()), "range")
    means = np.array([one.mean() for one in strata])
    low, high = (float(np.sqrt(((end - means) ** 2).sum()) / len(means)) for end in (lows, highs))
    return Interval(float(means.mean()) - low, float(means.mean()) + high)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts.

    Attributes:
        value: the mean; NaN where no prompt has a value.
        interval: of the mean, over prompts.
        prompts: that have a value.
    """

    value: float
    interval: Scalar
    prompts: int


def over_prompts(each: Floats, kind: Kind) -> Estimate:
    """Return the mean of (prompt,) values; prompts that are NaN are left out."""
    held = each[~np.isnan(each)]
    return Estimate(float(ratio(held.sum(), len(held))), of_mean(held, kind), len(held))


def mean_of(each: Sequence[Floats]) -> Floats:
    """Return (prompt,) mean of several (prompt,) values over those that are not NaN; NaN where all are."""
    stacked = np.stack(each)
    held = ~np.isnan(stacked)
    return np.asarray(ratio(np.where(held, stacked, 0).sum(axis=0), held.sum(axis=0)))
