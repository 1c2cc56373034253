"""Many configurations at once: every combination of choices, in one order and each once.

`ORDER` is the order of a trace's `config` dimension wherever configurations come from a grid: on the command line, in
a sweep file, in a script.

Options that are given beside a configuration's choices (policy, selection, granularity, …), and go to their owner.

`alpha=(0.25, 0.5)` beside three policies and two selections goes into each selection, `floor=0.1` into AdaKV alone: a
sweep names an option once. Presets are such options too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from perturbkv.configs.choice import Choice, as_choice, parse, split_policy_and_selection
from perturbkv.configs.eviction import CHOICES, EvictionConfig
from perturbkv.configs.option import Option, check_configurations
from perturbkv.configs.precision import CORRECTION_OPTIONS, FULL, NONE, PRECISION_OPTIONS
from perturbkv.configs.selections import GIVEN, GRANULARITY_OPTIONS, PRESETS, SELECTABLE, SELECTION_OPTIONS, SELECTIONS
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.selection import compatibility, effects
from perturbkv.selection.policies import registry

_OPTIONS = {
    "selection": SELECTION_OPTIONS,
    "granularity": GRANULARITY_OPTIONS,
    "precision": PRECISION_OPTIONS,
    "correction": CORRECTION_OPTIONS,
}


def known_options() -> dict[str, Option]:
    """Every name that can be spread, with the first option of this name."""
    found: dict[str, Option] = {}
    for options in _owners().values():
        found = {**options, **found}
    return found


def option_owners(name: str) -> list[str]:
    """'policy adakv', …: who has an option of this name."""
    return [" ".join(owned) for owned in _having(name)]


def written_option(name: str) -> str:
    """'adakv(floor=…)': how an option of this name is written behind its owner, the first of several."""
    return f"{_having(name)[0][1]}({name}=…)"


def _having(name: str) -> list[tuple[str, str]]:
    """Kind and name of each owner of an option of this name."""
    return [owned for owned, options in _owners().items() if name in options]


def check_options(name: str, value: Any) -> None:
    """Raise ConfigError or UnknownNameError for a value that no owner takes."""
    known_options()[name].convert(value, name)


def _owners() -> dict[tuple[str, str], Mapping[str, Option]]:
    """Kind of owner and name -> its options."""
    return {
        **{("policy", one.name): one.options() for one in registry.known()},
        **{(owner, name): options for owner, named in _OPTIONS.items() for name, options in named.items()},
    }


def takes_option(choice: Choice, owner: str, name: str) -> bool:
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
    return {
        name: value
        for name, value in beside.items()
        if takes_option(choice, owner, name) and name not in choice.options
    }


def _options(name: str, owner: str) -> Mapping[str, Option]:
    """The options of an owner. Raises UnknownNameError."""
    if owner == "policy":
        return registry.info(name).options()
    known = _OPTIONS[owner]
    if name not in known:
        raise UnknownNameError(name, owner, SELECTABLE if owner == "selection" else known)
    return known[name]


FIELDS = (
    "preset", "budget", "window", "granularity", "precision", "correction", "protect_first", "protect_recent", "policy",
    "selection",
)  # fmt: skip
"""What every configuration has; all else is an option of some policy, selection or granularity."""
ORDER = (
    "preset", "budget", "alpha", "window", "split", "score", "epsilon", "norm", "pool", "kernel",
    "granularity", "reduce", "product", "block", "block_score", "sinks", "seed",
    "beta", "line", "floor", "safeguard", "recent", "history",
    "protect_first", "protect_recent", "positions", "precision", "bits", "group", "fill", "correction", "mass",
    "policy", "selection",
)  # fmt: skip
"""The order of a grid, the outermost first: the selection varies fastest. Other options stand before the policy, by
name."""


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
        preset: names of `perturbkv.configs.selections.PRESETS`.
        policy: names of policies, each with its own options if they are not to be the defaults: `adakv(floor=0.1)`.
        selection: names of `SELECTIONS`, likewise: `two-stage(alpha=0.5)`, or `policy:selection`. A policy's name alone
            stands for its first selection; `random` alone is the selection.
        cache: the layout that has to hold every combination.
        choices: further fields of `EvictionConfig`, and options by name, which go to each policy, selection and
            granularity that has them; None is what preset and policy choose.

    Raises ConfigError, BudgetError or UnknownNameError for a value out of its range, an empty list, a combination that
    policy or cache does not take, and an option that makes no difference to any of them.

    >>> import perturbkv as pk
    >>> [config.label() for config in pk.grid(128, policy=("snapkv", "adakv"), floor=(0.1, 0.2))]  # doctest: +ELLIPSIS
    ['snapkv:two-stage b=128 ...', 'adakv(floor=0.1):two-stage b=128 ...', 'adakv:two-stage b=128 ...']
    """
    wanted = {"budget": budget, "preset": preset, "policy": policy, "selection": selection, **choices}
    made = every(wanted, cache)
    for name, value in choices.items():
        if name not in FIELDS and value is not None and (needs := idle(name, made)):
            msg = f"{name} has no effect here: it needs {needs}; leave it out"
            raise ConfigError(msg)
    return made


def every(choices: Mapping[str, Any], cache: str = "ragged") -> tuple[EvictionConfig, ...]:
    """`grid`, whether or not every choice makes a difference."""
    made = [asked(**combination) for combination in combinations(choices)]
    for one in made:
        compatibility.check(one.config, cache)
    check_told(made)
    return unique(one.config for one in made)


def combinations(choices: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The product of the choices, the last of `ORDER` fastest. Raises UnknownNameError, ConfigError."""
    listed = {name: _listed(value) for name, value in choices.items()}
    for name, values in listed.items():
        if name not in FIELDS and name not in known_options():
            raise UnknownNameError(name, "choice", [*FIELDS, *known_options()])
        if not values:
            msg = f"expected a value for {name} or a list of them, got an empty list"
            raise ConfigError(msg)
    check_configurations(math.prod(map(len, listed.values())))
    names = sorted(listed, key=_place)
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(listed[name] for name in names))]


def configuration(
    budget: Any,
    preset: str = "paper",
    policy: Choice | str = "snapkv",
    selection: Choice | str = "two-stage",
    **choices: Any,
) -> EvictionConfig:
    """One combination, as `grid` reads it; whether policy and selection go together is not asked.

    Raises ConfigError, BudgetError or UnknownNameError for a value out of its range, and an option without effect.
    """
    made = asked(budget, preset, policy, selection, **choices)
    check_told([made])
    return made.config


def check_told(made: Iterable[Asked]) -> None:
    """Raise ConfigError for an option that stands in a choice and makes no difference wherever that choice stands."""
    needed: dict[tuple[str, str, str], list[str]] = {}
    for one in made:
        for place, needs in one.told.items():
            needed.setdefault(place, []).append(needs)
    for (owner, choice, option), lacks in needed.items():
        if all(lacks):
            msg = f"{option} of {owner} '{choice}' has no effect here: it needs {lacks[0]}; leave it out"
            raise ConfigError(msg)


def asked(
    budget: Any, preset: str = "paper", policy: Any = "snapkv", selection: Any = "two-stage", **choices: Any
) -> Asked:
    """One combination, and which options that stand in its choices make a difference to it."""
    if preset not in PRESETS:
        raise UnknownNameError(preset, "preset", PRESETS)
    chosen = {name: value for name, value in choices.items() if value is not None}
    named, selected = policy_and_selection(selection, policy)
    named = registry.spelled(named)
    own = registry.info(named.name)
    if own.selections == (GIVEN,):  # it takes none of ours, nor a window, whatever others are asked with
        selected, chosen["window"] = _given(named, selected, named == as_choice(policy)), 0
    usual = own.own_granularity or PRESETS[preset].get("granularity", "query")
    granularity = as_choice(chosen.pop("granularity", usual))
    beyond = {name: as_choice(chosen.pop(name, usual)) for name, usual in (("precision", FULL), ("correction", NONE))}
    owners = {"policy": named, "selection": selected, "granularity": granularity, **beyond}
    beside = {name: value for name, value in chosen.items() if name not in FIELDS}
    _check_once(owners, beside)
    window = PRESETS[preset].get("window", 32) if own.own_window is None else own.own_window
    fields = {"window": window, **{name: value for name, value in chosen.items() if name in FIELDS}}
    preset_options = {
        name: value for name, value in PRESETS[preset].items() if name not in (*FIELDS, *own.own_defaults)
    }
    return configured(owners, preset_options, beside, budget=budget, **fields)


def _given(named: Choice, selected: Choice, alone: bool) -> Choice:
    """What stands in the selection's place of a policy from outside. Raises ConfigError for another beside it."""
    if not alone and selected.name != GIVEN:
        msg = f"policy '{named}' keeps what it keeps, by no selection of ours: leave ':{selected}' out"
        raise ConfigError(msg)
    return Choice(GIVEN)


def _check_once(owners: Mapping[str, Choice], beside: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that a choice says itself and that is given beside it too."""
    for (owner, choice), name in itertools.product(owners.items(), beside):
        if name in choice.options and takes_option(choice, owner, name):
            msg = f"'{name}' is given beside {choice} and in it; give it once"
            raise ConfigError(msg)


def idle(name: str, configs: Iterable[EvictionConfig]) -> str:
    """What an option beside the choices needs to make a difference to any of these; empty if it makes one."""
    reasons: dict[str, None] = {}
    for config in configs:
        without = effects.idle(config, registry.build(config.policy))
        for owned in ((owner, name) for owner in CHOICES if takes_option(getattr(config, owner), owner, name)):
            if owned not in without:
                return ""
            reasons[without[owned]] = None
    return " or ".join(reasons or option_owners(name))


def unique(configs: Iterable[EvictionConfig]) -> tuple[EvictionConfig, ...]:
    """The configurations in their order, each once."""
    return tuple(dict.fromkeys(configs))


def _place(name: str) -> tuple[int, str]:
    return (ORDER.index(name), "") if name in ORDER else (ORDER.index("policy") - 1, name)


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def names_policy(selection: str) -> bool:
    """Whether a selection, as `grid` takes it, says of which policy it is."""
    return policy_and_selection(selection, "-")[0].name != "-"


def policy_and_selection(text: str | Choice, policy: str | Choice) -> tuple[Choice, Choice]:
    """What a selection, as `grid` takes it, and the policy beside it stand for."""
    if isinstance(text, str) and len(parts := split_policy_and_selection(text)) > 1:
        return parse(parts[0]), parse(parts[1])
    chosen = as_choice(text)
    if chosen.name not in SELECTIONS and (":" in chosen.name or chosen.name in registry.names()):
        return chosen, Choice(registry.info(chosen.name).selections[0])
    return as_choice(policy), chosen
