"""At which budget does a baseline do as well as a treatment does at its own? By monotone interpolation over budgets.

The number comes from the sample means: isotonic regression makes both sides' fall with the budget, and between two
budgets a line on the logarithm of the budget joins the baseline's (of what is positive also on its own logarithm: it
falls by factors, and a straight line would lie above it). Where the baseline's curve is flat at the treatment's level,
the budget nearest to the treatment's own counts: equal curves save nothing, nor does noise that is made to fall.

Where a curve of scores begins and where it ends, two budgets and more may be alike for another reason: nothing is right
yet, or all is, whatever the budget. Of a treatment at one of these levels nothing is told but the smallest budget
measured that does as well.

Its interval is a test turned round: a budget belongs to it where the interval of `intervals` cannot tell the baseline
there from the treatment, sample by sample. So it covers as often as that one does, and nothing is resampled, which with
eight samples holds the truth too rarely. Budgets between two that belong belong as well.

Of what a single prompt can dominate, such as KL, means tell nothing: there each sample has a budget of its own, and
their median counts, between two of them (`intervals.of_medians`).

What a configuration loses, sample by sample, in the measures that budgets are compared by.

One measure of two curves over their budgets, and what the second saves at each of its budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from perturbkv.analyses.budget.budget_axis import Axis
from perturbkv.analyses.measurements import Floats, scores, values
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import DIFFERENCE, POSITIVE, RATIO, Interval, Kind, Scalar, share_of
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.trace import Trace

LEAST_BUDGETS = 5
"""Fewer leave too much to the lines between them."""
_CANDIDATES = 401
"""Budgets that are tried, evenly on the logarithm."""
_SMALLEST = 1e-12
"""Of what falls by factors: less is rounding."""
_SAME = 1e-9
"""Levels no further apart are one: a mean differs by rounding with the order in which its numbers lie."""
_DIGITS = 12
"""Of means, for the same reason, where it is asked whether they fall."""


@dataclass(frozen=True)
class Reached:
    """The budget at which a baseline does as well as a treatment.

    Attributes:
        value: that budget; infinite where the largest measured does not, 0 where the smallest does better already.
        interval: its interval; an end is infinite, or 0, where the measured budgets do not show it. None: one sample,
            or `flat`.
        flat: whether the treatment lies at the level on which the baseline's curve begins or ends flat: `value` is then
            the smallest budget measured that does as well, and which one would is not known.
    """

    value: float
    interval: Scalar
    flat: bool = False

    @property
    def told(self) -> bool:
        """Whether it is known and lies among the budgets measured."""
        return 0 < self.value < np.inf and not self.flat

    @property
    def beyond(self) -> str:
        """What is missing: `flat`; `both` ends; that it lies `above` or `below` the budgets measured; else empty."""
        if self.flat:
            return "flat"
        if self.interval is not None and self.interval.low == 0 and self.interval.high == np.inf:
            return "both"
        return "" if self.told else "above" if self.value else "below"


def reached(budgets: Floats, baseline: Floats, own: Floats, treatment: Floats, kind: Kind) -> list[Reached]:
    """Where the baseline's loss comes down to the treatment's, for each of the treatment's budgets.

    Args:
        budgets: (budget,) the baseline's, rising.
        baseline: (sample, budget) what is lost at each, the less the better.
        own: (own,) the treatment's budgets, rising.
        treatment: (sample, own) what it loses there.
        kind: of the comparison: on a logarithm a ratio of means, else a mean of differences of what lies in [0, 1].
    """
    falling, levels = _falling(baseline), _falling(treatment)
    return [_reached(budgets, falling, float(at), level, kind) for at, level in zip(own, levels.T, strict=True)]


def _reached(budgets: Floats, falling: Floats, own: float, level: Floats, kind: Kind) -> Reached:
    curve, aim = falling.mean(axis=0), float(level.mean())
    flat = None if kind.log else _flat(curve, aim)
    if flat is not None:
        return Reached(float(budgets[flat]), None, flat=True)
    value = _crossing(budgets, curve, aim, own, kind.log)
    tried = np.geomspace(budgets[0], budgets[-1], _CANDIDATES)
    contrast = _contrast(_weights(budgets, tried), falling, level, kind.log)
    band = intervals.band(contrast, len(falling), kind)
    if band is None:
        return Reached(value, None)
    equal = 1.0 if kind.log else 0.0
    low, high = _ends(tried, band.high < equal - _SAME, band.low > equal + _SAME)
    return Reached(value, Interval(min(low, value), max(high, value), band.kind))


def _flat(curve: Floats, aim: float) -> int | None:
    """The first budget at the level on which the curve begins or ends flat, or at that of no score; None elsewhere."""
    same = np.abs(curve - aim) <= _SAME
    if same[:2].all() or same[-2:].all() or aim >= 1 - _SAME:
        return int(np.argmax(same))  # the smallest one also where every budget scores something
    return None


def reached_by_half(budgets: Floats, baseline: Floats, own: Floats, treatment: Floats) -> list[Reached]:
    """The same of something positive, as the median over samples of each one's own budget."""
    sides = [np.stack([_falling(one[None])[0] for one in side]) for side in (baseline, treatment)]
    each = np.array(
        [
            [_crossing(budgets, curve, float(aim), float(at), log=True) for at, aim in zip(own, levels, strict=True)]
            for curve, levels in zip(*sides, strict=True)
        ]
    )
    middle = np.sort(each, axis=0)[(len(each) - 1) // 2]  # of an even number the lower one: no more than is saved
    band = intervals.of_medians(each)
    if band is None:
        return [Reached(float(value), None) for value in middle]
    ends = (band.at(place) for place in range(len(own)))
    return [
        Reached(float(value), Interval(min(one.low, budgets[-1]), max(one.high, budgets[0]), one.kind))
        for value, one in zip(middle, ends, strict=True)
    ]


def _falling(losses: Floats) -> Floats:
    """(sample, budget) losses whose mean falls: neighbouring budgets at which it rises have their common mean."""
    means = losses.mean(axis=0)
    shares = np.round(means / (means.max() or 1.0), _DIGITS)
    starts = isotonic_regression(shares, increasing=False).blocks
    sizes = np.diff(starts)
    return np.asarray(np.repeat(np.add.reduceat(losses, starts[:-1], axis=1) / sizes, sizes, axis=1))


def _crossing(budgets: Floats, curve: Floats, level: float, own: float, log: bool) -> float:
    """The budget at which a falling curve (budget,) is at the level; where it is flat there, the nearest to `own`."""
    curve, aim = _scaled(curve, log), _scaled(np.asarray(level), log)
    same = budgets[np.abs(curve - aim) <= _SAME]
    if len(same):
        return float(np.clip(own, same[0], same[-1]))
    if curve[-1] > aim:
        return float("inf")
    place = int(np.argmax(curve < aim))
    if place == 0:
        return 0.0
    share = (curve[place - 1] - aim) / (curve[place - 1] - curve[place])
    return float(budgets[place - 1] * (budgets[place] / budgets[place - 1]) ** share)


def _weights(budgets: Floats, tried: Floats) -> Floats:
    """(tried, budget) how much each measured budget counts at a tried one: the two beside it, by their logarithms."""
    places = np.log(budgets)
    return np.stack([np.interp(np.log(tried), places, one) for one in np.eye(len(budgets))], axis=1)


def _contrast(between: Floats, baseline: Floats, treatment: Floats, log: bool) -> Callable[[Floats], Floats]:
    """Treatment against baseline at each tried budget, of samples weighted (row, sample): (row, tried)."""

    def contrast(weights: Floats) -> Floats:
        level, curve = (weights @ treatment)[:, None], _scaled(weights @ baseline, log) @ between.T
        return np.asarray(ratio(level, np.exp(curve)) if log else level - curve)

    return contrast


def _ends(tried: Floats, ahead: np.ndarray, behind: np.ndarray) -> tuple[float, float]:
    """Ends of what lies behind the budgets at which the treatment is ahead for sure, and before those where it is not.

    Open, 0 or infinite, where no tried budget is on that side.
    """
    first = int(np.argmin(ahead))  # the first at which it is not surely ahead
    last = len(tried) - 1 - int(np.argmin(behind[::-1]))
    low = 0.0 if first == 0 and not ahead[0] else float(tried[-1] if ahead.all() else tried[first - 1])
    high = np.inf if last == len(tried) - 1 and not behind[-1] else float(tried[0] if behind.all() else tried[last + 1])
    return low, high


def _scaled(values: Floats, log: bool) -> Floats:
    return np.log(np.maximum(values, _SMALLEST)) if log else values


MEASURES = {
    "score": "score × 100",
    "propagated": "propagated L1 / ‖o‖₁",
    "kl": "KL, nat, median",
}
"""Name -> what it is called above numbers: mean score of answers, mean propagated perturbation of all heads over the
norms of their full outputs, and KL(full ‖ evicted), whose mean a single prompt can make."""


@dataclass(frozen=True)
class Loss:
    """One measure of a trace, as what is lost: the less the better.

    Attributes:
        name: a key of `MEASURES`.
        each: (sample, config) 1 − score; relative L1; nat.
        full: mean score of the full cache's answers; NaN of other measures.
    """

    name: str
    each: Floats
    full: float

    def level(self, place: int) -> tuple[float, Scalar]:
        """What stands in tables of one configuration: the score in [0, 1], the mean L1, the median KL."""
        each = self.each[:, place]
        if self.name == "kl":
            band = intervals.of_medians(each[:, None])
            return float(np.median(each)), None if band is None else band.at(0)
        if self.name == "score":
            return float(1 - each.mean()), intervals.of_mean(1 - each, share_of(0))
        return float(each.mean()), intervals.of_mean(each, POSITIVE)

    def reached(self, baseline: Axis, treatment: Axis) -> list[Reached]:
        """The budgets at which the baseline loses no more than the treatment does at each of its own."""
        falling, levels = (self.each[:, list(one.places)] for one in (baseline, treatment))
        if self.name == "kl":
            return reached_by_half(baseline.at, falling, treatment.at, levels)
        return reached(baseline.at, falling, treatment.at, levels, DIFFERENCE if self.name == "score" else RATIO)


def losses(trace: Trace, by: Sequence[str] | None, step: int, analysis: str) -> list[Loss]:
    """The measures asked for, or with None all that the trace has; scores are of whole answers, whatever the step.

    Raises TraceError where the trace lacks one, UnknownNameError for an unknown one, ConfigError for none at all.
    """
    return [_loss(trace, name, step, analysis) for name in (_held(trace) if by is None else checked(by))]


def checked(by: Sequence[str]) -> list[str]:
    """Names of measures, or one, each once. Raises UnknownNameError, or ConfigError where there is none."""
    names = [by] if isinstance(by, str) else list(by)
    for name in names:
        if name not in MEASURES:
            raise UnknownNameError(name, "measure", MEASURES)
    if not names:
        msg = f"expected a measure ({', '.join(MEASURES)}), got none"
        raise ConfigError(msg)
    return list(dict.fromkeys(names))


def _held(trace: Trace) -> list[str]:
    """The measures of a trace: all of them, without scores where some answer has none."""
    graded = "score_full" in trace.arrays and not np.isnan(np.asarray(trace.arrays["score_full"])[trace.ok]).any()
    return [name for name in MEASURES if graded or name != "score"]


def _loss(trace: Trace, name: str, step: int, analysis: str) -> Loss:
    if name == "score":
        found = scores(trace, analysis)
        return Loss(name, 1 - found.evicted, float(found.full.mean()))
    if name == "kl":
        return Loss(name, values(trace, "logit_kl", analysis, step), float("nan"))
    moved = values(trace, "perturbation_propagated", analysis, step).sum(axis=(2, 3))
    whole = values(trace, "output_norm", analysis, step).sum(axis=(1, 2))
    return Loss(name, moved / whole[:, None], float("nan"))


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
        measure: a key of `budget_equivalence.MEASURES`.
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
