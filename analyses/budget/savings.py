"""How much budget does a selection save? The budget at which a baseline does as well as it does (paper, figure 1).

How savings are told: in a sentence, in a table per measure, in the notes beneath.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.budget.budget_axis import Axis, check_kind, compared
from perturbkv.analyses.budget.budget_equivalence import (
    LEAST_BUDGETS,
    MEASURES,
    Level,
    Loss,
    MeasuredSavings,
    Point,
    losses,
    of_measure,
)
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import at_step
from perturbkv.analyses.pairing import SIDE, Sides, checked, folded, short_names, side_names
from perturbkv.analyses.result import Result, Several
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.text import Words, decided, extremes, over, sentence, tally_verdicts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

_NAMES = {"score": "score", "propagated": "propagated L1", "kl": "KL"}
_UNITS = {"budget": "budget", "held": "held / full"}
_SIGNS = {inf: "> ", 0.0: "< "}
_UNKNOWN = 2
"""A verdict beside those of `decided`: what is saved cannot be told."""
_HOW = (
    "b*: the budget at which the baseline does as well. Both curves are made to fall (isotonic regression), the "
    "baseline's is joined by lines over log b; in brackets the budgets at which the sides cannot be told apart, sample "
    "by sample. Saved: 1 − b / b*. Beyond the budgets measured nothing is told but >, < and ….",
    "KL: medians over samples, b* of each sample's own; one sample can make a mean of KL.",
    "Budgets are compared as held / full: the sides keep other sets, per query head or per group.",
    "≤, not told: the baseline does as well at that budget, the smallest measured, or the one from which on it is at "
    "its best; which one would do is not known.",
)


def conclusion(measures: Sequence[MeasuredSavings], setting: str, along: str, samples: int) -> str:
    """Of each measure whether budget is saved, at how many budgets, and how much at least and at most."""
    where = f"with {setting}, " if setting else ""
    return "\n".join(sentence(where + _concluded(one, along, samples)) for one in measures)


def _concluded(one: MeasuredSavings, along: str, samples: int) -> str:
    baseline, treatment = side_names(one.baseline[0].config, one.points[0].config)
    verdicts = [_UNKNOWN if point.reached.flat else decided(point.interval, 0) for point in one.points]
    known = [point for point in one.points if point.reached.beyond not in ("flat", "both")]
    places = [f"{_UNITS[along]} {_at(point, along)}" for point in known]
    told = extremes([(place, _size(point, one), shown(point, one)) for place, point in zip(places, known, strict=True)])
    told += f" at {places[0]}" if len(known) == 1 < len(verdicts) else ""
    said = tally_verdicts(verdicts, _words(baseline, treatment), "case") + (f": {told}" if known else "")
    if None in verdicts and known:
        said = f"{treatment} saves {told} of {baseline}'s budget"
    return f"by {_NAMES[one.measure]} {said} ({over(samples)})"


def _words(baseline: str, treatment: str) -> Words:
    return {
        1: (f"{treatment} saves budget over {baseline}", "saves"),
        -1: (f"{treatment} needs more budget than {baseline}", "needs more"),
        0: (f"whether {treatment} saves budget over {baseline} is undecided", "undecided"),
        _UNKNOWN: (f"what {treatment} saves over {baseline} cannot be told", "not told"),
    }


def shown(point: Point, one: MeasuredSavings) -> str:
    """'26 % [9, 43]'; '> 50 % [35, …]' where the baseline's largest budget does not do; 'not told' of a flat curve."""
    if point.reached.flat:
        return "not told"
    size = text.percent(_size(point, one))
    return _SIGNS.get(point.reached.value, "") + size + text.ends(point.interval, _hundredths, " ")


def _size(point: Point, one: MeasuredSavings) -> float:
    """The saving, or where it is beyond what was measured, the end that it lies behind."""
    if point.reached.told:
        return point.saving
    end = one.baseline[-1 if point.reached.value else 0]
    return 1 - point.at / end.at


def table(one: MeasuredSavings, setting: str, along: str) -> Table:
    """A row per budget of the treatment: both sides' numbers there, the baseline's budget for the same, the saving."""
    baseline, treatment = side_names(one.baseline[0].config, one.points[0].config)
    there = {level.at: level for level in one.baseline}
    columns = ["b", "#held /\nfull", *(f"#{folded(name, 14)}" for name in (treatment, baseline)), "#b*", "#saved"]
    rows = [
        [
            str(point.config.budget),
            text.held(point.held),
            _level(point, one),
            _level(there[point.at], one) if point.at in there else "–",
            _reached(point, one, along),
            shown(point, one).replace(" [", "\n[").replace(" (", "\n("),
        ]
        for point in one.points
    ]
    full = f"; full cache {100 * one.full:.1f}" if one.measure == "score" else ""
    return Table(f"{f'{setting}: ' if setting else ''}{MEASURES[one.measure]}{full}", columns, rows)


def _level(level: Level, one: MeasuredSavings) -> str:
    if one.measure == "score":
        return text.fixed(100 * level.level, 1) + text.ends(level.level_interval, _points, "\n")
    return text.significant(level.level, level.level_interval)


def _reached(point: Point, one: MeasuredSavings, along: str) -> str:
    """'0.27' with the interval; '> 0.8' where the largest budget measured does not do, '≤ 0.1' of a flat curve."""
    told, entries = point.reached, along == "budget" and isinstance(point.config.budget.value, int)

    def written(value: float) -> str:
        return f"{value:,.0f}" if entries else f"{value:.3g}"

    sign = "≤ " if told.flat else _SIGNS.get(told.value, "")
    beyond = {inf: one.baseline[-1].at, 0.0: one.baseline[0].at}
    value = sign + written(beyond.get(told.value, told.value))
    return value + text.ends(told.interval, lambda end: written(end) if 0 < end < inf else "…", "\n")


def _points(score: float) -> str:
    return text.fixed(100 * score, 0)


def _at(point: Point, along: str) -> str:
    return str(point.config.budget) if along == "budget" else text.held(point.at)


def _hundredths(end: float) -> str:
    """An end of a saving in percent; 1 and −∞ are ends that nothing shows."""
    return "…" if end in (1, -inf) else text.fixed(100 * end, 0)


def notes(measures: Sequence[MeasuredSavings], along: str, samples: int) -> str:
    """A line each on intervals, on b*, on what is compared, and on curves that do not fall."""
    names = [one.measure for one in measures]
    lines = [
        text.about_intervals(samples, medians="kl" in names),
        _HOW[0],
        *([_HOW[1]] if "kl" in names else []),
        *([_HOW[2]] if along == "held" else []),
        *([_HOW[3]] if any(point.reached.flat for one in measures for point in one.points) else []),
        *(line for one in measures for line in _pooled(one)),
        text.about_held(level.held for one in measures for level in (*one.baseline, *one.points)),
    ]
    return "\n".join(lines)


def _pooled(one: MeasuredSavings) -> Iterator[str]:
    names = side_names(one.baseline[0].config, one.points[0].config)
    for name, rising in zip(names, (one.rising, one.treatment_rising), strict=True):
        where = ", ".join(f"{low:.4g} to {high:.4g}" for low, high in rising)
        if rising:
            yield f"By {_NAMES[one.measure]} {name} does worse with more budget from {where}: pooled."


ANALYSIS = "savings"


@dataclass(frozen=True, repr=False)
class PairSavings(Result):
    """What one curve saves against another.

    Attributes:
        measures: one per measure.
        setting: what tells the baseline from those of other pairs, such as `adakv`; empty where nothing does.
        along: what budgets are compared in: `budget`, as they were given, or `held`, the share of the full cache's
            entries that a cache holds, where the sides keep other sets.
        step: decode step of perturbation and KL.
        identity: of the run, with the configurations of both curves.
    """

    measures: tuple[MeasuredSavings, ...]
    setting: str
    along: str
    step: int
    identity: RunIdentity

    def conclusion(self) -> str:
        """What is saved by each measure, with interval and n, or that it cannot be told."""
        return conclusion(self.measures, self.setting, self.along, self.identity.samples)

    def tables(self) -> Sequence[Table | str]:
        """Of each measure a row per budget of the treatment."""
        return [table(one, self.setting, self.along) for one in self.measures]

    def notes(self) -> str:
        """How the budget is found, what intervals are, where curves do not fall."""
        return notes(self.measures, self.along, self.identity.samples)

    def to_dict(self) -> dict[str, Any]:
        """`savings`: one object, as `docs/json.md` says."""
        return {"savings": [self._document()]}

    def _document(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(
            {
                "along": self.along,
                "setting": self.setting,
                "step": self.step,
                "measures": [one.to_dict() for one in self.measures],
            }
        )
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per measure and budget of the treatment.

        `saving` is 1 − b / b*, b* the budget at which the baseline does as well; NaN where b* lies outside the budgets
        measured, on the side that `beyond` names: `above` or `below`, and where it is `flat`: the baseline does as well
        where its curve begins or ends. `both`: no budget measured can be told from it. `reason` says so in words.
        """
        return [row for one in self.measures for row in _rows(one, self.along)]


class Savings(Several[PairSavings]):
    """What every treatment and setting saves: a `PairSavings` each."""

    def to_dict(self) -> dict[str, Any]:
        """`savings`: one object per pair of curves, as `docs/json.md` says."""
        return {"savings": [document for one in self.members for document in one.to_dict()["savings"]]}


def savings(
    trace: Trace,
    baseline: str = "attention",
    treatments: Sides = "two-stage",
    *,
    by: Sequence[str] | None = None,
    step: int = 0,
) -> Savings:
    """How much budget does a treatment save: at which budget does the baseline do as well? (Paper, figure 1.).

    Of at least five budgets of the baseline, all entries or all shares. Only complete samples that have the step count.

    Args:
        trace: from `measure` or `read_trace`.
        baseline: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`).
        treatments: likewise, one or several.
        by: measures: `score` of whole answers, `propagated` L1 of all heads, `kl` of the next token; by default all
            that the trace has.
        step: decode step of the last two, from 0.

    Returns a series of `PairSavings`.

    Raises TraceError where the trace has no such sides, or lacks a measure; ConfigError for fewer than five budgets or
    some of both kinds, for a step that it does not have, and for sides that are no names; UnknownNameError for an
    unknown measure.

    >>> import perturbkv as pk
    >>> found = pk.savings(trace, "attention", "two-stage", by=["propagated"])
    >>> [str(point.config.budget) for point in found[0].measures[0].points]
    ['40', '48', '56', '60', '64']
    """
    others = checked(trace, baseline, treatments)
    held = at_step(trace, ANALYSIS, step)
    found = losses(held, by, step, ANALYSIS)
    pairs = [pair for treatment in others for pair in compared(held, baseline, treatment, ANALYSIS)]
    settings = short_names([first.configs[0] for first, _ in pairs], "budget")
    members = tuple(
        _of_pair(found, first, second, setting, step, identity(trace, [*first.configs, *second.configs], step))
        for (first, second), setting in zip(pairs, settings, strict=True)
    )
    shown = dict.fromkeys(config for one in members for config in one.identity.configs)
    return Savings(members, identity(trace, list(shown), step))


def _of_pair(
    measured: Sequence[Loss], baseline: Axis, treatment: Axis, setting: str, step: int, told: RunIdentity
) -> PairSavings:
    along = "budget" if _alike(baseline, treatment) else "held"
    first, second = (_checked(one, along) for one in (baseline, treatment))
    return PairSavings(tuple(of_measure(loss, first, second) for loss in measured), setting, along, step, told)


def _alike(baseline: Axis, treatment: Axis) -> bool:
    """Whether budgets of both say the same of a cache: as many sets are kept, of as large blocks, counted alike."""
    first, second = (
        (one.granularity.name, one.block, one.budget.unit) for one in (baseline.configs[0], treatment.configs[0])
    )
    return first == second


def check_budgets(configs: Sequence[EvictionConfig]) -> None:
    """Raise ConfigError for fewer than five budgets, and for budgets of both kinds."""
    check_kind(configs, ANALYSIS)
    budgets = list(dict.fromkeys(str(config.budget) for config in configs))
    if len(budgets) < LEAST_BUDGETS:
        msg = (
            f"{ANALYSIS} needs at least {LEAST_BUDGETS} budgets of each curve, got {', '.join(budgets)}; measure more, "
            "such as -b 0.05 -b 0.1 -b 0.2 -b 0.4 -b 0.8"
        )
        raise ConfigError(msg)


def _checked(one: Axis, along: str) -> Axis:
    """The curve along its axis. Raises ConfigError as `check_budgets`, TraceError for caches that are not told."""
    check_budgets(one.configs)
    placed = one if along == "budget" else dataclasses.replace(one, at=one.held)
    if not (np.diff(placed.at) > 0).all():  # NaN where the trace does not tell what its caches hold
        msg = (
            f"{ANALYSIS} needs caches that grow with the budget, got held / full {placed.at.round(3).tolist()} of "
            f"'{one.configs[0].label()}'; compare sides of one granularity"
        )
        raise TraceError(msg)
    return placed


def _rows(one: MeasuredSavings, along: str) -> Iterator[dict[str, Any]]:
    for point in one.points:
        yield {
            "measure": one.measure,
            **columns_of(point.config),
            **{f"baseline_{name}": value for name, value in columns_of(one.baseline[0].config).items() if name in SIDE},
            "along": along,
            **_numbers(point),
            "reason": one.reason(point),
        }


def _numbers(point: Point) -> dict[str, Any]:
    told = point.reached
    return {
        "at": point.at,
        "level": point.level,
        "reached": told.value if told.told else float("nan"),
        "beyond": told.beyond,
        "saving": point.saving,
        "saving_low": float("nan") if point.interval is None else point.interval.low,
        "saving_high": float("nan") if point.interval is None else point.interval.high,
    }
