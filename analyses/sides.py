"""Sides of a comparison: which configurations are compared with which, and which may be ranked against each other.

Groups that may be ranked: METHOD, the protocol, 5 and 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perturbkv.configs.alpha_table import AlphaTable
from perturbkv.configs.choice import UNNAMED, Choice, as_choice, parse, split_policy_and_selection
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.configs.selections import ALL_QUERIES, SCORED, SELECTIONS, WINDOW_QUERIES
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

Pair = tuple[EvictionConfig, EvictionConfig]
"""Baseline and treatment."""


Sides = str | Iterable[str]
"""One side of a comparison, or several: a selection, a policy, or policy:selection each."""


def check_trace(trace: Any) -> None:
    """Raise TraceError for anything but a trace."""
    if not isinstance(trace, Trace):
        raise TraceError(f"expected a trace, as pk.read_trace or pk.measure give it; got {type(trace).__name__}")


def check_sides(trace: Any, baseline: Any, treatments: Any) -> tuple[str, ...]:
    """Return the names of one or several treatments as a tuple, with trace and sides checked.

    Raises TraceError for anything but a trace, ConfigError for sides that are no names, for no treatment, and for a
    repeated one.
    """
    check_trace(trace)
    several = isinstance(treatments, Iterable) and not isinstance(treatments, str)
    names = tuple(treatments) if several else (treatments,)
    wrong = [side for side in (baseline, *names) if not isinstance(side, str)]
    if wrong or not names or len({*names}) < len(names):
        got = "none" if not names else f"{type(wrong[0]).__name__}" if wrong else f"one of {', '.join(names)} twice"
        raise ConfigError(
            f"expected names of selections or policies, such as 'two-stage' or 'adakv:two-stage', got {got}"
        )
    return names


def choose_sides(trace: Any, baseline: Any, treatments: Any) -> tuple[str, tuple[str, ...]]:
    """Return the names of the baseline and of the treatments; None stands for the usual ones, or the trace's own.

    Usual is two-stage against attention. A trace without two-stage has its own sides: SnapKV's attention, else its
    first side, and all sides but random ones that can be compared with that one. Raises as `check_sides`.
    """
    names = check_sides(trace, baseline or "", "two-stage" if treatments is None else treatments)
    named = [(config.policy.name, config.selection.name) for config in trace.run.configs]
    sides = [":".join(side) for side in dict.fromkeys(named) if "random" not in side] or [":".join(named[0])]
    if treatments is not None or any(matches(config, "two-stage") for config in trace.run.configs):
        return baseline or "attention", names
    first = baseline or next((side for side in sides if side == "snapkv:attention"), sides[0])
    return first, tuple(side for side in sides if side != first and _has_pairs(trace.run, first, side)) or names


def _has_pairs(run: RunConfig, baseline: str, treatment: str) -> bool:
    """Return whether a run has pairs of these sides."""
    try:
        return bool(pairs(run, baseline, treatment))
    except TraceError:
        return False


def pairs(run: RunConfig, baseline: str, treatment: str) -> list[Pair]:
    """Return the pairs of baseline and treatment that differ in selection (and policy) alone.

    A side is a selection (`two-stage`, `two-stage(alpha=0.5)`), a policy and a selection (`snapkv:two-stage`), or a
    policy. Two selections are compared within each policy; a selection against a policy is that of the run's first
    policy that has it. Raises TraceError where the run has no such pair.
    """
    parts = [parse(part) for side in (baseline, treatment) for part in split_policy_and_selection(side)]
    free = {f"policy_{option or 'by'}" for part in parts for option in part.options}
    within = _is_selection(baseline) and _is_selection(treatment)
    firsts, seconds = (_side_configs(run, side, every_policy=within) for side in (baseline, treatment))
    matched = [
        (first, second)
        for second in seconds
        for first in _matching_baselines(
            [config for config in firsts if not within or config.policy.name == second.policy.name], second, free
        )
    ]
    if not matched:
        raise TraceError(
            f"expected configurations to compare '{baseline}' with '{treatment}', got a trace of {sides_text(run)}"
        )
    return sorted(matched, key=lambda pair: (firsts.index(pair[0]), seconds.index(pair[1])))


def _matching_baselines(
    candidates: list[EvictionConfig], treatment: EvictionConfig, free: set[str]
) -> list[EvictionConfig]:
    """Return the baselines nearest to a treatment: with equal options, else equal stage 1, else the first candidate."""
    comparable = [
        config for config in candidates if config != treatment and _equal_except_sides(config, treatment, free)
    ]
    same_stage = [
        config for config in comparable if _options_agree(config.selection, treatment.selection, ("alpha", "split"))
    ]
    closest = [
        config
        for config in same_stage
        if _options_agree(config.selection, treatment.selection)
        and _options_agree(config.granularity, treatment.granularity)
    ]
    return closest or same_stage or comparable[:1]


def _side_configs(run: RunConfig, side: str, every_policy: bool) -> list[EvictionConfig]:
    """Return a side's configurations; without `every_policy`, a bare selection means the first policy that has it."""
    configs = [config for config in run.configs if matches(config, side)]
    if every_policy or not _is_selection(side):
        return configs
    return [config for config in configs if config.policy.name == configs[0].policy.name]


def _is_selection(side: str) -> bool:
    """Return whether a side is a selection without a policy."""
    return len(split_policy_and_selection(side)) == 1 and parse(side).name in SELECTIONS


def series(run: RunConfig, baseline: str, treatment: str) -> list[list[Pair]]:
    """Return the pairs in groups that differ in budget alone, smallest budget first. Raises as `pairs`."""
    groups: dict[tuple[EvictionConfig, ...], list[Pair]] = {}
    for pair in sorted(pairs(run, baseline, treatment), key=lambda pair: budget_order(pair[0])):
        groups.setdefault(tuple(map(_without_budget, pair)), []).append(pair)
    return list(groups.values())


def all_series(trace: Trace, baseline: str | None, treatments: Sides | None) -> list[list[Pair]]:
    """Return the `series` of every treatment: pairs in groups. Raises as `choose_sides` and `pairs`."""
    first, names = choose_sides(trace, baseline, treatments)
    return [group for treatment in names for group in series(trace.run, first, treatment)]


def configs_of(pairs: Iterable[Pair]) -> list[EvictionConfig]:
    """Return the configurations of the pairs, without duplicates."""
    return list(dict.fromkeys(config for pair in pairs for config in pair))


def sides_text(run: RunConfig) -> str:
    """Return the policies and selections of a run as text, for error messages: 'snapkv:attention, h2o:attention'."""
    return ", ".join(dict.fromkeys(f"{config.policy.name}:{config.selection.name}" for config in run.configs))


def matches(config: EvictionConfig, side: str) -> bool:
    """Return whether a configuration matches a side's text in policy, selection and all given options."""
    parts = [parse(part) for part in split_policy_and_selection(side)]
    if len(parts) == 1:
        return _matches_choice(parts[0], config.selection) or _matches_choice(parts[0], config.policy)
    return len(parts) == 2 and _matches_choice(parts[0], config.policy) and _matches_choice(parts[1], config.selection)


def _matches_choice(request: Choice, choice: Choice) -> bool:
    """Return whether a choice has the requested name and options."""
    return request.name == choice.name and all(
        _has_option(choice, name, value) for name, value in request.options.items()
    )


_OMITTED = {WINDOW_QUERIES: ALL_QUERIES, "positions": "kept", "keep": "best"}
"""Options that a policy's choice omits at their default, with that default."""


def _has_option(choice: Choice, name: str, value: Any) -> bool:
    """Return whether a choice's option has the requested value; an unnamed value stands for `by`, or any option."""
    if name == UNNAMED and "by" not in choice.options:
        return any(_matches_value(value, option) for option in choice.options.values())
    name = name or "by"
    options = {**_OMITTED, **choice.options}
    return name in options and _matches_value(value, options[name])


def _matches_value(request: Any, value: Any) -> bool:
    """Return whether an option's value equals the requested value."""
    if isinstance(value, Choice):
        return isinstance(request, str | Choice) and _matches_choice(as_choice(request), value)
    if isinstance(value, AlphaTable):
        return str(request) == str(value) or Path(str(request)).name == value.name
    return bool(("none" if request is None else request) == value)


def _equal_except_sides(first: EvictionConfig, second: EvictionConfig, free: set[str]) -> bool:
    """Return whether two configurations agree in their common choices, except selection, policy and `free` choices.

    Options and window belong to the policy: they may differ between different policies.
    """
    systems = () if first.policy.name == second.policy.name else ("policy", "window")
    sides, one, other = ("selection", "granularity_product", *systems), _choices_of(first), _choices_of(second)
    common_names = (one.keys() & other.keys()) - free
    return all(one[name] == other[name] for name in common_names if not name.startswith(sides))


def _choices_of(config: EvictionConfig) -> dict[str, Any]:
    """Return `EvictionConfig.flat` with the defaults that choices omit; window queries vote where a score is used."""
    names = [name for name in _OMITTED if name != WINDOW_QUERIES or config.selection.name in SCORED]
    return {f"policy_{name}": _OMITTED[name] for name in names} | config.flat()


def _options_agree(first: Choice, second: Choice, names: Collection[str] | None = None) -> bool:
    """Return whether two choices have equal values of the named options; None: of all options that both have."""
    names = first.options.keys() & second.options.keys() if names is None else names
    return all(first.options.get(name) == second.options.get(name) for name in names)


def side_indices(run: RunConfig, side: str) -> list[int]:
    """Return the indices of a side's configurations, sorted by α, then budget (shares before entries).

    Raises TraceError where the run has none.
    """
    indices = [index for index, config in enumerate(run.configs) if matches(config, side)]
    if not indices:
        raise TraceError(f"expected configurations of '{side}', got a trace of {sides_text(run)}")
    return sorted(indices, key=lambda index: budget_order(run.configs[index]))


def budget_order(config: EvictionConfig) -> tuple[float, bool, float]:
    """Return the sort key of a configuration: α (a table's mean), then budget, shares before entries."""
    return config.mean_alpha, isinstance(config.budget.value, int), float(config.budget.value)


def group_by_selection(run: RunConfig) -> list[dict[str, int]]:
    """Return selection -> index for each group of configurations that differ in selection alone."""
    groups = group_settings(run, "selection")
    return [{config.selection.name: run.configs.index(config) for config in group} for group in groups]


def group_settings(run: RunConfig, *free: str) -> list[list[EvictionConfig]]:
    """Return the configurations grouped so that members differ in the `free` choices alone.

    Choices are named as in `EvictionConfig.flat`. A configuration without an option is in the group of each value.
    """
    choices = [
        {name: value for name, value in _choices_of(config).items() if name not in free} for config in run.configs
    ]
    groups = [tuple(range(len(choices)))]
    for name in dict.fromkeys(name for config in choices for name in config):
        groups = list(dict.fromkeys(part for group in groups for part in _split_by_value(group, choices, name)))
    largest = [group for group in groups if not any(set(group) < set(other) for other in groups)]  # none in another
    members = [[run.configs[index] for index in group] for group in largest]
    return sorted(members, key=lambda group: min(map(budget_order, group)))


def _split_by_value(group: tuple[int, ...], choices: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, ...]]:
    """Return one group per value of the choice called `name`; configurations without it are in all groups.

    The group itself where none has the choice. `choices`: each configuration's, by index.
    """
    values = dict.fromkeys(choices[index][name] for index in group if name in choices[index])
    parts = [tuple(index for index in group if choices[index].get(name, value) == value) for value in values]
    return parts or [group]


def sweeps(run: RunConfig, side: str | None) -> list[list[int]]:
    """Return groups of configuration indices that differ in budget alone; `side` None: of all configurations.

    Raises as `side_indices`.
    """
    groups: dict[EvictionConfig, list[int]] = {}
    for index in range(len(run.configs)) if side is None else side_indices(run, side):
        groups.setdefault(_without_budget(run.configs[index]), []).append(index)
    return list(groups.values())


def _without_budget(config: EvictionConfig) -> EvictionConfig:
    """Return the configuration with a dummy budget, so that those that differ in budget alone are equal."""
    return dataclasses.replace(config, budget=Budget(1.0))


DEFAULTS = ("full", "none")
"""Precision and correction that labels leave out."""
LEAST_CONFIGS = 3
"""Smallest number of configurations that are ranked."""
CACHE_SIZE_CHOICES = ("granularity", "precision", "correction", "protect_first", "protect_recent")
"""Choices that change the size of the cache: configurations are ranked only where they share these and the budget."""


def comparable_groups(configs: Sequence[EvictionConfig]) -> dict[str, list[int]]:
    """Return group name -> indices of configurations with equal budget, granularity, precision and protection.

    The name is the budget as the user gave it, then those of these choices of which there are several values.
    """
    varied = [name for name in CACHE_SIZE_CHOICES if len({getattr(config, name) for config in configs}) > 1]
    groups: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        words = [_choice_text(name, getattr(config, name)) for name in varied]
        groups.setdefault(" ".join(filter(None, [str(config.budget), *words])), []).append(index)
    return groups


def _choice_text(name: str, value: Choice | float) -> str:
    """Return a choice as in a label, a number with its name: 'protect-first=4'; empty for a default."""
    if isinstance(value, Choice):
        return "" if value.name in DEFAULTS else str(value)
    return f"{name.replace('_', '-')}={value:g}" if value else ""
