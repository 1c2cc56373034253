"""How much of a link is the methods' names alone: some methods perturb more and score less whatever the prompt.

The perturbation of every *other* prompt of the data set is held against this prompt's scores. If the prompt's own told
no more than the names of the methods do, another prompt's would tell as much. Pairs of prompts share prompts, so that
the interval leaves each prompt out of all of its pairs (the jackknife); it is as sure as the prompts that decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.correlation.lost_answers import AREA
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.estimates import Estimate
from perturbkv.analyses.stats.intervals import CORRELATION, LEAST, Kind
from perturbkv.analyses.stats.rank_correlation import mean_ranks
from perturbkv.analyses.stats.shuffled import Chance, Dealing, exchanged

DIFFERENCES = Kind(3 / 8, limits=(-2, 2))
"""A mean of differences between two rank correlations of the same prompt."""
AREAS = Kind(3 / 8, limits=(-1, 1))
"""A mean of differences between two areas of the same prompt."""


@dataclass(frozen=True)
class Names:
    """What of a statistic the methods' names make, over the prompts that have others to be held against.

    Attributes:
        others: the statistic of *other* prompts' measure with a prompt's scores: what a method's name tells.
        beyond: the prompt's own less that.
        exchanged: what prompts whose measures are dealt out among them show; its p is of a world in which a measure
            tells nothing but the names of the methods.
        stands: whether the statistic and `beyond` are decided on the side of a link, and p counts beside those of all
            measures and settings (Benjamini–Hochberg, 5 %); never of a measure that is circular.
    """

    others: Estimate
    beyond: Estimate
    exchanged: Chance
    stands: bool = False


def of_ranks(tables: Sequence[Floats], dealt: Dealing) -> Names:
    """Of Spearman's ρ, of one `rank_table` per setting."""
    return _names(tables, dealt, CORRELATION, DIFFERENCES)


def of_areas(tables: Sequence[Floats], dealt: Dealing) -> Names:
    """Of the areas, of one `area_table` per setting."""
    return _names(tables, dealt, AREA, AREAS)


def rank_table(measured: Floats, scored: Floats) -> Floats:
    """(prompt scored, prompt measured) Spearman's ρ of (prompt, config) arrays; NaN where either side is constant."""
    units = []
    for side in (scored, measured):
        ranks = mean_ranks(side.T).T
        centred = ranks - ranks.mean(axis=1, keepdims=True)
        units.append(ratio(centred, np.sqrt((centred**2).sum(axis=1, keepdims=True))))
    return _of_own(np.einsum("ic,jc->ij", *units), measured)


def area_table(measured: Floats, lost: NDArray[np.bool_]) -> Floats:
    """(prompt scored, prompt measured) share of pairs of a lost and a kept answer in which the lost is perturbed more.

    NaN where all answers of the prompt scored fared alike.
    """
    count = lost.sum(axis=1)[:, None]
    ranks = lost @ mean_ranks(measured.T)
    return _of_own(ratio(ranks - count * (count + 1) / 2, count * (lost.shape[1] - count)), measured)


def _of_own(table: Floats, measured: Floats) -> Floats:
    """The table without prompts that lack the measure, and without the scores of prompts that do not decide."""
    missing = np.isnan(measured).any(axis=1)
    held = np.where(missing, np.nan, table)
    return np.where(np.isnan(np.diag(held))[:, None], np.nan, held)


def _names(tables: Sequence[Floats], dealt: Dealing, kind: Kind, differences: Kind) -> Names:
    alike, prompts = dealt.alike, len(dealt.alike)

    def others(weights: Floats) -> Floats:
        return _means([_of_others(table, alike, weights) for table in tables])

    def beyond(weights: Floats) -> Floats:
        return _means([np.diag(table) - _of_others(table, alike, weights) for table in tables])

    return Names(_estimate(others, prompts, kind), _estimate(beyond, prompts, differences), exchanged(tables, dealt))


def _of_others(table: Floats, alike: NDArray[np.bool_], weights: Floats) -> Floats:
    """(row, prompt) weighted mean over the other prompts' measures; NaN where the prompt does not decide."""
    held = alike & ~np.isnan(table) & ~np.eye(len(table), dtype=bool)
    return np.asarray(ratio(weights @ np.where(held, table, 0).T, weights @ held.T.astype(np.float64)))


def _means(each: Sequence[Floats]) -> Floats:
    """Mean over settings of what is not NaN."""
    held = [~np.isnan(one) for one in each]
    top = sum(np.where(there, one, 0) for there, one in zip(held, each, strict=True))
    return np.asarray(ratio(top, np.sum(held, axis=0)))


def _estimate(each: Callable[[Floats], Floats], prompts: int, kind: Kind) -> Estimate:
    """The mean over prompts of what `each` says of every one, as unsure as the prompts of which it says anything."""

    def mean(weights: Floats) -> Floats:
        found = each(weights)
        held = ~np.isnan(found)
        return np.asarray(ratio((weights * np.where(held, found, 0)).sum(axis=1), (weights * held).sum(axis=1)))

    own = each(np.full((1, prompts), 1 / max(prompts, 1)))[0]
    own = own[~np.isnan(own)]
    if len(own) < LEAST:
        return Estimate(float(ratio(own.sum(), len(own))), intervals.of_mean(own, kind), len(own))
    return Estimate(float(own.mean()), intervals.scalar(mean, prompts, kind, len(own)), len(own))
