"""The method identity baseline: how much of a correlation with the score the methods' names alone make.

Some methods perturb more and score less whatever the prompt.

The perturbation of every *other* prompt of the data set is held against this prompt's scores. If the prompt's own told
no more than the names of the methods do, another prompt's would tell as much. Pairs of prompts share prompts, so that
the interval leaves each prompt out of all of its pairs (the jackknife); it is as sure as the prompts that decide.

Ranks and areas are of one prompt's configurations; strengths and contrasts are means of these over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import isnan

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, record
from perturbkv.analyses.correlation import lost_answers
from perturbkv.analyses.correlation.lost_answers import AREA
from perturbkv.analyses.measurements import CIRCULAR_MEASURES, Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import CORRELATION, LEAST, Estimate, Kind, mean_of, over_prompts
from perturbkv.analyses.stats.permutation import Chance, Dealing, corrected, dealing, exchanged
from perturbkv.analyses.stats.rank_correlation import kendall, mean_ranks, spearman
from perturbkv.analyses.text import interval_verdict

DIFFERENCES = Kind(3 / 8, limits=(-2, 2))
"""A mean of differences between two rank correlations of the same prompt."""
AREAS = Kind(3 / 8, limits=(-1, 1))
"""A mean of differences between two areas of the same prompt."""


@record
class Names(Record):
    """The part of a statistic that the methods' names make, over the prompts that have others to compare with."""

    SECTION = "method identity baseline of a statistic"

    others: Estimate = column("the same with the measure of other prompts of the data set: the methods' names alone")
    beyond: Estimate = column("the prompt's own less that")
    exchanged: Chance = column("permutation null: measures exchanged among the prompts of a data set, names alone")
    significant: bool = column(
        "whether the statistic and `beyond` are decided as a correlation with lost score, and p beside those of all "
        "measures and settings (Benjamini–Hochberg, 5 %); never of a circular measure",
        default=False,
    )


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


MEASURES = {
    "isolated": "isolated L1",
    "propagated": "propagated L1",
    "theta": "θ",
    "theta_hat": "θ̂",
    "lost": "1 − S",
}
"""Known before the answer's second token is there, which is the first that eviction can change in both scenarios."""
NAMES = {**MEASURES, **CIRCULAR_MEASURES}


@dataclass(frozen=True)
class Within:
    """What one measure says of each prompt: (prompt,) each, NaN where the prompt does not decide.

    Attributes:
        rho: Spearman's ρ with the score; `tau` Kendall's τ-b.
        area: share of pairs of a lost and a kept answer in which the lost one is more perturbed.
    """

    rho: Floats
    tau: Floats
    area: Floats


@record
class Strength(Record):
    """The correlation of one measure with the score, mean over prompts."""

    SECTION = "strength"

    measure: str = column(
        "isolated, propagated, theta, theta_hat, lost (1 − S), or circular kl or drift, all of the first decode step"
    )
    rho: Estimate = column("Spearman's ρ with the score between the configurations of a prompt")
    tau: Estimate = column("Kendall's τ-b")
    auc: Estimate = column(
        "share of pairs of a lost and a kept answer of a prompt in which the lost one is more perturbed"
    )


@record
class Contrast(Record):
    """Two measures compared on the same prompts."""

    SECTION = "contrast"

    first: str = column("a measure")
    second: str = column("another")
    rho: Estimate = column("ρ of the first less ρ of the second; below 0 the first correlates more")
    auc: Estimate = column("the same of areas; above 0 the first separates more")


def within(measured: Floats, scored: Floats, lost: NDArray[np.bool_]) -> Within:
    """Of (prompt, config) arrays; a prompt whose measure is NaN decides nothing."""
    return Within(
        rho=known(measured, lambda held, rows: spearman(held.T, scored[rows].T)),
        tau=known(measured, lambda held, rows: kendall(held.T, scored[rows].T)),
        area=known(measured, lambda held, rows: lost_answers.within(held, lost[rows])),
    )


def known(measured: Floats, of: Callable[[Floats, NDArray[np.bool_]], Floats]) -> Floats:
    """(prompt,) what `of` says of the prompts that have the measure; NaN for the others."""
    rows = np.asarray(~np.isnan(measured).any(axis=1))
    found = np.full(len(measured), np.nan)
    if rows.any():
        found[rows] = of(measured[rows], rows)
    return found


def joined(each: Sequence[Within]) -> Within:
    """Each prompt's mean over several settings, in every one of which its configurations were compared."""
    return Within(*(mean_of([getattr(one, name) for one in each]) for name in ("rho", "tau", "area")))


def of_prompts(found: Mapping[str, Within], rows: NDArray[np.bool_]) -> dict[str, Within]:
    """The part of some prompts."""
    return {name: Within(one.rho[rows], one.tau[rows], one.area[rows]) for name, one in found.items()}


def strengths(found: Mapping[str, Within]) -> tuple[Strength, ...]:
    """One per measure."""
    return tuple(
        Strength(name, *(over_prompts(one.rho, CORRELATION), over_prompts(one.tau, CORRELATION)),
                 over_prompts(one.area, AREA))
        for name, one in found.items()
    )  # fmt: skip


def contrasts(found: Mapping[str, Within]) -> tuple[Contrast, ...]:
    """Every two measures that are not circular."""
    return tuple(
        Contrast(
            first,
            second,
            rho=over_prompts(found[first].rho - found[second].rho, DIFFERENCES),
            auc=over_prompts(found[first].area - found[second].area, AREAS),
        )
        for first, second in combinations(MEASURES, 2)
    )


@dataclass(frozen=True)
class Tables:
    """What every prompt's measure says of every prompt's answers, (prompt scored, prompt measured) each.

    Attributes:
        rho: Spearman's ρ with the score.
        area: share of pairs in which the lost answer is perturbed more than the kept one.
    """

    rho: Floats
    area: Floats

    def of(self, rows: NDArray[np.bool_]) -> Tables:
        """The part of some prompts."""
        return Tables(self.rho[np.ix_(rows, rows)], self.area[np.ix_(rows, rows)])


@record
class Beyond(Record):
    """The method identity baseline of one measure."""

    SECTION = "method identity baseline"

    measure: str = column("the measure")
    rho: Names = column("of Spearman's ρ; `beyond` below 0: the prompt's own perturbation adds to the names")
    auc: Names = column("of the areas; `beyond` above 0: it does")


def tables(measured: Mapping[str, Floats], scored: Floats, lost: NDArray[np.bool_]) -> dict[str, Tables]:
    """Measure -> its tables, of (prompt, config) arrays."""
    return {name: Tables(rank_table(array, scored), area_table(array, lost)) for name, array in measured.items()}


def beyond(settings: Sequence[Mapping[str, Tables]], alike: NDArray[np.bool_]) -> tuple[Beyond, ...]:
    """One per measure, of each prompt's mean over the settings; `alike` (prompt, prompt): of one data set."""
    dealt = dealing(alike)
    return tuple(
        Beyond(
            name,
            rho=of_ranks([one[name].rho for one in settings], dealt),
            auc=of_areas([one[name].area for one in settings], dealt),
        )
        for name in settings[0]
    )


def with_significance(
    groups: Sequence[tuple[Beyond, ...]], strengths: Sequence[Sequence[Strength]]
) -> list[tuple[Beyond, ...]]:
    """Return the same with what is significant of all their tests together, itself and beyond the names.

    `strengths`: of each group the measures' own, in its order.
    """
    tested = [
        (place, one.measure, field, getattr(one, field), getattr(own, field))
        for place, (group, found) in enumerate(zip(groups, strengths, strict=True))
        for one, own in zip(group, found, strict=True)
        if one.measure in MEASURES
        for field in _LINKED
        if not isnan(getattr(one, field).exchanged.p)
    ]
    kept = corrected(np.array([names.exchanged.p for *_, names, _ in tested]))
    significant = {
        (place, measure, field)
        for (place, measure, field, names, own), stays in zip(tested, kept, strict=True)
        if stays and _links(names, own, *_LINKED[field])
    }
    return [tuple(_marked(one, place, significant) for one in group) for place, group in enumerate(groups)]


_LINKED = {"rho": (-1, 0.0), "auc": (1, 0.5)}
"""On which side a link lies, and of what."""


def _links(names: Names, own: Estimate, side: int, at: float) -> bool:
    both = (interval_verdict(own.interval, at), interval_verdict(names.beyond.interval, 0))
    return both == (side, side)


def _marked(one: Beyond, place: int, significant: set[tuple[int, str, str]]) -> Beyond:
    rho, auc = (
        replace(getattr(one, field), significant=(place, one.measure, field) in significant) for field in ("rho", "auc")
    )
    return replace(one, rho=rho, auc=auc)
