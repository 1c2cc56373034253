"""Configurations against a baseline: rows, settings and results that `ablation` and several questions share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.columns import Derived, Line, Record, attribute, column, derived, interval, record
from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.identity import RunIdentity, identity_at
from perturbkv.analyses.json_values import config_columns, setting_object
from perturbkv.analyses.layers import drift
from perturbkv.analyses.measurements import Measurements, resolve_step
from perturbkv.analyses.names import short_names
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import OptionalInterval
from perturbkv.analyses.text import interval_at
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace


@record
class ComparisonRow(HeadComparison):
    """A comparison of heads as a line of a table, isolated and propagated perturbation side by side."""

    isolated_ratio: ClassVar[Derived[float]] = attribute(
        "isolated.sum_ratio",
        "Isolated perturbation over the baseline's, summed over heads and samples",
        json=False,
        heading="#isolated\nsum",
    )
    propagated_ratio: ClassVar[Derived[float]] = attribute(
        "propagated.sum_ratio",
        "Propagated perturbation over the baseline's, summed over heads and samples",
        json=False,
        heading="#propagated\nsum",
    )
    median_ratio: ClassVar[Derived[float]] = attribute(
        "propagated.median_ratio",
        "The median head's propagated perturbation over the baseline's",
        json=False,
        heading="#propagated\nmedian head",
    )
    better_share: ClassVar[Derived[float]] = attribute(
        "propagated.better_share",
        "Mean over samples of each sample's share of heads with less propagated perturbation",
        json=False,
        heading="#heads\nbetter",
        unit="share",
    )


@record
class Outcome(ComparisonRow, section="outcome"):
    """A configuration against a baseline: heads, drift after the last layer, and KL of the next token."""

    drift_ratio: float = column(
        "mean drift after the last layer over the baseline's; NaN where that does not drift",
        heading="#last layer's\ndrift",
    )
    drift_ratio_interval: OptionalInterval = interval()
    kl_median: float = column(
        "KL(full ‖ evicted) of the next token, median over samples", unit="nat", heading="#KL of the next\ntoken, nat",
        text=text.three_digits,
    )  # fmt: skip
    kl_median_interval: OptionalInterval = interval()

    @classmethod
    def compare(
        cls,
        trace: Trace,
        analysis: str,
        baseline: EvictionConfig,
        treatment: EvictionConfig,
        step: int | None,
        **more: Any,
    ) -> Self:
        """Return the outcome of a treatment against a baseline, at a decode step or over all.

        Error messages name the `analysis`, the command; `more` are the fields that a subclass adds. Raises as
        `head_comparison.summarise` and `drift.summarise`.
        """
        layers = drift.summarise(trace, baseline, treatment, step=step)
        return cls(
            **field_values(head_comparison.summarise(trace, baseline, treatment, step)),
            drift_ratio=float(layers.ratio[-1]),
            drift_ratio_interval=interval_at(layers.ratio_interval, -1),
            **next_token_kl(trace, analysis, treatment, step),
            **more,
        )


def field_values(comparison: HeadComparison) -> dict[str, Any]:
    """Return field -> value of a comparison, as keyword arguments for its subclasses."""
    return {field.name: getattr(comparison, field.name) for field in dataclasses.fields(comparison)}


@record
class BaselineSetting(Record):
    """Configurations that differ only in the choices under comparison, each against one baseline.

    Attributes:
        identity: of the run, with these configurations.
    """

    baseline: EvictionConfig = column("what every row is compared with")
    rows: tuple[ComparisonRow, ...] = column("one per configuration that is compared")
    identity: RunIdentity

    @derived(key="setting")
    def choices(self) -> dict[str, Any]:
        """Choices that all rows share; others and the label are absent."""
        return setting_object(self.identity.configs)

    @derived(json=False, heading="#cache\nshare")
    def cache_share(self) -> float:
        """Entries that the baseline's cache holds over those of the full cache."""
        return self.rows[0].cache_shares[0]

    @property
    def setting(self) -> str:
        """The choices that all rows share, in a label's notation."""
        raise NotImplementedError

    def lines(self) -> Sequence[Line]:
        """Return the lines of the setting in the result's table."""
        raise NotImplementedError


@record
class OutcomeSetting(BaselineSetting):
    """A setting whose rows have drift and KL, too, and the KL of its baseline."""

    rows: tuple[Outcome, ...] = column("one per configuration that is compared")
    kl_median: float = column(
        "the baseline's KL(full ‖ evicted) of the next token, median over samples", unit="nat",
        heading="#KL of the next\ntoken, nat", text=text.three_digits,
    )  # fmt: skip
    kl_median_interval: OptionalInterval = interval()


def next_token_kl(trace: Trace, analysis: str, config: EvictionConfig, step: int | None) -> dict[str, Any]:
    """Return the columns `kl_median` and `kl_median_interval` of a configuration.

    Error messages name the `analysis`. Raises as `Measurements`.
    """
    measurements = Measurements(trace, analysis, step)
    kl = measurements["logit_kl"][:, measurements.index(config)]
    return {"kl_median": float(np.median(kl)), "kl_median_interval": intervals.of_median(kl)}


@record
class SettingsResult(Result):
    """A result of one or several settings, in one table with the lines of each setting under its name.

    Attributes:
        settings: each one's baseline and rows.
        step: decode step, from 0; None: the mean over the steps of each sample.
        identity: of the run, with the configurations of all settings.
        IGNORED: choices that names of settings leave out.
    """

    IGNORED: ClassVar[tuple[str, ...]] = ()

    settings: tuple[Any, ...] = column("one by one")
    step: int | None
    identity: RunIdentity

    @classmethod
    def from_settings(cls, trace: Trace, settings: tuple[Any, ...], step: int | None, **more: Any) -> Self:
        """Return the result of a trace's settings; `more` are the fields that a subclass adds."""
        configs = dict.fromkeys(config for setting in settings for config in setting.identity.configs)
        return cls(
            settings=settings, step=resolve_step(trace, step), identity=identity_at(trace, list(configs), step), **more
        )

    def setting_names(self) -> list[str]:
        """Return a distinct name per setting; an empty name for a single setting."""
        return short_names([setting.baseline for setting in self.settings], *self.IGNORED)

    def lines(self) -> Sequence[Line]:
        """Return the lines of all settings, under the setting's name if there are several."""
        if len(self.settings) == 1:
            return list(self.settings[0].lines())
        named = zip(self.setting_names(), self.settings, strict=True)
        return [line for name, setting in named for line in (Line(name or setting.setting, ()), *setting.lines())]


def head_rows(comparison: HeadComparison, **labels: Any) -> list[dict[str, Any]]:
    """Return a comparison's data frame rows, one per kind of perturbation, layer and head.

    Columns are the configurations, then `labels`, then the numbers.
    """
    sides = {**config_columns(comparison.treatment), "baseline": comparison.baseline.label()}
    layers = [comparison.identity.layer(index) for index in range(len(comparison.flagged))]
    kinds = (comparison.isolated, comparison.propagated)
    return [row for kind in kinds for row in kind.records(layers, **sides, **labels, kind=kind.name)]
