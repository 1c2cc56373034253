"""Configurations along their budgets: which belong to one curve, and where on its axis each stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perturbkv.analyses.measurements import Floats, held_shares
from perturbkv.analyses.pairing import pairs, sweeps
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace


@dataclass(frozen=True)
class Axis:
    """Configurations that differ in budget alone, smallest first.

    Attributes:
        places: (budget,) in the trace.
        configs: (budget,).
        held: (budget,) entries that the cache holds over those of the full cache; NaN where the trace does not tell.
        at: (budget,) where each stands: its budget as the user gave it, or `held`.
    """

    places: tuple[int, ...]
    configs: tuple[EvictionConfig, ...]
    held: Floats
    at: Floats


def axis(trace: Trace, places: Sequence[int], analysis: str) -> Axis:
    """The axis of configurations that differ in budget alone.

    Raises ConfigError as `check_kind`.
    """
    ordered = sorted(places, key=lambda place: trace.run.configs[place].budget.value)
    configs = [trace.run.configs[place] for place in ordered]
    check_kind(configs, analysis)
    budgets = np.array([config.budget.value for config in configs], dtype=np.float64)
    return Axis(tuple(ordered), tuple(configs), held_shares(trace, analysis)[ordered], budgets)


def check_kind(configs: Sequence[EvictionConfig], analysis: str) -> None:
    """Raise ConfigError where some budgets are entries and others shares: which is larger depends on the prompt."""
    units = {config.budget.unit: config.budget for config in configs}
    if len(units) > 1:
        got = " and ".join(f"{budget} ({unit})" for unit, budget in units.items())
        msg = f"{analysis} needs budgets of one kind, got {got}; give all as entries, or all as shares"
        raise ConfigError(msg)


def compared(trace: Trace, baseline: str, treatment: str, analysis: str) -> list[tuple[Axis, Axis]]:
    """Every two curves of which one is the other's baseline, each over all of its own budgets.

    They are those of `pairs`; where none agrees because the sides keep other sets (per head, or per group of heads),
    the two curves, if each side has but one. Raises as `pairs` and `axis`.
    """
    first, second = ([tuple(found) for found in sweeps(trace.run, side)] for side in (baseline, treatment))
    try:
        related = pairs(trace.run, baseline, treatment)
    except TraceError:
        if len(first) > 1 or len(second) > 1 or first == second:
            raise
        found = [(first[0], second[0])]
    else:
        found = list(dict.fromkeys((_holding(trace, first, one), _holding(trace, second, two)) for one, two in related))
    return [(axis(trace, one, analysis), axis(trace, two, analysis)) for one, two in found]


def _holding(trace: Trace, found: Sequence[tuple[int, ...]], config: EvictionConfig) -> tuple[int, ...]:
    """Those places among which a configuration is."""
    return next(places for places in found if any(trace.run.configs[place] == config for place in places))
