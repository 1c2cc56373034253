"""What each head of a trace suffers in each sample: relative L1, and what a treatment gains on a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perturbkv.analyses.horizon.growth import KINDS
from perturbkv.analyses.horizon.thirds import LEAST_STEPS, Steps, taken
from perturbkv.analyses.measurements import Floats, at_step, measured_steps, values
from perturbkv.analyses.pairing import of_selection
from perturbkv.analyses.questions.stability.name_meant import one_meant
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.configs import layer_types
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, TraceError
from perturbkv.schema import MEASURED
from perturbkv.trace import Trace

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
