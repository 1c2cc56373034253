"""How tight are the bounds? L/θ, L/θ̂, θ/θ̂ and θ̂/θ̂_relax per configuration, layer and head (paper, Theorems 2–4)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import intervals
from perturbkv.analyses.arithmetic import plain, quantiles, ratio
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.inequalities import Bounded, bounded, check_inequalities
from perturbkv.analyses.intervals import Scalar, rare_share_of
from perturbkv.analyses.pairing import of_selection
from perturbkv.analyses.reading import EVIDENCE, Floats, at_step, held_shares
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.trace import Trace

ANALYSIS = "bound-tightness"
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


@dataclass(frozen=True)
class BoundTightness:
    """Every configuration of a trace.

    Attributes:
        configs: one entry per configuration, in the trace's order.
        checked: how many values each inequality was checked on; none was violated, or this would not exist.
        step: decode step looked at.
        run: what was run.
        identity: of the run.
    """

    configs: tuple[Tightness, ...]
    checked: dict[str, int]
    step: int
    run: RunConfig
    identity: RunIdentity

    def of(self, side: str) -> BoundTightness:
        """The configurations of one selection alone, by α, then budget. Raises TraceError where there are none."""
        places = of_selection(self.run, side)
        configs = tuple(self.configs[place] for place in places)
        shown = dataclasses.replace(self.identity, configs=tuple(one.config for one in configs))
        return dataclasses.replace(self, configs=configs, identity=shown)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        return {
            "step": self.step,
            "levels": list(LEVELS),
            "per_head_levels": ["least", "median", "largest over samples"],
            "violations": 0,
            "inequalities_checked": self.checked,
            "configurations": [_tightness_dict(config) for config in self.configs],
        }


def summarise(trace: Trace, step: int = 0) -> BoundTightness:
    """Distributions of the bounds' ratios for every configuration of a trace.

    Raises BoundError where a bound is violated (METHOD: L ≤ θ ≤ θ̂, and θ̂ ≤ θ̂_relax where σ > 0.5), TraceError and
    ConfigError as `reading.at_step`.
    """
    there = at_step(trace, ANALYSIS, step)
    held, shares = bounded(there, ANALYSIS, step), held_shares(there, ANALYSIS)
    checked = check_inequalities(held)
    configs = tuple(
        _tightness(config, float(shares[place]), held.of(place)) for place, config in enumerate(held.configs)
    )
    return BoundTightness(configs, checked, step, trace.run, identity(trace, held.configs, step))


def _tightness(config: EvictionConfig, held_share: float, held: Bounded) -> Tightness:
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


def _tightness_dict(config: Tightness) -> dict[str, Any]:
    document: dict[str, Any] = plain(
        {
            "config": config.config,
            "held_over_full": config.held,
            "evicted_samples": config.evicted_samples,
            "retained_mass": config.retained_mass,
            "sigma_at_most_half_share": config.flagged_share,
            "sigma_at_most_half_share_interval": config.flagged_share_interval,
            "sigma_at_most_half_by_head": config.flagged_heads,
            "ratios": {
                name: {
                    "evidence": spread.evidence,
                    "sigma_at_most_half": spread.flagged,
                    "by_layer": spread.by_layer.T,
                    "by_head": np.moveaxis(spread.by_head, 0, -1),
                }
                for name, spread in config.spreads.items()
            },
            "retained_mass_bins": {
                "edges": MASS_EDGES,
                "count": config.mass.count,
                "L/θ": config.mass.quantiles.T,
            },
        }
    )
    return document
