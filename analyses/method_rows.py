"""Every eviction method of a run against SnapKV's, and against what its protected entries alone would bring."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perturbkv.analyses import heads
from perturbkv.analyses.arithmetic import plain
from perturbkv.analyses.heads import HeadComparison
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.naming import common
from perturbkv.analyses.objects import setting_object
from perturbkv.analyses.outcomes import Divergence, Outcome, divergence, outcome
from perturbkv.analyses.pairing import matches
from perturbkv.analyses.pairing import settings as alike
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "methods"
BASELINE = ("snapkv", "attention")
CONTROLS = ("random", "attention")
"""Selections that show what protection alone brings: of SnapKV, with a method's own window and protected entries."""
_FREE = ("policy", "selection", "window", "protect_first", "protect_recent", "granularity_product",
         "selection_alpha", "selection_split", "selection_score", "selection_epsilon", "selection_seed",
         "policy_pool", "policy_kernel")  # fmt: skip
"""What methods differ in, beside all options of their policies."""


@dataclass(frozen=True)
class Row(Outcome):
    """One method.

    Attributes:
        config: the method.
        controls: selection -> the method against SnapKV's entries so selected, with the same window and protected
            entries; without those that the run lacks.
    """

    config: EvictionConfig
    controls: Mapping[str, HeadComparison]

    @property
    def name(self) -> str:
        """Policy, and selection where it is not the policy's score alone."""
        plain_selection = self.config.selection.name in ("attention", "position", "given")
        return str(self.config.policy) if plain_selection else f"{self.config.policy}:{self.config.selection}"

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        controls = {name: one.to_dict() for name, one in self.controls.items()}
        return {**super().to_dict(), "name": self.name, "controls": controls}


@dataclass(frozen=True)
class Setting:
    """One budget and granularity.

    Attributes:
        baseline: SnapKV's.
        kl: the baseline's.
        controls: as a row's, of the baseline.
        rows: the methods, by propagated perturbation, the least first.
        identity: of the run.
    """

    baseline: EvictionConfig
    kl: Divergence
    controls: Mapping[str, HeadComparison]
    rows: tuple[Row, ...]
    identity: RunIdentity

    @property
    def setting(self) -> str:
        """What all rows share, in words."""
        return common((self.baseline,), "policy", "selection", "window", "alpha", "pool")

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "setting": setting_object(self.identity.configs),
                "baseline": self.baseline,
                "kl_median": self.kl.median,
                "kl_median_interval": self.kl.interval,
                "controls": {name: one.to_dict() for name, one in self.controls.items()},
                "rows": [row.to_dict() for row in self.rows],
            }
        )
        return found


def protection(config: EvictionConfig) -> tuple[int | float, int | float]:
    """First and recent entries that stay in every head whatever their scores, as a policy's options say it too.

    `sinks` are first entries of a policy or of the score that it ranks by, `recent` a share of b.
    """
    options = dict(config.policy.options)
    if isinstance(by := options.get("by"), Choice):
        options |= by.options
    first = max(config.protect_first, options.get("sinks", 0))
    return first, options.get("recent", config.protect_recent)


def control(config: EvictionConfig, selection: str) -> EvictionConfig:
    """SnapKV's entries by another selection, with the window and the protected entries of a method."""
    first, recent = protection(config)
    granularity = Choice(config.granularity.name, config.granularity.told)  # what was idle there may matter here
    return EvictionConfig(config.budget, BASELINE[0], selection, config.window, granularity, first, recent)


def settings(trace: Trace, step: int = 0, only: Sequence[str] = ()) -> tuple[Setting, ...]:
    """One entry per budget and granularity that holds SnapKV and another method; `only` methods, where some are named.

    Raises TraceError where none does, and as `heads.summarise`.
    """
    options = {name for one in trace.run.configs for name in one.flat() if name.startswith(("policy_", "selection_"))}
    groups = [[trace.run.configs[place] for place in group] for group in alike(trace.run, *_FREE, *options)]
    found = [one for group in groups if _baseline(group) and (one := _setting(trace, group, step, only)).rows]
    if not found:
        held = ", ".join(dict.fromkeys(str(config.policy) for config in trace.run.configs))
        msg = f"{ANALYSIS} needs {':'.join(BASELINE)} and another policy at the same budget; got a trace of {held}"
        raise TraceError(msg)
    return tuple(found)


def _baseline(group: list[EvictionConfig]) -> EvictionConfig | None:
    """SnapKV's with nothing protected beside its window."""
    named = [one for one in group if (one.policy.name, one.selection.name) == BASELINE]
    return next((one for one in named if protection(one) == (0, 0)), None)


def _methods(group: list[EvictionConfig]) -> list[EvictionConfig]:
    """What is no control."""
    controls = {_key(control(one, name)) for one in group for name in CONTROLS}
    base = _baseline(group)
    return [one for one in group if one == base or _key(one) not in controls or one.policy.name != BASELINE[0]]


def _key(config: EvictionConfig) -> tuple[Any, ...]:
    """What a control is known again by, whatever options its policy has."""
    return (config.budget, config.policy.name, config.selection.name, config.window, config.granularity.name,
            config.protect_first, config.protect_recent)  # fmt: skip


def _setting(trace: Trace, group: list[EvictionConfig], step: int, only: Sequence[str]) -> Setting:
    baseline = _baseline(group)
    assert baseline is not None  # noqa: S101
    named = [one for one in _methods(group) if not only or any(matches(one, name) for name in only)]
    others = [config for config in named if config != baseline]
    rows = sorted((_row(trace, baseline, config, group, step) for config in others), key=_ratio)
    return Setting(
        baseline=baseline,
        kl=divergence(trace, ANALYSIS, baseline, step),
        controls=_controls(trace, baseline, group, step),
        rows=tuple(rows),
        identity=identity(trace, group, step),
    )


def _ratio(row: Row) -> float:
    return row.compared.propagated.sum_ratio


def _row(trace: Trace, baseline: EvictionConfig, config: EvictionConfig, group: list[EvictionConfig], step: int) -> Row:
    found = outcome(trace, ANALYSIS, baseline, config, step)
    told = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return Row(**told, config=config, controls=_controls(trace, config, group, step))


def _controls(
    trace: Trace, config: EvictionConfig, group: list[EvictionConfig], step: int
) -> dict[str, HeadComparison]:
    """The method against each control that the group holds."""
    held = {_key(one): one for one in group if one != config}
    wanted = {name: held.get(_key(control(config, name))) for name in CONTROLS}
    return {name: heads.summarise(trace, one, config, step) for name, one in wanted.items() if one is not None}
