"""Every eviction method of a run against SnapKV's, and against what its protected entries alone would bring."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.identity import identity
from perturbkv.analyses.naming import apart, common
from perturbkv.analyses.outcomes import Outcome, Outcomes, divergence
from perturbkv.analyses.pairing import matches
from perturbkv.analyses.pairing import settings as alike
from perturbkv.configs.choice import Choice
from perturbkv.configs.entry_counts import entries
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
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
        controls: selection -> the method against SnapKV's entries so selected, with the same window and protected
            entries; without those that the run lacks.
        beside: in what it differs from other rows of its name.
    """

    controls: Mapping[str, HeadComparison]
    beside: str = ""

    @property
    def config(self) -> EvictionConfig:
        """The method."""
        return self.compared.treatment

    @property
    def name(self) -> str:
        """Policy, and selection where it is not the policy's score alone."""
        plain_selection = self.config.selection.name in ("attention", "position", "given")
        said = str(self.config.policy) if plain_selection else f"{self.config.policy}:{self.config.selection}"
        return f"{said} {self.beside}".strip()

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        controls = {name: one.to_dict() for name, one in self.controls.items()}
        return {**super().to_dict(), "controls": controls}


@dataclass(frozen=True)
class Setting(Outcomes[Row]):
    """One budget and granularity; the baseline is SnapKV's, the methods come by propagated perturbation.

    Attributes:
        controls: as a row's, of the baseline.
    """

    controls: Mapping[str, HeadComparison]

    @property
    def setting(self) -> str:
        """What all rows share, in words."""
        return common((self.baseline,), "policy", "selection", "window", "alpha", "pool")

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        return {**super().to_dict(), "controls": {name: one.to_dict() for name, one in self.controls.items()}}


def protection(config: EvictionConfig) -> tuple[int | float, int | float] | None:
    """First and recent entries, or shares of b, that stay in every head whatever their scores.

    `sinks` are first entries of a policy or of the score that it ranks by, `recent` a share of b. None where it is not
    known: of kept sets from outside, and of a number beside a share where b itself is a share.
    """
    options = dict(config.policy.options)
    if isinstance(by := options.get("by"), Choice):
        options |= by.options
    first = _larger(config.protect_first, options.get("sinks", 0), config)
    recent = _larger(config.protect_recent, options.get("recent", 0), config)
    return None if config.given or first is None or recent is None else (first, recent)


def _larger(one: float, other: float, config: EvictionConfig) -> int | float | None:
    """The one that keeps more entries, each a number of them or a share of b."""
    if not one or not other or type(one) is type(other):
        return max(one, other)
    if not isinstance(budget := config.budget.value, int):
        return None
    return max(entries(one, budget), entries(other, budget))


def control(baseline: EvictionConfig, config: EvictionConfig, selection: str) -> EvictionConfig | None:
    """The baseline's entries by another selection, with a method's window and protected entries; None: not known."""
    if (ends := protection(config)) is None:
        return None
    looks = selection == BASELINE[1]
    stages = {name: value for name, value in baseline.selection.told.items() if name in ("alpha", "split")}
    grouping = baseline.granularity.without(["product"] if looks else ["product", "reduce"])
    return EvictionConfig(
        config.budget,
        Choice(BASELINE[0], baseline.policy.told if looks else {}),
        Choice(selection, stages),
        config.window,
        Choice(grouping.name, grouping.told),
        *ends,
    )


def settings(trace: Trace, step: int = 0, only: Sequence[str] = ()) -> tuple[Setting, ...]:
    """One entry per budget and granularity that holds SnapKV and another method; `only` methods, where some are named.

    Raises TraceError where none does, and as `heads.summarise`.
    """
    found = [
        one
        for group in _groups(trace.run)
        if (base := baseline_of(group)) and (one := _setting(trace, group, base, step, only)).rows
    ]
    if not found:
        held = ", ".join(dict.fromkeys(str(config.policy) for config in trace.run.configs))
        msg = f"{ANALYSIS} needs {':'.join(BASELINE)} and another policy at the same budget; got a trace of {held}"
        raise TraceError(msg)
    return tuple(found)


def controls_of_others(run: RunConfig) -> set[EvictionConfig]:
    """SnapKV's entries with a window or protected entries that are another method's, which they are controls of."""
    found: set[EvictionConfig] = set()
    for group in _groups(run):
        if base := baseline_of(group):
            methods = [one for one in group if one.policy.name != BASELINE[0] or _key(one) not in _wanted(base, one)]
            keys = {key for one in methods for key in _wanted(base, one)} - _wanted(base, base)
            found |= {one for one in group if one.policy.name == BASELINE[0] and _key(one) in keys}
    return found


def _groups(run: RunConfig) -> list[list[EvictionConfig]]:
    """Configurations of equal budget and granularity."""
    options = {name for one in run.configs for name in one.flat() if name.startswith(("policy_", "selection_"))}
    return [[run.configs[place] for place in group] for group in alike(run, *_FREE, *options)]


def baseline_of(group: Sequence[EvictionConfig]) -> EvictionConfig | None:
    """SnapKV's with the least protection beside its window."""
    named = [one for one in group if (one.policy.name, one.selection.name) == BASELINE]
    return min(named, key=lambda one: sum(protection(one) or ()), default=None)


def _methods(group: list[EvictionConfig], base: EvictionConfig) -> list[EvictionConfig]:
    """What is neither the baseline nor a control of something else."""
    controls = {key for one in group if one != base for key in _wanted(base, one)}
    return [one for one in group if one != base and (_key(one) not in controls or one.policy.name != BASELINE[0])]


def _wanted(base: EvictionConfig, config: EvictionConfig) -> set[tuple[Any, ...]]:
    """What a method's controls are known by, where they are known."""
    wanted = (control(base, config, name) for name in CONTROLS)
    return {_key(one) for one in wanted if one is not None}


def _key(config: EvictionConfig) -> tuple[Any, ...]:
    """What a control is known again by."""
    return (config.budget, str(config.policy), config.selection.name, config.window, str(config.granularity),
            config.protect_first, config.protect_recent)  # fmt: skip


def _setting(
    trace: Trace, group: list[EvictionConfig], baseline: EvictionConfig, step: int, only: Sequence[str]
) -> Setting:
    named = [one for one in _methods(group, baseline) if not only or any(matches(one, name) for name in only)]
    rows = [
        Row.of(trace, ANALYSIS, baseline, one, step, controls=_controls(trace, baseline, one, group, step))
        for one in named
    ]
    return Setting(
        baseline=baseline,
        kl=divergence(trace, ANALYSIS, baseline, step),
        controls=_controls(trace, baseline, baseline, group, step),
        rows=tuple(sorted(_told_apart(rows), key=_ratio)),
        identity=identity(trace, group, step),
    )


def _told_apart(rows: list[Row]) -> list[Row]:
    """Rows of one name say in what they differ."""
    found = []
    for row in rows:
        alike = [other.config for other in rows if other.name == row.name]
        words = apart(alike, "policy", "selection")[alike.index(row.config)] if len(alike) > 1 else {}
        found.append(dataclasses.replace(row, beside=" ".join(words.values())))
    return found


def _ratio(row: Row) -> float:
    return row.compared.propagated.sum_ratio


def _controls(
    trace: Trace, baseline: EvictionConfig, config: EvictionConfig, group: list[EvictionConfig], step: int
) -> dict[str, HeadComparison]:
    """The method against each control that the group holds."""
    held = {_key(one): one for one in group if one != config}
    wanted = {name: control(baseline, config, name) for name in CONTROLS}
    there = {name: held.get(_key(one)) for name, one in wanted.items() if one is not None}
    return {name: head_comparison.summarise(trace, one, config, step) for name, one in there.items() if one is not None}
