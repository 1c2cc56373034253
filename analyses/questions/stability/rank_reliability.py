"""Are the heads ranked alike? Rank correlations of heads between samples, halves of samples, and traces.

A trace's profile is the mean over samples of each sample's ranks of its heads, so that no prompt counts for more
because all its heads suffer more. How far a profile can be trusted is its reliability: Spearman's ρ between the
profiles of two halves of the samples, mean over splits, brought to all of the samples by Spearman and Brown's
2r / (1 + r). Two profiles measured with noise correlate less than what they measure; divided by the root of both
reliabilities (Spearman's correction for attenuation, 1904) that is undone.

Where in depth the suffering of heads lies: what models of other layers and heads can be compared in.

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

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import half_share, ratio
from perturbkv.analyses.stats.intervals import (
    CORRELATION,
    LEAST,
    POSITIVE,
    Band,
    Estimate,
    Interval,
    Kind,
    Scalar,
    jackknife,
    over_prompts,
    share_of,
)
from perturbkv.analyses.stats.rank_correlation import mean_ranks, spearman

MOST_SPLITS = 200
WORST = 0.1
"""Share of the heads that suffer most, of which it is told whether they are the same ones."""
_CORRECTED = Kind(3 / 8)
"""A correlation that was corrected may exceed 1 by chance."""
_SEED = 0


@dataclass(frozen=True)
class Ranked:
    """A number of rank correlation with its interval; a range of fewer than five samples, None of one."""

    value: float
    interval: Scalar


@dataclass(frozen=True)
class Reliability:
    """How alike the samples of one trace rank the heads.

    Attributes:
        split_half: of the mean ranks, for all samples (Spearman–Brown); NaN of one sample.
        pairwise: mean Spearman's ρ of two single samples.
        splits: halves that were tried.
    """

    split_half: Ranked
    pairwise: Ranked
    splits: int


@dataclass(frozen=True)
class Agreement:
    """How alike two traces rank the heads.

    Attributes:
        rho: Spearman's ρ of the two profiles, as they were measured.
        corrected: the same, had both been measured without noise; above 1 by chance.
        shared: of the tenth of the heads that suffers most in one, the share that does so in the other too.
        chance: what two random orders share in the mean; `chance_most` in 97.5 % of draws at most.
        paired: whether the traces may be of the same prompts, each of which is left out of both at once.
    """

    rho: Ranked
    corrected: Ranked
    shared: float
    chance: float
    chance_most: float
    paired: bool


@dataclass(frozen=True)
class Heads:
    """The heads of one trace, ranked in each of its samples.

    Attributes:
        ranks: (sample, head) from 1, ties at their mean.
        split_half: the reliability of their mean; NaN of one sample.
        without: (sample,) the same without each sample.
    """

    ranks: Floats
    split_half: float
    without: Floats

    @classmethod
    def of(cls, values: Floats) -> Heads:
        """Of (sample, …) values, one for each head."""
        ranks = np.stack([mean_ranks(one.reshape(-1)) for one in values])
        return cls(ranks, split_half(ranks), np.array([split_half(rows) for rows in without_each(ranks)]))


def reliability(heads: Heads) -> Reliability:
    """How alike the samples of one trace rank its heads."""
    tried, matrix = halves(len(heads.ranks)), between_samples(heads.ranks)
    pairs = matrix[np.triu_indices(len(matrix), 1)]
    left = np.array([_pairwise(np.delete(rows, place, axis=1)) for place, rows in enumerate(without_each(matrix))])
    each = np.array([brown(_of_split(heads.ranks, half)) for half in tried])
    return Reliability(
        split_half=Ranked(heads.split_half, _of_samples(heads.split_half, heads.without, each)),
        pairwise=Ranked(_pairwise(matrix), _of_samples(_pairwise(matrix), left, pairs)),
        splits=len(tried),
    )


def between_samples(ranks: Floats) -> Floats:
    """(sample, sample) Spearman's ρ."""
    return np.array([[float(spearman(one, other)) for other in ranks] for one in ranks])


def _pairwise(matrix: Floats) -> float:
    pairs = matrix[np.triu_indices(len(matrix), 1)]
    return float(pairs.mean()) if len(pairs) else float("nan")


def _of_samples(value: float, left: Floats, single: Floats) -> Scalar:
    """The interval of a correlation from what it is without each sample; of few samples the range of `single` ones."""
    if len(left) < 2:
        return None
    if len(left) < LEAST:
        return Interval(float(single.min()), float(single.max()), "range")
    return _jackknifed(value, left, CORRELATION)


def split_half(ranks: Floats) -> float:
    """ρ between the mean ranks of two halves, mean over splits, brought to all samples; NaN of one sample."""
    found = [_of_split(ranks, half) for half in halves(len(ranks))]
    return brown(float(np.mean(found))) if found else float("nan")


def _of_split(ranks: Floats, half: NDArray[np.bool_]) -> float:
    return float(spearman(ranks[half].mean(axis=0), ranks[~half].mean(axis=0)))


def brown(half: float) -> float:
    """Spearman and Brown: of twice as many samples; below 0, where they say nothing, the same with its sign."""
    return 2 * half / (1 + abs(half))


def halves(samples: int) -> list[NDArray[np.bool_]]:
    """(sample,) True for the smaller half: every split, or 200 of them, always the same, where there are more."""
    size, same = samples // 2, samples % 2 == 0
    if comb(samples, size) // (2 if same else 1) <= MOST_SPLITS:
        places = [one for one in combinations(range(samples), size) if size and (not same or 0 in one)]
    else:
        draw = np.random.default_rng(_SEED)
        places = [tuple(draw.permutation(samples)[:size].tolist()) for _ in range(MOST_SPLITS)]
    return [np.isin(np.arange(samples), one) for one in places]


def agreement(first: Heads, second: Heads, paired: bool) -> Agreement:
    """Of the same heads in two traces; `paired` needs as many samples of both."""
    heads, profiles = first.ranks.shape[1], [one.ranks.mean(axis=0) for one in (first, second)]
    worst = ceil(WORST * heads)
    here, there = (np.argsort(-one, kind="stable")[:worst] for one in profiles)
    chance = stats.hypergeom(heads, worst, worst)
    measured = rho(first.ranks, second.ranks)
    return Agreement(
        rho=of_both(first.ranks, second.ranks, paired),
        corrected=_corrected(measured, first, second, paired),
        shared=len(np.intersect1d(here, there)) / worst,
        chance=float(chance.mean()) / worst,
        chance_most=float(chance.ppf(0.975)) / worst,
        paired=paired,
    )


def rho(first: Floats, second: Floats) -> float:
    """Spearman's ρ of the mean rows of two (sample, …) arrays."""
    return float(spearman(first.mean(axis=0), second.mean(axis=0)))


def of_both(first: Floats, second: Floats, paired: bool) -> Ranked:
    """`rho` with its interval over the samples of both: with each pair left out, or with each one, apart."""
    value, count = rho(first, second), min(len(first), len(second))
    if count < 2:
        return Ranked(value, None)
    if count < LEAST:
        each = [rho(one[None], second) for one in first] + [rho(first, one[None]) for one in second]
        return Ranked(value, Interval(min(each), max(each), "range"))
    return Ranked(value, _joined(value, _left(first, second, paired), CORRELATION))


def _left(first: Floats, second: Floats, paired: bool) -> list[Floats]:
    """`rho` without each pair of samples; or without each of the first trace's, and without each of the second's."""
    if paired:
        return [np.array([rho(*one) for one in zip(without_each(first), without_each(second), strict=True)])]
    return [np.array([rho(one, second) for one in without_each(first)]),
            np.array([rho(first, one) for one in without_each(second)])]  # fmt: skip


def _corrected(measured: float, first: Heads, second: Heads, paired: bool) -> Ranked:
    """ρ over the root of both reliabilities; NaN where one of these is not positive, no interval of few samples."""
    value = _undone(measured, first.split_half, second.split_half)
    if min(len(first.ranks), len(second.ranks)) < LEAST:
        return Ranked(float(value), None)
    left = _left(first.ranks, second.ranks, paired)
    alone = [(first.without, second.split_half), (first.split_half, second.without)]
    parts: list[tuple[Any, Any]] = [(first.without, second.without)] if paired else [*alone]
    each = [np.asarray(_undone(one, *part)) for one, part in zip(left, parts, strict=True)]
    return Ranked(float(value), _joined(float(value), each, _CORRECTED))


def _undone(measured: Floats | float, first: Floats | float, second: Floats | float) -> Floats:
    """A correlation as it were without noise."""
    usable = (np.asarray(first) > 0) & (np.asarray(second) > 0)
    return np.where(usable, measured / np.sqrt(np.where(usable, np.multiply(first, second), 1.0)), np.nan)


def without_each(values: Floats) -> list[Floats]:
    """(sample, …) values without each of the samples."""
    return [np.delete(values, place, axis=0) for place in range(len(values))]


def _jackknifed(value: float, left: Floats, kind: Kind) -> Scalar:
    if np.isnan(left).any() or np.isnan(value):
        return None
    low, high = jackknife(np.asarray(value), left, kind)
    return Interval(float(low), float(high))


def _joined(value: float, left: Sequence[Floats], kind: Kind) -> Scalar:
    """The interval where all of these vary, each apart: squared distances to the ends add up, as for strata."""
    known = [one for one in (_jackknifed(value, part, kind) for part in left) if one is not None]
    if len(known) < len(left):
        return None
    low, high = (float(np.sqrt(sum((getattr(one, end) - value) ** 2 for one in known))) for end in ("low", "high"))
    return Interval(max(value - low, kind.limits[0]), min(value + high, kind.limits[1]))


POINTS = 20
GRID = np.linspace(0, 1, POINTS)


@dataclass(frozen=True)
class Depth:
    """How the suffering of one trace is spread over depth; shares of the sum over all heads.

    Attributes:
        profile: (point,) the mean head at a relative depth over the mean head of all, mean over samples; NaN beyond the
            layers measured; `profile_interval` of it.
        first_layer: share of the sum in the first layer measured.
        first_tenth: in the first tenth of the layers measured, rounded up.
        half: share of the heads that carries half of the sum.
    """

    profile: Floats
    profile_interval: Band
    first_layer: Estimate
    first_tenth: Estimate
    half: Estimate


def depth(suffered: Floats, places: Floats) -> Depth:
    """Of a trace's (sample, layer, head) relative perturbation; `places` (layer,) are relative depths."""
    layers, heads = suffered.shape[1:]
    shares = np.asarray(ratio(suffered.sum(axis=2), suffered.sum(axis=(1, 2))[:, None]))
    each, kind = profiles(suffered, places), share_of(layers * heads)
    return Depth(
        profile=each.mean(axis=0),
        profile_interval=intervals.band(lambda weights: weights @ each, len(each), POSITIVE),
        first_layer=over_prompts(shares[:, 0], kind),
        first_tenth=over_prompts(shares[:, : ceil(layers / 10)].sum(axis=1), kind),
        half=over_prompts(np.array([half_share(one) for one in suffered]), kind),
    )


def profiles(suffered: Floats, places: Floats) -> Floats:
    """(sample, point) of (sample, layer, head): layers' means over the sample's own mean, by lines over `places`."""
    means = np.asarray(ratio(suffered.mean(axis=2), suffered.mean(axis=(1, 2))[:, None]))
    return np.stack([np.interp(GRID, places, one, left=np.nan, right=np.nan) for one in means])


def alike(first: Floats, second: Floats) -> Ranked:
    """Spearman's ρ of two traces' mean profiles, (sample, point) each, over the points that both have.

    Neighbouring points are alike, so that it says less than so many points would.
    """
    shared = ~np.isnan(first).any(axis=0) & ~np.isnan(second).any(axis=0)
    return of_both(first[:, shared], second[:, shared], paired=False)
