"""Short names for configurations that are shown side by side, from their choices: only what tells them apart."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

from perturbkv.configs.choice import Choice
from perturbkv.configs.correction import CORRECTED, CORRECTION_OPTIONS
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import PRECISION_OPTIONS, QUANTISE

SIDE = ("policy", "selection")
"""The choices that the sides of a comparison differ in."""
_PIECES = re.compile(r"[^(:,/]*[(:,/]|[^(:,/]+")


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


def curves(configs: Sequence[EvictionConfig]) -> list[str]:
    """What tells curves over budgets apart, one configuration of each: of a single curve its selection."""
    return [name or config.selection.name for name, config in zip(short(configs, "budget"), configs, strict=True)]


def choices(baseline: EvictionConfig, treatment: EvictionConfig) -> tuple[list[str], list[str]]:
    """Policy and selection of both sides of a comparison, each with those of its options that tell the sides apart."""
    both = (baseline, treatment)
    first, second = (
        [_with_options(getattr(config, owner), told) for owner in SIDE]
        for config, told in zip(both, apart(both), strict=True)
    )
    return first, second


def sides(baseline: EvictionConfig, treatment: EvictionConfig) -> tuple[str, str]:
    """The two sides of a comparison by what of policy and selection they differ in."""
    differing = [pair for pair in zip(*choices(baseline, treatment), strict=True) if len(set(pair)) > 1]
    first, second = (" ".join(pair[place] for pair in differing) for place in (0, 1))
    return first, second


def _with_options(choice: Choice, told: Mapping[str, str]) -> str:
    """A choice as it is written, with no other options than those that are told."""
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
        for choice, word in config.words(every=True).items():
            said.setdefault(choice, []).append(word)
    own = {name for config in configs for name in config.policy.options} - {"pool", "kernel"}
    own |= {"block", "block_score", *PRECISION_OPTIONS[QUANTISE], *CORRECTION_OPTIONS[CORRECTED]}
    alike = {choice for choice, words in said.items() if len(set(words)) == 1}
    return {choice for choice in alike if choice not in own or len(said[choice]) == len(configs)}


def folded(name: str, width: int = 16) -> str:
    """A long name on several lines, broken between its words; a longer word behind its brackets, colons and commas."""
    lines = textwrap.wrap(name, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(part for line in lines for part in _broken(line, width))


def _broken(line: str, width: int) -> list[str]:
    """A line that is too long, which is one word, in parts that fit as far as its signs let them."""
    parts = [""]
    for piece in _PIECES.findall(line) if len(line) > width else [line]:
        if parts[-1] and len(parts[-1]) + len(piece) > width:
            parts.append("")
        parts[-1] += piece
    return parts
