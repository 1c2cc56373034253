"""What configurations do against another, from the heads to the next token: lines of several tables, by setting.

A result of several settings, each with a baseline of its own, and the rows of its data frame.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of, setting_object
from perturbkv.analyses.layers import drift as layers
from perturbkv.analyses.measurements import at_step, values
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import Scalar
from perturbkv.analyses.text import at
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace


@dataclass(frozen=True)
class Divergence:
    """KL(full ‖ evicted) of the next token's distribution, in nat: the median over samples, with its interval."""

    median: float
    interval: Scalar


@dataclass(frozen=True)
class Outcome(ABC):
    """One configuration against a baseline.

    Attributes:
        compared: its heads against the baseline's.
        drift_ratio: mean drift after the last layer over the baseline's; NaN where that does not drift.
        drift_ratio_interval: over samples.
        kl: of the next token.
    """

    compared: HeadComparison
    drift_ratio: float
    drift_ratio_interval: Scalar
    kl: Divergence

    @classmethod
    def of(
        cls, trace: Trace, analysis: str, baseline: EvictionConfig, treatment: EvictionConfig, step: int, **more: Any
    ) -> Self:
        """What a treatment does against the baseline. Raises as `head_comparison.summarise` and `drift.summarise`."""
        drift = layers.summarise(trace, baseline, treatment, step=step)
        return cls(
            compared=head_comparison.summarise(trace, baseline, treatment, step),
            drift_ratio=float(drift.ratio[-1]),
            drift_ratio_interval=at(drift.ratio_interval, -1),
            kl=divergence(trace, analysis, treatment, step),
            **more,
        )

    @property
    @abstractmethod
    def name(self) -> str:
        """What its line is called."""

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        return {
            **self.compared.to_dict(),
            "name": self.name,
            "drift_ratio": self.drift_ratio,
            "drift_ratio_interval": self.drift_ratio_interval,
            "kl_median": self.kl.median,
            "kl_median_interval": self.kl.interval,
        }


Line = TypeVar("Line", bound=Outcome)


@dataclass(frozen=True)
class Outcomes(Generic[Line]):
    """One setting: what its configurations do against a baseline.

    Attributes:
        baseline: what every row is held against.
        kl: the baseline's.
        rows: the others, in the order in which they are shown.
        identity: of the run.
    """

    baseline: EvictionConfig
    kl: Divergence
    rows: tuple[Line, ...]
    identity: RunIdentity

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "setting": setting_object(self.identity.configs),
                "baseline": self.baseline,
                "kl_median": self.kl.median,
                "kl_median_interval": self.kl.interval,
                "rows": [row.to_dict() for row in self.rows],
            }
        )
        return found


def divergence(trace: Trace, analysis: str, config: EvictionConfig, step: int) -> Divergence:
    """KL of one configuration. Raises TraceError, ConfigError."""
    held = at_step(trace, analysis, step)
    found = values(held, "logit_kl", analysis, step)[:, [held.config_index(config.label())]]
    return Divergence(float(np.median(found)), at(intervals.of_medians(found), 0))


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
