"""Options that are given beside a configuration's choices (policy, selection, granularity, …), and go to their owner.

`alpha=(0.25, 0.5)` beside three policies and two selections goes into each selection, `floor=0.1` into AdaKV alone: a
sweep names an option once. Presets are such options too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perturbkv.configs.choice import Choice
from perturbkv.configs.correction import CORRECTION_OPTIONS
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import Option
from perturbkv.configs.precision import PRECISION_OPTIONS
from perturbkv.configs.selections import ASKED, GRANULARITY_OPTIONS, SELECTION_OPTIONS
from perturbkv.errors import UnknownNameError
from perturbkv.selection import effects
from perturbkv.selection.policies import registry

_OPTIONS = {
    "selection": SELECTION_OPTIONS,
    "granularity": GRANULARITY_OPTIONS,
    "precision": PRECISION_OPTIONS,
    "correction": CORRECTION_OPTIONS,
}


def known() -> dict[str, Option]:
    """Every name that can be spread, with the first option of this name."""
    found: dict[str, Option] = {}
    for options in _owners().values():
        found = {**options, **found}
    return found


def owners(name: str) -> list[str]:
    """'policy adakv', …: who has an option of this name."""
    return [" ".join(owned) for owned in _having(name)]


def written(name: str) -> str:
    """'adakv(floor=…)': how an option of this name is written behind its owner, the first of several."""
    return f"{_having(name)[0][1]}({name}=…)"


def _having(name: str) -> list[tuple[str, str]]:
    """Kind and name of each owner of an option of this name."""
    return [owned for owned, options in _owners().items() if name in options]


def check(name: str, value: Any) -> None:
    """Raise ConfigError or UnknownNameError for a value that no owner takes."""
    known()[name].checked(value, name)


def _owners() -> dict[tuple[str, str], Mapping[str, Option]]:
    """Kind of owner and name -> its options."""
    return {
        **{("policy", one.name): one.options() for one in registry.known()},
        **{(owner, name): options for owner, named in _OPTIONS.items() for name, options in named.items()},
    }


def takes(choice: Choice, owner: str, name: str) -> bool:
    """Whether a policy, selection or another owner has an option of this name."""
    return name in _options(choice.name, owner)


@dataclass(frozen=True)
class Asked:
    """A configuration, and for every option that stood in its choices what it needs to make a difference; else ''.

    `told` is by owner, the choice's name and the option.
    """

    config: EvictionConfig
    told: Mapping[tuple[str, str, str], str]


def configured(
    chosen: Mapping[str, Choice], preset: Mapping[str, Any], beside: Mapping[str, Any], **fields: Any
) -> Asked:
    """The configuration of what is `chosen`, by owner, with a preset's options and those given `beside`.

    An option goes wherever it belongs and makes a difference; what a choice says itself comes first, then what is
    given beside it, then the preset.

    Raises ConfigError or UnknownNameError for a value that the option's owner refuses, BudgetError for the budget.
    """
    held = {
        owner: {**_taken(choice, owner, preset), **_taken(choice, owner, beside)} for owner, choice in chosen.items()
    }
    whole = _made(chosen, held, fields)
    idle = effects.idle(whole, registry.build(whole.policy))
    for owner, option in idle:
        held[owner].pop(option, None)
    told = {
        (owner, choice.name, option): idle.get((owner, option), "")
        for owner, choice in chosen.items()
        for option in choice.options
        if option in _options(choice.name, owner)
        and getattr(whole, owner).options[option] != _options(choice.name, owner)[option].default
    }
    kept = {owner: choice.without(option for of, option in idle if of == owner) for owner, choice in chosen.items()}
    return Asked(registry.resolved(_made(kept, held, fields)), told)


def _made(
    chosen: Mapping[str, Choice], held: Mapping[str, Mapping[str, Any]], fields: Mapping[str, Any]
) -> EvictionConfig:
    choices: dict[str, Any] = {
        owner: Choice(choice.name, {**held[owner], **choice.options}) for owner, choice in chosen.items()
    }
    return EvictionConfig(**choices, **fields)


def _taken(choice: Choice, owner: str, beside: Mapping[str, Any]) -> dict[str, Any]:
    """Of what is given beside the choices what this one takes and does not say itself."""
    return {name: value for name, value in beside.items() if takes(choice, owner, name) and name not in choice.options}


def _options(name: str, owner: str) -> Mapping[str, Option]:
    """The options of an owner. Raises UnknownNameError."""
    if owner == "policy":
        return registry.info(name).options()
    known = _OPTIONS[owner]
    if name not in known:
        raise UnknownNameError(name, owner, ASKED if owner == "selection" else known)
    return known[name]
