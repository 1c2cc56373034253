"""Savings: the share of the budget that one selection saves over another (paper, figure 1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from perturbkv.analyses import columns, text
from perturbkv.analyses.budget.budget_axis import Axis, above_full_caveat, check_budget_units, paired_axes
from perturbkv.analyses.budget.budget_equivalence import (
    LEAST_BUDGETS,
    NAMES,
    Loss,
    MeasuredSavings,
    Point,
    measure_losses,
    measured_savings,
)
from perturbkv.analyses.columns import Line, column, record
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.pairing import SIDE, Sides, check_sides, short_names, side_names
from perturbkv.analyses.result import Result, Several
from perturbkv.analyses.text import Words, extremes, interval_verdict, sample_note, sentence, tally
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Part
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

ANALYSIS = "savings"
_UNITS = {"budget": "budget", "held": "cache share"}
_UNKNOWN = 2
"""A verdict beside those of `interval_verdict`: the saving is not known."""
_METHOD = (
    "Both curves are made to fall (isotonic regression); the baseline's is joined by lines over log b. Brackets behind "
    "b*: the budgets at which the sides cannot be told apart, sample by sample."
)
_FLAT = (
    "?: the baseline does as well at b*, the smallest budget measured, or the one from which on it is at its best; the "
    "smallest that would do is not known."
)


@record
class PairSavings(Result):
    """The budget that one curve saves over another, by every measure."""

    SHOWN: ClassVar[tuple[str, ...]] = ("caption", "cache_share", "level", "equivalent_budget", "saved")

    measures: tuple[MeasuredSavings, ...] = column("one per measure")
    setting: str = column(
        "what distinguishes the baseline from those of the other pairs, such as adakv; empty where nothing does"
    )
    along: str = column(
        "axis of the comparison: `budget` as given, or, where the sides keep other sets, `held`, entries of the cache "
        "over those of the full cache"
    )
    step: int = column("decode step of perturbation and KL, from 0")
    identity: RunIdentity

    def conclusion(self) -> str:
        """Return by each measure whether the treatment saves budget, in how many cases, and how much."""
        where = f"with {self.setting}, " if self.setting else ""
        clauses: dict[str, list[str]] = {}
        for measured in self.measures:
            clauses.setdefault(_measure_clause(measured, self.along), []).append(NAMES[measured.measure])
        parts = [f"by {text.join_names(names)} {clause}" for clause, names in clauses.items()]
        return sentence(f"{where}{'; '.join(parts)} ({sample_note(self.identity.samples)})")

    def title(self) -> str:
        """Return the table's title, with both sides."""
        baseline, treatment = self.sides
        return f"budget that {treatment} saves over {baseline}"

    def lines(self) -> Sequence[Line]:
        """Return a line per measure and budget of the treatment."""
        return _lines([self])

    def caveats(self) -> Sequence[str]:
        """Return notes on a comparison by cache share, on `?` in the table, and on cache shares above 1."""
        flat = any(point.equivalent.flat for measured in self.measures for point in measured.points)
        return [
            *(["Compared by cache share: the sides keep other sets."] if self.along == "held" else []),
            *(["?: the baseline's curve is flat there."] if flat else []),
            *above_full_caveat(level.cache_share for measured in self.measures for level in measured.points),
        ]

    def details(self) -> Sequence[Part]:
        """Return a table of both sides' values, and notes on b*, on curves that do not fall, and on cache shares."""
        names = [measured.measure for measured in self.measures]
        shown = [level for measured in self.measures for level in (*measured.baseline, *measured.points)]
        flat = any(point.equivalent.flat for measured in self.measures for point in measured.points)
        scores = [
            f"The full cache scores {measured.full:.3g}." for measured in self.measures if measured.measure == "score"
        ]
        levels = columns.table("values of both sides", self.lines(), ("caption", "level", "baseline_level"), self.FIRST)
        return [
            levels,
            _METHOD,
            *(["KL: medians over samples, b* of each sample's own; one sample can dominate a mean of KL."]
              if "kl" in names else []),
            *([_FLAT] if flat else []),
            *scores,
            *(line for measured in self.measures for line in _pooling_notes(measured)),
            text.cache_share_note(level.cache_share for level in shown),
        ]  # fmt: skip

    def interval_note(self) -> str:
        """Return the line on n and intervals."""
        return text.intervals_note(
            self.identity.samples, medians=any(measured.measure == "kl" for measured in self.measures)
        )

    def records(self) -> list[dict[str, Any]]:
        """Return a row per measure and budget of the treatment.

        `saving` is 1 − b / b*, b* the budget at which the baseline does as well; NaN where b* lies outside the budgets
        measured, on the side that `beyond` names: `above` or `below`, and where it is `flat`: the baseline does as well
        where its curve begins or ends. `both`: no budget measured can be distinguished from it. `reason` says it in
        words.
        """
        return [row for measured in self.measures for row in _rows(measured, self.along)]

    @property
    def sides(self) -> tuple[str, str]:
        """Names of baseline and treatment."""
        return side_names(self.measures[0].baseline[0].config, self.measures[0].points[0].config)


@record
class Savings(Several[PairSavings]):
    """The savings of every treatment and setting: a sequence of `PairSavings`."""

    SECTION: ClassVar[str] = "budget --savings"

    members: tuple[PairSavings, ...] = column("one per treatment and setting", key="savings")
    identity: RunIdentity

    def title(self) -> str:
        """Return the table's title, with all sides."""
        baselines, treatments = (dict.fromkeys(pair.sides[side] for pair in self.members) for side in (0, 1))
        return f"budget that {' and '.join(treatments)} saves over {' and '.join(baselines)}"

    def lines(self) -> Sequence[Line]:
        """Return a line per pair, measure and budget of the treatment."""
        return _lines(self.members)


def _lines(members: Sequence[PairSavings]) -> list[Line]:
    """Return a line per pair, measure and budget, with the short name of the treatment's configuration."""
    rows = [(measured, point) for member in members for measured in member.measures for point in measured.points]
    names = short_names([point.config for _, point in rows])
    return [Line(name, (measured, point)) for name, (measured, point) in zip(names, rows, strict=True)]


def _measure_clause(measured: MeasuredSavings, along: str) -> str:
    """Return a clause on whether, and how much, the treatment saves by one measure."""
    baseline, treatment = side_names(measured.baseline[0].config, measured.points[0].config)
    verdicts = [_UNKNOWN if point.equivalent.flat else interval_verdict(point.saving_interval, 0)
                for point in measured.points]  # fmt: skip
    known = [point for point in measured.points if point.equivalent.beyond not in ("flat", "both")]
    names = [f"{_UNITS[along]} {_format_coordinate(point, along)}" for point in known]
    sizes = extremes(
        [(name, point.least_saving, point.saved.replace("\n", " ")) for name, point in zip(names, known, strict=True)]
    )
    sizes += f" at {names[0]}" if len(known) == 1 < len(verdicts) else ""
    if None in verdicts and known:
        return f"too few samples to decide whether {treatment} saves budget over {baseline}: {sizes}"
    return tally(verdicts, _verdict_words(baseline, treatment), "case") + (f": {sizes}" if known else "")


def _verdict_words(baseline: str, treatment: str) -> Words:
    """Return verdict on a saving -> (clause, short word)."""
    return {
        1: (f"{treatment} saves budget over {baseline}", "saves"),
        -1: (f"{treatment} needs more budget than {baseline}", "needs more"),
        0: (f"whether {treatment} saves budget over {baseline} is undecided", "undecided"),
        _UNKNOWN: (f"the saving of {treatment} over {baseline} is unknown", "unknown"),
    }


def _format_coordinate(point: Point, along: str) -> str:
    """Return the coordinate of a point as text: its budget as given, or its cache share."""
    return str(point.config.budget) if along == "budget" else text.cache_share(point.at)


def _pooling_notes(measured: MeasuredSavings) -> Iterator[str]:
    """Yield a note for each side with losses that rise with the budget, whose budgets were therefore pooled."""
    names = side_names(measured.baseline[0].config, measured.points[0].config)
    for name, rising in zip(names, (measured.rising, measured.treatment_rising), strict=True):
        where = ", ".join(f"{low:.4g} to {high:.4g}" for low, high in rising)
        if rising:
            yield f"By {NAMES[measured.measure]} {name} does worse with more budget from {where}: pooled."


def savings(
    trace: Trace,
    baseline: str = "attention",
    treatments: Sides = "two-stage",
    *,
    by: Sequence[str] | None = None,
    step: int = 0,
) -> Savings:
    """Measure how much budget a treatment saves: the baseline's budget that does as well (paper, figure 1).

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
    >>> result = pk.savings(trace, "attention", "two-stage", by=["propagated"])
    >>> [str(point.config.budget) for point in result[0].measures[0].points]
    ['40', '48', '56', '60', '64']
    """
    sides = check_sides(trace, baseline, treatments)
    measured = Measurements(trace, ANALYSIS, step)
    losses = measure_losses(measured, by)
    pairs = [pair for treatment in sides for pair in paired_axes(measured, baseline, treatment)]
    settings = short_names([first.configs[0] for first, _ in pairs], "budget")
    members = tuple(
        _pair_savings(losses, first, second, setting, step, identity(trace, [*first.configs, *second.configs], step))
        for (first, second), setting in zip(pairs, settings, strict=True)
    )
    shown = dict.fromkeys(config for member in members for config in member.identity.configs)
    return Savings(members, identity(trace, list(shown), step))


def _pair_savings(
    losses: Sequence[Loss], baseline: Axis, treatment: Axis, setting: str, step: int, run: RunIdentity
) -> PairSavings:
    """Return the savings of one pair of curves by every measure."""
    along = "budget" if _equal_cache_sizes(baseline, treatment) else "held"
    first, second = (_with_coordinates(side, along) for side in (baseline, treatment))
    return PairSavings(
        tuple(measured_savings(loss, first, second, along) for loss in losses), setting, along, step, run
    )


def _equal_cache_sizes(baseline: Axis, treatment: Axis) -> bool:
    """Return whether equal budgets give caches of equal size: same granularity, block and budget unit."""
    first, second = (
        (config.granularity.name, config.block, config.budget.unit)
        for config in (baseline.configs[0], treatment.configs[0])
    )
    return first == second


def check_budgets(configs: Sequence[EvictionConfig]) -> None:
    """Raise ConfigError for fewer than five budgets, and for a mix of entries and shares."""
    check_budget_units(configs, ANALYSIS)
    budgets = list(dict.fromkeys(str(config.budget) for config in configs))
    if len(budgets) < LEAST_BUDGETS:
        raise ConfigError(
            f"{ANALYSIS} needs at least {LEAST_BUDGETS} budgets of each curve, got {', '.join(budgets)}; measure more, "
            "such as -b 0.05 -b 0.1 -b 0.2 -b 0.4 -b 0.8"
        )


def _with_coordinates(axis: Axis, along: str) -> Axis:
    """Return the axis with coordinates by `along`: `budget`, or `held` for the cache share.

    Raises ConfigError as `check_budgets`, TraceError where cache shares are unknown or do not grow with the budget.
    """
    check_budgets(axis.configs)
    located = axis if along == "budget" else dataclasses.replace(axis, at=axis.cache_shares)
    if not (np.diff(located.at) > 0).all():  # NaN where the trace lacks cache shares
        raise TraceError(
            f"{ANALYSIS} needs caches that grow with the budget, got cache share {located.at.round(3).tolist()} of "
            f"'{axis.configs[0].label()}'; compare sides of one granularity"
        )
    return located


def _rows(measured: MeasuredSavings, along: str) -> Iterator[dict[str, Any]]:
    """Yield the data frame rows of one measure, one per budget of the treatment."""
    baseline = config_columns(measured.baseline[0].config)
    for point in measured.points:
        yield {
            "measure": measured.measure,
            **config_columns(point.config),
            **{f"baseline_{name}": value for name, value in baseline.items() if name in SIDE},
            "along": along,
            **_point_columns(point),
            "reason": point.reason,
        }


def _point_columns(point: Point) -> dict[str, Any]:
    """Return a point's numbers, keyed by data frame column."""
    equivalent, ends = point.equivalent, point.saving_interval
    return {
        "at": point.at,
        "level": point.level,
        "reached": equivalent.value if equivalent.known else float("nan"),
        "beyond": equivalent.beyond,
        "saving": point.saving,
        "saving_low": float("nan") if ends is None else ends.low,
        "saving_high": float("nan") if ends is None else ends.high,
    }
