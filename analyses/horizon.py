"""Does the error grow while the model decodes on, and in which heads? (An open question of the paper.).

The tokens are the full run's own, so both runs read the same text; what grows is the error that evicted entries leave
in later tokens' keys and values, and what shrinks is the evicted entries' share of a growing cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.arithmetic import plain, ratio
from perturbkv.analyses.bootstrap import RESAMPLES, Interval, interval, intervals
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.pairing import of_selection
from perturbkv.analyses.reading import Floats, check
from perturbkv.errors import ConfigError
from perturbkv.trace import Trace

ANALYSIS = "horizon"
KINDS = {"propagated": "perturbation_propagated", "isolated": "perturbation_isolated"}
LEAST_STEPS = 3


@dataclass(frozen=True)
class Curve:
    """One kind of perturbation of one configuration over the decode steps.

    Attributes:
        kind: a key of `KINDS`.
        relative: (step,) Σ_h L / Σ_h ‖o_h‖₁ over all heads and samples.
        relative_interval: (2, step) over samples; None for one sample.
        growth: mean of the last third of the steps over that of the first third.
        growth_interval: of it.
        head_growth: (layer, head) the same of each head; NaN where the first third is 0.
        head_verdict: (layer, head) 1 grows, −1 shrinks, 0 where the interval holds 1; without intervals, by the value.
    """

    kind: str
    relative: Floats
    relative_interval: Floats | None
    growth: float
    growth_interval: Interval
    head_growth: Floats
    head_verdict: NDArray[np.int8]


@dataclass(frozen=True)
class ConfigHorizon:
    """One configuration: its curves by kind, and per step KL in nat and the share of samples with the same token."""

    label: str
    curves: dict[str, Curve]
    kl: Floats
    top1: Floats


@dataclass(frozen=True)
class Horizon:
    """Every configuration that was asked for.

    Attributes:
        identity: which run this is.
        steps: T.
        third: steps that begin and end are the mean of.
        configs: by budget, then selection.
        noise_floor: (step,) the propagated curve of the run that keeps everything.
    """

    identity: RunIdentity
    steps: int
    third: int
    configs: tuple[ConfigHorizon, ...]
    noise_floor: Floats

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "steps": self.steps,
                "third": self.third,
                "noise_floor": self.noise_floor,
                "configs": [
                    {**vars(config), "curves": [vars(curve) for curve in config.curves.values()]}
                    for config in self.configs
                ],
            }
        )
        return found


def summarise(trace: Trace, sides: list[str], resamples: int = RESAMPLES, seed: int = 0) -> Horizon:
    """Curves of the configurations of `sides` (selections, policies, or policy:selection).

    Raises ConfigError for fewer than three decode steps, TraceError where a side is not there.
    """
    check(trace, ANALYSIS, 0)
    if trace.run.steps < LEAST_STEPS:
        msg = f"{ANALYSIS} needs at least {LEAST_STEPS} decode steps, got a trace of {trace.run.steps}; use --steps 32"
        raise ConfigError(msg)
    places = list(dict.fromkeys(place for side in sides for place in of_selection(trace.run, side)))
    labels = [trace.run.labels()[place] for place in places]
    norm = _get(trace, "output_norm")
    return Horizon(
        identity=identity(trace, labels),
        steps=trace.run.steps,
        third=trace.run.steps // 3,
        configs=tuple(_config(trace, place, norm, resamples, seed) for place in places),
        noise_floor=_share(np.ones(len(norm)) / len(norm), _get(trace, "noise_floor"), norm),
    )


def _get(trace: Trace, name: str) -> Floats:
    return np.asarray(trace.get(name, ANALYSIS), dtype=np.float64)


def _config(trace: Trace, place: int, norm: Floats, resamples: int, seed: int) -> ConfigHorizon:
    curves = {kind: _curve(kind, _get(trace, name)[:, place], norm, resamples, seed) for kind, name in KINDS.items()}
    return ConfigHorizon(
        label=trace.run.labels()[place],
        curves=curves,
        kl=_get(trace, "logit_kl")[:, place].mean(axis=0),
        top1=_get(trace, "top1_agreement")[:, place].mean(axis=0),
    )


def _curve(kind: str, moved: Floats, norm: Floats, resamples: int, seed: int) -> Curve:
    """`moved` and `norm` are (sample, step, layer, head)."""
    samples = len(moved)
    even = np.ones(samples) / samples
    heads = _growth(even, moved, norm)
    ends = intervals(lambda weights: _growth(weights, moved, norm), samples, resamples, seed)
    return Curve(
        kind=kind,
        relative=_share(even, moved, norm),
        relative_interval=intervals(lambda weights: _share(weights, moved, norm), samples, resamples, seed),
        growth=float(_total_growth(even, moved, norm)),
        growth_interval=interval(lambda weights: _total_growth(weights, moved, norm), samples, resamples, seed),
        head_growth=heads,
        head_verdict=_verdict(heads, ends),
    )


def _share(weights: Floats, moved: Floats, norm: Floats) -> Floats:
    """(…, step): Σ over samples and heads of the one over that of the other; weights (…, sample)."""
    return np.asarray(ratio(weights @ moved.sum(axis=(2, 3)), weights @ norm.sum(axis=(2, 3))))


def _total_growth(weights: Floats, moved: Floats, norm: Floats) -> Floats:
    relative = _share(weights, moved, norm)
    third = moved.shape[1] // 3
    return np.asarray(ratio(relative[..., -third:].mean(axis=-1), relative[..., :third].mean(axis=-1)))


def _growth(weights: Floats, moved: Floats, norm: Floats) -> Floats:
    """(…, layer, head): each head's relative perturbation in the last third of the steps over that in the first."""
    third, shape = moved.shape[1] // 3, moved.shape[2:]

    def share(steps: slice) -> Floats:
        pieces = (array[:, steps].sum(axis=1).reshape(len(array), -1) for array in (moved, norm))
        top, bottom = (weights @ piece for piece in pieces)
        return np.asarray(ratio(top, bottom))

    late, early = share(slice(-third, None)), share(slice(0, third))
    return np.asarray(ratio(late, early)).reshape(*weights.shape[:-1], *shape)


def _verdict(heads: Floats, ends: Floats | None) -> NDArray[np.int8]:
    low, high = (heads, heads) if ends is None else ends
    return np.where(low > 1, 1, np.where(high < 1, -1, 0)).astype(np.int8)
