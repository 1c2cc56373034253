"""Pairs and groups of configurations to compare, and short names that distinguish configurations.

Groups of configurations of one prompt that may be ranked against each other: METHOD, the protocol, 5 and 7.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perturbkv.configs.alpha_table import AlphaTable
from perturbkv.configs.choice import UNNAMED, Choice, as_choice, parse, split_policy_and_selection
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import CORRECTED, CORRECTION_OPTIONS, PRECISION_OPTIONS, QUANTISE
from perturbkv.configs.run import RunConfig
from perturbkv.configs.selections import ALL_QUERIES, SCORED, SELECTIONS, WINDOW_QUERIES
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

_STAGE1 = ("alpha", "split")
Pair = tuple[EvictionConfig, EvictionConfig]
"""Baseline and treatment."""


class PairRecord:
    """A comparison of two configurations, shown in a notebook by their labels alone."""

    baseline: EvictionConfig
    treatment: EvictionConfig

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.baseline.label()} → {self.treatment.label()}>"


def pairs_of(comparisons: Iterable[PairRecord]) -> list[Pair]:
    """Return the baseline and the treatment of each comparison."""
    return [(comparison.baseline, comparison.treatment) for comparison in comparisons]


Sides = str | Iterable[str]
"""One side of a comparison, or several: a selection, a policy, or policy:selection each."""


def check_sides(trace: Any, baseline: Any, treatments: Any) -> tuple[str, ...]:
    """Return the names of one or several treatments as a tuple, with trace and sides checked.

    Raises TraceError for anything but a trace, ConfigError for sides that are no names, for no treatment, and for a
    repeated one.
    """
    if not isinstance(trace, Trace):
        raise TraceError(f"expected a trace, as pk.read_trace or pk.measure give it; got {type(trace).__name__}")
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
    sides = [":".join(names) for names in dict.fromkeys(named) if "random" not in names] or [":".join(named[0])]
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


def pair_columns(baseline: EvictionConfig, treatment: EvictionConfig) -> dict[str, Any]:
    """Return a pair as columns of a data frame: labels, policies and selections of both sides, and their budget."""
    both = (("baseline", baseline), ("treatment", treatment))
    return {
        **{name: config.label() for name, config in both},
        **{f"{name}_policy": config.policy.name for name, config in both},
        **{f"{name}_selection": config.selection.name for name, config in both},
        "budget": baseline.budget.value,
    }


def pairs(run: RunConfig, baseline: str, treatment: str) -> list[Pair]:
    """Return the pairs of baseline and treatment that differ in selection (and policy) alone.

    A side is a selection (`two-stage`, `two-stage(alpha=0.5)`), a policy and a selection (`snapkv:two-stage`), or a
    policy. Two selections are compared within each policy; a selection against a policy is that of the run's first
    policy that has it. Raises TraceError where the run has no such pair.
    """
    free = {f"policy_{option}" for side in (baseline, treatment) for option in _named_options(side)}
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
            f"expected configurations to compare '{baseline}' with '{treatment}', got a trace of {_sides_text(run)}"
        )
    return sorted(matched, key=lambda pair: (firsts.index(pair[0]), seconds.index(pair[1])))


def _named_options(side: str) -> set[str]:
    """Return the names of options given in a side's text."""
    return {name or "by" for part in split_policy_and_selection(side) for name in parse(part).options}


def _matching_baselines(
    candidates: list[EvictionConfig], treatment: EvictionConfig, free: set[str]
) -> list[EvictionConfig]:
    """Return the baselines nearest to a treatment: with equal options, else equal stage 1, else the first candidate."""
    comparable = [
        config for config in candidates if config != treatment and _equal_except_sides(config, treatment, free)
    ]
    same_stage = [config for config in comparable if _options_agree(config.selection, treatment.selection, _STAGE1)]
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


def _sides_text(run: RunConfig) -> str:
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


_OMITTED = {WINDOW_QUERIES: ALL_QUERIES, "positions": "kept"}
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
        raise TraceError(f"expected configurations of '{side}', got a trace of {_sides_text(run)}")
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
    largest = [group for group in groups if not any(set(group) < set(other) for other in groups)]
    members = [[run.configs[index] for index in group] for group in largest]
    return sorted(members, key=lambda group: min(map(budget_order, group)))


def _split_by_value(group: tuple[int, ...], choices: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, ...]]:
    """Return one group per value of a choice; configurations without the choice are in all groups."""
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


SIDE = ("policy", "selection")
"""Choices in which the sides of a comparison differ."""
OWNERS = (*SIDE, "granularity", "precision", "correction")
"""Choices that have options."""
_AFTER_SIDES = ("budget", "window", "granularity", "precision", "correction", "protect_first", "protect_recent")
"""The other choices, in the order of a label."""
_DEFAULTS = ("full", "none")
"""Precision and correction that labels leave out."""
_PIECES = re.compile(r"[^(:,/]*[(:,/]|[^(:,/]+")


def plural(number: int, word: str, many: str = "") -> str:
    """Return a number with its noun: '1 sample', '8 samples', or with the plural in `many` '8 batches'."""
    return f"{number:,} {word if number == 1 else many or f'{word}s'}"


def setting_name(config: EvictionConfig, *without: str) -> str:
    """Return a configuration's choices as text, without policy, selection and the choices in `without`."""
    return " ".join(word for choice, word in config.label_parts().items() if choice not in (*SIDE, *without))


def common(configs: Sequence[EvictionConfig], *without: str) -> str:
    """Return the choices that all configurations share, as text; choices in `without` are left out."""
    return " ".join(common_choices(configs, *without).values())


def common_choices(configs: Sequence[EvictionConfig], *without: str) -> dict[str, str]:
    """Return choice -> word for the choices that all configurations share; those in `without` left out.

    So is α where no configuration has stages: it says only of which entries σ is.
    """
    shared = _shared_choices(configs) - set(without)
    if not any(config.is_staged for config in configs):
        shared -= {"alpha"}
    return {choice: word for config in configs for choice, word in config.label_parts().items() if choice in shared}


def distinct_choices(configs: Sequence[EvictionConfig], *without: str) -> list[dict[str, str]]:
    """Return, per configuration, choice -> word for the choices that vary; those in `without` left out."""
    hidden = {*_shared_choices(configs), *without}
    return [
        {choice: word for choice, word in config.label_parts().items() if choice not in hidden} for config in configs
    ]


def short_names(configs: Sequence[EvictionConfig], *without: str) -> list[str]:
    """Return each label without the choices that all configurations share: 'adakv(floor=0.1):two-stage b=64'.

    Empty for a single configuration. Choices in `without` are left out, too.
    """
    distinct = distinct_choices(configs, *without)
    texts = [{name: _with_options(getattr(config, name), words) for name in OWNERS}
             for config, words in zip(configs, distinct, strict=True)]  # fmt: skip
    varied = {name for name in OWNERS if name not in without and any("(" in own[name] for own in texts)}
    return [_short_label(words, own, varied) for words, own in zip(distinct, texts, strict=True)]


def method_names(configs: Sequence[EvictionConfig], *without: str) -> list[str]:
    """Return the short name of each configuration; 'evicted' where nothing distinguishes it."""
    return [name or "evicted" for name in short_names(configs, *without)]


def _short_label(words: Mapping[str, str], texts: Mapping[str, str], varied: Collection[str]) -> str:
    """Return a label with only the parts that distinguish configurations, in the label's notation.

    Args:
        words: choice -> its word, for the choices that differ.
        texts: each choice that can have options -> its notation with the options that differ.
        varied: those of them whose options differ between any of the configurations.
    """
    named = {name: text for name, text in texts.items() if name in words or name in varied or "(" in text}
    sides = ":".join(named[name] for name in SIDE if name in named)
    parts = [named.get(name, "") if name in OWNERS else words.get(name, "") for name in _AFTER_SIDES]
    return " ".join(part for part in (sides, *parts) if part and part not in _DEFAULTS)


def curve_names(configs: Sequence[EvictionConfig]) -> list[str]:
    """Return a name per curve, from one configuration of each curve; a single curve has its selection's name."""
    return [name or config.selection.name for name, config in zip(short_names(configs, "budget"), configs, strict=True)]


def _side_choices(baseline: EvictionConfig, treatment: EvictionConfig) -> tuple[list[str], list[str]]:
    """Return (policy, selection) texts of baseline and of treatment, with only the options that differ."""
    both = (baseline, treatment)
    first, second = (
        [_with_options(getattr(config, owner), words) for owner in SIDE]
        for config, words in zip(both, distinct_choices(both), strict=True)
    )
    return first, second


def side_names(baseline: EvictionConfig, treatment: EvictionConfig) -> tuple[str, str]:
    """Return the names of both sides: the policy or selection in which they differ, else their short names."""
    differing = [pair for pair in zip(*_side_choices(baseline, treatment), strict=True) if len(set(pair)) > 1]
    if not differing:
        first, second = short_names((baseline, treatment))
        return first, second
    first, second = (":".join(pair[index] for pair in differing) for index in (0, 1))
    return first, second


def pair_names(pairs: Sequence[Pair]) -> list[str]:
    """Return distinct names of pairs: the treatments' short names, the treatment's side name for a single pair.

    The baseline's name follows where pairs share a treatment: 'adakv:two-stage b=64 vs snapkv'.
    """
    treatments = [
        name or side_names(*pair)[1]
        for name, pair in zip(short_names([treatment for _, treatment in pairs]), pairs, strict=True)
    ]
    baselines = short_names([baseline for baseline, _ in pairs], "budget")
    return [
        f"{treatment} vs {baseline}" if treatments.count(treatment) > 1 and baseline else treatment
        for treatment, baseline in zip(treatments, baselines, strict=True)
    ]


def pairs_title(pairs: Sequence[Pair], *without: str) -> str:
    """Return the sides and the shared choices, except `without`: 'two-stage against attention: snapkv b=64'."""
    baselines, treatments = (
        " and ".join(dict.fromkeys(names)) for names in zip(*(side_names(*pair) for pair in pairs), strict=True)
    )
    shared = common(configs_of(pairs), *without)
    return f"{treatments} against {baselines}" + (f": {shared}" if shared else "")


def _with_options(choice: Choice, words: Mapping[str, str]) -> str:
    """Return a choice as text, with only the options named in `words`."""
    wanted = {*words, "kernel"} if "pool" in words else {*words}  # the word for pool includes the kernel
    return str(choice.without(name for name in choice.options if name not in wanted))


def budget_names(configs: Sequence[EvictionConfig], *without: str) -> list[list[str]]:
    """Return, per configuration, its budget as given, followed by its other varying choices."""
    others = distinct_choices(configs, "budget", *without)
    return [[str(config.budget), *words.values()] for config, words in zip(configs, others, strict=True)]


def _shared_choices(configs: Sequence[EvictionConfig]) -> set[str]:
    """Return the names of choices with the same value in all configurations that have the choice.

    Options of policies, blocks, precision and correction are shared only where every configuration has them.
    """
    words: dict[str, list[str]] = {}
    for config in configs:
        for choice, word in config.label_parts(every=True).items():
            words.setdefault(choice, []).append(word)
    optional = {name for config in configs for name in config.policy.options} - {"pool", "kernel"}
    optional |= {"block", "block_score", *PRECISION_OPTIONS[QUANTISE], *CORRECTION_OPTIONS[CORRECTED]}
    equal = {choice for choice, values in words.items() if len(set(values)) == 1}
    return {choice for choice in equal if choice not in optional or len(words[choice]) == len(configs)}


def fold(name: str, width: int = 16) -> str:
    """Return a long name broken into lines, between words or after brackets, colons and commas."""
    lines = textwrap.wrap(name, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(part for line in lines for part in _break_word(line, width))


def _break_word(line: str, width: int) -> list[str]:
    """Return a word's parts, broken after brackets, colons and commas to fit `width` where possible."""
    parts = [""]
    for piece in _PIECES.findall(line) if len(line) > width else [line]:
        if parts[-1] and len(parts[-1]) + len(piece) > width:
            parts.append("")
        parts[-1] += piece
    return parts


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
        return "" if value.name in _DEFAULTS else str(value)
    return f"{name.replace('_', '-')}={value:g}" if value else ""
