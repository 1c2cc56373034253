"""The link within each prompt: what ranks and areas say of one prompt's configurations, and means of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.correlation import lost_answers
from perturbkv.analyses.correlation.by_name import AREAS, DIFFERENCES
from perturbkv.analyses.correlation.lost_answers import AREA
from perturbkv.analyses.first_step import CIRCULAR
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats.estimates import Estimate, mean_of, over_prompts
from perturbkv.analyses.stats.intervals import CORRELATION
from perturbkv.analyses.stats.rank_correlation import kendall, spearman

MEASURES = {
    "isolated": "isolated L1",
    "propagated": "propagated L1",
    "theta": "θ",
    "theta_hat": "θ̂",
    "lost": "1 − S",
}
"""Known before the answer's second token is there, which is the first that eviction can change in both scenarios."""
NAMES = {**MEASURES, **CIRCULAR}


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


@dataclass(frozen=True)
class Strength:
    """How strongly one measure is linked with the score, mean over prompts.

    Attributes:
        measure: a key of `NAMES`.
        rho: Spearman's ρ with the score; negative: the more perturbed of a prompt's configurations score less.
        tau: Kendall's τ-b.
        auc: share of pairs of a lost and a kept answer in which the lost one is more perturbed; 0.5 without a link.
    """

    measure: str
    rho: Estimate
    tau: Estimate
    auc: Estimate


@dataclass(frozen=True)
class Contrast:
    """Two measures held against each other on the same prompts.

    Attributes:
        first, second: keys of `MEASURES`.
        rho: mean of ρ of the first less ρ of the second; below 0 the first tells more.
        auc: the same of areas; above 0 the first tells more.
    """

    first: str
    second: str
    rho: Estimate
    auc: Estimate


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
