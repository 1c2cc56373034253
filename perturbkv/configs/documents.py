"""Choices inside choices as JSON holds them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perturbkv.configs.choice import Choice, as_choice


def nested(value: Any) -> Any:
    """An option as JSON holds it: a choice inside another as it is written, with all of its own options."""
    if not isinstance(value, Choice):
        return value
    return {"choice": str(value), "options": {name: nested(held) for name, held in value.options.items()}}


def unnested(value: Any) -> Any:
    """What `nested` made this of."""
    if not isinstance(value, dict):
        return value
    told, options = as_choice(value["choice"]), {name: unnested(held) for name, held in value["options"].items()}
    return holding(told, options)


def holding(told: Choice, options: Mapping[str, Any]) -> Choice:
    """A choice with all of its options, those that it shows in the order in which it does: JSON sorts its keys."""
    ordered = {name: options[name] for name in (*told.options, *options)}
    return Choice(told.name, ordered, frozenset(options) - frozenset(told.options))
