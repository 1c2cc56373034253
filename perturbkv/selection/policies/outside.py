"""Policies that are not ours: `given:NAME`, whose kept sets somebody hands over, and what runs outside code.

Such a policy has a name with a colon. It shares nothing out and takes no selection: what it kept is its kept set, one
per key/value head, whatever it holds, and `given` is what stands in the selection's place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.selection.policies.base import Policy

GIVEN = "given"


@dataclass(frozen=True)
class Outside(Policy):
    """A policy whose kept sets come from outside; `written` is how it was asked for."""

    selections: ClassVar[tuple[str, ...]] = (GIVEN,)
    budgets: ClassVar[str] = "by head"
    own_window: ClassVar[int | None] = 0
    own_granularity: ClassVar[str | None] = "kv"
    summary: ClassVar[str] = "kept sets that are handed over"

    @classmethod
    def completed(cls, choice: Choice) -> Choice:
        """The choice, which has no options. Raises ConfigError for one."""
        if choice.options:
            msg = f"policy '{choice.name}' is kept sets that are handed over; it takes no options, got {choice}"
            raise ConfigError(msg)
        return Choice(choice.name, {}, frozenset())

    @classmethod
    def made(cls, choice: Choice) -> Policy:
        """The policy; what its options say matters to whoever runs it."""
        return cls()


PREFIXES: dict[str, type[Outside]] = {"given": Outside}
"""What stands before the colon -> what such policies are."""


def names(text: str) -> bool:
    """Whether a text begins as a policy from outside does."""
    return text.partition(":")[0] in PREFIXES


@functools.cache
def info(name: str) -> type[Outside]:
    """The policy's class, of that name. Raises UnknownNameError for a prefix that is not known."""
    prefix = name.partition(":")[0]
    if prefix not in PREFIXES:
        raise UnknownNameError(name, "policy", [f"{known}:…" for known in PREFIXES])
    return type("Outside", (PREFIXES[prefix],), {"name": name})


def is_given(config: EvictionConfig) -> bool:
    """Whether a configuration's kept sets come from outside."""
    return config.selection.name == GIVEN


def given(configs: Iterable[EvictionConfig]) -> list[EvictionConfig]:
    """Those of the configurations whose kept sets come from outside."""
    return [config for config in configs if is_given(config)]
