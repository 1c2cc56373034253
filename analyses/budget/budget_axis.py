"""Curves of configurations over their budgets, and the coordinate of each configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from perturbkv.analyses.measurements import Floats, Measurements
from perturbkv.analyses.names import distinct_names
from perturbkv.analyses.sides import sweeps
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError


@dataclass(frozen=True)
class Axis:
    """A curve's configurations, which differ in budget alone, smallest budget first.

    Attributes:
        indices: (budget,) of the configurations in the trace.
        configs: (budget,).
        cache_shares: (budget,) entries of the cache over those of the full cache; NaN where the trace lacks them.
        budgets: (budget,) as the user gave them: all entries, or all shares of the prompt.
    """

    indices: tuple[int, ...]
    configs: tuple[EvictionConfig, ...]
    cache_shares: Floats
    budgets: Floats


def named_axes(measured: Measurements, sides: Sequence[str] | None) -> list[tuple[str, Axis]]:
    """Return (name, budget axis) of every curve of the given sides, or of the trace for None.

    Raises as `check_budget_units`.
    """
    run = measured.trace.run
    chosen: Sequence[str | None] = [None] if sides is None else sides
    axes = []
    for indices in dict.fromkeys(tuple(indices) for side in chosen for indices in sweeps(run, side)):
        ordered = sorted(indices, key=lambda index: run.configs[index].budget.value)
        configs = [run.configs[index] for index in ordered]
        check_budget_units(configs, measured.analysis)
        budgets = np.array([config.budget.value for config in configs], dtype=np.float64)
        axes.append(Axis(tuple(ordered), tuple(configs), measured.cache_shares[ordered], budgets))
    return list(zip(distinct_names([curve.configs[0] for curve in axes], "budget"), axes, strict=True))


def check_budget_units(configs: Sequence[EvictionConfig], analysis: str) -> None:
    """Raise ConfigError where budgets mix entries and shares of the prompt, which have no common order.

    `analysis` is the command, which the message names.
    """
    units = {config.budget.unit: config.budget for config in configs}
    if len(units) > 1:
        got = " and ".join(f"{budget} ({unit})" for unit, budget in units.items())
        raise ConfigError(f"{analysis} needs budgets of one kind, got {got}; give all as entries, or all as shares")


def above_full_caveat(shares: Iterable[float]) -> list[str]:
    """Return the caveat on cache shares above 1, as a list; empty without such shares."""
    above = any(share > 1 for share in shares)
    return ["Cache shares above 1 save nothing: each query head keeps its own set."] if above else []
