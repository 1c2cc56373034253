"""Many configurations at once: every combination of choices, in one order and each once. No torch here.

`ORDER` is the order of a trace's `config` dimension wherever configurations come from a grid: on the command line, in
a sweep file, in a script.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from perturbkv.configs.budget import Budget, parse_entries
from perturbkv.configs.choice import Choice, parse, split
from perturbkv.configs.eviction import SELECTIONS, EvictionConfig
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.selection.policies import registry

_OUTER, _INNER = ("preset", "budget", "alpha"), ("policy", "selection")
_FIELDS = tuple(field.name for field in dataclasses.fields(EvictionConfig))
ORDER = (*_OUTER, *(name for name in _FIELDS if name not in (*_OUTER, *_INNER)), *_INNER)
"""Every choice of a grid, the outermost first: the selection varies fastest."""
_ENTRIES = ("protect_first", "protect_recent")
"""Choices that may be text: entries (4) or a share (0.1)."""


def grid(
    budget: Any,
    *,
    preset: Any = "paper",
    policy: Any = "snapkv",
    selection: Any = "two-stage",
    cache: str = "ragged",
    **choices: Any,
) -> tuple[EvictionConfig, ...]:
    """Every combination of the choices, each a value or any series of values, nested in the order of `ORDER`.

    Args:
        budget: tokens (128), a fraction (0.05), either as text, or a `Budget`.
        preset: names of `perturbkv.configs.eviction.PRESETS`.
        policy: names of `perturbkv.selection.policies.registry`, each with its own parameters if they are not to be
            the defaults: `adakv(floor=0.1)`.
        selection: names of `SELECTIONS`, likewise: `two-stage(alpha=0.5)`, or `policy:selection`. A policy's name alone
            stands for its first selection; `random` alone is the selection.
        cache: the layout that has to hold every combination.
        choices: further fields of `EvictionConfig`; None is what preset and policy choose.

    Raises ConfigError, BudgetError or UnknownNameError for a value out of its range, an empty list, and a combination
    that policy or cache does not take.
    """
    asked = {"budget": budget, "preset": preset, "policy": policy, "selection": selection, **choices}
    made = [configuration(**combination) for combination in combinations(asked)]
    for config in made:
        registry.check(config, cache)
    return unique(made)


def combinations(choices: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The product of the choices, the last of `ORDER` fastest. Raises UnknownNameError, ConfigError."""
    listed = {name: _listed(value) for name, value in choices.items()}
    for name, values in listed.items():
        if name not in ORDER:
            raise UnknownNameError(name, "choice", ORDER)
        if not values:
            msg = f"expected a value for {name} or a list of them, got an empty list"
            raise ConfigError(msg)
    names = [name for name in ORDER if name in listed]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(listed[name] for name in names))]


def configuration(
    budget: Any, preset: str = "paper", policy: str = "snapkv", selection: str = "two-stage", **choices: Any
) -> EvictionConfig:
    """One combination, as `grid` reads it; whether policy and selection go together is not asked.

    Raises ConfigError, BudgetError or UnknownNameError for a value out of its range.
    """
    named, selected = _policy_and_selection(selection, policy)
    own = registry.own_choices(named, selected)
    if twice := [name for name in own if choices.get(name) is not None]:
        msg = f"'{twice[0]}' is given beside {named}:{selected} and in it; give it once"
        raise ConfigError(msg)
    choices |= own
    share = budget if isinstance(budget, Budget) else Budget.parse(str(budget))
    for name in _ENTRIES:
        if isinstance(choices.get(name), str):
            choices[name] = parse_entries(f"--{name.replace('_', '-')}", choices[name])
    return registry.configured(preset, share, named.name, selection=selected.name, **choices)


def unique(configs: Iterable[EvictionConfig]) -> tuple[EvictionConfig, ...]:
    """The configurations in their order, the first of equal ones; without pooling its width makes no difference."""
    found: dict[EvictionConfig, EvictionConfig] = {}
    for config in configs:
        found.setdefault(dataclasses.replace(config, kernel=1) if config.pool == "none" else config, config)
    return tuple(found.values())


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def names_policy(selection: str) -> bool:
    """Whether a selection, as `grid` takes it, says of which policy it is."""
    return _policy_and_selection(selection, "-")[0].name != "-"


def _policy_and_selection(text: str, policy: str) -> tuple[Choice, Choice]:
    parts = split(text, ":")
    if len(parts) > 1:
        return parse(parts[0]), parse(":".join(parts[1:]))
    chosen = parse(text)
    if chosen.name not in SELECTIONS and chosen.name in {info.name for info in registry.known()}:
        return chosen, Choice(registry.info(chosen.name).selections[0])
    return parse(policy), chosen
