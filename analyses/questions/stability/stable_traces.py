"""One trace's heads, ranked by what they suffer and gain; and two traces' against each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perturbkv.analyses.identity import identity
from perturbkv.analyses.measurements import Floats, values
from perturbkv.analyses.questions.stability.depths import Depth, alike, depth, profiles
from perturbkv.analyses.questions.stability.head_profiles import ANALYSIS, Suffering
from perturbkv.analyses.questions.stability.rank_reliability import (
    Agreement,
    Heads,
    Ranked,
    Reliability,
    agreement,
    reliability,
)
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.estimates import Estimate
from perturbkv.analyses.stats.intervals import CORRELATION
from perturbkv.analyses.stats.rank_correlation import spearman
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace


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
        over_steps={kind: _over_steps(one.early[kind], late) for kind, late in one.late.items()},
        depth={kind: depth(each, one.places) for kind, each in one.relative.items()},
    )


def _over_steps(early: Floats, late: Floats) -> Estimate:
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
