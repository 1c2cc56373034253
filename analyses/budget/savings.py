"""How much budget does a selection save? The budget at which a baseline does as well as it does (paper, figure 1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.budget import savings_told
from perturbkv.analyses.budget.budget_axis import Axis, check_kind, compared
from perturbkv.analyses.budget.budget_equivalence import LEAST_BUDGETS
from perturbkv.analyses.budget.losses import Loss, losses
from perturbkv.analyses.budget.saved_budget import MeasuredSavings, Point, of_measure
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import at_step
from perturbkv.analyses.naming import SIDE, short
from perturbkv.analyses.pairing import Sides, checked
from perturbkv.analyses.result import Result
from perturbkv.analyses.several import Several
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

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
        return savings_told.conclusion(self.measures, self.setting, self.along, self.identity.samples)

    def tables(self) -> Sequence[Table | str]:
        """Of each measure a row per budget of the treatment."""
        return [savings_told.table(one, self.setting, self.along) for one in self.measures]

    def notes(self) -> str:
        """How the budget is found, what intervals are, where curves do not fall."""
        return savings_told.notes(self.measures, self.along, self.identity.samples)

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
    settings = short([first.configs[0] for first, _ in pairs], "budget")
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
