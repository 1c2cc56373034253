"""Names of configurations: what distinguishes them, as tables, figures and sentences call them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from perturbkv.analyses.sides import DEFAULTS, Pair
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import CORRECTED, CORRECTION_OPTIONS, PRECISION_OPTIONS, QUANTISE


class PairRecord:
    """A comparison of two configurations, shown in a notebook by their labels alone."""

    baseline: EvictionConfig
    treatment: EvictionConfig

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.baseline.label()} → {self.treatment.label()}>"

    @cached_property
    def sides(self) -> tuple[str, str]:
        """The names of baseline and treatment, as `side_names` makes them."""
        return side_names(self.baseline, self.treatment)


def pairs_of(comparisons: Iterable[PairRecord]) -> list[Pair]:
    """Return the baseline and the treatment of each comparison."""
    return [(comparison.baseline, comparison.treatment) for comparison in comparisons]


def pair_columns(baseline: EvictionConfig, treatment: EvictionConfig) -> dict[str, Any]:
    """Return a pair as columns of a data frame: labels, policies and selections of both sides, and their budget."""
    both = (("baseline", baseline), ("treatment", treatment))
    return {
        **{name: config.label() for name, config in both},
        **{f"{name}_policy": config.policy.name for name, config in both},
        **{f"{name}_selection": config.selection.name for name, config in both},
        "budget": baseline.budget.value,
    }


SIDE = ("policy", "selection")
"""Choices in which the sides of a comparison differ."""
OWNERS = (*SIDE, "granularity", "precision", "correction")
"""Choices that have options."""
_AFTER_SIDES = ("budget", "window", "granularity", "precision", "correction", "protect_first", "protect_recent")
"""The other choices, in the order of a label."""
_PIECES = re.compile(r"[^(:,/]*[(:,/]|[^(:,/]+")


def setting_name(config: EvictionConfig, *without: str) -> str:
    """Return a configuration's choices as text, without policy, selection and the choices in `without`."""
    return " ".join(word for choice, word in config.label_parts().items() if choice not in (*SIDE, *without))


def common_text(configs: Sequence[EvictionConfig], *without: str) -> str:
    """Return the choices that all configurations share, as text; choices in `without` are left out."""
    return " ".join(common_choices(configs, *without).values())


def common_choices(configs: Sequence[EvictionConfig], *without: str) -> dict[str, str]:
    """Return choice -> word for the choices that all configurations share; those in `without` left out.

    α is left out, too, where no configuration has stages: there it only says over which entries σ is measured.
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


def distinct_names(configs: Sequence[EvictionConfig], *without: str) -> list[str]:
    """Return the short name of each configuration, its selection's name where nothing distinguishes it."""
    return [name or config.selection.name for name, config in zip(short_names(configs, *without), configs, strict=True)]


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
    return " ".join(part for part in (sides, *parts) if part and part not in DEFAULTS)


def side_names(baseline: EvictionConfig, treatment: EvictionConfig) -> tuple[str, str]:
    """Return the names of both sides: the policy or selection in which they differ, else their short names."""
    both = (baseline, treatment)
    texts = [
        [_with_options(getattr(config, owner), words) for owner in SIDE]
        for config, words in zip(both, distinct_choices(both), strict=True)
    ]
    differing = [pair for pair in zip(*texts, strict=True) if len(set(pair)) > 1]
    if not differing:
        first, second = short_names(both)
        return first, second
    first, second = (":".join(names) for names in zip(*differing, strict=True))
    return first, second


def pair_names(comparisons: Sequence[PairRecord]) -> list[str]:
    """Return distinct names of comparisons: the treatments' short names, the treatment's side name for a single one.

    The baseline's name follows where pairs share a treatment: 'adakv:two-stage b=64 vs snapkv'.
    """
    pairs = pairs_of(comparisons)
    short = short_names([treatment for _, treatment in pairs])
    treatments = [name or one.sides[1] for name, one in zip(short, comparisons, strict=True)]
    if len({*treatments}) == len(treatments):
        return treatments
    baselines = short_names([baseline for baseline, _ in pairs], "budget")
    return [
        f"{treatment} vs {baseline}" if treatments.count(treatment) > 1 and baseline else treatment
        for treatment, baseline in zip(treatments, baselines, strict=True)
    ]


def pairs_title(comparisons: Sequence[PairRecord], shared: str) -> str:
    """Return a title of both sides and the `shared` choices as text: 'two-stage against attention: snapkv b=64'."""
    baselines, treatments = (
        " and ".join(dict.fromkeys(names)) for names in zip(*(one.sides for one in comparisons), strict=True)
    )
    return f"{treatments} against {baselines}" + (f": {shared}" if shared else "")


def _with_options(choice: Choice, words: Mapping[str, str]) -> str:
    """Return a choice as text, with only the options named in `words`."""
    if not choice.options:
        return choice.name
    return choice.text({*words, "kernel"} if "pool" in words else words)  # the word for pool includes the kernel


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
    """Return a name in lines of at most `width` letters where possible, broken at spaces, brackets, colons, commas."""
    parts = []
    for line in textwrap.wrap(name, width, break_long_words=False, break_on_hyphens=False):
        parts.append("")
        for piece in _PIECES.findall(line) if len(line) > width else [line]:
            if parts[-1] and len(parts[-1]) + len(piece) > width:
                parts.append("")
            parts[-1] += piece
    return "\n".join(parts)
