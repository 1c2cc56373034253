"""Eviction methods ranked by perturbation, with the gain of their protected entries alone (METHOD: Protection)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, column, derived, record, table
from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.identity import identity
from perturbkv.analyses.outcomes import Outcome, OutcomeSetting, SettingsResult, head_rows, next_token_kl
from perturbkv.analyses.pairing import common, distinct_choices, group_settings, matches
from perturbkv.analyses.stats.intervals import OptionalInterval
from perturbkv.analyses.text import ALIKE, FEW, LESS, MORE, UNDECIDED, sample_note, sentence, tally
from perturbkv.configs.choice import Choice
from perturbkv.configs.entry_counts import entry_count
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import Part
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "methods"
BASELINE = ("snapkv", "attention")
CONTROLS = ("random", "attention")
"""SnapKV's selections that show the gain of protection alone: with a method's own window and protected entries."""
_FREE = ("policy", "selection", "window", "protect_first", "protect_recent", "granularity_product",
         "selection_alpha", "selection_split", "selection_score", "selection_epsilon", "selection_seed",
         "policy_pool", "policy_kernel")  # fmt: skip
"""Choices in which methods differ, beside all options of their policies."""


@record
class Row(Outcome):
    """One eviction method against SnapKV, and against controls with the method's own window and protected entries.

    Attributes:
        difference: choices in which it differs from other rows of the same name.
    """

    SECTION = "methods row"

    controls: Mapping[str, HeadComparison] = column(
        "the method against snapkv's entries so selected (random, attention) with its own window and protection"
    )
    difference: str = ""

    @derived()
    def name(self) -> str:
        """Policy, and selection where that is not the policy's own."""
        plain_selection = self.treatment.selection.name in ("attention", "position", "given")
        policy = str(self.treatment.policy)
        name = policy if plain_selection else f"{policy}:{self.treatment.selection}"
        return f"{name} {self.difference}".strip()

    @derived(
        json=False, heading="#random,\nsame ends", interval=lambda row: _propagated_ratio(row.controls.get("random"))[1]
    )
    def random_ratio(self) -> float:
        """Propagated sum over that of random entries under the method's own window and protection."""
        return _propagated_ratio(self.controls.get("random"))[0]

    @derived(
        json=False,
        heading="#snapkv,\nsame ends",
        interval=lambda row: _propagated_ratio(row.controls.get("attention"))[1],
    )
    def protected_ratio(self) -> float:
        """Propagated sum over that of SnapKV's entries under the method's own window and protection."""
        return _propagated_ratio(self.controls.get("attention"))[0]


@record
class MethodSetting(OutcomeSetting):
    """The methods of one budget and granularity against SnapKV, sorted by propagated perturbation."""

    SECTION = "methods setting"

    baseline: EvictionConfig = column("snapkv:attention, which every row is compared with")
    rows: tuple[Row, ...] = column("each method, that which perturbs least first")
    controls: Mapping[str, HeadComparison] = column("the same controls of the baseline as each row has of its method")

    @property
    def setting(self) -> str:
        """The choices that all rows share, in a label's notation."""
        return common((self.baseline,), "policy", "selection", "window", "alpha", "pool")

    @derived(
        json=False, heading="#random,\nsame ends", interval=lambda row: _propagated_ratio(row.controls.get("random"))[1]
    )
    def random_ratio(self) -> float:
        """The baseline's propagated sum over that of random entries under its own window and protection."""
        return _propagated_ratio(self.controls.get("random"))[0]

    def lines(self) -> Sequence[Line]:
        """Return the baseline's line, then one per method."""
        return [Line("snapkv (= 1)", (self,)), *(Line(row.name, (row,)) for row in self.rows)]


def _propagated_ratio(comparison: HeadComparison | None) -> tuple[float, OptionalInterval]:
    """Return a comparison's ratio of propagated perturbation with its interval; NaN and None without a comparison."""
    if comparison is None:
        return float("nan"), None
    return comparison.propagated.sum_ratio, comparison.propagated.sum_ratio_interval


def protection(config: EvictionConfig) -> tuple[int | float, int | float] | None:
    """Return the numbers of first and recent entries, or shares of b, that every head keeps whatever their scores.

    `sinks` are first entries of a policy or of the score that it ranks by, `recent` a share of b. None where unknown:
    for external kept sets, and for a number with a share where b itself is a share.
    """
    options = dict(config.policy.options)
    if isinstance(by := options.get("by"), Choice):
        options |= by.options
    first = _larger_protection(config.protect_first, options.get("sinks", 0), config)
    recent = _larger_protection(config.protect_recent, options.get("recent", 0), config)
    return None if config.is_external or first is None or recent is None else (first, recent)


def _larger_protection(first: float, second: float, config: EvictionConfig) -> int | float | None:
    """Return the larger of two protections, each a number of entries or a share of b; None if not comparable."""
    if not first or not second or type(first) is type(second):
        return max(first, second)
    if not isinstance(budget := config.budget.value, int):
        return None
    return max(entry_count(first, budget), entry_count(second, budget))


def control(baseline: EvictionConfig, config: EvictionConfig, selection: str) -> EvictionConfig | None:
    """Return a method's control: the baseline with another selection and the method's window and protection."""
    if (ends := protection(config)) is None:
        return None
    scored = selection == BASELINE[1]
    stages = {name: value for name, value in baseline.selection.shown_options.items() if name in ("alpha", "split")}
    grouping = baseline.granularity.without(["product"] if scored else ["product", "reduce"])
    return EvictionConfig(
        config.budget,
        Choice(BASELINE[0], baseline.policy.shown_options if scored else {}),
        Choice(selection, stages),
        config.window,
        Choice(grouping.name, grouping.shown_options),
        *ends,
    )


def settings(trace: Trace, step: int = 0, only: Sequence[str] = ()) -> tuple[MethodSetting, ...]:
    """Return a setting per budget and granularity that holds SnapKV and another method, or one of those in `only`.

    Raises TraceError where none does, and as `head_comparison.summarise`.
    """
    results = [
        setting
        for group in _setting_groups(trace.run)
        if (base := baseline_of(group)) and (setting := _setting(trace, group, base, step, only)).rows
    ]
    if not results:
        names = ", ".join(dict.fromkeys(str(config.policy) for config in trace.run.configs))
        msg = f"{ANALYSIS} needs {':'.join(BASELINE)} and another policy at the same budget; got a trace of {names}"
        raise TraceError(msg)
    return tuple(results)


def controls_of_others(run: RunConfig) -> set[EvictionConfig]:
    """Return SnapKV's configurations that are another method's controls, with its window and protection."""
    controls: set[EvictionConfig] = set()
    for group in _setting_groups(run):
        if base := baseline_of(group):
            plain = [
                config
                for config in group
                if config.policy.name == BASELINE[0] and _control_key(config) in _control_keys(base, config)
            ]
            methods = [config for config in group if config not in plain]
            keys = {key for config in methods for key in _control_keys(base, config)} - _control_keys(base, base)
            controls |= {
                config for config in group if config.policy.name == BASELINE[0] and _control_key(config) in keys
            }
    return controls


def _setting_groups(run: RunConfig) -> list[list[EvictionConfig]]:
    """Return the groups of configurations of equal budget and granularity."""
    options = {name for config in run.configs for name in config.flat() if name.startswith(("policy_", "selection_"))}
    return group_settings(run, *_FREE, *options)


def baseline_of(group: Sequence[EvictionConfig]) -> EvictionConfig | None:
    """Return SnapKV's configuration with the fewest protected entries in a group; None without SnapKV."""
    named = [config for config in group if (config.policy.name, config.selection.name) == BASELINE]
    return min(named, key=lambda config: sum(protection(config) or ()), default=None)


def _methods(group: list[EvictionConfig], base: EvictionConfig) -> list[EvictionConfig]:
    """Return a group's configurations other than the baseline and the controls of methods."""
    controls = {key for config in group if config != base for key in _control_keys(base, config)}
    return [
        config
        for config in group
        if config != base and (_control_key(config) not in controls or config.policy.name != BASELINE[0])
    ]


def _control_keys(base: EvictionConfig, config: EvictionConfig) -> set[tuple[Any, ...]]:
    """Return the `_control_key` of every control that a method can have."""
    controls = (control(base, config, name) for name in CONTROLS)
    return {_control_key(expected) for expected in controls if expected is not None}


def _control_key(config: EvictionConfig) -> tuple[Any, ...]:
    """Return the choices that identify a control: budget, policy, selection, window, granularity and protection."""
    return (config.budget, str(config.policy), config.selection.name, config.window, str(config.granularity),
            config.protect_first, config.protect_recent)  # fmt: skip


def _setting(
    trace: Trace, group: list[EvictionConfig], baseline: EvictionConfig, step: int, only: Sequence[str]
) -> MethodSetting:
    """Return a group's setting: its methods, or only those named in `only`, compared with the baseline."""
    methods = [
        config for config in _methods(group, baseline) if not only or any(matches(config, name) for name in only)
    ]
    rows = [
        Row.compare(
            trace,
            ANALYSIS,
            baseline,
            config,
            step,
            controls=_compare_with_controls(trace, baseline, config, group, step),
        )
        for config in methods
    ]
    return MethodSetting(
        baseline=baseline,
        **next_token_kl(trace, ANALYSIS, baseline, step),
        controls=_compare_with_controls(trace, baseline, baseline, group, step),
        rows=tuple(sorted(_with_distinct_names(rows), key=lambda row: row.propagated.sum_ratio)),
        identity=identity(trace, group, step),
    )


def _with_distinct_names(rows: list[Row]) -> list[Row]:
    """Return the rows, with the choices that tell apart rows of equal name in `difference`."""
    distinct = []
    for row in rows:
        same = [other.treatment for other in rows if other.name == row.name]
        words = distinct_choices(same, "policy", "selection")[same.index(row.treatment)] if len(same) > 1 else {}
        distinct.append(dataclasses.replace(row, difference=" ".join(words.values())))
    return distinct


def _compare_with_controls(
    trace: Trace, baseline: EvictionConfig, config: EvictionConfig, group: list[EvictionConfig], step: int
) -> dict[str, HeadComparison]:
    """Return control's name -> comparison of a method with that control, for the controls in the group."""
    by_key = {_control_key(member): member for member in group if member != config}
    controls = {
        name: by_key.get(_control_key(expected))
        for name in CONTROLS
        if (expected := control(baseline, config, name)) is not None
    }
    return {
        name: head_comparison.summarise(trace, member, config, step)
        for name, member in controls.items()
        if member is not None
    }


@record
class MethodRanking(SettingsResult):
    """Methods ranked by perturbation, at every budget and granularity with SnapKV and another method."""

    SECTION = "ablation --methods"
    SHOWN = ("cache_share", "propagated_ratio", "random_ratio", "protected_ratio", "kl_median")
    FIRST = "method"
    HAS_MEDIANS = True
    IGNORED: ClassVar[tuple[str, ...]] = ("policy", "selection", "window", "alpha", "pool")

    settings: tuple[MethodSetting, ...] = column("one per budget and granularity")

    def conclusion(self) -> str:
        """Return how many methods perturb less than SnapKV, and which one perturbs least."""
        rows = [row for setting in self.settings for row in setting.rows]
        verdicts = [row.propagated.case().verdict for row in rows]
        if FEW in verdicts:
            first = "too few samples to decide whose perturbation is lower than snapkv's"
        else:
            first = tally(verdicts, _VERDICT_CLAUSES, "method")
        best = (_best_text(setting) for setting in self.settings)
        where = (f" at {name}" if name else "" for name in self.setting_names())
        least = ", ".join(f"{clause}{at}" for clause, at in zip(best, where, strict=True))
        note = sample_note(self.identity.samples)
        return sentence(f"{first}; lowest: {least} (propagated, all heads; {note})", *(row.name for row in rows))

    def title(self) -> str:
        """Return the table's title: the baseline, and the choices of a single setting."""
        where = f": {self.settings[0].setting}" if len(self.settings) == 1 else ""
        return f"propagated L1, sum of all heads, over that of snapkv or of a control{where}"

    def caveats(self) -> Sequence[str]:
        """Return the note that defines 'same ends': the window and protection of the controls."""
        return ["Same ends: under the method's own window and protection."]

    def details(self) -> Sequence[Part]:
        """Return the isolated perturbation and the drift of every method, and the noise floor."""
        names = ("isolated_ratio", "drift_ratio", "kl_median")
        kind = self.settings[0].rows[0].propagated
        return [table("over snapkv's, and KL", self.lines(), names, self.FIRST),
                text.noise_floor_note(kind.floor_relative_median)]  # fmt: skip

    def records(self) -> list[dict[str, Any]]:
        """Return a row per method, kind, layer and head: both sides' mean L1, their floor and the verdict.

        `baseline` is SnapKV's label. A verdict is 1 (better), 0 (tied) or −1 (worse).
        """
        return [head for setting in self.settings for row in setting.rows for head in head_rows(row, name=row.name)]


_VERDICT_CLAUSES = {
    LESS: ("perturbation is lower than snapkv's", "lower"),
    MORE: ("perturbation is higher than snapkv's", "higher"),
    ALIKE: ("perturbation is snapkv's up to rounding", "equal"),
    UNDECIDED: ("whether perturbation is lower than snapkv's is undecided", "undecided"),
}


def _best_text(setting: MethodSetting) -> str:
    """Return the method that perturbs least, with its ratio to SnapKV: 'caote (0.80 [0.70, 0.90])'."""
    first = setting.rows[0]
    ratio = text.decimal(first.propagated.sum_ratio, first.propagated.sum_ratio_interval)
    if first.propagated.sum_ratio < 1:
        return f"{first.name} ({ratio} of snapkv's)"
    return f"snapkv ({first.name} is next, {ratio} of it)"


def methods(trace: Trace, step: int = 0, only: Sequence[str] = ()) -> MethodRanking:
    """Rank eviction methods by perturbation, each with the gain of its protected entries alone.

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
            names = ", ".join(dict.fromkeys(str(config.policy) for config in trace.run.configs))
            msg = f"expected {name} among the trace's methods, got a trace of {names}"
            raise TraceError(msg)
    return MethodRanking.from_settings(trace, settings(trace, step, only), step)
