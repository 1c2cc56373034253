"""What a link is beyond the methods' names, at one setting and over several in each of which a prompt was compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.correlation.by_name import Names, area_table, of_areas, of_ranks, rank_table
from perturbkv.analyses.correlation.link_prompts import MEASURES, Strength
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.sentences import decided
from perturbkv.analyses.stats.estimates import Estimate
from perturbkv.analyses.stats.permutation import corrected
from perturbkv.analyses.stats.shuffled import dealing


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


@dataclass(frozen=True)
class Beyond:
    """What of one measure's link the methods' names make.

    Attributes:
        measure: a key of `link_prompts.NAMES`.
        rho: of Spearman's ρ; below 0 the prompt's own perturbation tells more than the names.
        auc: of the areas; above 0 it does.
    """

    measure: str
    rho: Names
    auc: Names


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


def standing(groups: Sequence[tuple[Beyond, ...]], strengths: Sequence[Sequence[Strength]]) -> list[tuple[Beyond, ...]]:
    """The same with what stands of all their tests together: a link, itself and beyond the names, p kept beside all.

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
    stands = {
        (place, measure, field)
        for (place, measure, field, names, own), stays in zip(tested, kept, strict=True)
        if stays and _links(names, own, *_LINKED[field])
    }
    return [tuple(_marked(one, place, stands) for one in group) for place, group in enumerate(groups)]


_LINKED = {"rho": (-1, 0.0), "auc": (1, 0.5)}
"""On which side a link lies, and of what."""


def _links(names: Names, own: Estimate, side: int, at: float) -> bool:
    return decided(own.interval, at) == side and decided(names.beyond.interval, 0) == side


def _marked(one: Beyond, place: int, stands: set[tuple[int, str, str]]) -> Beyond:
    rho, auc = (replace(getattr(one, field), stands=(place, one.measure, field) in stands) for field in ("rho", "auc"))
    return replace(one, rho=rho, auc=auc)
