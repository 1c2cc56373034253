"""How savings are told: in a sentence, in a table per measure, in the notes beneath."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from perturbkv.analyses import text
from perturbkv.analyses.budget.losses import MEASURES
from perturbkv.analyses.budget.saved_budget import Level, MeasuredSavings, Point
from perturbkv.analyses.naming import folded, sides
from perturbkv.analyses.sentences import Words, decided, ends, over, sentence, tally
from perturbkv.display import Table

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
    baseline, treatment = sides(one.baseline[0].config, one.points[0].config)
    verdicts = [_UNKNOWN if point.reached.flat else decided(point.interval, 0) for point in one.points]
    known = [point for point in one.points if point.reached.beyond not in ("flat", "both")]
    places = [f"{_UNITS[along]} {_at(point, along)}" for point in known]
    told = ends([(place, _size(point, one), shown(point, one)) for place, point in zip(places, known, strict=True)])
    told += f" at {places[0]}" if len(known) == 1 < len(verdicts) else ""
    said = tally(verdicts, _words(baseline, treatment), "case") + (f": {told}" if known else "")
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
    baseline, treatment = sides(one.baseline[0].config, one.points[0].config)
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
    names = sides(one.baseline[0].config, one.points[0].config)
    for name, rising in zip(names, (one.rising, one.treatment_rising), strict=True):
        where = ", ".join(f"{low:.4g} to {high:.4g}" for low, high in rising)
        if rising:
            yield f"By {_NAMES[one.measure]} {name} does worse with more budget from {where}: pooled."
