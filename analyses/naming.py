"""Short names for configurations that are shown side by side, from their choices: only what tells them apart."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

from perturbkv.configs.eviction import EvictionConfig

SIDE = ("policy", "selection")
"""The choices that the sides of a comparison differ in."""
_SYMBOLS = {"stage2_score": "s2", "epsilon": "eps", "group_score": "group", "group_product": "product"}
"""How a name says its less usual choices, where not by the option's own name."""


def counted(number: int, word: str, many: str = "") -> str:
    """'1 sample', '8 samples', or with `many` '8 batches'."""
    return f"{number:,} {word if number == 1 else many or f'{word}s'}"


def words(config: EvictionConfig) -> dict[str, str]:
    """Choice -> how a name says it, policy and selection first; nothing of a less usual choice at its default."""
    pool = "unpooled" if config.pool == "none" else f"{config.pool}{config.kernel}"
    said = {name: getattr(config, name) for name in SIDE}
    said |= {"budget": f"b={config.budget}", "alpha": f"a={config.alpha:g}", "window": f"w={config.window}"}
    said |= {"pool": pool, "granularity": config.granularity}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in (*said, "kernel") and value != field.default:
            said[field.name] = f"{_SYMBOLS.get(field.name, field.name.replace('_', '-'))}={value}"
    return said


def setting(config: EvictionConfig, *more: str) -> str:
    """What the sides of a comparison share: a configuration without policy and selection, and without `more`."""
    return " ".join(word for choice, word in words(config).items() if choice not in (*SIDE, *more))


def common(configs: Sequence[EvictionConfig]) -> str:
    """The choices that all configurations share."""
    return " ".join(_shared(configs).values())


def apart(configs: Sequence[EvictionConfig], *without: str) -> list[dict[str, str]]:
    """Of each configuration the choices that not all share, as `words` says them; those of `without` left out."""
    known = {*_shared(configs), *without}
    return [{choice: word for choice, word in words(config).items() if choice not in known} for config in configs]


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


def _shared(configs: Sequence[EvictionConfig]) -> dict[str, str]:
    """The choices of which every configuration says the same, in the order of a name."""
    first, *others = [words(config) for config in configs] or [{}]
    return {choice: word for choice, word in first.items() if all(one.get(choice) == word for one in others)}


def folded(name: str, width: int = 16) -> str:
    """A long name on several lines, broken between its words."""
    return "\n".join(textwrap.wrap(name, width, break_long_words=False, break_on_hyphens=False))
