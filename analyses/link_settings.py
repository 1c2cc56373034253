"""The link at one budget, one granularity and one protection, and what else could make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import lost_answers
from perturbkv.analyses.arithmetic import ratio
from perturbkv.analyses.by_name import beyond_name, by_name
from perturbkv.analyses.calibration import Bin, curve
from perturbkv.analyses.estimates import Estimate
from perturbkv.analyses.link_data import Pooled
from perturbkv.analyses.link_prompts import (
    MEASURES,
    NAMES,
    Contrast,
    Strength,
    Within,
    contrasts,
    strengths,
    within,
)
from perturbkv.analyses.lost_answers import Rule
from perturbkv.analyses.ranks import mean_ranks
from perturbkv.analyses.reading import Floats
from perturbkv.analyses.shuffled import Chance, chances
from perturbkv.analyses.sign_flips import corrected
from perturbkv.configs.eviction import EvictionConfig


@dataclass(frozen=True)
class Control:
    """What else could make one measure's link.

    Attributes:
        measure: a key of `NAMES`.
        rho, auc: what scores that are dealt out anew within each prompt show; `auc` is told as the area less 0.5.
        by_name: ρ between the measure of every *other* prompt and this prompt's scores: what a method's name tells.
        beyond: ρ of the prompt's own perturbation less that; below 0 the prompt's own tells more.
        between: the area over answers of different prompts, which hard and long prompts confound.
        stands: whether `rho.p` still counts beside those of all measures and settings (Benjamini–Hochberg, 5 %);
            never of a measure that is circular.
    """

    measure: str
    rho: Chance
    auc: Chance
    by_name: Estimate
    beyond: Estimate
    between: Estimate
    stands: bool = False


@dataclass(frozen=True)
class Setting:
    """Configurations that are ranked together.

    Attributes:
        name: the budget as the user gave it, and what else tells it from other settings.
        configs: its configurations.
        held: (config,) entries that each cache holds over those of the full cache; NaN where the trace does not tell.
        measured: measure -> (prompt, config).
        full, evicted: (prompt,) and (prompt, config) scores; `lost` where an answer is lost.
        evidence: share of (prompt, head) that θ̂ is of: σ > 0.5 in every configuration.
        within: measure -> what each prompt says.
        strengths: one per measure, those that are circular last.
        contrasts: every two measures on the same prompts.
        controls: one per measure.
        curves: measure -> calibration curve.
    """

    name: str
    configs: tuple[EvictionConfig, ...]
    held: Floats
    measured: dict[str, Floats]
    full: Floats
    evicted: Floats
    lost: NDArray[np.bool_]
    evidence: float
    within: dict[str, Within]
    strengths: tuple[Strength, ...]
    contrasts: tuple[Contrast, ...]
    controls: tuple[Control, ...]
    curves: dict[str, tuple[Bin, ...]]

    @property
    def held_ends(self) -> tuple[float, float]:
        """The least and the largest of `held`."""
        return float(self.held.min()), float(self.held.max())

    def strength(self, measure: str) -> Strength:
        """Of one measure."""
        return next(one for one in self.strengths if one.measure == measure)

    def control(self, measure: str) -> Control:
        """Of one measure."""
        return next(one for one in self.controls if one.measure == measure)

    @property
    def decides(self) -> bool:
        """Whether any prompt has ranks, or a lost answer beside a kept one."""
        return any(one.rho.prompts or one.auc.prompts for one in self.strengths)

    def silence(self) -> str:
        """Why no prompt has ranks, or a lost answer beside a kept one; empty where there are both."""
        if not len(self.full):
            return "the full cache answers no prompt"
        return "; ".join(filter(None, (self.no_areas(), self.no_ranks())))

    def no_areas(self) -> str:
        """Why no prompt has a lost answer beside a kept one; empty where one has."""
        if not self.lost.any():
            return "no answer is lost"
        if self.lost.all():
            return "every answer is lost"
        return "" if any(one.auc.prompts for one in self.strengths) else "no prompt has lost and kept answers"

    def no_ranks(self) -> str:
        """Why no prompt has ranks; empty where one has."""
        if any(one.rho.prompts for one in self.strengths):
            return ""
        differ = (np.ptp(self.evicted, axis=1) > 0).any()
        return f"no two methods of a prompt {'perturb' if differ else 'score'} differently"


def setting(found: Pooled, name: str, places: Sequence[int], rule: Rule, bins: int) -> Setting:
    """What the prompts say of these configurations."""
    bound, evidence = found.bound(places)
    measured = {**{one: array[:, places] for one, array in found.measured.items()}, "theta_hat": bound}
    measured = {one: measured[one] for one in NAMES}
    scored = found.evicted[:, places]
    lost, drop = rule.lost_of(found.full, scored), found.full[:, None] - scored
    each = {one: within(array, scored, lost) for one, array in measured.items()}
    return Setting(
        name=name,
        configs=tuple(found.configs[place] for place in places),
        held=found.held[list(places)],
        measured=measured,
        full=found.full,
        evicted=scored,
        lost=lost,
        evidence=evidence,
        within=each,
        strengths=strengths(each),
        contrasts=contrasts(each),
        controls=_controls(measured, scored, lost),
        curves={one: curve(array, lost, drop, bins) for one, array in measured.items()},
    )


def corrected_together(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """The settings with what stands of all their tests together."""
    tested = [
        (place, one.measure, one.rho.p)
        for place, each in enumerate(settings)
        for one in each.controls
        if one.measure in MEASURES and not isnan(one.rho.p)
    ]
    kept = corrected(np.array([p for _, _, p in tested]))
    standing = {(place, measure) for (place, measure, _), stays in zip(tested, kept, strict=True) if stays}
    return tuple(
        replace(each, controls=tuple(replace(one, stands=(place, one.measure) in standing) for one in each.controls))
        for place, each in enumerate(settings)
    )


def _controls(measured: dict[str, Floats], scored: Floats, lost: NDArray[np.bool_]) -> tuple[Control, ...]:
    dealt = chances(np.stack([_rho_weights(array, scored) for array in measured.values()]), _centred(scored))
    areas = chances(np.stack([_area_weights(array, lost) for array in measured.values()]), lost.astype(np.float64))
    found = []
    for place, (name, array) in enumerate(measured.items()):
        rows = ~np.isnan(array).any(axis=1)
        held, own = array[rows], scored[rows]
        between = lost_answers.between(held, lost[rows])
        found.append(Control(name, dealt[place], areas[place], by_name(held, own), beyond_name(held, own), between))
    return tuple(found)


def _centred(values: Floats) -> Floats:
    """(prompt, config) ranks within each prompt, less their mean."""
    ranks = mean_ranks(values.T).T
    return np.asarray(ranks - ranks.mean(axis=1, keepdims=True))


def _rho_weights(measured: Floats, scored: Floats) -> Floats:
    """(prompt, config) whose sum with the scores' centred ranks is Spearman's ρ; NaN where the prompt has none."""
    ranks, others = _centred(measured), _centred(scored)
    size = np.sqrt((ranks**2).sum(axis=1) * (others**2).sum(axis=1))
    return _without(measured, np.asarray(ratio(ranks, size[:, None])))


def _area_weights(measured: Floats, lost: NDArray[np.bool_]) -> Floats:
    """(prompt, config) whose sum over the lost answers is the area less 0.5; NaN where the prompt has none."""
    pairs = lost.sum(axis=1) * (~lost).sum(axis=1)
    return _without(measured, np.asarray(ratio(_centred(measured), pairs[:, None])))


def _without(measured: Floats, weights: Floats) -> Floats:
    """The weights, NaN where a prompt lacks the measure."""
    return np.where(np.isnan(measured).any(axis=1, keepdims=True), np.nan, weights)
