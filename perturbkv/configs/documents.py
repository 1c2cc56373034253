"""Choices inside choices as JSON holds them, and back; what stands in a file is held against its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perturbkv.configs.alpha_table import AlphaTable
from perturbkv.configs.choice import DEEPEST, Choice, as_choice
from perturbkv.configs.option import Option
from perturbkv.errors import ConfigError


def nested(value: Any) -> Any:
    """An option as JSON holds it: a choice inside another as it is written, with all of its own options.

    A table of α is its name beside what its file holds.
    """
    if isinstance(value, AlphaTable):
        return {"table": value.name, **value.to_document()}
    if not isinstance(value, Choice):
        return value
    return {"choice": str(value), "options": {name: nested(held) for name, held in value.options.items()}}


def unnested(value: Any, depth: int = DEEPEST) -> Any:
    """What `nested` made this of. Raises ConfigError for more than `depth` choices inside each other."""
    if not isinstance(value, dict):
        return value
    if "table" in value:
        named = dict(value)
        return AlphaTable.from_document(named, str(named.pop("table")))
    if not depth:
        msg = f"expected at most {DEEPEST} choices inside each other in a configuration, got more"
        raise ConfigError(msg)
    told = as_choice(value["choice"])
    return holding(told, {name: unnested(held, depth - 1) for name, held in value["options"].items()})


def holding(told: Choice, options: Mapping[str, Any]) -> Choice:
    """A choice with all of its options, those that it shows in the order in which it does: JSON sorts its keys."""
    ordered = {name: options[name] for name in (*told.options, *options)}
    return Choice(told.name, ordered, frozenset(options) - frozenset(told.options))


def check_fields(document: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a configuration's window is whole and its budget and what it protects are numbers."""
    kinds: Mapping[str, Any] = {
        "window": int,
        **dict.fromkeys(("budget", "protect_first", "protect_recent"), int | float),
    }
    for name, kind in kinds.items():
        value = document.get(name, "")
        if name in document and (isinstance(value, bool) or not isinstance(value, kind)):
            msg = f"{name} of a configuration cannot be '{value}'"
            raise ConfigError(msg)


def check_options(owner: str, options: Mapping[str, Any], known: Mapping[str, Option]) -> None:
    """Raise ConfigError unless options are plain values or choices, and the `known` ones within their range."""
    for name, value in options.items():
        if name in known:
            known[name].checked(value, name, owner)
        elif not isinstance(value, bool | int | float | str | Choice | AlphaTable | None):
            msg = f"{name} of {owner} cannot be '{value}'"
            raise ConfigError(msg)
