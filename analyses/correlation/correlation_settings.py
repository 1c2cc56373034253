"""The link at one budget, one granularity and one protection, and what else could make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.correlation import lost_answers
from perturbkv.analyses.correlation.calibration import Bin, curve
from perturbkv.analyses.correlation.link_data import Pooled
from perturbkv.analyses.correlation.link_prompts import NAMES, Contrast, Strength, Within, contrasts, strengths, within
from perturbkv.analyses.correlation.lost_answers import Rule
from perturbkv.analyses.correlation.method_identity import Beyond, Tables, beyond, standing, tables
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.estimates import Estimate
from perturbkv.analyses.stats.rank_correlation import mean_ranks
from perturbkv.analyses.stats.shuffled import Chance, chances
from perturbkv.configs.eviction import EvictionConfig


@dataclass(frozen=True)
class Control:
    """What else could make one measure's link, beside the methods' names.

    Attributes:
        measure: a key of `NAMES`.
        rho, auc: what scores that are dealt out anew within each prompt show; `auc` is told as the area less 0.5. Any
            difference between methods sets real scores apart from these.
        between: the area over answers of different prompts, which hard and long prompts confound.
    """

    measure: str
    rho: Chance
    auc: Chance
    between: Estimate


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
        tables: measure -> what every prompt's measure says of every prompt's answers.
        names: what of the link the methods' names make, one per measure.
        controls: what else could make it, one per measure.
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
    tables: dict[str, Tables]
    names: tuple[Beyond, ...]
    controls: tuple[Control, ...]
    curves: dict[str, tuple[Bin, ...]]

    @property
    def held_ends(self) -> tuple[float, float]:
        """The least and the largest of `held`."""
        return float(self.held.min()), float(self.held.max())

    def strength(self, measure: str) -> Strength:
        """Of one measure."""
        return next(one for one in self.strengths if one.measure == measure)

    def named(self, measure: str) -> Beyond:
        """What the methods' names make of one measure's link."""
        return next(one for one in self.names if one.measure == measure)

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
    crossed = tables(measured, scored, lost)
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
        tables=crossed,
        names=beyond([crossed], found.alike),
        controls=_controls(measured, scored, lost),
        curves={one: curve(array, lost, drop, bins) for one, array in measured.items()},
    )


def marked(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """The settings with what stands of all their tests together."""
    names = standing([one.names for one in settings], [one.strengths for one in settings])
    return tuple(replace(one, names=marks) for one, marks in zip(settings, names, strict=True))


def _controls(measured: dict[str, Floats], scored: Floats, lost: NDArray[np.bool_]) -> tuple[Control, ...]:
    dealt = chances(np.stack([_rho_weights(array, scored) for array in measured.values()]), _centred(scored))
    areas = chances(np.stack([_area_weights(array, lost) for array in measured.values()]), lost.astype(np.float64))
    found = []
    for place, (name, array) in enumerate(measured.items()):
        rows = ~np.isnan(array).any(axis=1)
        found.append(Control(name, dealt[place], areas[place], lost_answers.between(array[rows], lost[rows])))
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
