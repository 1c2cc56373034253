"""A trace's numbers as every analysis takes them, checked, and what the first decode step and the answers give.

A trace's numbers as every analysis takes them: complete samples alone, float64, checked.

What eviction does to the first decode step, as one number per prompt and configuration.

The step reads the answer's first token and gives its second: it is known before the second is there (METHOD: the
protocol, 7). Sums of all heads, relative to the full run's own norms, so that prompts can stand beside each other.

How good the answers of the full and of the evicted caches are, sample by sample, as the data set's metric says.

Answers that eviction can hardly touch: their only token is every cache's alike (METHOD: Generation).

In the regular scenario an answer's first token comes from the prefill, which saw the whole prompt; what is evicted
shows from the second token on. In context-only the question is read over the evicted cache, and no token is alike.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.pairing import counted
from perturbkv.analyses.verdicts import equal_whole
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, TraceError
from perturbkv.schema import VARIABLES
from perturbkv.trace import Trace

Floats = NDArray[np.float64]
EVIDENCE = 0.5
"""Theorem 3 speaks only of heads whose σ exceeds this."""
_UNBOUNDED = frozenset({"theta_hat", "theta_hat_relax"})
"""Infinite where stage 1 holds no attention at all: their slope 2 − 1/σ has no end."""


class Measurements:
    """A trace's complete samples at one decode step, or at all: checked once, then read as float64 arrays.

    Samples whose text ends before the step are left out.

    Attributes:
        trace: with the complete samples that have the step.
        analysis: the command, which refusals name.
        step: the decode step, from 0; None: all of them.

    Raises TraceError where no sample is complete, ConfigError where the trace, or every sample of it, lacks the step.
    """

    def __init__(self, trace: Trace, analysis: str, step: int | None = 0) -> None:
        self.trace = at_step(trace, analysis, step or 0)
        self.analysis, self.step = analysis, step
        self._arrays: dict[str, Floats] = {}

    def __getitem__(self, name: str) -> Floats:
        """Return a variable over the complete samples: (sample, config?, layer?, head?), with steps where step is None.

        Raises TraceError where the trace lacks it, or where a complete sample holds NaN or infinity at a step that it
        measured (bounds of Theorems 3 and 4 may be infinite).
        """
        if name not in self._arrays:
            self._arrays[name] = values(self.trace, name, self.analysis, self.step)
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.trace.arrays

    @property
    def samples(self) -> int:
        """How many samples have the step."""
        return int(self.trace.ok.sum())

    def index(self, config: EvictionConfig) -> int:
        """Return the configuration's index along the axis `config`. Raises TraceError where it is not there."""
        return self.trace.config_index(config.label())

    @cached_property
    def cache_shares(self) -> Floats:
        """(config,) entries of the evicted cache over those of the full one, mean over samples; NaN: unknown."""
        return held_shares(self.trace, self.analysis)

    @cached_property
    def cache_shares_by_sample(self) -> Floats:
        """(sample, config) of the same."""
        return held_by_sample(self.trace, self.analysis)


def at_step(trace: Trace, analysis: str, step: int) -> Trace:
    """The trace without the complete samples whose text ends before `step`: every analysis of one step looks at this.

    Raises TraceError where no sample is complete, ConfigError where the trace, or every sample of it, has no such step.
    """
    if not trace.ok.any():
        msg = f"{analysis} needs at least one complete sample, {trace.source or 'this trace'} has none"
        raise TraceError(msg)
    if not 0 <= step < trace.run.steps:
        msg = f"expected a step from 0 to {trace.run.steps - 1}, got {step}"
        raise ConfigError(msg)
    steps = measured_steps(trace)
    if step >= steps.max():
        msg = f"expected a step from 0 to {steps.max() - 1}, where the longest text ends, got {step}"
        raise ConfigError(msg)
    return trace if (steps > step).all() else _of(trace, steps > step)


def measured_steps(trace: Trace) -> NDArray[np.int64]:
    """Return (sample,) how many decode steps each complete sample has; later ones lie past the end of its text."""
    if "steps_measured" not in trace.arrays:
        return np.full(int(trace.ok.sum()), trace.run.steps)
    return np.asarray(trace.arrays["steps_measured"][trace.ok], dtype=np.int64)


def _of(trace: Trace, held: NDArray[np.bool_]) -> Trace:
    """Return the failed samples, and of the complete ones those that are `held`."""
    stays = ~trace.ok
    stays[trace.ok] = held
    arrays = {
        name: array[stays] if VARIABLES[name].axes[0] == "sample" else array for name, array in trace.arrays.items()
    }
    names = tuple(name for name, stay in zip(trace.sample_ids, stays, strict=True) if stay)
    return dataclasses.replace(trace, sample_ids=names, arrays=arrays)


def values(trace: Trace, name: str, analysis: str, step: int | None = None) -> Floats:
    """A variable over the complete samples, at one decode step where it has steps: (sample, config?, layer?, head?).

    Without `step` a variable that has steps keeps them. Raises TraceError where the trace lacks the variable, or where
    a complete sample holds NaN or infinity at a step that it measured (bounds of theorems 3 and 4 may be infinite).
    """
    array = np.asarray(trace.get(name, analysis), dtype=np.float64)
    dims, steps = VARIABLES[name].dims, measured_steps(trace)
    if "step" not in dims:
        held = array
    else:
        axis = 1 + dims.index("step")
        wanted = np.arange(array.shape[axis]) if step is None else np.array([step])
        array = array.take(wanted, axis=axis)
        held = np.moveaxis(array, axis, 1)[wanted < steps[:, None]]
        array = array if step is None else array.squeeze(axis)
    _check_numbers(trace, name, held)
    return np.asarray(array)


def _check_numbers(trace: Trace, name: str, held: Floats) -> None:
    """Raise TraceError for NaN, and for infinity in what cannot be infinite."""
    wrong = np.isnan(held) if name in _UNBOUNDED else ~np.isfinite(held)
    if wrong.any():
        got = "NaN" if np.isnan(held).any() else "infinity"
        msg = f"expected numbers in every complete sample of {trace.source}, got {got} in '{name}'"
        raise TraceError(msg)


def held_shares(trace: Trace, analysis: str) -> Floats:
    """Return (config,) `held_by_sample`, mean over samples."""
    return np.asarray(held_by_sample(trace, analysis).mean(axis=0))


def held_by_sample(trace: Trace, analysis: str) -> Floats:
    """Return (sample, config) entries that the evicted cache holds over those of the full cache.

    In entries of the model's own cache: a kept set per query head can hold more than the whole grouped cache (METHOD:
    the protocol, 5). A trace that does not say it tells it where one of its configurations keeps a set per key/value
    head, which shows how many of these there are; NaN elsewhere.
    """
    if "held_share" in trace.arrays:
        return values(trace, "held_share", analysis)
    kept, tokens = values(trace, "kept_count", analysis), values(trace, "prompt_tokens", analysis)
    grouped = np.array([config.granularity.name != "query" for config in trace.run.configs])
    heads = kept.shape[-1]
    sets = sets_per_layer(trace, int(np.argmax(grouped))) if grouped.any() else np.nan
    stored = np.where(grouped, heads, sets)  # of a group one head stands for all
    return np.asarray(kept.mean(axis=2).sum(axis=-1) / stored / tokens[:, None])


def prefill_seconds(trace: Trace) -> tuple[Floats, float]:
    """Return (config,) seconds of prefills of their own, NaN where there is none, and of the full one.

    Means over samples.
    """
    if "prefill_seconds" not in trace.arrays:
        return np.full(len(trace.run.configs), np.nan), np.nan
    own, full = (trace.arrays[name][trace.ok] for name in ("prefill_seconds", "prefill_seconds_full"))
    return np.asarray(own.mean(axis=0)), float(full.mean())


def byte_shares(trace: Trace, analysis: str) -> Floats:
    """Return (config,) bytes of the evicted cache over those of the full one in 16 bits, mean over samples.

    Raises TraceError where the trace does not tell.
    """
    held, full = values(trace, "held_bytes", analysis), values(trace, "full_bytes", analysis)
    return np.asarray((held / full[:, None]).mean(axis=0))


def sets_per_layer(trace: Trace, config: int) -> int:
    """Return how many kept sets a layer of the configuration has: heads of a group share one place in the file.

    Raises TraceError where the trace does not hold the kept positions.
    """
    trace.get("kept_offset", "kept sets")
    places = trace.arrays["kept_offset"][trace.ok][0, config]
    return max(len(np.unique(layer)) for layer in places)


def kept_share(trace: Trace, config: int, analysis: str) -> float:
    """Mean share of the prompt's entries that a configuration keeps, over samples, layers and heads; in (0, 1]."""
    kept = values(trace, "kept_count", analysis)[:, config]
    tokens = values(trace, "prompt_tokens", analysis)
    return float((kept.mean(axis=(1, 2)) / tokens).mean())


FIRST_STEP_MEASURES = {
    "isolated": "isolated L1",
    "theta": "θ",
    "propagated": "propagated L1",
    "lost": "1 − S",
}
CIRCULAR_MEASURES = {"kl": "KL, nat", "drift": "last layer's drift"}
"""Of what the step gives, the answer's second token: nearly the score itself."""


def first_step_measures(trace: Trace, analysis: str) -> dict[str, Floats]:
    """Return (sample, config) of each measure, equal where all kept sets are.

    Raises TraceError as `measurements.values`.
    """
    heads = values(trace, "output_norm", analysis, 0).sum(axis=(1, 2))[:, None]
    total = {
        name: values(trace, name, analysis, 0).sum(axis=(2, 3)) / heads
        for name in ("perturbation_isolated", "theta", "perturbation_propagated")
    }
    drift, norm = (values(trace, name, analysis, 0)[..., -1] for name in ("hidden_drift_l1", "hidden_norm"))
    found = {
        "isolated": total["perturbation_isolated"],
        "theta": total["theta"],
        "propagated": total["perturbation_propagated"],
        "lost": 1 - values(trace, "retained_mass", analysis, 0).mean(axis=(2, 3)),
        "kl": values(trace, "logit_kl", analysis, 0),
        "drift": drift / norm[:, None],
    }
    return alike_first_steps(trace, found)


def alike_first_steps(trace: Trace, found: dict[str, Floats]) -> dict[str, Floats]:
    """The (sample, config) arrays with equal values where all kept sets are equal: what differs there is rounding."""
    first = _first_alike(trace)
    return {name: np.take_along_axis(array, first, axis=1) for name, array in found.items()}


def _first_alike(trace: Trace) -> NDArray[np.int64]:
    """Return (sample, config) the first configuration that keeps the same sets everywhere."""
    count, samples = len(trace.run.configs), int(trace.ok.sum())
    first = np.tile(np.arange(count), (samples, 1))
    for later in range(count):
        for earlier in reversed(range(later)):
            same = equal_whole(trace, earlier, later)
            first[same, later] = first[same, earlier]
    return first


@dataclass(frozen=True)
class Scores:
    """Scores in [0, 1] of the complete samples.

    Attributes:
        full: (sample,) of the full cache's answers.
        evicted: (sample, config) of each configuration's.
    """

    full: Floats
    evicted: Floats

    @property
    def drop(self) -> Floats:
        """(sample, config) what eviction cost; negative where the evicted cache answers better."""
        return self.full[:, None] - self.evicted


def scores(trace: Trace, analysis: str) -> Scores:
    """Return the scores of a trace; `analysis` is who asks.

    Raises TraceError where no answers were generated, or where no metric graded one of them.
    """
    if "score_full" not in trace.arrays:
        msg = (
            f"{analysis} needs graded answers, {trace.source or 'this trace'} has none; make a trace that has them: "
            f"perturbkv quality --model {trace.run.model} --dataset {trace.run.dataset}"
        )
        raise TraceError(msg)
    full, evicted = (np.asarray(trace.get(name, analysis), dtype=np.float64) for name in ("score_full", "score"))
    if ungraded := int((np.isnan(full) | np.isnan(evicted).any(axis=1)).sum()):
        msg = (
            f"{analysis} needs graded answers, got none in {ungraded} of {len(full)} samples of "
            f"{trace.source or 'this trace'}; measure prompts that have accepted answers"
        )
        raise TraceError(msg)
    return Scores(full, evicted)


def only_alike(trace: Trace) -> NDArray[np.bool_]:
    """(sample,) of the complete samples: True where the full cache's answer has no token but one that all share."""
    if trace.run.scenario != "regular" or "generated_full" not in trace.arrays:
        return np.zeros(int(trace.ok.sum()), dtype=bool)
    tokens = np.asarray(trace.arrays["generated_full"][trace.ok], dtype=np.int64)
    return np.asarray((tokens >= 0).sum(axis=1) <= 1)


def first_token_caveat(alike: int, samples: int) -> list[str]:
    """Return in how many samples the answer cannot be lost; nothing where there are none."""
    few = f"In {alike} of {counted(samples, 'sample')} the full cache's answer is one token or none, alike for all."
    return [few] if alike else []


def about_first_token(alike: int, samples: int) -> str:
    """What a note says of so many of so many samples; empty of none."""
    if not alike:
        return ""
    return (
        f"In {alike} of {counted(samples, 'sample')} the full cache's answer is one token or none: in the regular "
        "scenario that token comes from the prefill, alike for all caches. Such an answer cannot be lost but by what "
        "is added to it, at whatever budget; context-only has no such token."
    )
