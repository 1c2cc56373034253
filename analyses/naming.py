"""Short names for configurations that are shown side by side, from their choices: only what tells them apart."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from perturbkv.configs.eviction import EvictionConfig

SIDE = ("policy", "selection")
"""The choices that the sides of a comparison differ in."""


def counted(number: int, word: str, many: str = "") -> str:
    """'1 sample', '8 samples', or with `many` '8 batches'."""
    return f"{number:,} {word if number == 1 else many or f'{word}s'}"


def setting(config: EvictionConfig, *more: str) -> str:
    """What the sides of a comparison share: a configuration without policy and selection, and without `more`."""
    return " ".join(word for choice, word in config.words().items() if choice not in (*SIDE, *more))


def common(configs: Sequence[EvictionConfig], *without: str) -> str:
    """The choices that all configurations share, those of `without` left out."""
    shared = _shared(configs) - set(without)
    said = {choice: word for one in configs for choice, word in one.words().items() if choice in shared}
    return " ".join(said.values())


def apart(configs: Sequence[EvictionConfig], *without: str) -> list[dict[str, str]]:
    """Of each configuration the choices that not all share, those of `without` left out."""
    known = {*_shared(configs), *without}
    return [{choice: word for choice, word in config.words().items() if choice not in known} for config in configs]


def short(configs: Sequence[EvictionConfig], *without: str) -> list[str]:
    """The same as one name each; empty where there is but one configuration."""
    return [" ".join(told.values()) for told in apart(configs, *without)]


def sides(baseline: EvictionConfig, treatment: EvictionConfig) -> tuple[str, str]:
    """The two sides of a comparison by what of policy and selection they differ in."""
    first, second = (
        " ".join(word for choice, word in told.items() if choice in SIDE) for told in apart((baseline, treatment))
    )
    return first, second


def budgets(configs: Sequence[EvictionConfig], *without: str) -> list[list[str]]:
    """Each configuration's budget as the user gave it, and behind it what else tells the configurations apart."""
    others = apart(configs, "budget", *without)
    return [[str(config.budget), *told.values()] for config, told in zip(configs, others, strict=True)]


def _shared(configs: Sequence[EvictionConfig]) -> set[str]:
    """The choices of which every configuration that has them says the same; of policies and blocks, if all have it."""
    said: dict[str, list[str]] = {}
    for config in configs:
        for choice, word in config.words(every=True).items():
            said.setdefault(choice, []).append(word)
    own = {name for config in configs for name in config.policy.options} - {"pool", "kernel"}
    own |= {"block", "block_score"}
    alike = {choice for choice, words in said.items() if len(set(words)) == 1}
    return {choice for choice in alike if choice not in own or len(said[choice]) == len(configs)}


def folded(name: str, width: int = 16) -> str:
    """A long name on several lines, broken between its words."""
    return "\n".join(textwrap.wrap(name, width, break_long_words=False, break_on_hyphens=False))
