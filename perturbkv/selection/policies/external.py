"""External policies: `given:NAME`, whose kept sets the user passes, and the base class of those that run other code.

An external policy has a name with a colon. It allocates no budget and takes no selection: its cache holds, per
key/value head, what was handed over or what the other code left in it. The name of its selection is `given`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import FULL, NONE
from perturbkv.configs.selections import GIVEN
from perturbkv.errors import ConfigError
from perturbkv.selection.policies.base import Policy


@dataclass(frozen=True)
class ExternalPolicy(Policy):
    """A policy whose cache comes from outside: kept sets that are handed over, or what other code leaves in a cache."""

    selections: ClassVar[tuple[str, ...]] = (GIVEN,)
    budgets: ClassVar[str] = "by head"
    own_window: ClassVar[int | None] = 0
    own_granularity: ClassVar[str | None] = "kv"
    summary: ClassVar[str] = "kept sets that are handed over"
    ranks: ClassVar[bool] = False

    @classmethod
    def check(cls, config: EvictionConfig) -> None:
        """Raise ConfigError for options that external kept sets do not support, such as a selection or granularity."""
        fields = {"selection": (config.selection.name, GIVEN), "granularity": (str(config.granularity), "kv"),
                 "window": (config.window, 0), "protect_first": (config.protect_first, 0),
                 "protect_recent": (config.protect_recent, 0), "precision": (str(config.precision), FULL),
                 "correction": (str(config.correction), NONE)}  # fmt: skip
        for what, (got, required) in fields.items():
            if got != required:
                raise ConfigError(
                    f"policy '{config.policy}' keeps what it keeps, per key/value head: expected {what} "
                    f"{required}, got {got}; leave it out, pk.grid and --policy then choose it"
                )

    @classmethod
    def complete(cls, choice: Choice) -> Choice:
        """Return the choice unchanged. Raises ConfigError for a choice with options."""
        if choice.options:
            raise ConfigError(
                f"policy '{choice.name}' is kept sets that are handed over; it takes no options, got {choice}"
            )
        return Choice(choice.name, {}, frozenset())


def policy_class(name: str) -> type[ExternalPolicy]:
    """Return the policy class of the external kept sets `given:NAME`."""
    return type("Given", (ExternalPolicy,), {"name": name})
