"""What each head of a trace suffers in each sample: relative L1, and what a treatment gains on a baseline.

Which configuration a name means where several match it: the one without options that the name leaves unsaid.

One trace's heads, ranked by what they suffer and gain; and two traces' against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perturbkv.analyses.horizon.growth import KINDS, LEAST_STEPS, Steps, taken
from perturbkv.analyses.identity import identity
from perturbkv.analyses.measurements import Floats, at_step, measured_steps, values
from perturbkv.analyses.pairing import matches, of_selection
from perturbkv.analyses.questions.stability.rank_reliability import (
    Agreement,
    Depth,
    Heads,
    Ranked,
    Reliability,
    agreement,
    alike,
    depth,
    profiles,
    reliability,
)
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import CORRELATION, Estimate
from perturbkv.analyses.stats.rank_correlation import spearman
from perturbkv.configs import layer_types
from perturbkv.configs.choice import FIRST, Choice, halves, parse
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, TraceError
from perturbkv.schema import MEASURED
from perturbkv.trace import Trace

_BY = "by"


def meant(found: Sequence[EvictionConfig], side: str) -> EvictionConfig | None:
    """Of configurations that match a side the only one, or the only plain one; None where there is none.

    Plain is what evicts alone, uncorrected and in full precision, with no option that is not at its default but those
    that the side says: `two-stage` beside `two-stage(norm=l2)` is the first, `two-stage(norm=l2)` the second.
    """
    plain = found if len(found) == 1 else [one for one in found if _plain(one, side)]
    return plain[0] if len(plain) == 1 else None


def one_meant(found: Sequence[EvictionConfig], side: str) -> EvictionConfig:
    """The same. Raises ConfigError where a side means none of them, with the names that mean one, if there are any."""
    if (one := meant(found, side)) is not None:
        return one
    held = dict.fromkeys(f"{config.policy}:{config.selection}" for config in found)
    names = [name for name in held if meant([config for config in found if matches(config, name)], name) is not None]
    if names:
        msg = f"'{side}' means one of {len(found)} configurations; say which: {_listed(names)}"
    else:
        labels = ", ".join(config.label() for config in found[:3])
        msg = f"'{side}' means {len(found)} configurations that no name tells apart, such as {labels}; trace one alone"
    raise ConfigError(msg)


def _listed(names: Sequence[str]) -> str:
    """As a shell takes them: 'a', 'b' or 'c'."""
    *others, last = [f"'{name}'" for name in names]
    return f"{', '.join(others)} or {last}" if others else last


def _plain(config: EvictionConfig, side: str) -> bool:
    told = [parse(part) for part in halves(side)]
    choices = (config.policy, config.selection, config.granularity)
    return config.evicts_alone and not any(_unsaid(choice, told) for choice in choices)


def _unsaid(held: Choice, told: Sequence[Choice]) -> bool:
    """Whether a choice has an option off its default that the side does not say."""
    said = {name for one in told if one.name == held.name for name in one.options}
    if FIRST in said:  # the score that a policy ranks by, or its only option
        said |= {_BY} if _BY in held.options else held.options.keys()
    return bool(held.told.keys() - said)


ANALYSIS = "stability"


@dataclass(frozen=True)
class Suffering:
    """One trace's heads.

    Attributes:
        trace: whose.
        config: what was evicted; `baseline` what its gain is over, None where the trace has none.
        places: (layer,) relative depth of the layers measured, layer / (layers − 1).
        relative: kind → (sample, layer, head) L / ‖o_h‖₁ at step 0, propagated and isolated.
        gain: kind → (sample, layer, head) the baseline's less the treatment's; empty without a baseline.
        late: kind → (long sample, layer, head) mean over each sample's last third of steps; `early` at step 0 of
            the same samples. Empty where no text has three steps.
    """

    trace: Trace
    config: EvictionConfig
    baseline: EvictionConfig | None
    places: Floats
    relative: dict[str, Floats]
    gain: dict[str, Floats]
    early: dict[str, Floats]
    late: dict[str, Floats]


def check_apart(traces: Sequence[Trace]) -> None:
    """Raise TraceError for no trace, and for one that is given twice: it would agree with itself."""
    if not traces:
        msg = f"{ANALYSIS} needs at least one trace, got none"
        raise TraceError(msg)
    digests = [trace.digest for trace in traces if trace.digest]
    for trace in traces:
        if digests.count(trace.digest) > 1:
            msg = f"expected different traces, got {trace.source or trace.digest} twice; leave one out"
            raise TraceError(msg)


def chosen(traces: Sequence[Trace], side: str, budget: str | None) -> list[EvictionConfig]:
    """One configuration of each trace: of the side and of one budget, alike in all else.

    Raises TraceError where a trace has none, or they differ in more than the budget; ConfigError where it has several
    budgets, or the side means none of several configurations of the budget.
    """
    found = [[trace.run.configs[place] for place in of_selection(trace.run, side)] for trace in traces]
    wanted = _shared_budget(found, budget)
    picked = [_one([one for one in held if wanted is None or one.budget == wanted], held, side) for held in found]
    _check_alike(picked)
    return picked


def _shared_budget(found: Sequence[Sequence[EvictionConfig]], budget: str | None) -> Budget | None:
    """The budget that was asked for, or the only one that all traces hold; None where each has but one of its own."""
    if budget is not None:
        return Budget.parse(budget)
    held = [dict.fromkeys(config.budget for config in configs) for configs in found]
    shared = [one for one in held[0] if all(one in others for others in held)]
    if len(shared) > 1 or (not shared and any(len(one) > 1 for one in held)):
        every = dict.fromkeys(str(one) for budgets in held for one in budgets)
        msg = f"{ANALYSIS} looks at one budget at a time, got traces of {', '.join(every)}; choose one with --budget"
        raise ConfigError(msg)
    return shared[0] if shared else None


def _one(fitting: Sequence[EvictionConfig], held: Sequence[EvictionConfig], side: str) -> EvictionConfig:
    if not fitting:
        got = ", ".join(dict.fromkeys(str(config.budget) for config in held))
        msg = f"expected the same budget of '{side}' in every trace, got one of {got}; choose one that all hold"
        raise TraceError(msg)
    return one_meant(fitting, side)


def _check_alike(picked: Sequence[EvictionConfig]) -> None:
    first = _without_budget(picked[0])
    for one in picked[1:]:
        if (other := _without_budget(one)) != first:
            wrong = next(name for name in {**first, **other} if first.get(name) != other.get(name))
            msg = (
                f"expected configurations that differ in budget at most, got {wrong} {first.get(wrong)} and "
                f"{other.get(wrong)}: '{picked[0].label()}' and '{one.label()}'"
            )
            raise TraceError(msg)


def _without_budget(config: EvictionConfig) -> dict[str, object]:
    return {name: value for name, value in config.flat().items() if name != "budget"}


def suffering(trace: Trace, config: EvictionConfig, baseline: EvictionConfig | None) -> Suffering:
    """What a trace's heads suffer under a configuration. Raises TraceError where it has no complete sample."""
    held = at_step(trace, ANALYSIS, 0)
    relative = _relative(held, config)
    others = {} if baseline is None else _relative(held, baseline)
    gain = {kind: other - relative[kind] for kind, other in others.items()}
    counts = measured_steps(held)
    steps = Steps(np.arange(counts.max()) < counts[:, None])
    early, late = _over_steps(held, config, steps) if counts.max() >= LEAST_STEPS else ({}, {})
    return Suffering(held, config, baseline, _places(held), relative, gain, early, late)


def _places(trace: Trace) -> Floats:
    """(layer,) where in depth the measured layers lie; a model of one layer is at 0."""
    count = trace.arrays["output_norm"].shape[2]
    told = trace.attrs.get(MEASURED, "")
    layers, whole = layer_types.parsed(told) if told else (tuple(range(count)), count)
    return np.asarray(layers, dtype=np.float64) / max(1, whole - 1)


def _relative(trace: Trace, config: EvictionConfig) -> dict[str, Floats]:
    """Kind → (sample, layer, head) at step 0; a head without output loses nothing."""
    place, norm = trace.run.configs.index(config), values(trace, "output_norm", ANALYSIS, 0)
    return {
        kind: np.nan_to_num(ratio(values(trace, name, ANALYSIS, 0)[:, place], norm)) for kind, name in KINDS.items()
    }


def _over_steps(trace: Trace, config: EvictionConfig, steps: Steps) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Step 0, and the mean over each sample's last third of steps, of the samples of three steps or more."""
    place, norm = trace.run.configs.index(config), taken(trace, "output_norm", steps)
    each = {kind: np.nan_to_num(ratio(taken(trace, name, steps, place), norm)) for kind, name in KINDS.items()}
    late = {kind: steps.thirds(one)[1][0] for kind, one in each.items()}
    return {kind: one[steps.long][:, 0] for kind, one in each.items()}, late


@dataclass(frozen=True)
class OfTrace:
    """One trace.

    Attributes:
        place: its number, from 1.
        model, dataset, seed, source: of its run.
        tokens: mean entries of its prompts.
        samples: complete ones.
        layers, heads: of its model, as far as they are measured.
        config: what was evicted.
        suffering: kind → how alike its samples rank the heads by relative L1.
        gain: the same by what the treatment gains; empty without a baseline.
        over_steps: kind → mean over samples of Spearman's ρ between the heads at step 0 and in the last third of the
            steps; empty where no text has three.
        depth: kind → where in depth it lies.
    """

    place: int
    model: str
    dataset: str
    seed: int
    source: str
    tokens: float
    samples: int
    layers: int
    heads: int
    config: EvictionConfig
    suffering: dict[str, Reliability]
    gain: dict[str, Reliability]
    over_steps: dict[str, Estimate]
    depth: dict[str, Depth]


@dataclass(frozen=True)
class Between:
    """Two traces, by their numbers: `suffering` and `gain` of one model, kind → agreement; `depth` of two models."""

    first: int
    second: int
    suffering: dict[str, Agreement]
    gain: dict[str, Agreement]
    depth: dict[str, Ranked]


@dataclass(frozen=True)
class TraceRanks:
    """One trace and its number; kind → its heads by what they suffer, and by what they gain."""

    place: int
    of: Suffering
    suffering: dict[str, Heads]
    gain: dict[str, Heads]

    @classmethod
    def numbered(cls, place: int, of: Suffering) -> TraceRanks:
        """The trace with its number, its heads ranked."""
        suffered, gained = ({kind: Heads.of(each) for kind, each in one.items()} for one in (of.relative, of.gain))
        return cls(place, of, suffered, gained)


def of_trace(found: TraceRanks) -> OfTrace:
    """What is told of one trace by itself."""
    one, run = found.of, found.of.trace.run
    shape = one.relative["propagated"].shape
    return OfTrace(
        place=found.place,
        model=run.model,
        dataset=run.dataset,
        seed=run.seed,
        source=one.trace.source,
        tokens=float(values(one.trace, "prompt_tokens", ANALYSIS).mean()),
        samples=shape[0],
        layers=shape[1],
        heads=shape[2],
        config=one.config,
        suffering={kind: reliability(heads) for kind, heads in found.suffering.items()},
        gain={kind: reliability(heads) for kind, heads in found.gain.items()},
        over_steps={kind: _stable_traces_over_steps(one.early[kind], late) for kind, late in one.late.items()},
        depth={kind: depth(each, one.places) for kind, each in one.relative.items()},
    )


def _stable_traces_over_steps(early: Floats, late: Floats) -> Estimate:
    """Mean over samples of ρ between the heads of (sample, layer, head) arrays."""
    each = np.array(
        [float(spearman(one.reshape(-1), other.reshape(-1))) for one, other in zip(early, late, strict=True)]
    )
    return Estimate(float(each.mean()), intervals.of_mean(each, CORRELATION), len(each))


def between(first: TraceRanks, second: TraceRanks) -> Between:
    """What is told of two traces: of the same heads where they are of one model, else of depth alone."""
    here, there = first.of, second.of
    if not _same_heads(here.trace, there.trace):
        over_depth = [
            {kind: profiles(each, one.places) for kind, each in one.relative.items()} for one in (here, there)
        ]
        shared = {kind: alike(each, over_depth[1][kind]) for kind, each in over_depth[0].items()}
        return Between(first.place, second.place, {}, {}, shared)
    paired = _paired(here.trace, there.trace)
    suffered, gained = (
        {kind: agreement(heads, other[kind], paired) for kind, heads in own.items()}
        for own, other in ((first.suffering, second.suffering), (first.gain, second.gain))
    )
    return Between(first.place, second.place, suffered, gained, {})


def _same_heads(first: Trace, second: Trace) -> bool:
    """Whether two traces are of one model, and of the same layers of it."""
    shapes = {trace.arrays["output_norm"].shape[2:] for trace in (first, second)}
    models = {(trace.run.model, trace.run.revision) for trace in (first, second)}
    return len(shapes) == len(models) == 1 and len({identity(one, ()).measured for one in (first, second)}) == 1


def _paired(first: Trace, second: Trace) -> bool:
    """Whether the traces' samples may be the same prompts, or grow from the same draws: of one data set and seed."""
    here, there = ((one.run.dataset, one.run.seed) for one in (first, second))
    return here == there and np.array_equal(first.ok, second.ok)
