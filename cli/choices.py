"""Reading what was typed for options that take lists, or one of a few words."""

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
"""What answers are compared under where the user chose nothing."""
_Value = TypeVar("_Value")


def numbers(option: str, texts: list[str] | None) -> tuple[float, ...]:
    """Return finite numbers that were given one by one or with commas. Raises ConfigError for anything else."""
    pieces = [piece.strip() for text in texts or [] for piece in text.split(",") if piece.strip()]
    try:
        if texts and not pieces:
            raise ValueError
        found = tuple(float(piece) for piece in pieces)
    except ValueError:
        msg = f"{option} takes numbers, such as {option} 0.5 or {option} 1,2; got '{', '.join(texts or [])}'"
        raise ConfigError(msg) from None
    for number in found:
        check_number(option, number)
    return tuple(check_distinct(option, found))


def check_distinct(option: str, values: Sequence[_Value]) -> Sequence[_Value]:
    """Return the values. Raises ConfigError where one is there twice."""
    seen = set()
    for value in values:
        if value in seen:
            said = f"{value:g}" if isinstance(value, float) else value
            msg = f"expected different values for {option}, got {said} twice; leave one out"
            raise ConfigError(msg)
        seen.add(value)
    return values


def parse_compare(text: str) -> list[str]:
    """Return the names of `attention,two-stage`, the baseline first. Raises ConfigError for fewer than two."""
    names = [name.strip() for name in split_outside_brackets(text, ",") if name.strip()]
    if len(names) < 2:
        msg = f"--compare takes two or more selections, such as {DEFAULT_COMPARE}; got '{text}'"
        raise ConfigError(msg)
    return list(check_distinct("--compare", names))


def parse_names(option: str, texts: Sequence[str] | None) -> list[str] | None:
    """Return names given one by one or with commas, None where none was. Raises ConfigError for one twice."""
    if texts is None:
        return None
    return list(
        check_distinct(
            option, [name.strip() for text in texts for name in split_outside_brackets(text, ",") if name.strip()]
        )
    )


def parse_methods(text: str) -> list[str]:
    """Return the names of `adakv:two-stage,snapkv`. Raises ConfigError for none, or one twice."""
    names = [name.strip() for name in split_outside_brackets(text, ",") if name.strip()]
    if not names:
        msg = f"--compare takes methods such as {METHODS.partition(',')[0]}, got none"
        raise ConfigError(msg)
    return list(check_distinct("--compare", names))


def check_choice(option: str, value: str, known: tuple[str, ...]) -> str:
    """Return the value. Raises UnknownNameError where it is none of the known ones."""
    if value not in known:
        raise UnknownNameError(value, option, known)
    return value


def name_with_distance(analysis: str, distance: str) -> str:
    """Return an analysis' key in summary.json and the beginning of its files' names: each distance has its own."""
    return analysis if distance == "l1" else f"{analysis}-{distance}"
