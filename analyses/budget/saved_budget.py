"""One measure of two curves over their budgets, and what the second saves at each of its budgets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from perturbkv.analyses.budget.budget_axis import Axis
from perturbkv.analyses.budget.budget_equivalence import Reached
from perturbkv.analyses.budget.losses import Loss
from perturbkv.analyses.stats.intervals import Interval, Scalar
from perturbkv.configs.eviction import EvictionConfig


@dataclass(frozen=True)
class Level:
    """One configuration of a curve.

    Attributes:
        config: the configuration.
        at: where it stands on the axis: its budget, or held / full.
        held: entries that its cache holds over those of the full cache; NaN where the trace does not tell.
        level: its score in [0, 1], mean relative L1 or median KL in nat; `level_interval` over samples.
    """

    config: EvictionConfig
    at: float
    held: float
    level: float
    level_interval: Scalar


@dataclass(frozen=True)
class Point(Level):
    """One configuration of the treatment, and what the baseline needs for the same.

    Attributes:
        reached: the baseline's budget, on the same axis.
    """

    reached: Reached

    @property
    def saving(self) -> float:
        """1 − b / b*; negative where the baseline needs less; NaN where b* is not known among the budgets measured."""
        return 1 - self.at / self.reached.value if self.reached.told else float("nan")

    @property
    def interval(self) -> Scalar:
        """Of the saving; −∞ or 1 at an end that the budgets measured do not show; None where b* has none."""
        ends = self.reached.interval
        if ends is None:
            return None
        low, high = (1 - self.at / end if end > 0 else -np.inf for end in (ends.low, ends.high))
        return Interval(low, high, ends.kind)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        reached = {"value": self.reached.value, "interval": self.reached.interval, "beyond": self.reached.beyond}
        own = {name: value for name, value in vars(self).items() if name != "reached"}
        return {**own, "reached": reached, "saving": self.saving, "saving_interval": self.interval}


@dataclass(frozen=True)
class MeasuredSavings:
    """Both curves by one measure, smallest budget first.

    Attributes:
        measure: a key of `losses.MEASURES`.
        full: the full cache's score in [0, 1]; NaN of other measures.
        baseline: the baseline's levels.
        points: the treatment's, and what each saves.
        rising: the baseline's neighbouring budgets between which it loses more instead of less: pooled.
        treatment_rising: the treatment's, likewise.
    """

    measure: str
    full: float
    baseline: tuple[Level, ...]
    points: tuple[Point, ...]
    rising: tuple[tuple[float, float], ...]
    treatment_rising: tuple[tuple[float, float], ...]

    def reason(self, point: Point) -> str:
        """Why a saving has no number, or no interval that says anything; empty where it has both."""
        smallest, largest = (f"{level.at:.4g}" for level in (self.baseline[0], self.baseline[-1]))
        at = f"{point.reached.value:.4g}"
        best = f"the baseline does as well from {at} on, where it is at its best"
        return {
            "flat": f"the baseline does as well at {at}, the smallest budget measured" if at == smallest else best,
            "both": "no budget measured can be told from it",
            "above": f"the baseline does worse at {largest}, the largest budget measured",
            "below": f"the baseline does better at {smallest}, the smallest budget measured",
        }.get(point.reached.beyond, "")

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        return {**vars(self), "points": [{**point.to_dict(), "reason": self.reason(point)} for point in self.points]}


def of_measure(loss: Loss, baseline: Axis, treatment: Axis) -> MeasuredSavings:
    """What the treatment saves by one measure."""
    levels, own = _levels(loss, baseline), _levels(loss, treatment)
    reached = loss.reached(baseline, treatment)
    return MeasuredSavings(
        measure=loss.name,
        full=loss.full,
        baseline=tuple(levels),
        points=tuple(Point(**vars(level), reached=at) for level, at in zip(own, reached, strict=True)),
        rising=_rising(loss, levels),
        treatment_rising=_rising(loss, own),
    )


def _levels(loss: Loss, one: Axis) -> list[Level]:
    return [
        Level(config, float(at), float(held), *loss.level(place))
        for config, place, at, held in zip(one.configs, one.places, one.at, one.held, strict=True)
    ]


def _rising(loss: Loss, levels: list[Level]) -> tuple[tuple[float, float], ...]:
    """Where more budget loses more."""
    sign = -1 if loss.name == "score" else 1
    return tuple((low.at, high.at) for low, high in pairwise(levels) if sign * (high.level - low.level) > 0)
