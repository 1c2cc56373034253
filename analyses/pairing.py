"""Which configurations of a run are the two sides of one comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from perturbkv.configs.budget import Budget
from perturbkv.configs.eviction import SELECTIONS, EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

Pair = tuple[EvictionConfig, EvictionConfig]
"""Baseline and treatment."""


class OfPair:
    """What compares two configurations: in a notebook one line says which, its arrays are left out."""

    baseline: EvictionConfig
    treatment: EvictionConfig

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.baseline.label()} → {self.treatment.label()}>"


Sides = str | Iterable[str]
"""One side of a comparison, or several: a selection, a policy, or policy:selection each."""


def checked(trace: Any, baseline: Any, treatments: Any) -> tuple[str, ...]:
    """The treatments, one or several, as a tuple.

    Raises TraceError where `trace` is none, ConfigError for sides that are no names, for no treatment, and for one
    that is there twice.
    """
    if not isinstance(trace, Trace):
        msg = f"expected a trace, as pk.read_trace or pk.measure give it; got {type(trace).__name__}"
        raise TraceError(msg)
    series = isinstance(treatments, Iterable) and not isinstance(treatments, str)
    found = tuple(treatments) if series else (treatments,)
    wrong = [side for side in (baseline, *found) if not isinstance(side, str)]
    if wrong or not found or len({*found}) < len(found):
        got = "none" if not found else f"{type(wrong[0]).__name__}" if wrong else f"one of {', '.join(found)} twice"
        msg = f"expected names of selections or policies, such as 'two-stage' or 'adakv:two-stage', got {got}"
        raise ConfigError(msg)
    return found


def pair_columns(baseline: EvictionConfig, treatment: EvictionConfig) -> dict[str, Any]:
    """A pair as the columns of a table: both labels, what their sides are, and the budget that they share."""
    both = (("baseline", baseline), ("treatment", treatment))
    return {
        **{name: config.label() for name, config in both},
        **{f"{name}_policy": config.policy for name, config in both},
        **{f"{name}_selection": config.selection for name, config in both},
        "budget": baseline.budget.value,
    }


def pairs(run: RunConfig, baseline: str, treatment: str) -> list[Pair]:
    """Every two configurations, baseline and treatment, that differ in selection (and policy) alone.

    A side is a selection (`two-stage`), a policy and a selection (`snapkv:two-stage`), or a policy. Two selections are
    compared within each policy; a selection against a policy is that of the run's first policy that has it. Raises
    TraceError where the run holds no such pair.
    """
    within = baseline in SELECTIONS and treatment in SELECTIONS
    found = [
        (first, second)
        for first in _side(run, baseline, every=within)
        for second in _side(run, treatment, every=within)
        if first != second and _alike(first, second) and (not within or first.policy == second.policy)
    ]
    if not found:
        msg = f"expected configurations to compare '{baseline}' with '{treatment}', got a trace of {_held(run)}"
        raise TraceError(msg)
    return found


def _side(run: RunConfig, side: str, every: bool) -> list[EvictionConfig]:
    """Configurations of one side; of a bare selection those of the first policy, unless `every` one's are wanted."""
    found = [config for config in run.configs if _matches(config, side)]
    return found if every or side not in SELECTIONS else [one for one in found if one.policy == found[0].policy]


def series(run: RunConfig, baseline: str, treatment: str) -> list[list[Pair]]:
    """The same pairs, those together that differ in budget alone, smallest first. Raises as `pairs`."""
    found: dict[tuple[EvictionConfig, ...], list[Pair]] = {}
    for pair in sorted(pairs(run, baseline, treatment), key=lambda pair: order(pair[0])):
        found.setdefault(tuple(map(_at_any_budget, pair)), []).append(pair)
    return list(found.values())


def all_series(trace: Trace, baseline: str, treatments: Sides) -> list[list[Pair]]:
    """The series of every treatment, one after the other. Raises as `checked` and `pairs`."""
    return [
        found for treatment in checked(trace, baseline, treatments) for found in series(trace.run, baseline, treatment)
    ]


def configs_of(pairs: Iterable[Pair]) -> list[EvictionConfig]:
    """Both sides of each pair."""
    return [config for pair in pairs for config in pair]


def _held(run: RunConfig) -> str:
    return ", ".join(dict.fromkeys(f"{config.policy}:{config.selection}" for config in run.configs))


def _matches(config: EvictionConfig, side: str) -> bool:
    return side in (config.selection, config.policy, f"{config.policy}:{config.selection}")


def _alike(first: EvictionConfig, second: EvictionConfig) -> bool:
    """Different systems may pool, look back and place keys differently: that is part of what they are."""
    own = [] if first.policy == second.policy else ["pool", "window", "positions"]
    free = ["policy", "selection", *own]
    return dataclasses.replace(first, **{name: getattr(second, name) for name in free}) == second


def of_selection(run: RunConfig, side: str) -> list[int]:
    """Places of the configurations of one side, by α, then budget: fractions before tokens.

    Raises TraceError where the run holds none.
    """
    found = [place for place, config in enumerate(run.configs) if _matches(config, side)]
    if not found:
        msg = f"expected configurations of '{side}', got a trace of {_held(run)}"
        raise TraceError(msg)
    return sorted(found, key=lambda place: order(run.configs[place]))


def order(config: EvictionConfig) -> tuple[float, bool, float]:
    """Sorts configurations by α, then budget: fractions before tokens."""
    return config.alpha, isinstance(config.budget.value, int), float(config.budget.value)


def by_selection(run: RunConfig) -> list[dict[str, int]]:
    """Configurations that differ in selection alone: selection -> place; one entry per policy, α, budget, …."""
    found: dict[EvictionConfig, dict[str, int]] = {}
    for place, config in enumerate(run.configs):
        shared = dataclasses.replace(config, selection=next(iter(SELECTIONS)))
        found.setdefault(shared, {})[config.selection] = place
    return [found[shared] for shared in sorted(found, key=order)]


def sweeps(run: RunConfig, side: str) -> list[list[int]]:
    """Places of one side's configurations, those together that differ in budget alone. Raises as `of_selection`."""
    found: dict[EvictionConfig, list[int]] = {}
    for place in of_selection(run, side):
        found.setdefault(_at_any_budget(run.configs[place]), []).append(place)
    return list(found.values())


def _at_any_budget(config: EvictionConfig) -> EvictionConfig:
    """One configuration for all that differ in budget alone."""
    return dataclasses.replace(config, budget=Budget(1.0))
