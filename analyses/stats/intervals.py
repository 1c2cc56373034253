"""Intervals over samples of shares, means, medians and ratios, from a few samples: the only place where they are made.

A share of samples, such as the mean of scores that are all 0 or 1, has the exact interval of Clopper and Pearson
(1934). Everything else is a statistic of weighted means over samples: leaving out one sample at a time gives its
standard error (the jackknife: Efron, 1982), and Student's t widens it. Results of real prompts are skewed, and a few
prompts weigh more than all others together; with n − 1 degrees of freedom eight samples cover a ratio of sums in 82 to
90 % of draws, not in 95 %. So the degrees of freedom are those of `StatisticKind`, taken from a simulation on real
samples (`studies/coverage.py`) to cover at least 92 %. Nothing is drawn at random: the same trace always gives the
same interval.

A standard error needs samples that differ. Where all n samples of a mean with limits are alike, or all but one lie at a
limit, they say of the others only that these are rarer than 1 − 0.025^(1/n): such a share may lie at the far limit. Of
samples that are all 1, or all 0, this is the exact interval of a share of samples; of correlations the same on [−1, 1].

Where at least half of the differences are 0 the others are rare, and the few that were drawn say too little of how far
they go: there an end that does not leave out 0 lies further out by that same share of the farthest sample on its side.

A mean over several data sets is stratified, as the samples of one say nothing of those of another: the squared
distances from each data set's mean to the ends of its own interval add up, each end for itself (MOVER, the method of
variance estimates recovery: Zou and Donner, Statistics in Medicine 27, 2008). Nothing is pooled: a data set in which
all samples are alike keeps what its own interval leaves for others, and one of few samples keeps its wide interval.
An average of several is no share of samples: its parts are the jackknife's, also of scores that are all 0 or 1.
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
"""Two order statistics cover a median with a few levels only: the narrowest of at least this is taken."""
COVERED = 0.92
"""Least coverage of the intervals that promise `LEVEL`, by the simulation."""
MIN_SAMPLES = 5
"""Fewer samples give a range, from the least to the largest single sample, and no interval."""
_RARE_TIES = 0.5
"""Share of differences of 0 from which on the others are rare."""
_ROUNDING = 1e-12
"""Weights such as 1/6 do not sum to 1 exactly: a share this near to 0 or 1 is one."""

Floats = NDArray[np.float64]
End = TypeVar("End", float, Floats)


@dataclass(frozen=True)
class Interval(Generic[End]):
    """The interval of a number, or of each number of an array: then both ends are arrays.

    Attributes:
        low, high: its ends.
        kind: `interval` (95 %; of medians `median_level`), or, of fewer than five samples, `range`: the least and the
            largest single sample; a number of all together can lie outside (a median of heads' sums).
    """

    low: End
    high: End
    kind: str = "interval"

    def at(self, index: int) -> Interval[float]:
        """Return the interval of the number at an index of the array."""
        return Interval(float(np.asarray(self.low)[index]), float(np.asarray(self.high)[index]), self.kind)


OptionalInterval = Interval[float] | None
Band = Interval[Floats] | None


def joined(each: Sequence[OptionalInterval]) -> Band:
    """Return intervals of several numbers as those of an array; None where the first number has none.

    NaN where a number has none, or one of another kind than the first.
    """
    if not each or each[0] is None:
        return None
    kind = each[0].kind
    alike = [one if one is not None and one.kind == kind else Interval(np.nan, np.nan) for one in each]
    return Interval(np.array([one.low for one in alike]), np.array([one.high for one in alike]), kind)


@dataclass(frozen=True)
class StatisticKind:
    """The kind of statistic that an interval is of: how unsure it is, on which scale and between which limits.

    Attributes:
        freedom: degrees of freedom of Student's t, per sample; never fewer than 1.
        log: whether it is made on the logarithm: for what is positive, has no upper end and is skewed.
        limits: least and largest value that the number can have; where both are finite it is a mean over samples.
        heads: how many heads each sample's share is of; 0 where the number is no share of heads. The shares can be
            the same in all samples seen: they never count for more than so many independent heads would.
        rare: whether it is of differences, of which most can be 0.
        level: how often the interval promises to hold the number.
    """

    freedom: float
    log: bool = False
    limits: tuple[float, float] = (-np.inf, np.inf)
    heads: int = 0
    rare: bool = False
    level: float = LEVEL

    def degrees(self, samples: float) -> float:
        """Return Student's degrees of freedom for a number of samples."""
        return max(1.0, min(self.freedom * samples, samples - 1.0))

    def t_quantile(self, samples: float) -> float:
        """Return how many standard errors lie between the number and each end of its interval: Student's t."""
        return float(special.stdtrit(self.degrees(samples), (1 + self.level) / 2))  # without importing `scipy.stats`


RATIO = StatisticKind(7 / 32, log=True, limits=(0, np.inf))
"""A ratio of sums over samples, or a median of such ratios."""
POSITIVE = StatisticKind(3 / 16, log=True, limits=(0, np.inf))
"""A mean of something positive that a single sample can dominate: drift, KL."""
CORRELATION = StatisticKind(3 / 8, limits=(-1, 1))
"""A mean of rank correlations, one of each sample."""


def difference_kind(width: float) -> StatisticKind:
    """Return the kind of a mean of differences, where two scores differ by at most `width`."""
    return StatisticKind(3 / 8, limits=(-width, width), rare=True)


DIFFERENCE = difference_kind(1)
"""A mean of differences between two scores in [0, 1]."""
SIGNED = StatisticKind(3 / 16)
"""A mean of something of either sign that a single sample can dominate, such as changes of log p."""


def share_kind(heads: int) -> StatisticKind:
    """Return the kind of a mean over samples of each sample's share of `heads` heads; 0 for shares of anything else."""
    return StatisticKind(3 / 8, limits=(0, 1), heads=heads)


def rare_share_kind(heads: int) -> StatisticKind:
    """Return the kind of a share of heads that is near 0 or 1 in most samples, such as of those with σ > 0.5."""
    return StatisticKind(3 / 16, limits=(0, 1), heads=heads)


def of_share(hits: NDArray[np.bool_]) -> OptionalInterval:
    """Return the exact interval of the share of `hits` that are True (Clopper–Pearson); None for a single sample."""
    count, successes = len(hits), int(np.sum(hits))
    if count < 2:
        return None
    tail = (1 - LEVEL) / 2
    low = float(special.betaincinv(successes, count - successes + 1, tail)) if successes else 0.0
    high = float(special.betaincinv(successes + 1, count - successes, 1 - tail)) if successes < count else 1.0
    return Interval(low, high)


def of_shares(per_sample: Floats) -> OptionalInterval:
    """Return the interval of the mean of (sample,) shares: exact, as a share of samples, where all are 0 or 1."""
    whole = np.isin(per_sample, (0, 1)).all()
    return of_share(per_sample == 1) if whole else of_mean(per_sample, share_kind(0))


def of_mean(per_sample: Floats, kind: StatisticKind) -> OptionalInterval:
    """Return the interval of the mean over samples of (sample,) values; samples that are NaN are left out.

    Exact, as a share of samples, where five samples or more are all 0 or 1 and `kind` is `share_kind(0)`.
    """
    known = per_sample[~np.isnan(per_sample)]
    if kind == share_kind(0) and len(known) >= MIN_SAMPLES and np.isin(known, (0, 1)).all():
        return of_share(known == 1)
    return _jackknife_of_mean(known, kind)


def _jackknife_of_mean(known: Floats, kind: StatisticKind) -> OptionalInterval:
    """Return the interval of the mean over samples of (sample,) values without NaN, by the jackknife in any case."""
    return of_statistic(lambda weights: weights @ known, len(known), kind)


def of_means(per_sample: Floats, kind: StatisticKind) -> Band:
    """Return the interval of each mean over samples of (sample, …) values."""
    return of_statistics(lambda weights: weights @ per_sample, len(per_sample), kind)


def of_ratio(numerators: Floats, denominators: Floats, kind: StatisticKind = RATIO) -> OptionalInterval:
    """Return the interval of Σ numerators / Σ denominators, of (sample,) values each."""
    return of_statistic(
        lambda weights: np.asarray(ratio(weights @ numerators, weights @ denominators)), len(numerators), kind
    )


def of_median(per_sample: Floats) -> OptionalInterval:
    """Return the interval of the median over samples of (sample,) values, as `of_medians` has it."""
    medians = of_medians(per_sample)
    return None if medians is None else Interval(float(medians.low), float(medians.high), medians.kind)


def of_medians(per_sample: Floats) -> Band:
    """Return the interval of the median over samples of (sample, …) values: two order statistics, for any distribution.

    The k-th least and the k-th largest, with the largest k that covers the median in 92 % of draws (of eight samples
    the second and the seventh: 93 %). It holds where means of a few skewed values have no interval worth reading.
    """
    count = len(per_sample)
    if count < 2:
        return None
    ordered = np.sort(per_sample, axis=0)
    if count < MIN_SAMPLES:
        return Interval(ordered[0], ordered[-1], "range")
    rank = len(_median_levels(count)) - 1
    return Interval(ordered[rank], ordered[-1 - rank])


def median_level(samples: int) -> float:
    """Return the exact coverage of the intervals of `of_medians` for a number of samples of a continuous value."""
    return float(_median_levels(samples)[-1])


def _median_levels(samples: int) -> Floats:
    """Return the coverage of the median by k-th least to k-th largest sample, (k,), while at least `MEDIAN_LEVEL`."""
    tails = accumulate(math.comb(samples, count) for count in range(samples // 2))
    inside = np.array([1 - 2 * (tail / 2**samples) for tail in tails])
    return np.asarray(inside[inside >= MEDIAN_LEVEL])


def of_statistic(
    statistic: Callable[[Floats], Floats], samples: int, kind: StatisticKind, deciding: float | None = None
) -> OptionalInterval:
    """Return the interval of a number; None where it has none. Arguments as of `of_statistics`, with (row,) values."""
    ends = of_statistics(statistic, samples, kind, deciding)
    if ends is None or np.isnan([ends.low, ends.high]).any():
        return None
    return Interval(float(ends.low), float(ends.high), ends.kind)


def of_statistics(
    statistic: Callable[[Floats], Floats], samples: int, kind: StatisticKind, deciding: float | None = None
) -> Band:
    """Return the interval of each number of an array, over samples; None for a single sample.

    NaN where a number has none; a range for fewer than five samples.

    `statistic` maps weights (row, sample), each row summing to 1, to values (row, …): means over samples are then
    matrix products. `deciding`: the number of samples that the statistic really depends on, where it is smaller.
    """
    if samples < 2:
        return None
    single = np.eye(samples)
    if samples < MIN_SAMPLES:
        each = statistic(single)
        return Interval(each.min(axis=0), each.max(axis=0), "range")
    value = statistic(np.full((1, samples), 1 / samples))[0]
    low, high = jackknife(value, statistic((1 - single) / (samples - 1)), kind, deciding)
    return Interval(low, high)


def jackknife(
    value: Floats, left_out: Floats, kind: StatisticKind, deciding: float | None = None
) -> tuple[Floats, Floats]:
    """Return the ends of the interval of `value` (…), from its leave-one-out values (sample, …).

    They are made on the scale of `kind`; where that is not defined, because a value is 0, on the plain one. `deciding`:
    as of `of_statistics`.
    """
    count = len(left_out)
    samples = deciding or count
    reach = kind.t_quantile(samples)
    share = np.clip(value, 0, 1)
    alone = share * (1 - share) / (count * kind.heads) if kind.heads else np.zeros_like(value)  # of independent heads
    plain = reach * np.sqrt(_variance(left_out) + alone)
    low, high = value - plain, value + plain
    if kind.log:
        usable = (value > 0) & (left_out > 0).all(axis=0)
        safe, others = np.where(usable, value, 1.0), np.where(usable, left_out, 1.0)
        factor = np.exp(np.minimum(reach * np.sqrt(_variance(np.log(others))), 700))  # beyond it a float overflows
        low, high = np.where(usable, safe / factor, low), np.where(usable, safe * factor, high)
    low, high = np.clip(low, *kind.limits), np.clip(high, *kind.limits)
    if not np.isfinite(kind.limits).all():
        return low, high
    return _widen_for_unseen(value, low, high, left_out, kind, samples)


def _variance(left_out: Floats) -> Floats:
    """Return the jackknife's squared standard error (…), from leave-one-out values (sample, …)."""
    count = len(left_out)
    return np.asarray((count - 1) / count * ((left_out - left_out.mean(axis=0)) ** 2).sum(axis=0))


def _widen_for_unseen(
    value: Floats, low: Floats, high: Floats, left_out: Floats, kind: StatisticKind, deciding: float
) -> tuple[Floats, Floats]:
    """Return the interval's ends, moved outward to allow for rare values that no sample shows."""
    count, (least, most) = len(left_out), kind.limits
    rest = 1 - ((1 - kind.level) / 2) ** (1 / deciding)  # largest share of others that such samples do not exclude
    each = count * value - (count - 1) * left_out  # the samples that the mean is of
    alike = np.zeros_like(value) if kind.heads else 1.0 * (np.ptp(each, axis=0) < count * _ROUNDING)
    unsure = [np.maximum(alike, _single_departure(np.abs(each - limit), count)) for limit in kind.limits]
    extension = _rare_extension(low, high, each, rest) if kind.rare else (0.0, 0.0)
    low = low - np.maximum(unsure[1] * (low - value + rest * (value - least)), extension[0])
    high = high + np.maximum(unsure[0] * (value + rest * (most - value) - high), extension[1])
    return _snap_to_limit(np.maximum(low, least), least), _snap_to_limit(np.minimum(high, most), most)


def _rare_extension(low: Floats, high: Floats, each: Floats, rest: float) -> tuple[Floats, Floats]:
    """Return how far to move out both ends of the interval of a mean of (sample, …) differences.

    0 unless at least half of these are 0, and at an end that leaves out 0; else `rest`, the share that no sample may
    show, of the way to the farthest sample.
    """
    size = np.abs(each).max(axis=0)
    rare = (np.abs(each) <= len(each) * _ROUNDING * size).mean(axis=0) >= _RARE_TIES
    mean, least, most = each.mean(axis=0), np.minimum(each.min(axis=0), 0), np.maximum(each.max(axis=0), 0)
    return rest * np.where(rare & (low <= 0), mean - least, 0), rest * np.where(rare & (high >= 0), most - mean, 0)


def _single_departure(distance: Floats, count: int) -> Floats:
    """Return 1 where at most one sample's distance from a limit is not 0, falling to 0 for two equal distances."""
    departing = np.where(distance < count * _ROUNDING, 0, distance)
    squares = (departing**2).sum(axis=0)
    effective = departing.sum(axis=0) ** 2 / np.where(squares > 0, squares, 1)  # k equal departures: k
    return np.asarray(np.clip(2 - effective, 0, 1))


def _snap_to_limit(end: Floats, limit: float) -> Floats:
    """Return the end, set to the limit where it differs from it by rounding alone."""
    return np.where(np.abs(end - limit) <= _ROUNDING, limit, end)


def stratified_mean(strata: Sequence[Floats]) -> float:
    """Return the mean over data sets of the mean of each data set's (sample,) values."""
    return float(np.mean([values.mean() for values in strata]))


def of_stratified_mean(strata: Sequence[Floats], kind: StatisticKind) -> OptionalInterval:
    """Return the interval of `stratified_mean`; each stratum holds the (sample,) values of one data set.

    A range where one of them has fewer than five samples: from the mean of their lower ends to that of their upper
    ones. None where one has a single sample.
    """
    if len(strata) == 1:
        return of_mean(strata[0], kind)
    each = [_jackknife_of_mean(values, kind) for values in strata]
    known = [interval for interval in each if interval is not None]
    if len(known) < len(each):
        return None
    lows, highs = (np.array([getattr(interval, end) for interval in known]) for end in ("low", "high"))
    if any(interval.kind == "range" for interval in known):
        return Interval(float(lows.mean()), float(highs.mean()), "range")
    means = np.array([values.mean() for values in strata])
    low, high = (float(np.sqrt(((end - means) ** 2).sum()) / len(means)) for end in (lows, highs))
    return Interval(float(means.mean()) - low, float(means.mean()) + high)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its interval.

    Attributes:
        value: the mean; NaN where no prompt has a value.
        interval: of the mean, over prompts.
        prompts: how many have a value.
    """

    value: float
    interval: OptionalInterval
    prompts: int


def estimate_mean(each: Floats, kind: StatisticKind) -> Estimate:
    """Return the mean of (prompt,) values with its interval, ignoring NaN."""
    known = each[~np.isnan(each)]
    return Estimate(float(ratio(known.sum(), len(known))), of_mean(known, kind), len(known))


def mean_where_known(values: Sequence[Floats] | Floats, axis: int | tuple[int, ...] = 0) -> Floats:
    """Return the mean along `axis`, ignoring NaN; NaN if all numbers are NaN."""
    known = ~np.isnan(values)
    return np.asarray(ratio(np.where(known, values, 0).sum(axis=axis), known.sum(axis=axis)))
