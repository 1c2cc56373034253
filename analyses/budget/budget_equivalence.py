"""Equivalent budgets: where a baseline does as well as a treatment, by monotone interpolation over budgets.

The number comes from the sample means: isotonic regression makes both sides' fall with the budget, and between two
budgets a line on the logarithm of the budget joins the baseline's (of what is positive also on its own logarithm: it
falls by factors, and a straight line would lie above it). Where the baseline's curve is flat at the treatment's level,
the budget nearest to the treatment's own counts: equal curves save nothing, nor does noise that is made to fall.

At both ends of a curve of scores several budgets may be equal for another reason: no answer is right yet, or all are,
whatever the budget. For a treatment at one of these levels only the smallest budget measured that does as well is
given.

The interval of the number inverts a test: a budget belongs to it where the interval of `intervals` cannot distinguish
the baseline there from the treatment, sample by sample. So it covers as often as that one does, and nothing is
resampled, which with eight samples covers too rarely. Budgets between two that belong belong as well.

Where a single prompt can dominate a mean, as of KL, each sample has a budget of its own, and their median counts, with
the interval of a median (`intervals.of_medians`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import ClassVar

import numpy as np
from scipy.optimize import isotonic_regression

from perturbkv.analyses import text
from perturbkv.analyses.budget.budget_axis import Axis
from perturbkv.analyses.columns import Record, column, derived, interval, record
from perturbkv.analyses.measurements import Floats, Measurements, scores
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import (
    DIFFERENCE,
    POSITIVE,
    RATIO,
    Interval,
    OptionalInterval,
    StatisticKind,
    share_kind,
)
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, UnknownNameError

LEAST_BUDGETS = 5
"""Fewer leave too much to the lines between them."""
_CANDIDATES = 401
"""Budgets that are tried, evenly spaced on the logarithm."""
_SMALLEST = 1e-12
"""Least value on a logarithmic scale: less is rounding."""
_SAME = 1e-9
"""Levels that differ by less are equal: means differ by rounding with the order of their numbers."""
_DIGITS = 12
"""Digits of means, for the same reason, where it is decided whether they fall."""


@record
class EquivalentBudget(Record):
    """The budget at which a baseline does as well as a treatment.

    Attributes:
        flat: whether the treatment lies at the level on which the baseline's curve begins or ends flat: `value` is then
            the smallest budget measured that does as well, and the true one is not known.
    """

    SECTION: ClassVar[str] = "equivalent budget"

    value: float = column(
        "the budget; null or 0 beyond those measured; where `beyond` is flat the smallest measured that does as well"
    )
    interval: OptionalInterval = column(
        "budgets that the samples cannot distinguish from it; null or 0 at an open end; null where `beyond` is flat"
    )
    flat: bool = False

    @property
    def known(self) -> bool:
        """True where `value` lies within the measured budgets, on a part of the curve that is not flat."""
        return 0 < self.value < np.inf and not self.flat

    @derived()
    def beyond(self) -> str:
        """Side of the budgets measured, above or below; both: no end is known; flat: a flat curve; else empty."""
        if self.flat:
            return "flat"
        if self.interval is not None and self.interval.low == 0 and self.interval.high == np.inf:
            return "both"
        return "" if self.known else "above" if self.value else "below"


def equivalent_budgets(
    budgets: Floats, baseline: Floats, own: Floats, treatment: Floats, kind: StatisticKind
) -> list[EquivalentBudget]:
    """Return, per budget of the treatment, the baseline's budget with an equally low loss.

    Args:
        budgets: (budget,) the baseline's, rising.
        baseline: (sample, budget) its losses.
        own: (own,) the treatment's budgets, rising.
        treatment: (sample, own) its losses.
        kind: of the comparison: on a logarithm a ratio of means, else a mean of differences of what lies in [0, 1].
    """
    falling, levels = _make_falling(baseline), _make_falling(treatment)
    return [
        _equivalent_budget(budgets, falling, float(at), level, kind) for at, level in zip(own, levels.T, strict=True)
    ]


def _equivalent_budget(
    budgets: Floats, falling: Floats, own: float, level: Floats, kind: StatisticKind
) -> EquivalentBudget:
    """Return the baseline's budget at which its `falling` losses reach the treatment's `level` at budget `own`."""
    curve, aim = falling.mean(axis=0), float(level.mean())
    flat = None if kind.log else _flat_index(curve, aim)
    if flat is not None:
        return EquivalentBudget(float(budgets[flat]), None, flat=True)
    value = _budget_at(budgets, curve, aim, own, kind.log)
    tried = np.geomspace(budgets[0], budgets[-1], _CANDIDATES)
    contrast = _contrast(_interpolation_weights(budgets, tried), falling, level, kind.log)
    band = intervals.of_statistics(contrast, len(falling), kind)
    if band is None:
        return EquivalentBudget(value, None)
    equal = 1.0 if kind.log else 0.0
    low, high = _undecided_ends(tried, band.high < equal - _SAME, band.low > equal + _SAME)
    return EquivalentBudget(value, Interval(min(low, value), max(high, value), band.kind))


def _flat_index(curve: Floats, level: float) -> int | None:
    """Return the index of the first budget at which a curve (budget,) equals `level` on a flat end; else None.

    A level of 1, a score of 0, counts as such an end.
    """
    same = np.abs(curve - level) <= _SAME
    if same[:2].all() or same[-2:].all() or level >= 1 - _SAME:
        return int(np.argmax(same))  # the smallest one also where every budget scores something
    return None


def median_equivalent_budgets(
    budgets: Floats, baseline: Floats, own: Floats, treatment: Floats
) -> list[EquivalentBudget]:
    """Return the median over samples of each sample's own equivalent budget; losses are positive.

    Arguments as of `equivalent_budgets`.
    """
    sides = [np.stack([_make_falling(curve[None])[0] for curve in side]) for side in (baseline, treatment)]
    each = np.array(
        [
            [_budget_at(budgets, curve, float(aim), float(at), log=True) for at, aim in zip(own, levels, strict=True)]
            for curve, levels in zip(*sides, strict=True)
        ]
    )
    middle = np.sort(each, axis=0)[(len(each) - 1) // 2]  # of an even number the lower one: no more than is saved
    band = intervals.of_medians(each)
    if band is None:
        return [EquivalentBudget(float(value), None) for value in middle]
    return [
        EquivalentBudget(float(value), Interval(min(ends.low, budgets[-1]), max(ends.high, budgets[0]), ends.kind))
        for value, ends in zip(middle, map(band.at, range(len(own))), strict=True)
    ]


def _make_falling(losses: Floats) -> Floats:
    """Return losses (sample, budget) with a falling mean: adjacent budgets over which the mean rises are averaged."""
    means = losses.mean(axis=0)
    shares = np.round(means / (means.max() or 1.0), _DIGITS)
    starts = isotonic_regression(shares, increasing=False).blocks
    sizes = np.diff(starts)
    return np.asarray(np.repeat(np.add.reduceat(losses, starts[:-1], axis=1) / sizes, sizes, axis=1))


def _budget_at(budgets: Floats, curve: Floats, level: float, own: float, log: bool) -> float:
    """Return the budget where a falling curve (budget,) reaches `level`; on a flat part the budget nearest to `own`."""
    curve, aim = _log_if(curve, log), _log_if(np.asarray(level), log)
    same = budgets[np.abs(curve - aim) <= _SAME]
    if len(same):
        return float(np.clip(own, same[0], same[-1]))
    if curve[-1] > aim:
        return float("inf")
    index = int(np.argmax(curve < aim))
    if index == 0:
        return 0.0
    share = (curve[index - 1] - aim) / (curve[index - 1] - curve[index])
    return float(budgets[index - 1] * (budgets[index] / budgets[index - 1]) ** share)


def _interpolation_weights(budgets: Floats, tried: Floats) -> Floats:
    """Return weights (tried, budget) that interpolate measured budgets at `tried` budgets, linear in the logarithm."""
    logs = np.log(budgets)
    return np.stack([np.interp(np.log(tried), logs, unit) for unit in np.eye(len(budgets))], axis=1)


def _contrast(between: Floats, baseline: Floats, treatment: Floats, log: bool) -> Callable[[Floats], Floats]:
    """Return the function from weights (row, sample) to treatment against baseline at each tried budget, (row, tried).

    With `log` it gives ratios, else differences.
    """

    def contrast(weights: Floats) -> Floats:
        level, curve = (weights @ treatment)[:, None], _log_if(weights @ baseline, log) @ between.T
        return np.asarray(ratio(level, np.exp(curve)) if log else level - curve)

    return contrast


def _undecided_ends(tried: Floats, better: np.ndarray, worse: np.ndarray) -> tuple[float, float]:
    """Return the range of tried budgets at which neither side is significantly better, one step wider at both ends.

    `better` and `worse` (tried,): whether the treatment is. An end is open, 0 or infinite, where no budget beyond it
    is significant.
    """
    first = int(np.argmin(better))  # the first at which the treatment is not decided to be better
    last = len(tried) - 1 - int(np.argmin(worse[::-1]))
    low = 0.0 if first == 0 and not better[0] else float(tried[-1] if better.all() else tried[first - 1])
    high = np.inf if last == len(tried) - 1 and not worse[-1] else float(tried[0] if worse.all() else tried[last + 1])
    return low, high


def _log_if(values: Floats, log: bool) -> Floats:
    """Return the logarithms of the values if `log`, else the values."""
    return np.log(np.maximum(values, _SMALLEST)) if log else values


MEASURES = {
    "score": "score × 100",
    "propagated": "propagated L1 / ‖o‖₁",
    "kl": "KL, nat, median",
}
"""Name -> its caption: mean score of answers, mean propagated perturbation of all heads over the norms of their full
outputs, and KL(full ‖ evicted), whose mean a single prompt can dominate."""
NAMES = {"score": "score", "propagated": "propagated L1", "kl": "KL"}
"""Name -> its short caption."""


@dataclass(frozen=True)
class Loss:
    """A measure of a trace as a loss: the lower the better.

    Attributes:
        name: a key of `MEASURES`.
        each: (sample, config) 1 − score; relative L1; nat.
        full: mean score of the full cache's answers; NaN for other measures.
    """

    name: str
    each: Floats
    full: float

    def level(self, index: int) -> tuple[float, OptionalInterval]:
        """Return a configuration's value by index, with its interval: mean score in [0, 1], mean L1 or median KL."""
        each = self.each[:, index]
        if self.name == "kl":
            return float(np.median(each)), intervals.of_median(each)
        if self.name == "score":
            return float(1 - each.mean()), intervals.of_mean(1 - each, share_kind(0))
        return float(each.mean()), intervals.of_mean(each, POSITIVE)

    def equivalent_budgets(self, baseline: Axis, treatment: Axis) -> list[EquivalentBudget]:
        """Return, per budget of the treatment, the baseline's budget with an equally low loss."""
        falling, levels = (self.each[:, list(side.indices)] for side in (baseline, treatment))
        if self.name == "kl":
            return median_equivalent_budgets(baseline.at, falling, treatment.at, levels)
        kind = DIFFERENCE if self.name == "score" else RATIO
        return equivalent_budgets(baseline.at, falling, treatment.at, levels, kind)


def measure_losses(measured: Measurements, by: Sequence[str] | None) -> list[Loss]:
    """Return the losses by the measures in `by`, or by all of the trace's for None. Scores are of whole answers.

    Raises TraceError where the trace lacks one, UnknownNameError for an unknown one, ConfigError for none at all.
    """
    return [_loss(measured, name) for name in (_available_measures(measured) if by is None else check_measures(by))]


def check_measures(by: Sequence[str]) -> list[str]:
    """Return the names of measures without duplicates. Raises UnknownNameError, or ConfigError for no name."""
    names = [by] if isinstance(by, str) else list(by)
    for name in names:
        if name not in MEASURES:
            raise UnknownNameError(name, "measure", MEASURES)
    if not names:
        raise ConfigError(f"expected a measure ({', '.join(MEASURES)}), got none")
    return list(dict.fromkeys(names))


def _available_measures(measured: Measurements) -> list[str]:
    """Return the names of the measures that a trace has; scores only if all answers have one."""
    trace = measured.trace
    graded = "score_full" in measured and not np.isnan(np.asarray(trace.arrays["score_full"])[trace.ok]).any()
    return [name for name in MEASURES if graded or name != "score"]


def _loss(measured: Measurements, name: str) -> Loss:
    """Return a trace's loss by one measure. Raises TraceError where the trace lacks it."""
    if name == "score":
        graded = scores(measured.trace, measured.analysis)
        return Loss(name, 1 - graded.evicted, float(graded.full.mean()))
    if name == "kl":
        return Loss(name, measured["logit_kl"], float("nan"))
    perturbation = measured["perturbation_propagated"].sum(axis=(2, 3))
    norms = measured["output_norm"].sum(axis=(1, 2))
    return Loss(name, perturbation / norms[:, None], float("nan"))


@record
class Level(Record):
    """The value of one configuration of a curve."""

    SECTION: ClassVar[str] = "level"

    config: EvictionConfig = column("the configuration")
    at: float = column("its coordinate: its budget, or the share of the full cache's entries that its cache holds")
    cache_share: float = column(
        "entries of its cache over those of the full cache; null where the trace lacks them", key="held",
        heading="#cache\nshare",
    )  # fmt: skip
    level: float = column(
        "mean score (0 to 1), mean propagated L1 over the norms of the full outputs, or median KL (nat)",
        heading="#its value", text=text.three_digits,
    )  # fmt: skip
    level_interval: OptionalInterval = interval()


@record
class Point(Level):
    """The value of one configuration of the treatment, and the baseline's budget that does as well.

    Attributes:
        baseline_range: the least and the largest coordinate at which the baseline was measured.
        entries: whether coordinates are whole numbers of entries.
    """

    SECTION: ClassVar[str] = "saving at a budget"

    equivalent: EquivalentBudget = column("the baseline's budget for the same, on the same axis", key="reached")
    reason: str = column("why there is no saving, or no end of its interval; empty where both are there")
    baseline_level: float | None = column(
        "the same of the baseline at that budget", heading="#baseline's\nvalue", text=text.three_digits, json=False
    )
    baseline_level_interval: OptionalInterval
    baseline_range: tuple[float, float]
    entries: bool

    @derived()
    def saving(self) -> float:
        """1 − budget / the baseline's; null where that lies beyond the budgets measured, or is not known."""
        return 1 - self.at / self.equivalent.value if self.equivalent.known else float("nan")

    @derived()
    def saving_interval(self) -> OptionalInterval:
        """Interval of the saving; an end is 1, or null for −∞, where the budgets measured do not show it."""
        ends = self.equivalent.interval
        if ends is None:
            return None
        low, high = (1 - self.at / end if end > 0 else -np.inf for end in (ends.low, ends.high))
        return Interval(low, high, ends.kind)

    @property
    def least_saving(self) -> float:
        """The saving; where it is not known, the saving over the baseline's largest or smallest measured budget."""
        if self.equivalent.known:
            return self.saving
        return 1 - self.at / self.baseline_range[1 if self.equivalent.value else 0]

    @derived(heading="#saved\n1 − b / b*", json=False)
    def saved(self) -> str:
        """Share of the baseline's budget that the treatment saves; ? where the baseline's curve is flat."""
        if self.equivalent.flat:
            return "?"
        return _SIGNS.get(self.equivalent.value, "") + text.percent(self.least_saving) + text.interval_text(
            self.saving_interval, _percent_end, "\n")  # fmt: skip

    @derived(heading="#baseline's\nbudget b*", json=False)
    def equivalent_budget(self) -> str:
        """Budget at which the baseline does as well; > and <: beyond those measured, ≤ on a flat curve."""
        value, low_high = self.equivalent.value, self.baseline_range
        sign = "≤ " if self.equivalent.flat else _SIGNS.get(value, "")
        shown = sign + self._coordinate({inf: low_high[1], 0.0: low_high[0]}.get(value, value))
        ends = text.interval_text(
            self.equivalent.interval, lambda end: self._coordinate(end) if 0 < end < inf else "…", "\n"
        )
        return shown + ends

    def _coordinate(self, value: float) -> str:
        """Return a coordinate as text: '1,024' entries or '0.05'."""
        return f"{value:,.0f}" if self.entries else f"{value:.3g}"


_SIGNS = {inf: "> ", 0.0: "< "}


def _percent_end(end: float) -> str:
    """Return an end of a saving's interval in percent; '…' for an open end (1 or −∞)."""
    return "…" if end in (1, -inf) else text.fixed(100 * end, 0)


@record
class MeasuredSavings(Record):
    """The values of both curves by one measure, and the savings of the treatment."""

    SECTION: ClassVar[str] = "savings by one measure"

    measure: str = column("score, propagated or kl")
    full: float = column("mean score of the full cache's answers, 0 to 1; null of other measures")
    baseline: tuple[Level, ...] = column("smallest budget first")
    points: tuple[Point, ...] = column("the treatment's, likewise")
    rising: tuple[tuple[float, float], ...] = column(
        "the baseline's neighbouring budgets between which it does worse with more: these are pooled"
    )
    treatment_rising: tuple[tuple[float, float], ...] = column("the treatment's, likewise")

    @derived(heading="measure", json=False)
    def caption(self) -> str:
        """Mean score of the answers, mean propagated L1 of all heads over their full outputs' norms, or median KL."""
        return NAMES[self.measure].replace(" ", "\n")


def measured_savings(loss: Loss, baseline: Axis, treatment: Axis, along: str) -> MeasuredSavings:
    """Return the treatment's savings by one measure; `along`: the axes' coordinates, `budget` or `held`."""
    levels, own = _levels(loss, baseline), _levels(loss, treatment)
    equivalents = loss.equivalent_budgets(baseline, treatment)
    entries = along == "budget" and isinstance(treatment.configs[0].budget.value, int)
    return MeasuredSavings(
        measure=loss.name,
        full=loss.full,
        baseline=tuple(levels),
        points=tuple(
            _point(level, equivalent, levels, entries) for level, equivalent in zip(own, equivalents, strict=True)
        ),
        rising=_rising_pairs(loss, levels),
        treatment_rising=_rising_pairs(loss, own),
    )


def _point(level: Level, equivalent: EquivalentBudget, baseline: Sequence[Level], entries: bool) -> Point:
    """Return a point: the treatment's value at one budget, and the baseline's equivalent budget."""
    same = next((own for own in baseline if own.at == level.at), None)
    ends = (baseline[0].at, baseline[-1].at)
    return Point(
        **vars(level),
        equivalent=equivalent,
        reason=_unknown_reason(equivalent, ends),
        baseline_level=None if same is None else same.level,
        baseline_level_interval=None if same is None else same.level_interval,
        baseline_range=ends,
        entries=entries,
    )


def _unknown_reason(equivalent: EquivalentBudget, measured: tuple[float, float]) -> str:
    """Return the reason why a saving lacks its number or interval; empty if it lacks neither."""
    smallest, largest, at = (f"{value:.4g}" for value in (*measured, equivalent.value))
    best = f"the baseline does as well from {at} on, where it is at its best"
    return {
        "flat": f"the baseline does as well at {at}, the smallest budget measured" if at == smallest else best,
        "both": "no budget measured can be told from it",
        "above": f"the baseline does worse at {largest}, the largest budget measured",
        "below": f"the baseline does better at {smallest}, the smallest budget measured",
    }.get(equivalent.beyond, "")


def _levels(loss: Loss, axis: Axis) -> list[Level]:
    """Return the value of each configuration of a curve."""
    return [
        Level(config, float(at), float(share), *loss.level(index))
        for config, index, at, share in zip(axis.configs, axis.indices, axis.at, axis.cache_shares, strict=True)
    ]


def _rising_pairs(loss: Loss, levels: list[Level]) -> tuple[tuple[float, float], ...]:
    """Return the pairs of adjacent budgets of a curve between which the loss rises with the budget."""
    sign = -1 if loss.name == "score" else 1
    return tuple((low.at, high.at) for low, high in pairwise(levels) if sign * (high.level - low.level) > 0)
