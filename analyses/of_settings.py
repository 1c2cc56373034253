"""A result of several settings, each with a baseline of its own, and the rows of its data frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.result import Result
from perturbkv.trace import Trace


class _Setting(Protocol):
    """What every setting has."""

    @property
    def identity(self) -> RunIdentity: ...

    def to_dict(self) -> dict[str, Any]: ...


OneSetting = TypeVar("OneSetting", bound=_Setting)


@dataclass(frozen=True, repr=False)
class OfSettings(Result, Generic[OneSetting]):
    """A result of at least one setting.

    Attributes:
        settings: one by one.
        step: decode step looked at.
        identity: of the run, with the configurations of all settings.
    """

    settings: tuple[OneSetting, ...]
    step: int
    identity: RunIdentity

    @classmethod
    def of(cls, trace: Trace, settings: tuple[OneSetting, ...], step: int, **more: Any) -> Self:
        """The result of a trace's settings, and `more` fields."""
        configs = dict.fromkeys(config for one in settings for config in one.identity.configs)
        return cls(settings, step, identity(trace, list(configs), step), **more)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        return {"settings": [setting.to_dict() for setting in self.settings]}


def by_head(compared: HeadComparison, **told: Any) -> list[dict[str, Any]]:
    """A row per kind of perturbation, layer and head: both configurations, what is `told`, and the numbers."""
    sides = {**columns_of(compared.treatment), "baseline": compared.baseline.label()}
    return [
        {**sides, **told, "kind": kind, **one}
        for kind in ("isolated", "propagated")
        for one in getattr(compared, kind).records(compared.identity.layer)
    ]
