"""Grids of configurations: every combination of choices, in a fixed order and each once.

`ORDER` is the order of a trace's `config` dimension wherever configurations come from a grid: on the command line, in
a sweep file, in a script.

Options may be given separately from the choices that own them (policy, selection, granularity, …): with three policies
and two selections, `alpha=(0.25, 0.5)` goes into each selection and `floor=0.1` into AdaKV alone, so that a sweep
names an option once. Presets are such options too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perturbkv.configs.choice import Choice, as_choice, as_tuple, parse, split_policy_and_selection
from perturbkv.configs.eviction import CHOICES, EvictionConfig
from perturbkv.configs.option import Option, check_configurations
from perturbkv.configs.precision import CORRECTION_OPTIONS, FULL, NONE, PRECISION_OPTIONS, as_precision
from perturbkv.configs.selections import GIVEN, GRANULARITY_OPTIONS, PRESETS, SELECTABLE, SELECTION_OPTIONS, SELECTIONS
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.selection import compatibility
from perturbkv.selection.policies import registry

_OPTIONS = {
    "selection": SELECTION_OPTIONS,
    "granularity": GRANULARITY_OPTIONS,
    "precision": PRECISION_OPTIONS,
    "correction": CORRECTION_OPTIONS,
}


def known_options() -> dict[str, Option]:
    """Return option name -> option, over all policies and choices; the first owner's for a shared name."""
    first: dict[str, Option] = {}
    for options in _options_by_owner().values():
        first = {**options, **first}
    return first


def option_owners(name: str) -> list[str]:
    """Return the policies and choices that have the named option, as text such as `policy adakv`."""
    return [" ".join(owner) for owner in _owners_of(name)]


def option_example(name: str) -> str:
    """Return an example of writing the named option in its first owner, such as `adakv(floor=…)`."""
    return f"{_owners_of(name)[0][1]}({name}=…)"


def _owners_of(name: str) -> list[tuple[str, str]]:
    """Return (kind, name) pairs of the policies and choices with the named option, such as ("policy", "adakv")."""
    return [owner for owner, options in _options_by_owner().items() if name in options]


def _options_by_owner() -> dict[tuple[str, str], Mapping[str, Option]]:
    """Return (kind, name) -> options, for every policy and choice."""
    return {
        **{("policy", policy.name): policy.options() for policy in registry.all_policies()},
        **{(owner, name): options for owner, owners in _OPTIONS.items() for name, options in owners.items()},
    }


def takes_option(choice: Choice, owner: str, name: str) -> bool:
    """Return whether a choice of the field `owner`, such as `policy` or `selection`, has the named option."""
    return name in _options(choice.name, owner)


@dataclass(frozen=True)
class ParsedConfig:
    """A configuration, and what the options written in its choices need to have an effect.

    `needs` maps (field, choice, option), such as ("policy", "adakv", "floor"), to the need, '' where there is none.
    """

    config: EvictionConfig
    needs: Mapping[tuple[str, str, str], str]


def _build_configuration(
    choices: Mapping[str, Choice], preset: Mapping[str, Any], separate: Mapping[str, Any], **fields: Any
) -> ParsedConfig:
    """Return the configuration of choices per field, with a preset's options and `separate` options filled in.

    An option goes into each choice that has it and where it makes a difference. Options written in a choice come first,
    then separate ones, then the preset's.

    Raises ConfigError or UnknownNameError for a value that the option's owner refuses, BudgetError for the budget.
    """
    added = {
        owner: {**_applicable_options(choice, owner, preset), **_applicable_options(choice, owner, separate)}
        for owner, choice in choices.items()
    }
    config = _eviction_config(choices, added, fields)
    without_effect = registry.options_without_effect(config, registry.build(config.policy))
    for owner, option in without_effect:
        added[owner].pop(option, None)
    needs = {
        (owner, choice, option): without_effect.get((owner, option), "")
        for owner, choice, option in _options_off_default(choices, config)
    }
    effective = {
        owner: choice.drop(option for other, option in without_effect if other == owner)
        for owner, choice in choices.items()
    }
    return ParsedConfig(registry.normalise(_eviction_config(effective, added, fields)), needs)


def _options_off_default(choices: Mapping[str, Choice], config: EvictionConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (owner, choice, option) of the options that are written in a choice and are not the default.

    The configuration's value is compared, which a choice's own class has made of the written one.
    """
    for owner, choice in choices.items():
        known = _options(choice.name, owner)
        for name in choice.options:
            if name in known:
                default = known[name].default
                if getattr(config, owner).options.get(name, default) != default:
                    yield owner, choice.name, name


def _eviction_config(
    choices: Mapping[str, Choice], added: Mapping[str, Mapping[str, Any]], fields: Mapping[str, Any]
) -> EvictionConfig:
    """Return the configuration of choices per field, with the `added` options per field and the remaining fields."""
    complete: dict[str, Any] = {
        owner: Choice(choice.name, {**added[owner], **choice.options}) for owner, choice in choices.items()
    }
    return EvictionConfig(**complete, **fields)


def _applicable_options(choice: Choice, owner: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the subset of `options` that a choice of the field `owner` takes and does not set itself."""
    return {
        name: value
        for name, value in options.items()
        if takes_option(choice, owner, name) and name not in choice.options
    }


def _options(name: str, owner: str) -> Mapping[str, Option]:
    """Return the options of the choice `name` in the field `owner`, such as `policy`. Raises UnknownNameError."""
    if owner == "policy":
        return registry.policy_class(name).options()
    known = _OPTIONS[owner]
    if name not in known:
        raise UnknownNameError(name, owner, SELECTABLE if owner == "selection" else known)
    return known[name]


FIELDS = (
    "preset", "budget", "window", "granularity", "precision", "correction", "protect_first", "protect_recent", "policy",
    "selection",
)  # fmt: skip
"""Choices of every configuration; every other name is an option of some policy, selection or granularity."""
ORDER = (
    "preset", "budget", "alpha", "window", "window_queries", "split", "score", "epsilon", "norm", "pool", "kernel",
    "granularity", "reduce", "product", "block", "block_score", "sinks", "seed",
    "beta", "line", "floor", "safeguard", "recent", "history",
    "protect_first", "protect_recent", "positions", "precision", "bits", "keys", "values", "group", "fill", "by_layer",
    "correction", "mass", "policy", "selection",
)  # fmt: skip
"""The order of a grid, the outermost first: the selection varies fastest. Other options come before the policy, sorted
by name."""


def grid(
    budget: Any,
    *,
    preset: Any = "paper",
    policy: Any = "snapkv",
    selection: Any = "two-stage",
    cache: str = "ragged",
    **choices: Any,
) -> tuple[EvictionConfig, ...]:
    """Return a configuration per combination of the choices, each a value or a series, nested in the order of `ORDER`.

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
    configs = expand_grid(wanted, cache)
    for name, value in choices.items():
        if name not in FIELDS and value is not None and (needs := why_without_effect(name, configs)):
            raise ConfigError(f"{name} has no effect here: it needs {needs}; leave it out")
    return configs


def expand_grid(choices: Mapping[str, Any], cache: str = "ragged") -> tuple[EvictionConfig, ...]:
    """Return the configurations of `grid`, without checking that separate options have an effect."""
    parsed = [parse_configuration(**combination) for combination in combinations(choices)]
    for each in parsed:
        compatibility.check(each.config, cache)
    check_written_options(parsed)
    return unique(each.config for each in parsed)


def combinations(choices: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of the choices' values as a dict; the last name in `ORDER` varies fastest.

    Raises UnknownNameError for a name that is no choice, ConfigError for an empty list and for too many combinations.
    """
    series = {name: as_tuple(value) for name, value in choices.items()}
    if "precision" in series:  # a file of rules is read once
        series["precision"] = tuple(None if each is None else as_precision(each) for each in series["precision"])
    _check_names(series.get("policy", ()), series.get("selection", ()))
    for name, values in series.items():
        if name not in ORDER and name not in known_options():
            raise UnknownNameError(name, "choice", [*FIELDS, *known_options()])
        if not values:
            raise ConfigError(f"expected a value for {name} or a list of them, got an empty list")
    check_configurations(math.prod(map(len, series.values())))
    before = ORDER.index("policy") - 1  # where the names stand that `ORDER` lacks
    names = sorted(series, key=lambda name: (ORDER.index(name), "") if name in ORDER else (before, name))
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(series[name] for name in names))]


def _check_names(policies: Iterable[Any], selections: Iterable[Any]) -> None:
    """Raise UnknownNameError for an unknown policy, score or selection, before a policy's module is imported."""
    for policy in policies:
        registry.check_name(as_choice(policy))
    for text in selections:
        parts = split_policy_and_selection(text) if isinstance(text, str) else [text]
        chosen = as_choice(parts[-1])
        if len(parts) > 1:
            registry.check_name(parse(parts[0]))
        elif _names_policy_alone(chosen):
            registry.check_name(chosen)
            continue
        if chosen.name not in SELECTIONS:
            raise UnknownNameError(chosen.name, "selection", SELECTABLE)


def configuration(
    budget: Any,
    preset: str = "paper",
    policy: Choice | str = "snapkv",
    selection: Choice | str = "two-stage",
    **choices: Any,
) -> EvictionConfig:
    """Return a single configuration of `grid`, without checking that policy and selection are compatible.

    Raises ConfigError, BudgetError or UnknownNameError for a value out of its range, and an option without effect.
    """
    parsed = parse_configuration(budget, preset, policy, selection, **choices)
    check_written_options([parsed])
    return parsed.config


def check_written_options(parsed: Iterable[ParsedConfig]) -> None:
    """Raise ConfigError for an option that is written in a choice and ineffective in all its configurations."""
    all_needs: dict[tuple[str, str, str], list[str]] = {}
    for each in parsed:
        for key, need in each.needs.items():
            all_needs.setdefault(key, []).append(need)
    for (owner, choice, option), needs in all_needs.items():
        if all(needs):
            raise ConfigError(f"{option} of {owner} '{choice}' has no effect here: it needs {needs[0]}; leave it out")


def parse_configuration(
    budget: Any, preset: str = "paper", policy: Any = "snapkv", selection: Any = "two-stage", **choices: Any
) -> ParsedConfig:
    """Return a single configuration of `grid`, with what its written options need to take effect."""
    if preset not in PRESETS:
        raise UnknownNameError(preset, "preset", PRESETS)
    values = {name: value for name, value in choices.items() if value is not None}
    policy_choice, selection_choice = _split_policy_and_selection(selection, policy)
    policy_choice = registry.name_first_argument(policy_choice)
    kind = registry.policy_class(policy_choice.name)
    if kind.selections == (GIVEN,):  # it takes none of ours, nor a window, whatever the grid's other policies get
        alone = policy_choice == as_choice(policy)
        selection_choice, values["window"] = _external_selection(policy_choice, selection_choice, alone), 0
    default_granularity = kind.own_granularity or PRESETS[preset].get("granularity", "query")
    owners = {"policy": policy_choice, "selection": selection_choice}
    for owner, default in (("granularity", default_granularity), ("precision", FULL), ("correction", NONE)):
        chosen = values.pop(owner, default)
        owners[owner] = as_precision(chosen) if owner == "precision" else as_choice(chosen)
    separate = {name: value for name, value in values.items() if name not in FIELDS}
    _check_no_duplicate_options(owners, separate)
    window = PRESETS[preset].get("window", 32) if kind.own_window is None else kind.own_window
    fields = {"window": window, **{name: value for name, value in values.items() if name in FIELDS}}
    preset_options = {
        name: value for name, value in PRESETS[preset].items() if name not in (*FIELDS, *kind.own_defaults)
    }
    return _build_configuration(owners, preset_options, separate, budget=budget, **fields)


def _external_selection(policy: Choice, selection: Choice, alone: bool) -> Choice:
    """Return the selection `given` for an external policy. Raises ConfigError for any other selection of the user.

    `alone`: the policy was named without a selection.
    """
    if not alone and selection.name != GIVEN:
        raise ConfigError(f"policy '{policy}' keeps what it keeps, by no selection of ours: leave ':{selection}' out")
    return Choice(GIVEN)


def _check_no_duplicate_options(owners: Mapping[str, Choice], separate: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that is both written in a choice and passed separately."""
    for (owner, choice), name in itertools.product(owners.items(), separate):
        if name in choice.options and takes_option(choice, owner, name):
            raise ConfigError(f"'{name}' is given beside {choice} and in it; give it once")


def why_without_effect(name: str, configs: Iterable[EvictionConfig]) -> str:
    """Return what a separate option needs to take effect; empty if it is effective in any configuration."""
    reasons: dict[str, None] = {}
    for config in configs:
        needs = registry.options_without_effect(config, registry.build(config.policy))
        for owner in CHOICES:
            if takes_option(getattr(config, owner), owner, name):
                if (owner, name) not in needs:
                    return ""
                reasons[needs[owner, name]] = None
    return " or ".join(reasons or option_owners(name))


def unique(configs: Iterable[EvictionConfig]) -> tuple[EvictionConfig, ...]:
    """Return the configurations without duplicates, in order of first appearance."""
    return tuple(dict.fromkeys(configs))


def names_policy(selection: str) -> bool:
    """Return whether a selection's text includes a policy, as in `adakv:two-stage`, or is a policy's name."""
    return _split_policy_and_selection(selection, "-")[0].name != "-"  # no policy has that name


def _split_policy_and_selection(text: str | Choice, policy: str | Choice) -> tuple[Choice, Choice]:
    """Return (policy, selection); `text` is a selection of `policy`, a pair such as `adakv:two-stage`, or a policy."""
    if isinstance(text, str) and len(parts := split_policy_and_selection(text)) > 1:
        return parse(parts[0]), parse(parts[1])
    chosen = as_choice(text)
    if _names_policy_alone(chosen):
        return chosen, Choice(registry.policy_class(chosen.name).selections[0])
    return as_choice(policy), chosen


def _names_policy_alone(chosen: Choice) -> bool:
    """Return whether a choice in a selection's place is a policy's, which then stands for its first selection.

    `random`, which is both, is the selection.
    """
    return chosen.name not in SELECTIONS and (":" in chosen.name or chosen.name in registry.names())
