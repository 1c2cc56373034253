"""L/θ, L/θ̂, θ/θ̂ and θ̂/θ̂_relax per configuration, layer and head (paper, Theorems 2–4).

Do the bounds bound? L ≤ θ ≤ θ̂ always, θ̂ ≤ θ̂_relax where σ > 0.5 (paper, Theorems 2–4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import EVIDENCE, Floats, values
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain, quantiles, ratio
from perturbkv.analyses.stats.intervals import Scalar, rare_share_of
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import BoundError, TraceError
from perturbkv.trace import Trace

RELATIVE_SLACK = 1e-5
"""θ is made of norms ν in float32, L of float64 products: their rounding is no violation."""
ABSOLUTE_SLACK = 1e-12
"""Of ‖o_h‖₁: where nearly everything is kept both sides are what is left of a float64 subtraction."""


@dataclass(frozen=True)
class Bounded:
    """L and its bounds, (sample, config, layer, head) each, or (sample, layer, head) of one configuration.

    Attributes:
        perturbation: L, isolated.
        theta, theta_hat, theta_hat_relax: its bounds.
        sigma: of stage 1 and the always-kept entries.
        mass: S.
        scale: ‖o_h‖₁, with an axis for `config` of length 1.
        evicted: (sample, config) True where the configuration evicted anything of the sample.
        configs, sample_ids, layers: of the axes.
    """

    perturbation: Floats
    theta: Floats
    theta_hat: Floats
    theta_hat_relax: Floats
    sigma: Floats
    mass: Floats
    scale: Floats
    evicted: NDArray[np.bool_]
    configs: tuple[EvictionConfig, ...]
    sample_ids: tuple[str, ...]
    layers: tuple[int, ...]

    def of(self, config: int) -> Bounded:
        """One configuration, over the samples of which it evicted anything."""
        held = self.evicted[:, config]
        arrays = {
            field.name: getattr(self, field.name)[held, 0 if field.name == "scale" else config]
            for field in fields(self)
            if field.name not in ("configs", "sample_ids", "layers")
        }
        names = tuple(name for name, there in zip(self.sample_ids, held, strict=True) if there)
        return Bounded(**arrays, configs=(self.configs[config],), sample_ids=names, layers=self.layers)


def of_eviction(trace: Trace) -> tuple[Trace, tuple[EvictionConfig, ...]]:
    """The part of a trace of which the theorems speak, and the configurations that it so lacks.

    Those are in few bits, or corrected for what went.

    Raises TraceError where nothing is left.
    """
    others = tuple(config for config in trace.run.configs if not config.evicts_alone)
    if not others:
        return trace, ()
    if len(others) == len(trace.run.configs):
        msg = (
            "expected an uncorrected configuration in full precision, as bounds speak of eviction alone, got "
            f"{', '.join(config.label() for config in others)}"
        )
        raise TraceError(msg)
    part = trace.sel(where=lambda config: config.evicts_alone)
    return replace(part, source=trace.source, digest=trace.digest), others


def about_others(others: Sequence[EvictionConfig]) -> str:
    """What a caption says of configurations that were left out; empty where there are none."""
    labels = ", ".join(config.label() for config in others)
    said = "bounds speak of eviction alone, not of few bits or corrected outputs"
    return f" Left out, as {said}: {labels}." if others else ""


def bounded(trace: Trace, analysis: str, step: int) -> Bounded:
    """L and its bounds out of a trace. Raises TraceError as `measurements.values`."""
    names = {
        "perturbation": "perturbation_isolated",
        "theta": "theta",
        "theta_hat": "theta_hat",
        "theta_hat_relax": "theta_hat_relax",
        "sigma": "sigma_stage1",
        "mass": "retained_mass",
    }
    arrays = {field: values(trace, name, analysis, step) for field, name in names.items()}
    complete = tuple(name for name, whole in zip(trace.sample_ids, trace.ok, strict=True) if whole)
    return Bounded(
        **arrays,
        scale=values(trace, "output_norm", analysis, step)[:, None],
        evicted=values(trace, "evicted", analysis) > 0,
        configs=trace.run.configs,
        sample_ids=complete,
        layers=tuple(map(trace.layer_name, range(arrays["theta"].shape[2]))),
    )


def check_inequalities(held: Bounded) -> dict[str, int]:
    """How many values each inequality was checked on. Raises BoundError at the first violation."""
    everywhere = np.broadcast_to(held.evicted[:, :, None, None], held.theta.shape)
    return {
        "L ≤ θ": _check("L", held.perturbation, "θ", held.theta, held, everywhere),
        "θ ≤ θ̂": _check("θ", held.theta, "θ̂", held.theta_hat, held, everywhere),
        "θ̂ ≤ θ̂_relax": _check(
            "θ̂", held.theta_hat, "θ̂_relax", held.theta_hat_relax, held, everywhere & (held.sigma > EVIDENCE)
        ),
    }


def _check(below: str, lower: Floats, above: str, upper: Floats, held: Bounded, where: NDArray[np.bool_]) -> int:
    slack = RELATIVE_SLACK * np.abs(upper) + ABSOLUTE_SLACK * held.scale
    violated = where & (lower > upper + slack)
    if violated.any():
        sample, config, layer, head = (int(place) for place in np.argwhere(violated)[0])
        msg = f"{below} ≤ {above}"
        raise BoundError(
            msg,
            f"{lower[sample, config, layer, head]:.6g} > {upper[sample, config, layer, head]:.6g}",
            f"layer {held.layers[layer]}, head {head} of sample '{held.sample_ids[sample]}', "
            f"'{held.configs[config].label()}'",
            int(violated.sum()),
        )
    return int(where.sum())


RATIOS = ("L/θ", "L/θ̂", "θ/θ̂", "θ̂/θ̂_relax")
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
OVER_SAMPLES = (0.0, 0.5, 1.0)
"""Per head there are few values, one per sample: least, median, largest."""
MASS_EDGES = np.linspace(0, 1, 21)


@dataclass(frozen=True)
class Spread:
    """How one ratio is distributed over samples and heads.

    Attributes:
        evidence: (level,) quantiles at `LEVELS` where σ > 0.5; NaN where no sample of any head has it.
        flagged: the same where σ ≤ 0.5: shown, never counted as evidence.
        by_layer: (level, layer) quantiles over samples and heads with σ > 0.5.
        by_head: (least/median/largest, layer, head) over all samples; `Tightness.flagged_heads` says where σ ≤ 0.5.
    """

    evidence: Floats
    flagged: Floats
    by_layer: Floats
    by_head: Floats


@dataclass(frozen=True)
class MassCurve:
    """L/θ against the retained mass S.

    Attributes:
        count: (bin,) values, one per sample and head, in each bin between `MASS_EDGES`.
        quantiles: (level, bin) of L/θ at `LEVELS`.
    """

    count: NDArray[np.int64]
    quantiles: Floats


@dataclass(frozen=True)
class Tightness:
    """One configuration's bounds.

    Attributes:
        config: the configuration.
        held: entries that its cache holds over those of the full cache; NaN where the trace does not tell.
        evicted_samples: samples in which it evicted anything; only these are looked at.
        spreads: ratio -> its distribution.
        mass: L/θ against S.
        retained_mass: mean S.
        flagged_share: share of (sample, head) with σ ≤ 0.5, with its interval over samples.
        flagged_heads: (layer, head) share of the samples in which σ ≤ 0.5.
    """

    config: EvictionConfig
    held: float
    evicted_samples: int
    spreads: dict[str, Spread]
    mass: MassCurve
    retained_mass: float
    flagged_share: float
    flagged_share_interval: Scalar
    flagged_heads: Floats

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        document: dict[str, Any] = plain(
            {
                "config": self.config,
                "held_over_full": self.held,
                "evicted_samples": self.evicted_samples,
                "retained_mass": self.retained_mass,
                "sigma_at_most_half_share": self.flagged_share,
                "sigma_at_most_half_share_interval": self.flagged_share_interval,
                "sigma_at_most_half_by_head": self.flagged_heads,
                "ratios": {
                    name: {
                        "evidence": spread.evidence,
                        "sigma_at_most_half": spread.flagged,
                        "by_layer": spread.by_layer.T,
                        "by_head": np.moveaxis(spread.by_head, 0, -1),
                    }
                    for name, spread in self.spreads.items()
                },
                "retained_mass_bins": {
                    "edges": MASS_EDGES,
                    "count": self.mass.count,
                    "L/θ": self.mass.quantiles.T,
                },
            }
        )
        return document


def tightness(config: EvictionConfig, held_share: float, held: Bounded) -> Tightness:
    """The distributions of one configuration's ratios; `held` are the samples of which it evicted anything."""
    flagged = held.sigma <= EVIDENCE
    ratios = dict(
        zip(
            RATIOS,
            (
                ratio(held.perturbation, held.theta),
                ratio(held.perturbation, held.theta_hat),
                ratio(held.theta, held.theta_hat),
                ratio(held.theta_hat, held.theta_hat_relax),
            ),
            strict=True,
        )
    )
    return Tightness(
        config=config,
        held=held_share,
        evicted_samples=len(flagged),
        spreads={name: _spread(values, flagged) for name, values in ratios.items()},
        mass=_mass_curve(held.mass, ratios[RATIOS[0]]),
        retained_mass=float(held.mass.mean()) if held.mass.size else float("nan"),
        flagged_share=float(flagged.mean()) if flagged.size else float("nan"),
        flagged_share_interval=intervals.of_mean(
            flagged.mean(axis=(1, 2)), rare_share_of(int(np.prod(flagged.shape[1:])))
        ),
        flagged_heads=flagged.mean(axis=0) if len(flagged) else np.full(flagged.shape[1:], np.nan),
    )


def _spread(values: Floats, flagged: NDArray[np.bool_]) -> Spread:
    evidence = np.where(flagged, np.nan, values)
    layers = evidence.shape[1]
    return Spread(
        evidence=quantiles(evidence, LEVELS),
        flagged=quantiles(np.where(flagged, values, np.nan), LEVELS),
        by_layer=quantiles(evidence.swapaxes(0, 1).reshape(layers, -1), LEVELS, axis=1),
        by_head=quantiles(values, OVER_SAMPLES, axis=0),
    )


def _mass_curve(mass: Floats, tightness: Floats) -> MassCurve:
    held = ~np.isnan(tightness)
    bins = np.clip(np.digitize(mass[held], MASS_EDGES) - 1, 0, len(MASS_EDGES) - 2)
    inside = [tightness[held][bins == place] for place in range(len(MASS_EDGES) - 1)]
    return MassCurve(
        count=np.array([len(part) for part in inside]),
        quantiles=np.stack([quantiles(part, LEVELS) for part in inside], axis=1),
    )
