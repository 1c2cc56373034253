"""Does the error grow while the model decodes on, and in which heads? (An open question of the paper.).

The tokens are the full run's own, so both runs read the same text; what grows is the error that evicted entries leave
in later tokens' keys and values, and what shrinks is the evicted entries' share of a growing cache. Steps end where a
sample's text ends: each step is of the samples that have it, and growth of each sample's own last and first third.
Rounding does not grow: what is within two noise floors has no growth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import intervals, sign_flips
from perturbkv.analyses.arithmetic import plain, ratio
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.intervals import POSITIVE, RATIO, Band, Interval, Kind, Scalar
from perturbkv.analyses.pairing import of_selection
from perturbkv.analyses.reading import Floats, at_step, held_shares, measured_steps, values
from perturbkv.analyses.sign_flips import Decided
from perturbkv.analyses.verdicts import TIE_FLOORS
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError
from perturbkv.trace import Trace

ANALYSIS = "horizon"
KINDS = {"propagated": "perturbation_propagated", "isolated": "perturbation_isolated"}
_FLOORS = {"propagated": "noise_floor", "isolated": "noise_floor_isolated"}
LEAST_STEPS = 3


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


@dataclass(frozen=True)
class Horizon:
    """Every configuration that was asked for.

    Attributes:
        identity: which run this is.
        steps: T, of the longest text.
        samples_at: (step,) how many samples have the step.
        grown: samples of at least three steps, of which growth is told; `short`: the others.
        configs: by budget, then selection.
        noise_floor: (step,) the propagated curve of the run that keeps everything.
    """

    identity: RunIdentity
    steps: int
    samples_at: NDArray[np.int64]
    grown: int
    short: int
    configs: tuple[ConfigHorizon, ...]
    noise_floor: Floats

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "steps": self.steps,
                "samples_at_step": self.samples_at,
                "samples_with_growth": self.grown,
                "samples_too_short_for_growth": self.short,
                "noise_floor": self.noise_floor,
                "configs": [
                    {**vars(config), "curves": [_curve_dict(curve) for curve in config.curves.values()]}
                    for config in self.configs
                ],
            }
        )
        return found


def _curve_dict(curve: Curve) -> dict[str, Any]:
    numbers = {name: value for name, value in vars(curve).items() if name != "decided"}
    return {**numbers, "head_verdict": curve.head_verdict, "sign_flips": curve.decided.to_dict()}


@dataclass(frozen=True)
class _Steps:
    """Which steps each sample has: `held` (sample, step), and of those of three steps or more the two thirds."""

    held: NDArray[np.bool_]

    @property
    def long(self) -> NDArray[np.bool_]:
        """(sample,) True for three steps or more."""
        return np.asarray(self.held.sum(axis=1) >= LEAST_STEPS)

    def thirds(self) -> tuple[Floats, Floats]:
        """(sample, step) shares of the first and of the last third of the steps of each long sample."""
        counts = self.held[self.long].sum(axis=1)
        step, third = np.arange(self.held.shape[1]), (counts // 3)[:, None]
        last = (step >= counts[:, None] - third) & (step < counts[:, None])
        return (step < third) / third, last / third


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


def summarise(trace: Trace, sides: list[str]) -> Horizon:
    """Curves of the configurations of `sides` (selections, policies, or policy:selection).

    Raises ConfigError where no text has three decode steps, TraceError where a side is not there.
    """
    at_step(trace, ANALYSIS, 0)
    counts = measured_steps(trace)
    if counts.max() < LEAST_STEPS:
        msg = f"{ANALYSIS} needs at least {LEAST_STEPS} decode steps, got a trace of {counts.max()}; use --steps 32"
        raise ConfigError(msg)
    places = list(dict.fromkeys(place for side in sides for place in of_selection(trace.run, side)))
    held = held_shares(trace, ANALYSIS)
    steps = _Steps(np.arange(counts.max()) < counts[:, None])
    norm, *floors = (_get(trace, name, steps) for name in ("output_norm", *_FLOORS.values()))
    return Horizon(
        identity=identity(trace, [trace.run.configs[place] for place in places]),
        steps=int(counts.max()),
        samples_at=steps.held.sum(axis=0),
        grown=int(steps.long.sum()),
        short=int((~steps.long).sum()),
        configs=tuple(
            _config(trace, place, float(held[place]), norm, dict(zip(_FLOORS, floors, strict=True)), steps)
            for place in places
        ),
        noise_floor=np.asarray(ratio(*_sums(floors[0], norm))),
    )


def _get(trace: Trace, name: str, steps: _Steps, config: int | None = None) -> Floats:
    """(sample, step, …) of one configuration, 0 at the steps that a sample has not: sums leave these out."""
    array = values(trace, name, ANALYSIS)
    array = (array if config is None else array[:, config])[:, : steps.held.shape[1]]
    held = steps.held.reshape(*steps.held.shape, *[1] * (array.ndim - 2))
    return np.where(held, array, 0.0)


def _config(
    trace: Trace, place: int, held: float, norm: Floats, floors: dict[str, Floats], steps: _Steps
) -> ConfigHorizon:
    counts, kl = steps.held.sum(axis=0), _get(trace, "logit_kl", steps, place)
    return ConfigHorizon(
        config=trace.run.configs[place],
        held=held,
        curves={
            kind: _curve(kind, _get(trace, name, steps, place), norm, floors[kind], steps)
            for kind, name in KINDS.items()
        },
        kl=kl.sum(axis=0) / counts,
        kl_interval=_step_intervals(kl, np.ones_like(kl), steps.held, POSITIVE),
        top1=_get(trace, "top1_agreement", steps, place).sum(axis=0) / counts,
    )


def _curve(kind: str, moved: Floats, norm: Floats, floor: Floats, steps: _Steps) -> Curve:
    """`moved`, `norm` and `floor` are (sample, step, layer, head)."""
    early, late = (
        [np.einsum("st,st...->s...", third, part[steps.long]) for part in (moved, norm, floor)]
        for third in steps.thirds()
    )
    total, heads, each = (
        _Growth.of([add(part) for part in early], [add(part) for part in late])
        for add in (np.sum, partial(np.sum, axis=0), np.asarray)
    )
    weighed = partial(_growth, early=early[:2], late=late[:2])
    return Curve(
        kind=kind,
        relative=np.asarray(ratio(*_sums(moved, norm))),
        relative_interval=_step_intervals(moved.sum(axis=(2, 3)), norm.sum(axis=(2, 3)), steps.held, RATIO),
        first=float(total.first),
        last=float(total.last),
        growth=float(total.factor),
        growth_interval=intervals.scalar(weighed, len(early[0]), RATIO) if total.above else None,
        head_growth=heads.factor,
        decided=sign_flips.decide(each.logarithm),
    )


def _sums(moved: Floats, norm: Floats) -> tuple[Floats, Floats]:
    """(step,) each, over samples and heads."""
    return moved.sum(axis=(0, 2, 3)), norm.sum(axis=(0, 2, 3))


def _growth(weights: Floats, early: list[Floats], late: list[Floats]) -> Floats:
    """(row,) relative perturbation of the last third over that of the first; both hold perturbation and norm."""
    first, last = (ratio(*(weights @ part.sum(axis=(1, 2)) for part in third)) for third in (early, late))
    return np.asarray(ratio(last, first))


def _step_intervals(tops: Floats, bottoms: Floats, held: NDArray[np.bool_], kind: Kind) -> Band:
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
