"""Which eviction method perturbs least, and how much of that is what it protects? (METHOD: Protection).

Every eviction method of a run against SnapKV's, and against what its protected entries alone would bring.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perturbkv.analyses import text
from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.identity import identity
from perturbkv.analyses.outcomes import OfSettings, Outcome, Outcomes, by_head, divergence
from perturbkv.analyses.pairing import apart, common, counted, folded, matches
from perturbkv.analyses.pairing import settings as alike
from perturbkv.analyses.text import capital, decided, over
from perturbkv.configs.choice import Choice
from perturbkv.configs.entry_counts import entries
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import Table
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
class MethodSetting(Outcomes[Row]):
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


def settings(trace: Trace, step: int = 0, only: Sequence[str] = ()) -> tuple[MethodSetting, ...]:
    """One entry per budget and granularity that holds SnapKV and another method; `only` methods, where some are named.

    Raises TraceError where none does, and as `head_comparison.summarise`.
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
) -> MethodSetting:
    named = [one for one in _methods(group, baseline) if not only or any(matches(one, name) for name in only)]
    rows = [
        Row.of(trace, ANALYSIS, baseline, one, step, controls=_controls(trace, baseline, one, group, step))
        for one in named
    ]
    return MethodSetting(
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


_OVER = ("method", "#held /\nfull", "#snapkv", "#random,\nsame ends", "#snapkv,\nsame ends")
_OUTPUT = ("method", "#isolated", "#last layer's\ndrift", "#KL of the next\ntoken (nat)")


class MethodRanking(OfSettings[MethodSetting]):
    """Every budget and granularity of a trace that holds SnapKV and another method.

    A setting: methods of equal budget and granularity.
    """

    def conclusion(self) -> str:
        """Of each setting the method that perturbs least, and how many perturb less than SnapKV, or than chance."""
        return " ".join(_concluded(one) for one in self.settings) + f" ({over(self.identity.samples)})"

    def tables(self) -> list[Table | str]:
        """Of each setting the methods by their propagated perturbation, then what comes out."""
        return [part for setting in self.settings for part in _tables(setting)]

    def notes(self) -> str:
        """What rows and columns mean."""
        kind = self.settings[0].rows[0].compared.propagated
        return (
            f"{text.about_intervals(self.identity.samples, medians=True)} Σ of all heads' propagated L1, the "
            "method's over what the column names; below 1 it perturbs less. Same ends: with the method's own window "
            "and protected first and recent entries, the others drawn at random, or by SnapKV's score. KL: median over "
            f"samples. {text.ABOUT_HELD} {text.about_floor(kind.floor_relative_median)}"
        )

    def records(self) -> list[dict[str, Any]]:
        """A row per method, kind, layer and head: both sides' mean L1 over samples, their floor and the verdict.

        `baseline` is SnapKV's label. A verdict is 1 (better), 0 (tied) or −1 (worse).
        """
        return [
            one for setting in self.settings for row in setting.rows for one in by_head(row.compared, name=row.name)
        ]


def methods(trace: Trace, step: int = 0, only: Sequence[str] = ()) -> MethodRanking:
    """Rank eviction methods by how much they perturb, each beside what its protected entries alone bring.

    Compared is propagated L1 over all heads (METHOD: the quantities) with SnapKV's at the same budget, and with
    random entries and SnapKV's under the method's own window and protected entries, where the trace holds them.

    Args:
        trace: what was measured.
        step: decode step.
        only: policies, or `policy:selection`, where not all that the trace holds are to be ranked.

    Raises TraceError where no budget holds SnapKV and another policy, or the trace has no complete sample or not what
    is needed; ConfigError where it has no such step.
    """
    for name in only:
        if not any(matches(config, name) for config in trace.run.configs):
            held = ", ".join(dict.fromkeys(str(config.policy) for config in trace.run.configs))
            msg = f"expected {name} among the trace's methods, got a trace of {held}"
            raise TraceError(msg)
    return MethodRanking.of(trace, settings(trace, step, only), step)


def _concluded(setting: MethodSetting) -> str:
    """'At b=128 query, caote perturbs least: 0.80 [0.70, 0.90] of snapkv; of 12 methods 5 perturb less, …'."""
    best = setting.rows[0]
    ratio, interval = best.compared.propagated.sum_ratio, best.compared.propagated.sum_ratio_interval
    least = best.name if ratio < 1 else "snapkv"
    told = f"{text.decimal(ratio, interval)} of snapkv's" if ratio < 1 else f"{best.name} is next, {ratio:.2f} of it"
    chance = [row.controls["random"] for row in setting.rows if "random" in row.controls]
    beside = f"; {_counted(chance)} than random entries under the same protection" if chance else ""
    among = f"of {counted(len(setting.rows), 'method')} {_counted([row.compared for row in setting.rows])}"
    return f"{capital(f'at {setting.setting}')}, {least} perturbs least ({told}); {among} than snapkv{beside}."


def _counted(found: list[HeadComparison]) -> str:
    """'5 perturb less and 3 more, 4 undecided'."""
    sides = Counter(decided(one.propagated.sum_ratio_interval, 1) for one in found)
    undecided = sides[0] + sides[None]
    return f"{sides[-1]} perturb less and {sides[1]} more{f' ({undecided} undecided)' if undecided else ''}"


def _tables(setting: MethodSetting) -> list[Table | str]:
    held = text.held(setting.rows[0].compared.held[0])
    first = ["snapkv (= 1)", held, "1", _summed(setting.controls.get("random")), ""]
    kl = text.significant(setting.kl.median, setting.kl.interval)
    return [
        Table(
            f"{setting.setting}: propagated, Σ of all heads, over that of", _OVER, [first, *map(_over, setting.rows)]
        ),
        Table(
            f"{setting.setting}: over snapkv's, and KL",
            _OUTPUT,
            [["snapkv", "1", "1", kl], *map(_output, setting.rows)],
        ),
    ]


def _over(row: Row) -> list[str]:
    ratios = [row.compared, row.controls.get("random"), row.controls.get("attention")]
    return [folded(row.name), text.held(row.compared.held[1]), *map(_summed, ratios)]


def _summed(found: HeadComparison | None) -> str:
    if found is None:
        return ""
    return text.decimal(found.propagated.sum_ratio, found.propagated.sum_ratio_interval, apart="\n")


def _output(row: Row) -> list[str]:
    isolated = row.compared.isolated
    return [
        folded(row.name),
        text.decimal(isolated.sum_ratio, isolated.sum_ratio_interval, apart="\n"),
        text.decimal(row.drift_ratio, row.drift_ratio_interval, apart="\n"),
        text.significant(row.kl.median, row.kl.interval),
    ]
