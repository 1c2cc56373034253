"""What a budget has to keep to be called safe: a limit of a mean over samples, and the bound that must hold it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats, measured_steps, values
from perturbkv.analyses.scores import scores
from perturbkv.analyses.stats import one_sided
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

ANALYSIS = "budget"
_SMALLEST = 1e-12
"""Nat: less is rounding, and has no logarithm worth the name."""


@dataclass(frozen=True)
class Criterion:
    """A limit that the mean over samples keeps to.

    Attributes:
        name: `kl` (nat, at most), `drop` (of the score, in [0, 1], at most), `top1` (share, at least).
        limit: in that unit.
    """

    name: str
    limit: float

    @property
    def least(self) -> bool:
        """Whether the limit is one from below."""
        return self.name == "top1"

    def keeps(self, value: float) -> bool:
        """Whether a mean, or its bound, keeps to the limit."""
        return value >= self.limit if self.least else value <= self.limit

    def each(self, trace: Trace) -> Floats:
        """(sample, config) what is limited, a mean over each sample's measured steps. Raises TraceError."""
        if self.name == "drop":
            return _drop(trace)
        steps = np.arange(trace.run.steps) < measured_steps(trace)[:, None]
        if self.name == "top1":
            return _mean(values(trace, "top1_agreement", ANALYSIS), steps[:, None])
        floor = _mean(values(trace, "logit_kl_noise_floor", ANALYSIS), steps)
        kl = _mean(values(trace, "logit_kl", ANALYSIS), steps[:, None])
        return np.asarray(np.maximum(kl, np.maximum(floor, _SMALLEST)[:, None]))

    def bound(self, each: Floats, samples: int | None = None) -> float:
        """The one-sided bound of the mean of (sample,) values, 95 %; as of so many `samples` like these."""
        if self.name == "kl":
            return one_sided.mean_at_most(each, samples)
        if self.name == "drop":
            return 1 - 2 * one_sided.mean_at_least((1 - each) / 2, samples)
        if np.isin(each, (0, 1)).all():
            return one_sided.share_at_least(each > 0, samples)
        return one_sided.mean_at_least(each, samples)

    def above(self, each: Floats) -> float | None:
        """Of KL the exact bound of the share of samples (sample,) that exceed the limit: its mean has none."""
        return 1 - one_sided.share_at_least(each <= self.limit) if self.name == "kl" else None

    def samples_for(self, each: Floats) -> int | None:
        """With how many samples like these the bound would keep to the limit; None where no number is known."""
        return one_sided.samples_for(lambda count: self.keeps(self.bound(each, count)), len(each))


def _drop(trace: Trace) -> Floats:
    """(sample, config) what eviction cost in score. Raises TraceError where there was nothing to lose."""
    found = scores(trace, ANALYSIS)
    if not found.full.any():
        msg = (
            f"the full cache answers none of the {len(found.full)} prompts of {trace.source or 'this trace'} (score "
            "0): there is nothing that eviction can lose; limit KL or the same token, or take prompts that the model "
            "answers"
        )
        raise TraceError(msg)
    return found.drop


def _mean(array: Floats, measured: NDArray[np.bool_]) -> Floats:
    """Over the steps that each sample has."""
    return np.asarray(np.mean(array, axis=-1, where=np.broadcast_to(measured, array.shape)))


def criteria(max_kl: float | None, max_drop: float | None, min_top1: float | None) -> tuple[Criterion, ...]:
    """The limits that are given; `max_drop` in points of 100. Raises ConfigError for none, or one out of its range."""
    asked = {"kl": max_kl, "drop": max_drop, "top1": min_top1}
    if all(limit is None for limit in asked.values()):
        msg = (
            "expected what a safe budget may cost, got nothing; give max_kl (--max-kl 0.1), max_drop (--max-drop 1, "
            "points of 100) or min_top1 (--min-top1 0.99)"
        )
        raise ConfigError(msg)
    return tuple(_criterion(name, limit) for name, limit in asked.items() if limit is not None)


_RANGES = {
    "kl": ("max_kl (--max-kl)", math.inf, "nat"),
    "drop": ("max_drop (--max-drop)", 100, "points of 100"),
    "top1": ("min_top1 (--min-top1)", 1, "a share of tokens, such as 0.99"),
}
"""What each limit is called, what it lies below, and its unit."""


def _criterion(name: str, limit: float) -> Criterion:
    said, most, unit = _RANGES[name]
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < most:
        end = f" and below {most:g}" if most < math.inf else ", finite"
        msg = f"expected {said} above 0{end} ({unit}), got {limit}"
        raise ConfigError(msg)
    return Criterion(name, limit / 100 if name == "drop" else float(limit))
