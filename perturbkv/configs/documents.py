"""What a configuration's JSON holds: choices inside choices and back, and what its numbers and options may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perturbkv.configs.choice import DEEPEST, Choice, as_choice
from perturbkv.configs.selections import GRANULARITY_OPTIONS, SELECTION_OPTIONS
from perturbkv.errors import ConfigError


def nested(value: Any) -> Any:
    """An option as JSON holds it: a choice inside another as it is written, with all of its own options."""
    if not isinstance(value, Choice):
        return value
    return {"choice": str(value), "options": {name: nested(held) for name, held in value.options.items()}}


def unnested(value: Any, depth: int = DEEPEST) -> Any:
    """What `nested` made this of. Raises ConfigError where more than `depth` choices are inside each other."""
    if not isinstance(value, dict):
        return value
    if not depth:
        msg = f"expected at most {DEEPEST} choices inside each other in a configuration, got more"
        raise ConfigError(msg)
    told = as_choice(value["choice"])
    return holding(told, {name: unnested(held, depth - 1) for name, held in value["options"].items()})


def holding(told: Choice, options: Mapping[str, Any]) -> Choice:
    """A choice with all of its options, those that it shows in the order in which it does: JSON sorts its keys."""
    ordered = {name: options[name] for name in (*told.options, *options)}
    return Choice(told.name, ordered, frozenset(options) - frozenset(told.options))


def check_kind(name: str, value: Any) -> None:
    """Raise ConfigError unless a document's number is one: a window whole, a budget whole or a share."""
    if isinstance(value, bool) or not isinstance(value, int if name == "window" else int | float):
        msg = f"{name} of a configuration cannot be '{value}'"
        raise ConfigError(msg)


def check_options(what: str, name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError unless options are plain values, and those that are known here within their range."""
    known = {"selection": SELECTION_OPTIONS, "granularity": GRANULARITY_OPTIONS}.get(what, {}).get(name, {})
    for option, value in options.items():
        if option in known:
            known[option].checked(value, option, f"{what} '{name}'")
        elif not isinstance(value, bool | int | float | str | Choice | None):
            msg = f"{option} of {what} '{name}' cannot be '{value}'"
            raise ConfigError(msg)
