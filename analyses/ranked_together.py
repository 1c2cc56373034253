"""Which configurations of a prompt may be ranked against each other (METHOD: the protocol, 5 and 7)."""

from __future__ import annotations

from collections.abc import Sequence

from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig

LEAST_CONFIGS = 3
"""Ranks of fewer configurations are no ranks."""
APART = ("granularity", "precision", "correction", "protect_first", "protect_recent")
"""What is ranked apart beside budgets: a budget of query heads holds more of a cache than one of key/value heads, and
one in few bits less."""


def ranked_together(configs: Sequence[EvictionConfig]) -> dict[str, list[int]]:
    """Name -> places of the configurations that share budget, granularity and protection.

    The name is the budget as the user gave it, and behind it the granularity and the protection where the run has
    several.
    """
    telling = [name for name in APART if len({getattr(config, name) for config in configs}) > 1]
    found: dict[str, list[int]] = {}
    for place, config in enumerate(configs):
        words = [_word(name, getattr(config, name)) for name in telling]
        found.setdefault(" ".join([str(config.budget), *words]), []).append(place)
    return found


def _word(name: str, value: Choice | float) -> str:
    return str(value) if isinstance(value, Choice) else f"{name.replace('_', '-')}={value:g}"
