"""Do the bounds bound? L ≤ θ ≤ θ̂ always, θ̂ ≤ θ̂_relax where σ > 0.5 (paper, Theorems 2–4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import EVIDENCE, Floats, values
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
    """L and its bounds out of a trace. Raises TraceError as `reading.values`."""
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
