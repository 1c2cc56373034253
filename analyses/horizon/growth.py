"""Perturbation per decode step, and its growth from the first third of the steps to the last, of all heads and of each.

Rounding does not grow: what is within two noise floors has no growth.

The decode steps that each sample has, and the first and last third of them.

Does one selection's lead over another last? Perturbation of both in the first and in the last third of the steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats, measured_steps, values
from perturbkv.analyses.pairing import Pair, pairs
from perturbkv.analyses.stats import intervals, permutation
from perturbkv.analyses.stats.arithmetic import plain, ratio
from perturbkv.analyses.stats.intervals import POSITIVE, RATIO, Band, Interval, Kind, Scalar
from perturbkv.analyses.stats.permutation import Decided
from perturbkv.analyses.verdicts import TIE_FLOORS
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

ANALYSIS = "horizon"
LEAST_STEPS = 3


@dataclass(frozen=True)
class Steps:
    """Which steps each sample has: `held` (sample, step), and of those of three steps or more the two thirds."""

    held: NDArray[np.bool_]

    @property
    def long(self) -> NDArray[np.bool_]:
        """(sample,) True for three steps or more."""
        return np.asarray(self.held.sum(axis=1) >= LEAST_STEPS)

    def thirds(self, *arrays: Floats) -> tuple[list[Floats], list[Floats]]:
        """Means of (sample, step, …) arrays over the first and over the last third of the steps: (long sample, …).

        Each long sample has thirds of its own steps.
        """
        first, last = (
            [np.einsum("st,st...->s...", third, array[self.long]) for array in arrays] for third in self._weights()
        )
        return first, last

    def _weights(self) -> tuple[Floats, Floats]:
        """(long sample, step) what each step weighs in the first and in the last third."""
        counts = self.held[self.long].sum(axis=1)
        step, third = np.arange(self.held.shape[1]), (counts // 3)[:, None]
        last = (step >= counts[:, None] - third) & (step < counts[:, None])
        return (step < third) / third, last / third


def steps_of(trace: Trace) -> Steps:
    """The steps of a trace's complete samples. Raises ConfigError where no text has three of them."""
    counts = measured_steps(trace)
    if counts.max() < LEAST_STEPS:
        msg = f"{ANALYSIS} needs at least {LEAST_STEPS} decode steps, got a trace of {counts.max()}; use --steps 32"
        raise ConfigError(msg)
    return Steps(np.arange(counts.max()) < counts[:, None])


def taken(trace: Trace, name: str, steps: Steps, config: int | None = None) -> Floats:
    """(sample, step, …) of one configuration, 0 at the steps that a sample has not: sums leave these out."""
    array = values(trace, name, ANALYSIS)
    array = (array if config is None else array[:, config])[:, : steps.held.shape[1]]
    held = steps.held.reshape(*steps.held.shape, *[1] * (array.ndim - 2))
    return np.where(held, array, 0.0)


KINDS = {"propagated": "perturbation_propagated", "isolated": "perturbation_isolated"}
FLOORS = {"propagated": "noise_floor", "isolated": "noise_floor_isolated"}


@dataclass(frozen=True)
class Curve:
    """One kind of perturbation of one configuration over the decode steps.

    Attributes:
        kind: a key of `KINDS`.
        relative: (step,) Σ_h L / Σ_h ‖o_h‖₁ over all heads and the samples that have the step.
        relative_interval: over these samples; NaN where fewer than two have the step; None for one sample.
        first, last: the same over each sample's first and last third of its steps.
        growth: last over first; NaN where either is within two noise floors.
        growth_interval: of it, over the samples of three steps or more.
        head_growth: (layer, head) the same of each head.
        decided: which heads grow (1) or shrink (−1) beyond chance, by their samples' log growth.
    """

    kind: str
    relative: Floats
    relative_interval: Band
    first: float
    last: float
    growth: float
    growth_interval: Scalar
    head_growth: Floats
    decided: Decided

    @property
    def head_verdict(self) -> NDArray[np.int8]:
        """(layer, head) 1 grows, −1 shrinks, 0 undecided."""
        return self.decided.verdict

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        told = {name: value for name, value in vars(self).items() if name != "decided"}
        found: dict[str, Any] = plain({**told, "head_verdict": self.head_verdict, "sign_flips": self.decided.to_dict()})
        return found


@dataclass(frozen=True)
class ConfigHorizon:
    """One configuration.

    Attributes:
        config: the configuration.
        held: entries that its cache holds over those of the full cache; NaN where the trace does not tell.
        curves: by kind.
        kl, top1: (step,) mean KL in nat, and the share of samples with the same token, of the samples with the step.
        kl_interval: of the mean KL, over these samples; NaN and None as of `Curve.relative_interval`.
    """

    config: EvictionConfig
    held: float
    curves: dict[str, Curve]
    kl: Floats
    kl_interval: Band
    top1: Floats

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain({**vars(self), "curves": [curve.to_dict() for curve in self.curves.values()]})
        return found


@dataclass(frozen=True)
class _Growth:
    """Relative perturbation of the first third and of the last, and two noise floors: the larger third's."""

    first: Floats
    last: Floats
    noise: Floats

    @classmethod
    def of(cls, early: list[Floats], late: list[Floats]) -> _Growth:
        """Of both thirds' perturbation, norm and noise floor."""
        (first, floor), (last, later) = (
            [np.asarray(ratio(part, norm)) for part in (moved, noise)] for moved, norm, noise in (early, late)
        )
        return cls(first, last, TIE_FLOORS * np.maximum(floor, later))

    @property
    def above(self) -> NDArray[np.bool_]:
        """True where both thirds exceed the noise."""
        return np.asarray((self.first > self.noise) & (self.last > self.noise))

    @property
    def factor(self) -> Floats:
        """Last over first; NaN where one of them may be noise."""
        return np.where(self.above, ratio(self.last, self.first), np.nan)

    @property
    def logarithm(self) -> Floats:
        """Of the factor; 0, no evidence, where a third, or the difference of both, may be noise."""
        there = self.above & (np.abs(self.last - self.first) > self.noise)
        return np.where(there, np.log(np.where(there, self.factor, 1.0)), 0.0)


def followed(
    trace: Trace, place: int, held: float, norm: Floats, floors: dict[str, Floats], steps: Steps
) -> ConfigHorizon:
    """One configuration over the steps; `norm` and `floors`, by kind, are (sample, step, layer, head)."""
    counts, kl = steps.held.sum(axis=0), taken(trace, "logit_kl", steps, place)
    return ConfigHorizon(
        config=trace.run.configs[place],
        held=held,
        curves={
            kind: _curve(kind, taken(trace, name, steps, place), norm, floors[kind], steps)
            for kind, name in KINDS.items()
        },
        kl=kl.sum(axis=0) / counts,
        kl_interval=step_intervals(kl, np.ones_like(kl), steps.held, POSITIVE),
        top1=taken(trace, "top1_agreement", steps, place).sum(axis=0) / counts,
    )


def _curve(kind: str, moved: Floats, norm: Floats, floor: Floats, steps: Steps) -> Curve:
    """`moved`, `norm` and `floor` are (sample, step, layer, head)."""
    early, late = steps.thirds(moved, norm, floor)
    total, heads, each = (
        _Growth.of(*([np.asarray(add(part)) for part in third] for third in (early, late)))
        for add in (np.sum, partial(np.sum, axis=0), np.asarray)
    )
    weighed = partial(_growth, early=early[:2], late=late[:2])
    return Curve(
        kind=kind,
        relative=relative(moved, norm),
        relative_interval=step_intervals(moved.sum(axis=(2, 3)), norm.sum(axis=(2, 3)), steps.held, RATIO),
        first=float(total.first),
        last=float(total.last),
        growth=float(total.factor),
        growth_interval=intervals.scalar(weighed, len(early[0]), RATIO) if total.above else None,
        head_growth=heads.factor,
        decided=permutation.decide(each.logarithm),
    )


def relative(moved: Floats, norm: Floats) -> Floats:
    """(step,) Σ moved / Σ norm over samples and heads, of (sample, step, layer, head) each."""
    return np.asarray(ratio(moved.sum(axis=(0, 2, 3)), norm.sum(axis=(0, 2, 3))))


def _growth(weights: Floats, early: list[Floats], late: list[Floats]) -> Floats:
    """(row,) relative perturbation of the last third over that of the first; both hold perturbation and norm."""
    first, last = (ratio(*(weights @ part.sum(axis=(1, 2)) for part in third)) for third in (early, late))
    return np.asarray(ratio(last, first))


def step_intervals(tops: Floats, bottoms: Floats, held: NDArray[np.bool_], kind: Kind) -> Band:
    """Each step's interval of Σ top / Σ bottom over the samples that have it, (sample, step) both.

    NaN where these are too few for the others' kind.
    """
    found = [
        _step_interval(top[rows], bottom[rows], kind)
        for top, bottom, rows in zip(tops.T, bottoms.T, held.T, strict=True)
    ]
    if found[0] is None:
        return None
    kept = [one if one is not None and one.kind == found[0].kind else None for one in found]
    low, high = (np.array([np.nan if one is None else getattr(one, end) for one in kept]) for end in ("low", "high"))
    return Interval(low, high, found[0].kind)


def _step_interval(top: Floats, bottom: Floats, kind: Kind) -> Scalar:
    return intervals.scalar(lambda weights: np.asarray(ratio(weights @ top, weights @ bottom)), len(top), kind)


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
