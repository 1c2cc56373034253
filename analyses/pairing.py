"""The two sides of a comparison: which configurations they are, and what they are called.

Which configurations of a run are the two sides of one comparison.

Short names for configurations that are shown side by side, from their choices: only what tells them apart.

Which configurations of a prompt may be ranked against each other (METHOD: the protocol, 5 and 7).
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
from perturbkv.configs.selections import SELECTIONS
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

_STAGE1 = ("alpha", "split")
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
    """Return the treatments, one or several, as a tuple.

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
    """Return a pair as the columns of a table: both labels, what their sides are, and the budget that they share."""
    both = (("baseline", baseline), ("treatment", treatment))
    return {
        **{name: config.label() for name, config in both},
        **{f"{name}_policy": config.policy.name for name, config in both},
        **{f"{name}_selection": config.selection.name for name, config in both},
        "budget": baseline.budget.value,
    }


def pairs(run: RunConfig, baseline: str, treatment: str) -> list[Pair]:
    """Return every two configurations, baseline and treatment, that differ in selection (and policy) alone.

    A side is a selection (`two-stage`, `two-stage(alpha=0.5)`), a policy and a selection (`snapkv:two-stage`), or a
    policy. Two selections are
    compared within each policy; a selection against a policy is that of the run's first policy that has it. Raises
    TraceError where the run holds no such pair.
    """
    named = {f"policy_{option}" for side in (baseline, treatment) for option in _options(side)}
    within = _of_any_policy(baseline) and _of_any_policy(treatment)
    firsts, seconds = (_side(run, side, every=within) for side in (baseline, treatment))
    found = [
        (first, second)
        for second in seconds
        for first in _fitting(
            [one for one in firsts if not within or one.policy.name == second.policy.name], second, named
        )
    ]
    if not found:
        msg = f"expected configurations to compare '{baseline}' with '{treatment}', got a trace of {_held(run)}"
        raise TraceError(msg)
    return sorted(found, key=lambda pair: (firsts.index(pair[0]), seconds.index(pair[1])))


def _options(side: str) -> set[str]:
    """Options that a side names, which may then differ between the sides."""
    return {name or "by" for part in split_policy_and_selection(side) for name in parse(part).options}


def _fitting(firsts: list[EvictionConfig], second: EvictionConfig, named: set[str]) -> list[EvictionConfig]:
    """Baselines of a treatment: of its stage 1 and group if there are any, else the first that is alike."""
    alike = [first for first in firsts if first != second and _alike(first, second, named)]
    same = [first for first in alike if _agree(first.selection, second.selection, _STAGE1)]
    close = [
        first
        for first in same
        if _agree(first.selection, second.selection) and _agree(first.granularity, second.granularity)
    ]
    return close or same or alike[:1]


def _side(run: RunConfig, side: str, every: bool) -> list[EvictionConfig]:
    """Configurations of one side; of a bare selection those of the first policy, unless `every` one's are wanted."""
    found = [config for config in run.configs if matches(config, side)]
    if every or not _of_any_policy(side):
        return found
    return [one for one in found if one.policy.name == found[0].policy.name]


def _of_any_policy(side: str) -> bool:
    """Return whether a side is a selection alone."""
    return len(split_policy_and_selection(side)) == 1 and parse(side).name in SELECTIONS


def series(run: RunConfig, baseline: str, treatment: str) -> list[list[Pair]]:
    """Return the same pairs, those together that differ in budget alone, smallest first. Raises as `pairs`."""
    found: dict[tuple[EvictionConfig, ...], list[Pair]] = {}
    for pair in sorted(pairs(run, baseline, treatment), key=lambda pair: order(pair[0])):
        found.setdefault(tuple(map(_at_any_budget, pair)), []).append(pair)
    return list(found.values())


def all_series(trace: Trace, baseline: str, treatments: Sides) -> list[list[Pair]]:
    """Return the series of every treatment, one after the other. Raises as `checked` and `pairs`."""
    return [
        found for treatment in checked(trace, baseline, treatments) for found in series(trace.run, baseline, treatment)
    ]


def configs_of(pairs: Iterable[Pair]) -> list[EvictionConfig]:
    """Return both sides of each pair."""
    return [config for pair in pairs for config in pair]


def _held(run: RunConfig) -> str:
    return ", ".join(dict.fromkeys(f"{config.policy.name}:{config.selection.name}" for config in run.configs))


def matches(config: EvictionConfig, side: str) -> bool:
    """Return whether a configuration is of a side: its names, and every option that the side gives."""
    told = [parse(part) for part in split_policy_and_selection(side)]
    if len(told) == 1:
        return _fits(told[0], config.selection) or _fits(told[0], config.policy)
    return len(told) == 2 and _fits(told[0], config.policy) and _fits(told[1], config.selection)


def _fits(told: Choice, held: Choice) -> bool:
    """Return whether a choice is the one that is told; the score that a policy ranks by may stand without a name."""
    return told.name == held.name and all(_has(held, name, value) for name, value in told.options.items())


def _has(held: Choice, name: str, value: Any) -> bool:
    """Return whether a choice has an option of this value: one of the name.

    Without a name `by`, or any where it has no by.
    """
    if name == UNNAMED and "by" not in held.options:
        return any(_means(value, one) for one in held.options.values())
    name = name or "by"
    return name in held.options and _means(value, held.options[name])


def _means(told: Any, held: Any) -> bool:
    """Return whether an option is what is told of it."""
    if isinstance(held, Choice):
        return isinstance(told, str | Choice) and _fits(as_choice(told), held)
    if isinstance(held, AlphaTable):
        return str(told) == str(held) or Path(str(told)).name == held.name
    return bool(("none" if told is None else told) == held)


def _alike(first: EvictionConfig, second: EvictionConfig, named: set[str]) -> bool:
    """Return whether all but the selection and what is `named` is alike: what both have, as an idle option is none.

    Different systems have different options and look back differently: that is part of what they are.
    """
    systems = () if first.policy.name == second.policy.name else ("policy", "window")
    free, one, other = ("selection", "granularity_product", *systems), first.flat(), second.flat()
    both = (one.keys() & other.keys()) - named
    return all(one[name] == other[name] for name in both if not name.startswith(free))


def _agree(first: Choice, second: Choice, names: Collection[str] | None = None) -> bool:
    """Return whether two choices have the same values of the options that both have, or of the named ones."""
    both = first.options.keys() & second.options.keys() if names is None else names
    return all(first.options.get(name) == second.options.get(name) for name in both)


def of_selection(run: RunConfig, side: str) -> list[int]:
    """Places of the configurations of one side, by α, then budget: fractions before tokens.

    Raises TraceError where the run holds none.
    """
    found = [place for place, config in enumerate(run.configs) if matches(config, side)]
    if not found:
        msg = f"expected configurations of '{side}', got a trace of {_held(run)}"
        raise TraceError(msg)
    return sorted(found, key=lambda place: order(run.configs[place]))


def order(config: EvictionConfig) -> tuple[float, bool, float]:
    """Sorts configurations by α, of a table its mean, then budget: fractions before tokens."""
    return config.mean_alpha, isinstance(config.budget.value, int), float(config.budget.value)


def by_selection(run: RunConfig) -> list[dict[str, int]]:
    """Configurations that differ in selection alone: selection -> place; one entry per policy, α, budget, …."""
    return [{run.configs[place].selection.name: place for place in group} for group in settings(run, "selection")]


def settings(run: RunConfig, *free: str) -> list[list[int]]:
    """Places of the configurations that differ in the `free` choices alone, as `EvictionConfig.flat` names them.

    A configuration that lacks an option goes with every value of it.
    """
    flat = [{name: value for name, value in one.flat().items() if name not in free} for one in run.configs]
    groups = [tuple(range(len(flat)))]
    for name in dict.fromkeys(name for one in flat for name in one):
        groups = list(dict.fromkeys(part for group in groups for part in _parted(group, flat, name)))
    whole = [group for group in groups if not any(set(group) < set(other) for other in groups)]
    return [list(group) for group in sorted(whole, key=lambda group: min(order(run.configs[place]) for place in group))]


def _parted(group: tuple[int, ...], flat: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, ...]]:
    """Return a group for each value of a choice, together with those that lack it."""
    values = dict.fromkeys(flat[place][name] for place in group if name in flat[place])
    parts = [tuple(place for place in group if flat[place].get(name, value) == value) for value in values]
    return parts or [group]


def sweeps(run: RunConfig, side: str | None) -> list[list[int]]:
    """Places of one side's configurations, or of all, those together that differ in budget alone.

    Raises as `of_selection`.
    """
    found: dict[EvictionConfig, list[int]] = {}
    for place in range(len(run.configs)) if side is None else of_selection(run, side):
        found.setdefault(_at_any_budget(run.configs[place]), []).append(place)
    return list(found.values())


def _at_any_budget(config: EvictionConfig) -> EvictionConfig:
    """Return one configuration for all that differ in budget alone."""
    return dataclasses.replace(config, budget=Budget(1.0))


SIDE = ("policy", "selection")
"""The choices that the sides of a comparison differ in."""
OWNERS = (*SIDE, "granularity", "precision", "correction")
"""The choices that have options."""
_PLAIN = ("budget", "window", "protect_first", "protect_recent")
_UNSAID = ("full", "none")
"""Precision and correction that a label leaves out."""
_PIECES = re.compile(r"[^(:,/]*[(:,/]|[^(:,/]+")


def counted(number: int, word: str, many: str = "") -> str:
    """Return '1 sample', '8 samples', or with `many` '8 batches'."""
    return f"{number:,} {word if number == 1 else many or f'{word}s'}"


def setting_name(config: EvictionConfig, *more: str) -> str:
    """What the sides of a comparison share: a configuration without policy and selection, and without `more`."""
    return " ".join(word for choice, word in config.label_parts().items() if choice not in (*SIDE, *more))


def common(configs: Sequence[EvictionConfig], *without: str) -> str:
    """Return the choices that all configurations share, those of `without` left out."""
    shared = _shared(configs) - set(without)
    said = {choice: word for one in configs for choice, word in one.label_parts().items() if choice in shared}
    return " ".join(said.values())


def apart(configs: Sequence[EvictionConfig], *without: str) -> list[dict[str, str]]:
    """Of each configuration the choices that not all share, those of `without` left out."""
    known = {*_shared(configs), *without}
    return [
        {choice: word for choice, word in config.label_parts().items() if choice not in known} for config in configs
    ]


def short_names(configs: Sequence[EvictionConfig], *without: str) -> list[str]:
    """Return each label without what all configurations share: 'adakv(floor=0.1):two-stage b=64'.

    Empty where there is but one configuration. Choices of `without` are left out too.
    """
    words = apart(configs, *without)
    written = [{name: _with_options(getattr(config, name), own) for name in OWNERS}
               for config, own in zip(configs, words, strict=True)]  # fmt: skip
    telling = {name for name in OWNERS if name not in without and any("(" in texts[name] for texts in written)}
    return [_short_label(own, texts, telling) for own, texts in zip(words, written, strict=True)]


def _short_label(words: Mapping[str, str], written: Mapping[str, str], telling: Collection[str]) -> str:
    """Return the parts of a label that the words name, in the label's order and notation.

    Args:
        words: choice -> its word, of the choices that tell configurations apart.
        written: each choice that has options, as it is written with those that tell.
        telling: those of them that have such options in any of the configurations.
    """
    named = {name: text for name, text in written.items() if name in words or name in telling or "(" in text}
    sides = ":".join(named.pop(name) for name in SIDE if name in named)
    named = {name: text for name, text in named.items() if text not in _UNSAID}
    rest = [word for name, word in words.items() if name in _PLAIN]
    return " ".join([*([sides] if sides else []), *rest, *named.values()])


def curve_names(configs: Sequence[EvictionConfig]) -> list[str]:
    """What tells curves over budgets apart, one configuration of each: of a single curve its selection."""
    return [name or config.selection.name for name, config in zip(short_names(configs, "budget"), configs, strict=True)]


def choices(baseline: EvictionConfig, treatment: EvictionConfig) -> tuple[list[str], list[str]]:
    """Policy and selection of both sides of a comparison, each with those of its options that tell the sides apart."""
    both = (baseline, treatment)
    first, second = (
        [_with_options(getattr(config, owner), told) for owner in SIDE]
        for config, told in zip(both, apart(both), strict=True)
    )
    return first, second


def side_names(baseline: EvictionConfig, treatment: EvictionConfig) -> tuple[str, str]:
    """Return the names of the two sides of a comparison: the policy and selection that they differ in, else all."""
    differing = [pair for pair in zip(*choices(baseline, treatment), strict=True) if len(set(pair)) > 1]
    if not differing:
        first, second = short_names((baseline, treatment))
        return first, second
    first, second = (":".join(pair[index] for pair in differing) for index in (0, 1))
    return first, second


def pair_names(pairs: Sequence[Pair]) -> list[str]:
    """Return what tells each pair from the others: its treatment's short name, of a single pair its treatment's side.

    Its baseline's name follows where pairs share a treatment: 'adakv:two-stage b=64 vs snapkv'.
    """
    treatments = [
        name or side_names(*pair)[1] for name, pair in zip(short_names([one for _, one in pairs]), pairs, strict=True)
    ]
    baselines = short_names([one for one, _ in pairs], "budget")
    return [
        f"{treatment} vs {baseline}" if treatments.count(treatment) > 1 and baseline else treatment
        for treatment, baseline in zip(treatments, baselines, strict=True)
    ]


def pairs_title(pairs: Sequence[Pair], *without: str) -> str:
    """Return 'two-stage against attention: snapkv b=64': the sides, and what all configurations share.

    Choices of `without` are left out.
    """
    baselines, treatments = (
        " and ".join(dict.fromkeys(names)) for names in zip(*(side_names(*pair) for pair in pairs), strict=True)
    )
    shared = common(configs_of(pairs), *without)
    return f"{treatments} against {baselines}" + (f": {shared}" if shared else "")


def _with_options(choice: Choice, told: Mapping[str, str]) -> str:
    """Return a choice as it is written, with no other options than those that are told."""
    wanted = {*told, "kernel"} if "pool" in told else {*told}  # one word says both
    return str(choice.without(name for name in choice.options if name not in wanted))


def budgets(configs: Sequence[EvictionConfig], *without: str) -> list[list[str]]:
    """Each configuration's budget as the user gave it, and behind it what else tells the configurations apart."""
    others = apart(configs, "budget", *without)
    return [[str(config.budget), *told.values()] for config, told in zip(configs, others, strict=True)]


def _shared(configs: Sequence[EvictionConfig]) -> set[str]:
    """Choices of which every configuration that has them says the same; of policies, blocks, bits, if all have them."""
    said: dict[str, list[str]] = {}
    for config in configs:
        for choice, word in config.label_parts(every=True).items():
            said.setdefault(choice, []).append(word)
    own = {name for config in configs for name in config.policy.options} - {"pool", "kernel"}
    own |= {"block", "block_score", *PRECISION_OPTIONS[QUANTISE], *CORRECTION_OPTIONS[CORRECTED]}
    alike = {choice for choice, words in said.items() if len(set(words)) == 1}
    return {choice for choice in alike if choice not in own or len(said[choice]) == len(configs)}


def folded(name: str, width: int = 16) -> str:
    """Return a long name on several lines, broken between its words.

    A longer word behind its brackets, colons and commas.
    """
    lines = textwrap.wrap(name, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(part for line in lines for part in _broken(line, width))


def _broken(line: str, width: int) -> list[str]:
    """Return a line that is too long, which is one word, in parts that fit as far as its signs let them."""
    parts = [""]
    for piece in _PIECES.findall(line) if len(line) > width else [line]:
        if parts[-1] and len(parts[-1]) + len(piece) > width:
            parts.append("")
        parts[-1] += piece
    return parts


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
