"""Does one selection's lead over another last? Perturbation of both in the first and in the last third of the steps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.horizon.thirds import Steps, taken
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.pairing import Pair, pairs
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain, ratio
from perturbkv.analyses.stats.intervals import RATIO, Scalar
from perturbkv.analyses.verdicts import TIE_FLOORS
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_VARIABLE = "perturbation_propagated"


@dataclass(frozen=True)
class Lead:
    """Two configurations that differ in selection, or policy, alone.

    Attributes:
        baseline, treatment: the configurations.
        first, last: Σ L of the treatment over the baseline's, propagated, of all heads and samples, in each sample's
            first and last third of its steps; NaN where one of the two is within two noise floors.
        first_interval, last_interval: over samples.
    """

    baseline: EvictionConfig
    treatment: EvictionConfig
    first: float
    first_interval: Scalar
    last: float
    last_interval: Scalar

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(vars(self))
        return found


def leads(trace: Trace, sides: Sequence[str], steps: Steps) -> tuple[Lead, ...]:
    """Each later side against the first, wherever the trace holds both alike in everything else."""
    configs, floors = trace.run.configs, steps.thirds(taken(trace, "noise_floor", steps))
    return tuple(
        _lead(pair, floors, *(steps.thirds(taken(trace, _VARIABLE, steps, configs.index(one))) for one in pair))
        for side in sides[1:]
        for pair in _pairs(trace.run, sides[0], side)
    )


def _pairs(run: RunConfig, baseline: str, treatment: str) -> list[Pair]:
    """The pairs, or none: the curves of two sides can be shown that nothing else makes comparable."""
    with contextlib.suppress(TraceError):
        return pairs(run, baseline, treatment)
    return []


_Thirds = tuple[list[Floats], list[Floats]]


def _lead(pair: Pair, floors: _Thirds, baseline: _Thirds, treatment: _Thirds) -> Lead:
    """Each third is a list of one (sample, layer, head) array."""
    (first, first_interval), (last, last_interval) = (
        _ratio(*(parts[0].sum(axis=(1, 2)) for parts in third))
        for third in zip(treatment, baseline, floors, strict=True)
    )
    return Lead(*pair, first, first_interval, last, last_interval)


def _ratio(treatment: Floats, baseline: Floats, floor: Floats) -> tuple[float, Scalar]:
    """Of (sample,) sums, with its interval; NaN and None within noise."""
    if min(treatment.sum(), baseline.sum()) <= TIE_FLOORS * floor.sum():
        return float("nan"), None
    found = intervals.scalar(
        lambda weights: np.asarray(ratio(weights @ treatment, weights @ baseline)), len(baseline), RATIO
    )
    return float(ratio(treatment.sum(), baseline.sum())), found
