"""Rank correlations of heads between samples, halves of samples, and traces, and the layers' shares of perturbation.

A trace's profile is the mean over samples of each sample's ranks of its heads, so that no prompt counts for more
because all its heads are perturbed more. How far a profile can be trusted is its reliability: Spearman's ρ between the
profiles of two halves of the samples, mean over splits, brought to all of the samples by Spearman and Brown's
2r / (1 + r). Two profiles measured with noise correlate less than what they measure; divided by the root of both
reliabilities (Spearman's correction for attenuation, 1904) that is undone.

Heads of two models cannot be matched. What both have is a relative depth, layer / (layers − 1): on it lie the layers'
shares of the sum over all heads, brought to 20 points by lines; and how much the first layers carry, and few heads.
Of a model of which only some layers are measured, points before the first of them and behind the last have no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil, comb
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from perturbkv.analyses import text
from perturbkv.analyses.columns import Record, column, interval, record
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import half_share, ratio
from perturbkv.analyses.stats.intervals import (
    CORRELATION,
    MIN_SAMPLES,
    POSITIVE,
    Band,
    Estimate,
    Interval,
    OptionalInterval,
    StatisticKind,
    estimate_mean,
    jackknife,
    share_kind,
)
from perturbkv.analyses.stats.rank_correlation import mean_ranks, spearman

MOST_SPLITS = 200
WORST = 0.1
"""The overlap of two traces is that of this share of their heads, the most perturbed ones."""
_CORRECTED = StatisticKind(3 / 8)
"""A correlation that was corrected may exceed 1 by chance."""
_SEED = 0


def format_estimate(estimate: RankEstimate | Estimate, separator: str = " ") -> str:
    """Return an estimate with its interval behind the separator."""
    return text.decimal(estimate.value, estimate.interval, separator=separator)


def _format_share(estimate: Estimate) -> str:
    """Return a share in percent, its interval on a second line."""
    return text.percent(estimate.value, estimate.interval, "\n")


@record
class RankEstimate(Record):
    """A rank correlation with its interval: a range for fewer than five samples, None for one."""

    value: float = column("a rank correlation")
    interval: OptionalInterval = column("over samples; of fewer than five a range of single splits, pairs or samples")


@record
class Reliability(Record):
    """The reliability of one trace's ranks of its heads."""

    split_half: RankEstimate = column(
        "Spearman's ρ of the mean ranks of two halves of the samples, mean over splits, for all samples "
        "(Spearman–Brown)",
        heading="#reliability",
        text=format_estimate,
    )
    pairwise: RankEstimate = column("mean ρ of two samples", heading="#two samples", text=format_estimate)
    splits: int = column("splits into halves that were tried", heading="#splits")


@record
class RankAgreement(Record):
    """The agreement of two traces' ranks of the same heads."""

    rho: RankEstimate = column(
        "Spearman's ρ of both traces' mean ranks, as measured", heading="#ρ", text=format_estimate
    )
    corrected: RankEstimate = column(
        "ρ over the root of both reliabilities, without noise; by chance it exceeds 1; null where one is not positive",
        heading="#corrected",
        text=format_estimate,
    )
    shared: float = column(
        "overlap of the tenth of the heads that is perturbed most in one trace and in the other",
        unit="share",
        heading="#worst\n10 %",
    )
    chance: float = column("overlap of two random orders, mean", unit="share")
    chance_most: float = column("overlap of two random orders in 97.5 % of draws at most", unit="share")
    paired: bool = column("whether a prompt is left out of both at once: the traces may be of the same prompts")


@dataclass(frozen=True)
class RankedHeads:
    """The heads of one trace, ranked in each of its samples.

    Attributes:
        ranks: (sample, head) from 1, ties at their mean.
        split_half: split-half reliability of the mean ranks; NaN of one sample.
        without: (sample,) the reliability with each of the samples left out.
    """

    ranks: Floats
    split_half: float
    without: Floats

    @classmethod
    def from_values(cls, values: Floats) -> RankedHeads:
        """Rank the heads of each sample by (sample, …) values."""
        ranks = np.stack([mean_ranks(sample.reshape(-1)) for sample in values])
        return cls(ranks, split_half(ranks), np.array([split_half(rows) for rows in leave_one_out(ranks)]))


def reliability(heads: RankedHeads) -> Reliability:
    """Return the reliability of a trace's ranks of its heads."""
    splits, matrix = halves(len(heads.ranks)), between_samples(heads.ranks)
    pairs = matrix[np.triu_indices(len(matrix), 1)]
    left = np.array([_mean_rho(np.delete(rows, index, axis=1)) for index, rows in enumerate(leave_one_out(matrix))])
    each = np.array([spearman_brown(_split_rho(heads.ranks, half)) for half in splits])
    return Reliability(
        split_half=RankEstimate(heads.split_half, _interval_or_range(heads.split_half, heads.without, each)),
        pairwise=RankEstimate(_mean_rho(matrix), _interval_or_range(_mean_rho(matrix), left, pairs)),
        splits=len(splits),
    )


def between_samples(ranks: Floats) -> Floats:
    """Return (sample, sample) Spearman's ρ between the heads' ranks of two samples."""
    return np.array([[float(spearman(one, other)) for other in ranks] for one in ranks])


def _mean_rho(matrix: Floats) -> float:
    """Return the mean of a (sample, sample) matrix of ρ over its pairs of samples; NaN without a pair."""
    pairs = matrix[np.triu_indices(len(matrix), 1)]
    return float(pairs.mean()) if len(pairs) else float("nan")


def _interval_or_range(value: float, left: Floats, single: Floats) -> OptionalInterval:
    """Return a value's jackknife interval from `left`, its values with each sample left out.

    For fewer than five samples, the range of the values of `single` splits or pairs; None for one sample.
    """
    if len(left) < 2:
        return None
    if len(left) < MIN_SAMPLES:
        return Interval(float(single.min()), float(single.max()), "range")
    return _jackknife_interval(value, left, CORRELATION)


def split_half(ranks: Floats) -> float:
    """Return the split-half reliability of (sample, head) ranks, scaled to all samples; NaN for one sample."""
    each = [_split_rho(ranks, half) for half in halves(len(ranks))]
    return spearman_brown(float(np.mean(each))) if each else float("nan")


def _split_rho(ranks: Floats, half: NDArray[np.bool_]) -> float:
    """Return Spearman's ρ between the mean ranks of both halves of the samples; `half`: mask of the first half."""
    return float(spearman(ranks[half].mean(axis=0), ranks[~half].mean(axis=0)))


def spearman_brown(half: float) -> float:
    """Return the reliability at twice the number of samples (Spearman–Brown), with the sign of `half`."""
    return 2 * half / (1 + abs(half))


def halves(samples: int) -> list[NDArray[np.bool_]]:
    """Return splits of the samples into halves, as (sample,) masks of the smaller half: all, or 200 drawn at random."""
    size, even = samples // 2, samples % 2 == 0
    if comb(samples, size) // (2 if even else 1) <= MOST_SPLITS:
        splits = [split for split in combinations(range(samples), size) if size and (not even or 0 in split)]
    else:
        draw = np.random.default_rng(_SEED)
        splits = [tuple(draw.permutation(samples)[:size].tolist()) for _ in range(MOST_SPLITS)]
    return [np.isin(np.arange(samples), split) for split in splits]


def agreement(first: RankedHeads, second: RankedHeads, paired: bool) -> RankAgreement:
    """Return the agreement of two traces' ranks of the same heads.

    `paired`: the same prompts in both, so that both have as many samples.
    """
    heads, profiles = first.ranks.shape[1], [one.ranks.mean(axis=0) for one in (first, second)]
    worst = ceil(WORST * heads)
    first_worst, second_worst = (np.argsort(-one, kind="stable")[:worst] for one in profiles)
    chance = stats.hypergeom(heads, worst, worst)
    measured = rho(first.ranks, second.ranks)
    return RankAgreement(
        rho=rho_estimate(first.ranks, second.ranks, paired),
        corrected=_corrected_estimate(measured, first, second, paired),
        shared=len(np.intersect1d(first_worst, second_worst)) / worst,
        chance=float(chance.mean()) / worst,
        chance_most=float(chance.ppf(0.975)) / worst,
        paired=paired,
    )


def rho(first: Floats, second: Floats) -> float:
    """Return Spearman's ρ between the means over samples of two (sample, …) arrays."""
    return float(spearman(first.mean(axis=0), second.mean(axis=0)))


def rho_estimate(first: Floats, second: Floats, paired: bool) -> RankEstimate:
    """Return `rho` with its interval over the samples of both arrays: a range for fewer than five, None for one."""
    value, count = rho(first, second), min(len(first), len(second))
    if count < 2:
        return RankEstimate(value, None)
    if count < MIN_SAMPLES:
        each = [rho(one[None], second) for one in first] + [rho(first, one[None]) for one in second]
        return RankEstimate(value, Interval(min(each), max(each), "range"))
    return RankEstimate(value, _independent_interval(value, _leave_one_out_rho(first, second, paired), CORRELATION))


def _leave_one_out_rho(first: Floats, second: Floats, paired: bool) -> list[Floats]:
    """Return `rho` with each sample left out: (sample,) of pairs of samples if `paired`, else for either array."""
    if paired:
        return [np.array([rho(*one) for one in zip(leave_one_out(first), leave_one_out(second), strict=True)])]
    return [np.array([rho(one, second) for one in leave_one_out(first)]),
            np.array([rho(first, one) for one in leave_one_out(second)])]  # fmt: skip


def _corrected_estimate(measured: float, first: RankedHeads, second: RankedHeads, paired: bool) -> RankEstimate:
    """Return ρ corrected for both traces' reliabilities, with its interval.

    NaN where one reliability is not positive; no interval for fewer than five samples.
    """
    value = _disattenuate(measured, first.split_half, second.split_half)
    if min(len(first.ranks), len(second.ranks)) < MIN_SAMPLES:
        return RankEstimate(float(value), None)
    left = _leave_one_out_rho(first.ranks, second.ranks, paired)
    singly = [(first.without, second.split_half), (first.split_half, second.without)]
    parts: list[tuple[Any, Any]] = [(first.without, second.without)] if paired else [*singly]
    each = [np.asarray(_disattenuate(one, *part)) for one, part in zip(left, parts, strict=True)]
    return RankEstimate(float(value), _independent_interval(float(value), each, _CORRECTED))


def _disattenuate(measured: Floats | float, first: Floats | float, second: Floats | float) -> Floats:
    """Return a correlation over √(first × second) of two reliabilities; NaN unless both are positive."""
    usable = (np.asarray(first) > 0) & (np.asarray(second) > 0)
    return np.where(usable, measured / np.sqrt(np.where(usable, np.multiply(first, second), 1.0)), np.nan)


def leave_one_out(values: Floats) -> list[Floats]:
    """Return copies of (sample, …) values, each without a different sample."""
    return [np.delete(values, index, axis=0) for index in range(len(values))]


def _jackknife_interval(value: float, left: Floats, kind: StatisticKind) -> OptionalInterval:
    """Return the jackknife interval of a value, from the values with each sample left out; None where one is NaN."""
    if np.isnan(left).any() or np.isnan(value):
        return None
    low, high = jackknife(np.asarray(value), left, kind)
    return Interval(float(low), float(high))


def _independent_interval(value: float, left: Sequence[Floats], kind: StatisticKind) -> OptionalInterval:
    """Return the interval of a value over independent groups of samples; `left`: leave-one-out values per group.

    Squared distances from the value to the ends of each group's interval add up.
    """
    known = [one for one in (_jackknife_interval(value, group, kind) for group in left) if one is not None]
    if len(known) < len(left):
        return None
    low, high = (float(np.sqrt(sum((getattr(one, end) - value) ** 2 for one in known))) for end in ("low", "high"))
    return Interval(max(value - low, kind.limits[0]), min(value + high, kind.limits[1]))


POINTS = 20
GRID = np.linspace(0, 1, POINTS)


@record
class DepthProfile(Record):
    """The distribution of one trace's perturbation over depth."""

    profile: Floats = column(
        "(point) at 20 points of relative depth, the layer's mean head over the mean head of all, mean over samples; "
        "null beyond the layers measured",
        dims=("point",),
    )
    profile_interval: Band = interval()
    first_layer: Estimate = column(
        "share of the sum over all heads in the first layer measured", heading="#first\nlayer", text=_format_share
    )
    first_tenth: Estimate = column(
        "share in the first tenth of the layers measured, rounded up", heading="#first\ntenth", text=_format_share
    )
    half: Estimate = column(
        "share of the heads that carries half of the sum", heading="#half in\nheads", text=_format_share
    )


def depth_profile(relative: Floats, depths: Floats) -> DepthProfile:
    """Return the distribution of (sample, layer, head) relative perturbation over the (layer,) relative depths."""
    layers, heads = relative.shape[1:]
    shares = np.asarray(ratio(relative.sum(axis=2), relative.sum(axis=(1, 2))[:, None]))
    each, kind = profiles(relative, depths), share_kind(layers * heads)
    return DepthProfile(
        profile=each.mean(axis=0),
        profile_interval=intervals.of_statistics(lambda weights: weights @ each, len(each), POSITIVE),
        first_layer=estimate_mean(shares[:, 0], kind),
        first_tenth=estimate_mean(shares[:, : ceil(layers / 10)].sum(axis=1), kind),
        half=estimate_mean(np.array([half_share(one) for one in relative]), kind),
    )


def profiles(relative: Floats, depths: Floats) -> Floats:
    """Return each sample's layer means over its overall mean, at 20 points of relative depth, (sample, point).

    `relative` is (sample, layer, head) perturbation, `depths` (layer,); NaN beyond the layers measured.
    """
    means = np.asarray(ratio(relative.mean(axis=2), relative.mean(axis=(1, 2))[:, None]))
    return np.stack([np.interp(GRID, depths, one, left=np.nan, right=np.nan) for one in means])


def profile_correlation(first: Floats, second: Floats) -> RankEstimate:
    """Return Spearman's ρ between two traces' mean (sample, point) profiles, over common points.

    Neighbouring points are alike, so that it says less than so many points would.
    """
    shared = ~np.isnan(first).any(axis=0) & ~np.isnan(second).any(axis=0)
    return rho_estimate(first[:, shared], second[:, shared], paired=False)
