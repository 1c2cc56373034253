"""Which heads does a selection help? Perturbation per head, baseline against treatment (paper, figure 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import kept_sets
from perturbkv.analyses.distances import distance_of
from perturbkv.analyses.heads.head_kind import HeadKind, compare
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.measurements import EVIDENCE, Floats, at_step, held_shares, prefill_seconds, values
from perturbkv.analyses.pairing import OfPair
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace

ANALYSIS = "heads"
_PREFILLS = ("baseline", "treatment", "full")


@dataclass(frozen=True, repr=False)
class HeadComparison(OfPair):
    """Two configurations compared head by head.

    Attributes:
        baseline, treatment: the configurations.
        distance: l1, l2 or cosine.
        step: decode step looked at.
        isolated, propagated: the two kinds of perturbation.
        flagged: (layer, head) True where the treatment's mean σ is at most 0.5: no evidence for Theorem 3.
        retained_mass: mean S of baseline and treatment, in [0, 1].
        held: entries that each side's cache holds over those of the full cache; NaN where the trace does not tell.
        prefill_seconds: of baseline's and treatment's own prefills, and of the full one; NaN where there is none.
        identity: of the run.
    """

    baseline: EvictionConfig
    treatment: EvictionConfig
    distance: str
    step: int
    isolated: HeadKind
    propagated: HeadKind
    flagged: NDArray[np.bool_]
    retained_mass: tuple[float, float]
    held: tuple[float, float]
    prefill_seconds: tuple[float, float, float]
    identity: RunIdentity

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = {
            "baseline": self.baseline,
            "treatment": self.treatment,
            "distance": self.distance,
            "step": self.step,
            "samples": self.identity.samples,
            "failed_samples": self.identity.failed,
            "samples_ended_before_step": self.identity.ended,
            "heads": int(self.flagged.size),
            "flagged_heads": [f"{self.identity.layer(layer)}-{head}" for layer, head in np.argwhere(self.flagged)],
            "retained_mass_baseline": self.retained_mass[0],
            "retained_mass_treatment": self.retained_mass[1],
            "held_over_full_baseline": self.held[0],
            "held_over_full_treatment": self.held[1],
            **{
                f"prefill_seconds_{name}": seconds
                for name, seconds in zip(_PREFILLS, self.prefill_seconds, strict=True)
            },
            "isolated": self.isolated.to_dict(),
            "propagated": self.propagated.to_dict(),
        }
        numbers: dict[str, Any] = plain(found)
        return numbers


def summarise(
    trace: Trace, baseline: EvictionConfig, treatment: EvictionConfig, step: int = 0, distance: str = "l1"
) -> HeadComparison:
    """Compare two configurations of a trace head by head, over its complete samples that have the step.

    Raises TraceError where the trace has no complete sample, no such configuration, lacks the distance, or holds NaN
    in a complete sample; ConfigError where it has no such step, UnknownNameError for an unknown distance.
    """
    distance_of(distance)
    held = at_step(trace, ANALYSIS, step)
    sides = (held.config_index(baseline.label()), held.config_index(treatment.label()))
    flagged = values(held, "sigma_stage1", ANALYSIS, step)[:, sides[1]].mean(axis=0) <= EVIDENCE
    mass = values(held, "retained_mass", ANALYSIS, step).mean(axis=(0, 2, 3))
    shares, (seconds, full) = held_shares(held, ANALYSIS), prefill_seconds(held)
    kinds = [_kind(held, kind, distance, sides, step, flagged) for kind in ("isolated", "propagated")]
    return HeadComparison(
        baseline=baseline,
        treatment=treatment,
        distance=distance,
        step=step,
        isolated=kinds[0],
        propagated=kinds[1],
        flagged=flagged,
        retained_mass=(float(mass[sides[0]]), float(mass[sides[1]])),
        held=(float(shares[sides[0]]), float(shares[sides[1]])),
        prefill_seconds=(float(seconds[sides[0]]), float(seconds[sides[1]]), full),
        identity=identity(trace, (baseline, treatment), step),
    )


def _kind(
    trace: Trace, kind: str, distance: str, sides: tuple[int, int], step: int, flagged: NDArray[np.bool_]
) -> HeadKind:
    both, floor = perturbed(trace, kind, distance, sides, step)
    unit = distance_of(distance)
    norm = np.ones_like(floor) if unit.angular else values(trace, f"output_norm{unit.suffix}", ANALYSIS, step)
    return compare(*both, floor, norm, flagged, distance)


def perturbed(
    trace: Trace, kind: str, distance: str, sides: tuple[int, int], step: int
) -> tuple[tuple[Floats, Floats], Floats]:
    """Baseline and treatment, and their noise floor: (sample, layer, head) each. `kind` is isolated or propagated.

    Where the kept sets say that both are equal, the treatment is the baseline. Raises TraceError for what the trace
    lacks.
    """
    found, floor = with_floor(trace, kind, distance, step)
    same = {"isolated": kept_sets.isolated, "propagated": kept_sets.propagated}[kind](trace, *sides)
    return tied(found, sides, same), floor


def with_floor(trace: Trace, kind: str, distance: str, step: int) -> tuple[Floats, Floats]:
    """(sample, config, layer, head) perturbation and (sample, layer, head) noise floor. Raises as `perturbed`."""
    ending = distance_of(distance).suffix
    found = values(trace, f"perturbation_{kind}{ending}", ANALYSIS, step)
    return found, values(trace, f"noise_floor{'_isolated' if kind == 'isolated' else ''}{ending}", ANALYSIS, step)


def tied(found: Floats, sides: tuple[int, int], same: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Baseline and treatment, (sample, layer, head) each, of (sample, config, layer, head): equal where `same`."""
    baseline = found[:, sides[0]]
    return baseline, np.where(same, baseline, found[:, sides[1]])
