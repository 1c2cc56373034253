"""Eviction methods ranked by perturbation, each held against controls of the same protection (METHOD: Protection).

A control keeps random entries, or attention's, under the method's own window and protected entries. Each comparison
ends in a verdict of `perturbkv.analyses.stats.equivalence`: better, worse, equivalent within δ, or undecided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, column, derived, interval, record, table
from perturbkv.analyses.conclusions import COMPARED, Claim
from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import HeadComparison, HeadKind
from perturbkv.analyses.identity import identity_at
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.names import common_text, distinct_choices
from perturbkv.analyses.outcomes import (
    Outcome,
    OutcomeSetting,
    SettingsResult,
    field_values,
    head_rows,
    next_token_kl,
)
from perturbkv.analyses.result import add_first_step
from perturbkv.analyses.sides import group_settings, matches, sides_text
from perturbkv.analyses.stats import equivalence, intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.equivalence import BETTER, WORSE, ControlVerdict
from perturbkv.analyses.stats.intervals import MIN_SAMPLES, OptionalInterval, median_level
from perturbkv.analyses.verdicts import LESS, MARGIN, MORE, check_margin
from perturbkv.configs.choice import Choice, split_policy_and_selection
from perturbkv.configs.entry_counts import entry_count
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import Part
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

if TYPE_CHECKING:
    from perturbkv.captions import CaptionedFigure

ANALYSIS = "methods"
BASELINE = ("snapkv", "attention")
CONTROLS = ("random", "attention")
"""SnapKV's selections that show the gain of protection alone: with a method's own window and protected entries."""
_FREE = ("policy", "selection", "window", "protect_first", "protect_recent", "granularity_product",
         "selection_alpha", "selection_split", "selection_score", "selection_epsilon", "selection_seed",
         "policy_pool", "policy_kernel")  # fmt: skip
"""Choices in which methods differ, beside all options of their policies."""


@record
class ControlComparison(HeadComparison, section="comparison with a control"):
    """A method against a control of the same protection, with a verdict for each kind of perturbation.

    Attributes:
        margin: δ of these verdicts.
    """

    isolated_verdict: ControlVerdict = column("of the isolated sums")
    propagated_verdict: ControlVerdict = column("of the propagated sums")
    margin: float

    @classmethod
    def compare(
        cls, trace: Trace, control: EvictionConfig, method: EvictionConfig, step: int | None, margin: float
    ) -> ControlComparison:
        """Return the comparison of a method with its control. Raises as `head_comparison.summarise`."""
        compared = head_comparison.summarise(trace, control, method, step)
        isolated, propagated = (
            equivalence.decide(kind.sample_sums[1], kind.sample_sums[0], margin, tied=not kind.differences.any())
            for kind in (compared.isolated, compared.propagated)
        )
        return cls(**field_values(compared), isolated_verdict=isolated, propagated_verdict=propagated, margin=margin)

    @property
    def kinds(self) -> dict[str, tuple[HeadKind, ControlVerdict]]:
        """Name of each kind of perturbation -> its sums and the verdict on them."""
        return {
            "isolated": (self.isolated, self.isolated_verdict),
            "propagated": (self.propagated, self.propagated_verdict),
        }

    def cell(self, name: str) -> str:
        """Return a ratio of sums with its interval, and the verdict on the next line; `name`: of a kind in `kinds`."""
        kind, verdict = self.kinds[name]
        return f"{text.decimal(kind.sum_ratio, kind.sum_ratio_interval)}\n{verdict.words(self.margin)}"

    def numbers(self, name: str) -> dict[str, Any]:
        """Return a kind's ratio of sums, the ends of its interval, and the verdict, as cells of a data frame.

        Keys are the ends of the columns' names; the ends of the interval are None without one.
        """
        kind, verdict = self.kinds[name]
        ends = kind.sum_ratio_interval
        low, high = (ends.low, ends.high) if ends else (None, None)
        return {"": kind.sum_ratio, "_low": low, "_high": high, "_verdict": verdict.verdict}


class _ControlColumns:
    """Columns of a record with `controls`: its sums over those of each control of the same protection."""

    controls: Mapping[str, ControlComparison]

    @derived(json=False, heading="#random,\nsame ends", text=lambda one: one.cell("propagated"),
             numbers=lambda one: one.numbers("propagated"))  # fmt: skip
    def over_random(self) -> ControlComparison | None:
        """Propagated sum over that of random entries under the method's own window and protection, and the verdict."""
        return self.controls.get("random")

    @derived(json=False, heading="#attention,\nsame ends", text=lambda one: one.cell("propagated"),
             numbers=lambda one: one.numbers("propagated"))  # fmt: skip
    def over_attention(self) -> ControlComparison | None:
        """Propagated sum over SnapKV's under the method's own window and protection, and the verdict."""
        return self.controls.get("attention")

    @derived(json=False, heading="#random,\nsame ends", text=lambda one: one.cell("isolated"),
             numbers=lambda one: one.numbers("isolated"))  # fmt: skip
    def isolated_over_random(self) -> ControlComparison | None:
        """Isolated sum over that of random entries under the method's own window and protection, and the verdict."""
        return self.controls.get("random")

    @derived(json=False, heading="#attention,\nsame ends", text=lambda one: one.cell("isolated"),
             numbers=lambda one: one.numbers("isolated"))  # fmt: skip
    def isolated_over_attention(self) -> ControlComparison | None:
        """Isolated sum over SnapKV's under the method's own window and protection, and the verdict."""
        return self.controls.get("attention")


RELATIVE = "propagated Σ L1 over Σ ‖o_h‖₁, how far all outputs move as a share of their norm under the full cache"


def relative_sum(measured: Measurements, config: EvictionConfig) -> dict[str, Any]:
    """Return the columns `relative` and `relative_interval` of a configuration, over all heads and samples."""
    perturbation = measured["perturbation_propagated"][:, measured.index(config)].sum(axis=(1, 2))  # (sample,)
    norm = measured["output_norm"].sum(axis=(1, 2))
    relative = float(ratio(perturbation.sum(), norm.sum()))
    return {"relative": relative, "relative_interval": intervals.of_ratio(perturbation, norm)}


@record
class Row(_ControlColumns, Outcome, section="methods row"):
    """One eviction method against SnapKV, and against controls with the method's own window and protected entries.

    Attributes:
        difference: the choices that tell it apart from other rows of the same name, as text; empty without such rows.
    """

    controls: Mapping[str, ControlComparison] = column(
        "the method against snapkv's entries so selected (random, attention) with its own window and protection"
    )
    relative: float = column(RELATIVE, unit="share")
    relative_interval: OptionalInterval = interval()
    difference: str = ""

    @derived()
    def name(self) -> str:
        """Policy, and selection where that is not the policy's own."""
        policy = str(self.treatment.policy)
        name = policy if _has_own_selection(self.treatment) else f"{policy}:{self.treatment.selection}"
        return f"{name} {self.difference}".strip()


@record
class MethodSetting(_ControlColumns, OutcomeSetting, section="methods setting"):
    """The methods of one budget and granularity against SnapKV, sorted by propagated perturbation."""

    baseline: EvictionConfig = column("snapkv:attention, which every row is compared with")
    rows: tuple[Row, ...] = column("each method, that which perturbs least first")
    controls: Mapping[str, ControlComparison] = column(
        "the same controls of the baseline as each row has of its method"
    )
    relative: float = column(RELATIVE, unit="share")
    relative_interval: OptionalInterval = interval()

    @property
    def setting(self) -> str:
        """The choices that all rows share, in a label's notation."""
        return common_text((self.baseline,), "policy", "selection", "window", "alpha", "pool")

    def lines(self) -> Sequence[Line]:
        """Return the baseline's line, then one per method."""
        return [Line("snapkv (= 1)", (self,)), *(Line(row.name, (row,)) for row in self.rows)]


def _has_own_selection(config: EvictionConfig) -> bool:
    """Return whether a configuration's selection is its policy's own, with which the policy alone is named."""
    return config.selection.name in ("attention", "position", "given")


def _is_method(config: EvictionConfig, name: str) -> bool:
    """Return whether a configuration is the method of a name, a policy or `policy:selection`."""
    return matches(config, name) and (len(split_policy_and_selection(name)) > 1 or _has_own_selection(config))


def check_names(trace: Trace, only: Sequence[str]) -> None:
    """Raise TraceError for a name in `only` that is no method of the trace."""
    for name in only:
        if not any(_is_method(config, name) for config in trace.run.configs):
            raise TraceError(f"expected {name} among the trace's methods, got a trace of {sides_text(trace.run)}")


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
    if not first or not second or type(first) is type(second):  # both numbers, or both shares
        return max(first, second)
    if not isinstance(budget := config.budget.value, int):
        return None
    return max(entry_count(first, budget), entry_count(second, budget))


def control(baseline: EvictionConfig, config: EvictionConfig, selection: str) -> EvictionConfig | None:
    """Return a method's control: the baseline with a selection of `CONTROLS`, and the method's window and protection.

    None where the method's protection is unknown.
    """
    if (ends := protection(config)) is None:
        return None
    scored = selection == "attention"  # random entries have no pooling, and no scores that a group reduces
    stages = {name: value for name, value in baseline.selection.shown_options.items() if name in ("alpha", "split")}
    grouping = baseline.granularity.drop(["product"] if scored else ["product", "reduce"])
    return EvictionConfig(
        config.budget,
        Choice(BASELINE[0], baseline.policy.shown_options if scored else {}),
        Choice(selection, stages),
        config.window,
        Choice(grouping.name, grouping.shown_options),
        *ends,
    )


def settings(
    trace: Trace, step: int | None = None, only: Sequence[str] = (), margin: float = MARGIN
) -> tuple[MethodSetting, ...]:
    """Return a setting per budget and granularity that holds SnapKV and another method, of those in `only` if given.

    `margin` is δ of the verdicts. Raises TraceError where no setting does, and as `head_comparison.summarise`.
    """
    results = [
        setting
        for group in _setting_groups(trace.run)
        if (base := baseline_of(group)) and (setting := _setting(trace, group, base, step, only, margin)).rows
    ]
    if not results:
        names = ", ".join(dict.fromkeys(str(config.policy) for config in trace.run.configs))
        raise TraceError(
            f"{ANALYSIS} needs {':'.join(BASELINE)} and another policy at the same budget; got a trace of {names}"
        )
    return tuple(results)


def controls_of_others(run: RunConfig) -> set[EvictionConfig]:
    """Return SnapKV's configurations that a run holds as controls of another method, with its window and protection."""
    controls: set[EvictionConfig] = set()
    for group in _setting_groups(run):
        if base := baseline_of(group):
            snapkv = [config for config in group if config.policy.name == BASELINE[0]]
            own_controls = [config for config in snapkv if _control_key(config) in _control_keys(base, config)]
            methods = [config for config in group if config not in own_controls]
            keys = {key for method in methods for key in _control_keys(base, method)} - _control_keys(base, base)
            controls |= {config for config in snapkv if _control_key(config) in keys}
    return controls


def _setting_groups(run: RunConfig) -> list[list[EvictionConfig]]:
    """Return the run's configurations, a group per budget and granularity."""
    options = {name for config in run.configs for name in config.flat() if name.startswith(("policy_", "selection_"))}
    return group_settings(run, *_FREE, *options)


def baseline_of(group: Sequence[EvictionConfig]) -> EvictionConfig | None:
    """Return SnapKV's configuration with the fewest protected entries in a group; None without SnapKV."""
    named = [config for config in group if (config.policy.name, config.selection.name) == BASELINE]
    return min(named, key=lambda config: sum(protection(config) or ()), default=None)


def _control_keys(base: EvictionConfig, config: EvictionConfig) -> set[tuple[Any, ...]]:
    """Return the `_control_key` of every control that the method `config` can have; none without known protection."""
    controls = (control(base, config, name) for name in CONTROLS)
    return {_control_key(expected) for expected in controls if expected is not None}


def _control_key(config: EvictionConfig) -> tuple[Any, ...]:
    """Return the choices that identify a control: budget, policy, selection, window, granularity and protection."""
    return (config.budget, str(config.policy), config.selection.name, config.window, str(config.granularity),
            config.protect_first, config.protect_recent)  # fmt: skip


def _setting(
    trace: Trace,
    group: list[EvictionConfig],
    baseline: EvictionConfig,
    step: int | None,
    only: Sequence[str],
    margin: float,
) -> MethodSetting:
    """Return a group's setting: its methods, or only those named in `only`, compared with the baseline."""
    others = [config for config in group if config != baseline]
    controls = {key for config in others for key in _control_keys(baseline, config)}
    methods = [
        config
        for config in others
        if (_control_key(config) not in controls or config.policy.name != BASELINE[0])
        and (not only or any(_is_method(config, name) for name in only))
    ]
    measured = Measurements(trace, ANALYSIS, step)
    rows = [
        Row.compare(
            trace,
            ANALYSIS,
            baseline,
            config,
            step,
            controls=_compare_with_controls(trace, baseline, config, group, step, margin),
            **relative_sum(measured, config),
        )
        for config in methods
    ]
    distinct = list(rows)
    for index, row in enumerate(rows):  # what tells apart rows of equal name
        same = [other.treatment for other in rows if other.name == row.name]
        if len(same) > 1:
            words = distinct_choices(same, "policy", "selection")[same.index(row.treatment)]
            distinct[index] = dataclasses.replace(row, difference=" ".join(words.values()))
    return MethodSetting(
        baseline=baseline,
        **next_token_kl(trace, ANALYSIS, baseline, step),
        **relative_sum(measured, baseline),
        controls=_compare_with_controls(trace, baseline, baseline, group, step, margin),
        rows=tuple(sorted(distinct, key=lambda row: row.propagated.sum_ratio)),
        identity=identity_at(trace, group, step),
    )


def _compare_with_controls(
    trace: Trace,
    baseline: EvictionConfig,
    config: EvictionConfig,
    group: list[EvictionConfig],
    step: int | None,
    margin: float,
) -> dict[str, ControlComparison]:
    """Return name of a control -> comparison of the method `config` with it, for the controls that the group holds."""
    by_key = {_control_key(member): member for member in group if member != config}
    controls = {
        name: by_key.get(_control_key(expected))
        for name in CONTROLS
        if (expected := control(baseline, config, name)) is not None
    }
    return {
        name: ControlComparison.compare(trace, member, config, step, margin)
        for name, member in controls.items()
        if member is not None
    }


@record
class MethodRanking(
    SettingsResult,
    section="ablation --methods",
    scope="propagated, all heads",
    rows="heads",
    shown=("cache_share", "propagated_ratio", "over_random", "over_attention"),
    first="method",
    ignored=("policy", "selection", "window", "alpha", "pool"),
):
    """Methods ranked by perturbation, at every budget and granularity with SnapKV and another method."""

    settings: tuple[MethodSetting, ...] = column("one per budget and granularity")
    margin: float = column("share of a control's sum within which a method is equivalent to it: δ")

    def claims(self) -> Sequence[Claim]:
        """Return how often methods perturb less than SnapKV, and than each control of the same protection."""
        named = list(zip(self.setting_names(), self.settings, strict=True))
        rows = [(f"{where} {row.name}".strip(), row) for where, setting in named for row in setting.rows]
        cases = [row.propagated.case(name) for name, row in rows]
        only = rows[0][1].name if len(rows) == 1 else ""
        over_snapkv = Claim(only or "a method", "perturbs", cases, COMPARED, BASELINE[0], is_name=only != "")
        if self.identity.samples < MIN_SAMPLES:
            return [over_snapkv]
        return [over_snapkv, *filter(None, (self._control_claim(rows, control) for control in CONTROLS))]

    def _control_claim(self, rows: Sequence[tuple[str, Row]], control: str) -> Claim | None:
        """Return the claim against one control, of the methods that have it; None where none has."""
        compared = [(name, row.controls[control]) for name, row in rows if control in row.controls]
        if not compared:
            return None
        words = {BETTER: LESS, WORSE: MORE}
        cases = []
        for name, one in compared:  # against a control the verdict is that of equivalence within the margin
            verdict = one.propagated_verdict.verdict
            cases.append(one.propagated.case(name)._replace(verdict=words.get(verdict, verdict)))
        subject = compared[0][0] if len(compared) == 1 else "a method"
        return Claim(subject, "perturbs", cases, COMPARED, control, " at equal protection", margin=self._margin_text)

    @property
    def _margin_text(self) -> str:
        """The margin as text: 'within 5 %'."""
        return f"within {equivalence.margin_text(self.margin)}"

    def title(self) -> str:
        """Return the table's title: the baseline, and the choices of a single setting."""
        where = f": {self.settings[0].setting}" if len(self.settings) == 1 else ""
        return f"propagated L1, sum of all heads, over that of snapkv or of a control{where}"

    def caveats(self) -> Sequence[str]:
        """Return the notes that define 'same ends' and the verdicts on the controls."""
        verdicts = (
            f"Better or worse: by the interval; {self._margin_text}: by two one-sided tests at 5 %; undecided: about n "
            "such samples would decide."
        )
        ends = "Same ends: under the method's own window and protection."
        return [ends, verdicts] if self.identity.samples >= MIN_SAMPLES else [ends]

    def details(self) -> Sequence[Part]:
        """Return each method's isolated perturbation over SnapKV's and the controls', its drift and KL, the floor."""
        isolated = ("isolated_ratio", "isolated_over_random", "isolated_over_attention")
        kind, samples = self.settings[0].rows[0].propagated, self.identity.samples
        level = f", whose intervals have {100 * median_level(samples):.0f} %" if samples >= MIN_SAMPLES else ""
        return [
            table("isolated L1, likewise", self.lines(), isolated, self.FIRST),
            table("over snapkv's, and KL", self.lines(), ("drift_ratio", "kl_median"), self.FIRST),
            f"KL: medians{level}.",
            text.noise_floor_note(kind.floor_relative_median),
        ]

    def plot_budgets(self, width_mm: float | None = None, style: str = "screen") -> CaptionedFigure:
        """Return the figure of each method's perturbation over the budgets; arguments and errors as `plot`."""
        return self._draw("MethodRanking.plot_budgets", width_mm, style)

    def records(self) -> list[dict[str, Any]]:
        """Return a row per method, kind, layer and head: both sides' mean L1, their floor and the verdict.

        `baseline` is SnapKV's label. A verdict is 1 (better), 0 (tied) or −1 (worse). `against_random` and
        `against_attention` are the verdicts on the sum of all heads against the control of the same protection.
        """
        rows = []
        for row in (row for setting in self.settings for row in setting.rows):
            for head in head_rows(row, name=row.name):
                for name in CONTROLS:
                    control = row.controls.get(name)  # None where the trace lacks it
                    head[f"against_{name}"] = control and control.kinds[head["kind"]][1].verdict
                rows.append(head)
        return rows


def methods(trace: Trace, step: int | None = None, only: Sequence[str] = (), margin: float = MARGIN) -> MethodRanking:
    """Rank eviction methods by perturbation, each with a verdict against controls of the same protection.

    Compared is propagated L1 over all heads (METHOD: the quantities) with SnapKV's at the same budget, and with
    random entries and SnapKV's under the method's own window and protected entries, where the trace holds them.

    Args:
        trace: what was measured.
        step: decode step, from 0; None: the mean over the steps of each sample.
        only: policies with their own selection, or `policy:selection`, where not all that the trace holds are to be
            ranked.
        margin: δ, the share of a control's sum within which a method counts as equivalent to it; chosen beforehand.

    Raises TraceError where no budget holds SnapKV and another policy, and where the trace has no complete sample or
    lacks a variable that is needed; ConfigError where it has no such step, and for a margin not between 0 and 1.
    """
    check_margin(margin)
    check_names(trace, only)
    result = MethodRanking.from_settings(trace, settings(trace, step, only, margin), step, margin=margin)
    return add_first_step(result, result.step, partial(methods, trace, 0, only, margin))
