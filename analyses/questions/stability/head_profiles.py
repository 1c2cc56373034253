"""One trace's heads ranked by relative perturbation and by what a treatment gains, and two traces' ranks compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.horizon.growth import KINDS, LEAST_STEPS, Steps, by_step
from perturbkv.analyses.identity import identity
from perturbkv.analyses.measurements import Floats, Measurements, measured_steps
from perturbkv.analyses.pairing import fold, matches, side_indices
from perturbkv.analyses.questions.stability.rank_reliability import (
    DepthProfile,
    RankAgreement,
    RankedHeads,
    RankEstimate,
    Reliability,
    agreement,
    depth_profile,
    format_estimate,
    profile_correlation,
    profiles,
    reliability,
)
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import CORRELATION, Estimate
from perturbkv.analyses.stats.rank_correlation import spearman
from perturbkv.configs import layer_types
from perturbkv.configs.choice import UNNAMED, Choice, parse, split_policy_and_selection
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, TraceError
from perturbkv.schema import MEASURED_LAYERS
from perturbkv.trace import Trace

_BY = "by"


def resolve(matching: Sequence[EvictionConfig], side: str) -> EvictionConfig | None:
    """Return the configuration that a side means: the only match or the only plain match; None if ambiguous.

    A plain configuration only evicts, uncorrected and in full precision, and has no option off its default that the
    side does not name: of `two-stage` and `two-stage(norm=l2)` the side `two-stage` means the first.
    """
    plain = matching if len(matching) == 1 else [config for config in matching if _is_plain(config, side)]
    return plain[0] if len(plain) == 1 else None


def resolve_one(matching: Sequence[EvictionConfig], side: str) -> EvictionConfig:
    """Return the configuration that a side means. Raises ConfigError where `resolve` returns None.

    Raises ConfigError where `resolve` finds none; the message lists names that would each mean one, if any.
    """
    if (config := resolve(matching, side)) is not None:
        return config
    every = dict.fromkeys(f"{config.policy}:{config.selection}" for config in matching)
    names = [name for name in every if resolve([one for one in matching if matches(one, name)], name) is not None]
    if names:
        msg = f"'{side}' means one of {len(matching)} configurations; say which: {_quote_names(names)}"
    else:
        labels = ", ".join(config.label() for config in matching[:3])
        count = f"{len(matching)} configurations"
        msg = f"'{side}' means {count} that no name tells apart, such as {labels}; trace one alone"
    raise ConfigError(msg)


def _quote_names(names: Sequence[str]) -> str:
    """Return names quoted for a shell: 'a', 'b' or 'c'."""
    *others, last = [f"'{name}'" for name in names]
    return f"{', '.join(others)} or {last}" if others else last


def _is_plain(config: EvictionConfig, side: str) -> bool:
    """Return whether a configuration only evicts, without non-default options that the side does not name."""
    named = [parse(part) for part in split_policy_and_selection(side)]
    choices = (config.policy, config.selection, config.granularity)
    return config.only_evicts and not any(_has_other_options(choice, named) for choice in choices)


def _has_other_options(choice: Choice, named: Sequence[Choice]) -> bool:
    """Return whether a choice has a non-default option that is not given in `named`."""
    given = {name for each in named if each.name == choice.name for name in each.options}
    if UNNAMED in given:  # the score that a policy ranks by, or its only option
        given |= {_BY} if _BY in choice.options else choice.options.keys()
    return bool(choice.shown_options.keys() - given)


ANALYSIS = "stability"


@dataclass(frozen=True)
class RelativePerturbation:
    """The relative perturbation of one trace's heads in each sample, and what a treatment gains on a baseline.

    Attributes:
        measured: the trace's measurements at step 0.
        config: the treatment.
        depths: (layer,) relative depth of the layers measured, layer / (layers − 1).
        relative: kind → (sample, layer, head) L / ‖o_h‖₁ at step 0, propagated and isolated.
        gain: kind → (sample, layer, head) the baseline's relative perturbation less the treatment's; empty where the
            trace has no baseline.
        early: kind → (long sample, layer, head) at step 0, of the samples with three steps or more; empty without one.
        late: the same for the mean over each sample's last third of steps.
    """

    measured: Measurements
    config: EvictionConfig
    depths: Floats
    relative: dict[str, Floats]
    gain: dict[str, Floats]
    early: dict[str, Floats]
    late: dict[str, Floats]


def check_distinct(traces: Sequence[Trace]) -> None:
    """Raise TraceError for no trace, and for a trace that is given twice: it would agree with itself."""
    if not traces:
        raise TraceError(f"{ANALYSIS} needs at least one trace, got none")
    digests = [trace.digest for trace in traces if trace.digest]
    for trace in traces:
        if digests.count(trace.digest) > 1:
            raise TraceError(f"expected different traces, got {trace.source or trace.digest} twice; leave one out")


def choose_configs(traces: Sequence[Trace], side: str, budget: str | None) -> list[EvictionConfig]:
    """Return, per trace, the configuration that a side means at one budget; only budgets may differ.

    Raises TraceError where a trace has none, or they differ in more than the budget; ConfigError where a trace has
    several budgets, or the side means none of several configurations.
    """
    matching = [[trace.run.configs[index] for index in side_indices(trace.run, side)] for trace in traces]
    shared = _shared_budget(matching, budget)
    chosen = [_resolve_at_budget(configs, side, shared) for configs in matching]
    _check_alike(chosen)
    return chosen


def _shared_budget(matching: Sequence[Sequence[EvictionConfig]], budget: str | None) -> Budget | None:
    """Return the requested budget, else the only common budget; None if each trace has a single, different budget.

    Raises ConfigError where several budgets are possible.
    """
    if budget is not None:
        return Budget.parse(budget)
    budgets = [dict.fromkeys(config.budget for config in configs) for configs in matching]
    shared = [value for value in budgets[0] if all(value in values for values in budgets)]
    if len(shared) > 1 or (not shared and any(len(values) > 1 for values in budgets)):
        every = dict.fromkeys(str(value) for values in budgets for value in values)
        raise ConfigError(
            f"{ANALYSIS} looks at one budget at a time, got traces of {', '.join(every)}; choose one with --budget"
        )
    return shared[0] if shared else None


def _resolve_at_budget(matching: Sequence[EvictionConfig], side: str, budget: Budget | None) -> EvictionConfig:
    """Return the configuration that a side means at a budget. Raises TraceError for no match."""
    fitting = [config for config in matching if budget is None or config.budget == budget]
    if not fitting:
        got = ", ".join(dict.fromkeys(str(config.budget) for config in matching))
        raise TraceError(
            f"expected the same budget of '{side}' in every trace, got one of {got}; choose one that all hold"
        )
    return resolve_one(fitting, side)


def _check_alike(chosen: Sequence[EvictionConfig]) -> None:
    """Raise TraceError for configurations that differ in more than the budget."""
    first = _without_budget(chosen[0])
    for config in chosen[1:]:
        if (other := _without_budget(config)) != first:
            wrong = next(name for name in {**first, **other} if first.get(name) != other.get(name))
            raise TraceError(
                f"expected configurations that differ in budget at most, got {wrong} {first.get(wrong)} and "
                f"{other.get(wrong)}: '{chosen[0].label()}' and '{config.label()}'"
            )


def _without_budget(config: EvictionConfig) -> dict[str, object]:
    """Return choice -> value of a configuration, but for its budget."""
    return {name: value for name, value in config.flat().items() if name != "budget"}


def relative_perturbation(
    trace: Trace, config: EvictionConfig, baseline: EvictionConfig | None
) -> RelativePerturbation:
    """Return the relative perturbation of a trace's heads under a configuration, and its gain over the baseline.

    Raises TraceError where the trace has no complete sample.
    """
    measured = Measurements(trace, ANALYSIS, 0)
    relative = _first_step(measured, config)
    baselines = {} if baseline is None else _first_step(measured, baseline)
    counts = measured_steps(measured.trace)
    steps = Steps(np.arange(counts.max()) < counts[:, None])
    early, late = _early_and_late(measured, config, steps) if counts.max() >= LEAST_STEPS else ({}, {})
    return RelativePerturbation(
        measured=measured,
        config=config,
        depths=_relative_depths(measured.trace),
        relative=relative,
        gain={kind: values - relative[kind] for kind, values in baselines.items()},
        early=early,
        late=late,
    )


def _relative_depths(trace: Trace) -> Floats:
    """Return (layer,) relative depths, layer / (layers − 1), of the measured layers; 0 for a model of one layer."""
    count = trace.arrays["output_norm"].shape[2]
    measured = trace.attrs.get(MEASURED_LAYERS, "")
    layers, model_layers = layer_types.parse_measured(measured) if measured else (tuple(range(count)), count)
    return np.asarray(layers, dtype=np.float64) / max(1, model_layers - 1)


def _first_step(measured: Measurements, config: EvictionConfig) -> dict[str, Floats]:
    """Return kind → (sample, layer, head) relative perturbation at step 0; 0 where a head has no output."""
    index, norm = measured.index(config), measured["output_norm"]
    return {kind: np.nan_to_num(ratio(measured[name][:, index], norm)) for kind, name in KINDS.items()}


def _early_and_late(
    measured: Measurements, config: EvictionConfig, steps: Steps
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Return kind → (long sample, layer, head) relative perturbation: at step 0, and mean over the last third of steps.

    Long samples have three steps or more.
    """
    index, every = measured.index(config), Measurements(measured.trace, ANALYSIS, None)
    norm = by_step(every, "output_norm", steps)
    each = {kind: np.nan_to_num(ratio(by_step(every, name, steps, index), norm)) for kind, name in KINDS.items()}
    late = {kind: steps.thirds(values)[1][0] for kind, values in each.items()}
    return {kind: values[steps.long][:, 0] for kind, values in each.items()}, late


def _format_estimate(estimate: RankEstimate | Estimate) -> str:
    """Return an estimate, its interval on a second line."""
    return format_estimate(estimate, "\n")


@record
class StableTrace(Record):
    """The stability of heads' ranks in one trace; its maps have the keys `isolated` and `propagated`."""

    number: int = column("its number, from 1")
    model: str = column("of its run", heading="model", text=lambda name: fold(name, 22))
    dataset: str = column("of its run", heading="data set", text=fold)
    seed: int = column("of its run", heading="#seed", text=str)
    source: str = column("its path")
    tokens: float = column("mean entries of its prompts", heading="#tokens", text=lambda mean, _: f"{mean:,.0f}")
    samples: int = column("complete ones", heading="#n")
    layers: int = column("of its model, those measured")
    heads: int = column("of a layer")
    config: EvictionConfig = column("what was evicted")
    perturbation: dict[str, Reliability] = column("reliability of ranks by relative perturbation, L / ‖o_h‖₁ at step 0")
    gain: dict[str, Reliability] = column(
        "reliability of ranks by the baseline's less the treatment's; empty without a baseline"
    )
    over_steps: dict[str, Estimate] = column(
        "Spearman's ρ between the heads at step 0 and in the last third of the steps, mean over samples; empty where "
        "no text has three"
    )
    depth: dict[str, DepthProfile] = column("distribution over depth")

    @derived(heading="#b", json=False)
    def budget(self) -> str:
        """Budget of the treatment."""
        return str(self.config.budget)

    @derived(heading="#isolated", text=_format_estimate, json=False)
    def isolated(self) -> RankEstimate:
        """Isolated L1: reliability of a trace's ranks of its heads; between two traces ρ of their mean ranks."""
        return self.perturbation["isolated"].split_half

    @derived(heading="#propagated", text=_format_estimate, json=False)
    def propagated(self) -> RankEstimate:
        """Propagated L1: reliability of a trace's ranks of its heads; between two traces ρ of their mean ranks."""
        return self.perturbation["propagated"].split_half

    @derived(heading="#isolated", text=_format_estimate, json=False)
    def isolated_steps(self) -> Estimate | None:
        """Isolated L1: ρ between the heads at step 0 and in the last third of the steps."""
        return self.over_steps.get("isolated")

    @derived(heading="#propagated", text=_format_estimate, json=False)
    def propagated_steps(self) -> Estimate | None:
        """Propagated L1: ρ between the heads at step 0 and in the last third of the steps."""
        return self.over_steps.get("propagated")

    @derived(heading="#n", json=False)
    def long_samples(self) -> int | None:
        """Samples of three steps or more."""
        return self.over_steps["isolated"].prompts if self.over_steps else None

    @property
    def name(self) -> str:
        """The trace's number and data set."""
        return f"{self.number}: {self.dataset}"


@record
class TracePair(Record):
    """The agreement of two traces' ranks; the maps have the keys `isolated` and `propagated`."""

    SECTION: ClassVar[str] = "pair of traces"

    first: int = column("number of a trace")
    second: int = column("number of another")
    perturbation: dict[str, RankAgreement] = column("agreement of ranks by relative perturbation; empty between models")
    gain: dict[str, RankAgreement] = column("the same by gain; empty between models, and without a baseline")
    depth: dict[str, RankEstimate] = column("between models: ρ of the profiles over depth; else empty")

    @derived(heading="#isolated", text=_format_estimate, json=False)
    def isolated(self) -> RankEstimate:
        """Isolated L1: ρ of both traces' mean ranks; between models of their profiles over depth."""
        return self.perturbation["isolated"].rho if self.perturbation else self.depth["isolated"]

    @derived(heading="#propagated", text=_format_estimate, json=False)
    def propagated(self) -> RankEstimate:
        """Propagated L1: ρ of both traces' mean ranks; between models of their profiles over depth."""
        return self.perturbation["propagated"].rho if self.perturbation else self.depth["propagated"]

    @derived(heading="#propagated,\ncorrected", text=_format_estimate, json=False)
    def corrected(self) -> RankEstimate | None:
        """Propagated L1: ρ over the root of both reliabilities, without noise; by chance it exceeds 1."""
        return self.perturbation["propagated"].corrected if self.perturbation else None

    @derived(heading="#worst\n10 %", unit="share", json=False)
    def shared(self) -> float | None:
        """Propagated L1: overlap of the tenth of the heads that is perturbed most in one trace and in the other."""
        return self.perturbation["propagated"].shared if self.perturbation else None

    @property
    def paired(self) -> bool:
        """True where both traces may be of the same prompts, so that intervals leave a prompt out of both at once."""
        return any(agreement.paired for agreement in self.perturbation.values())

    @property
    def name(self) -> str:
        """Both traces' numbers, with a star where both may be of the same prompts."""
        return f"{self.first}–{self.second}{'*' if self.paired else ''}"


@dataclass(frozen=True)
class RankedTrace:
    """A trace with its number and its heads' ranks.

    Attributes:
        perturbation, gain: kind → heads ranked by relative perturbation, and by gain.
    """

    number: int
    values: RelativePerturbation
    perturbation: dict[str, RankedHeads]
    gain: dict[str, RankedHeads]

    @classmethod
    def from_values(cls, number: int, values: RelativePerturbation) -> RankedTrace:
        """Rank the heads of a trace."""
        perturbation, gain = (
            {kind: RankedHeads.from_values(array) for kind, array in arrays.items()}
            for arrays in (values.relative, values.gain)
        )
        return cls(number, values, perturbation, gain)

    @property
    def trace(self) -> Trace:
        """The trace's complete samples."""
        return self.values.measured.trace


def stable_trace(ranked: RankedTrace) -> StableTrace:
    """Return the stability of one trace's ranks."""
    values, run = ranked.values, ranked.trace.run
    shape = values.relative["propagated"].shape
    return StableTrace(
        number=ranked.number,
        model=run.model,
        dataset=run.dataset,
        seed=run.seed,
        source=ranked.trace.source,
        tokens=float(values.measured["prompt_tokens"].mean()),
        samples=shape[0],
        layers=shape[1],
        heads=shape[2],
        config=values.config,
        perturbation={kind: reliability(heads) for kind, heads in ranked.perturbation.items()},
        gain={kind: reliability(heads) for kind, heads in ranked.gain.items()},
        over_steps={kind: _step_correlation(values.early[kind], late) for kind, late in values.late.items()},
        depth={kind: depth_profile(each, values.depths) for kind, each in values.relative.items()},
    )


def _step_correlation(early: Floats, late: Floats) -> Estimate:
    """Return Spearman's ρ between the heads of two (sample, layer, head) arrays, mean over samples."""
    each = np.array(
        [float(spearman(first.reshape(-1), last.reshape(-1))) for first, last in zip(early, late, strict=True)]
    )
    return Estimate(float(each.mean()), intervals.of_mean(each, CORRELATION), len(each))


def compare_pair(first: RankedTrace, second: RankedTrace) -> TracePair:
    """Return the agreement of two traces: of heads' ranks in one model, of profiles over depth between models."""
    if not _same_heads(first.trace, second.trace):
        own, other = (
            {kind: profiles(each, one.values.depths) for kind, each in one.values.relative.items()}
            for one in (first, second)
        )
        depth = {kind: profile_correlation(each, other[kind]) for kind, each in own.items()}
        return TracePair(first.number, second.number, {}, {}, depth)
    paired = _may_share_prompts(first.trace, second.trace)
    perturbation, gain = (
        {kind: agreement(heads, seconds[kind], paired) for kind, heads in firsts.items()}
        for firsts, seconds in ((first.perturbation, second.perturbation), (first.gain, second.gain))
    )
    return TracePair(first.number, second.number, perturbation, gain, {})


def _same_heads(first: Trace, second: Trace) -> bool:
    """Return whether two traces measure the same heads: same model, same layers."""
    shapes = {trace.arrays["output_norm"].shape[2:] for trace in (first, second)}
    models = {(trace.run.model, trace.run.revision) for trace in (first, second)}
    layers = {identity(trace, ()).measured_layers for trace in (first, second)}
    return len(shapes) == len(models) == len(layers) == 1


def _may_share_prompts(first: Trace, second: Trace) -> bool:
    """Return whether two traces may have the same prompts: same data set, seed and complete samples."""
    sources = {(trace.run.dataset, trace.run.seed) for trace in (first, second)}
    return len(sources) == 1 and np.array_equal(first.ok, second.ok)
