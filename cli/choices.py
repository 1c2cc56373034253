"""Parsers of options that take a list of values, or one of a few names."""

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


def parse_numbers(option: str, texts: list[str] | None) -> tuple[float, ...]:
    """Return the numbers in an option's texts, each a number or several separated by commas; none for None.

    Raises ConfigError for text that is no finite number, for texts without a number, and for a repeated number.
    """
    numerals = [numeral.strip() for text in texts or [] for numeral in text.split(",") if numeral.strip()]
    invalid = f"{option} takes numbers, such as {option} 0.5 or {option} 1,2; got '{', '.join(texts or [])}'"
    if texts and not numerals:
        raise ConfigError(invalid)
    try:
        values = tuple(map(float, numerals))
    except ValueError:
        raise ConfigError(invalid) from None
    for number in values:
        check_number(option, number)
    return tuple(check_distinct(option, values))


def check_distinct(option: str, values: Sequence[_Value]) -> Sequence[_Value]:
    """Return the values of an option unchanged. Raises ConfigError for a repeated value."""
    seen = set()
    for value in values:
        if value in seen:
            text = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(f"expected different values for {option}, got {text} twice; leave one out")
        seen.add(value)
    return values


def split_names(text: str) -> list[str]:
    """Return the names in a text, split at commas outside brackets."""
    return [name.strip() for name in split_outside_brackets(text, ",") if name.strip()]


def parse_compare(text: str) -> list[str]:
    """Return the selections that --compare lists, the baseline first. Raises ConfigError for fewer than two."""
    names = split_names(text)
    if len(names) < 2:
        raise ConfigError(f"--compare takes two or more selections, such as {DEFAULT_COMPARE}; got '{text}'")
    return list(check_distinct("--compare", names))


def parse_methods(text: str) -> list[str]:
    """Return the methods that --compare lists: `adakv:two-stage,snapkv`. Raises ConfigError for none or a repeat."""
    if not (names := split_names(text)):
        raise ConfigError(f"--compare takes methods such as {METHODS.partition(',')[0]}, got none")
    return list(check_distinct("--compare", names))


def check_choice(option: str, value: str, known: tuple[str, ...]) -> str:
    """Return the value of an option unchanged. Raises UnknownNameError if it is not among the known values."""
    if value not in known:
        raise UnknownNameError(value, option, known)
    return value
