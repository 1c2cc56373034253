"""Parsers of options that take a list, or one of a few words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from perturbkv.configs.choice import split_outside_brackets
from perturbkv.configs.option import check_number
from perturbkv.errors import ConfigError, UnknownNameError

DEFAULT_COMPARE = "attention,two-stage"
METHODS = ",".join(
    f"{policy}:{selection}" for policy in ("snapkv", "pyramidkv", "adakv") for selection in ("attention", "two-stage")
)
"""The methods whose answers are compared where the user named none."""
_Value = TypeVar("_Value")


def numbers(option: str, texts: list[str] | None) -> tuple[float, ...]:
    """Return the finite numbers of texts that may hold several, with commas. Raises ConfigError for anything else."""
    pieces = [piece.strip() for text in texts or [] for piece in text.split(",") if piece.strip()]
    try:
        if texts and not pieces:
            raise ValueError
        values = tuple(float(piece) for piece in pieces)
    except ValueError:
        msg = f"{option} takes numbers, such as {option} 0.5 or {option} 1,2; got '{', '.join(texts or [])}'"
        raise ConfigError(msg) from None
    for number in values:
        check_number(option, number)
    return tuple(check_distinct(option, values))


def check_distinct(option: str, values: Sequence[_Value]) -> Sequence[_Value]:
    """Return the values. Raises ConfigError where one is repeated."""
    seen = set()
    for value in values:
        if value in seen:
            text = f"{value:g}" if isinstance(value, float) else value
            msg = f"expected different values for {option}, got {text} twice; leave one out"
            raise ConfigError(msg)
        seen.add(value)
    return values


def split_names(text: str) -> list[str]:
    """Return the names in a text, separated by commas outside all brackets."""
    return [name.strip() for name in split_outside_brackets(text, ",") if name.strip()]


def parse_compare(text: str) -> list[str]:
    """Return the names of `attention,two-stage`, the baseline first. Raises ConfigError for fewer than two."""
    names = split_names(text)
    if len(names) < 2:
        msg = f"--compare takes two or more selections, such as {DEFAULT_COMPARE}; got '{text}'"
        raise ConfigError(msg)
    return list(check_distinct("--compare", names))


def parse_methods(text: str) -> list[str]:
    """Return the names of `adakv:two-stage,snapkv`. Raises ConfigError for none, or one twice."""
    names = split_names(text)
    if not names:
        msg = f"--compare takes methods such as {METHODS.partition(',')[0]}, got none"
        raise ConfigError(msg)
    return list(check_distinct("--compare", names))


def check_choice(option: str, value: str, known: tuple[str, ...]) -> str:
    """Return the value. Raises UnknownNameError where it is not among the known ones."""
    if value not in known:
        raise UnknownNameError(value, option, known)
    return value


def name_with_distance(analysis: str, distance: str) -> str:
    """Return the name of an analysis with its distance, for summary.json and for file names; l1 adds nothing."""
    return analysis if distance == "l1" else f"{analysis}-{distance}"
