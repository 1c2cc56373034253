"""Which heads does a selection help? Perturbation per head, baseline against treatment (paper, figure 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.arithmetic import median, plain, reduction
from perturbkv.analyses.bootstrap import RESAMPLES, Interval, interval
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.reading import EVIDENCE, Floats, check, values
from perturbkv.analyses.verdicts import verdicts
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "heads"


@dataclass(frozen=True)
class HeadKind:
    """One kind of perturbation, isolated or propagated.

    Attributes:
        baseline_mean, treatment_mean: (layer, head) mean over samples, L1.
        floor_mean: (layer, head) mean noise floor, L1.
        verdict: (layer, head) 1 improved, 0 tied, −1 worsened.
        improved_share: of all heads, in [0, 1]; `improved_share_interval` its 95 % interval over samples.
        unflagged_improved_share: of the heads with σ > 0.5; NaN where there is none.
        total_reduction: 1 − ΣT / ΣB over heads and samples, with its interval.
        median_reduction: median over heads of 1 − T / B.
        floor_relative_median, floor_relative_max: noise floor over ‖o_h‖₁, over heads.
    """

    baseline_mean: Floats
    treatment_mean: Floats
    floor_mean: Floats
    verdict: NDArray[np.int8]
    improved_share: float
    improved_share_interval: Interval
    unflagged_improved_share: float
    total_reduction: float
    total_reduction_interval: Interval
    median_reduction: float
    floor_relative_median: float
    floor_relative_max: float

    def __post_init__(self) -> None:
        shapes = {array.shape for array in (self.baseline_mean, self.treatment_mean, self.floor_mean, self.verdict)}
        if len(shapes) != 1:
            msg = f"expected (layer, head) arrays of one shape, got {sorted(shapes)}"
            raise TraceError(msg)

    @property
    def improved_count(self) -> int:
        """Heads whose treatment perturbs less."""
        return int((self.verdict == 1).sum())

    @property
    def tied_count(self) -> int:
        """Heads under the noise, or exactly equal."""
        return int((self.verdict == 0).sum())

    @property
    def worsened_count(self) -> int:
        """Heads whose treatment perturbs more."""
        return int((self.verdict == -1).sum())

    @property
    def l1_ratio(self) -> float:
        """L1 over the baseline's, summed over heads; NaN where the baseline's is 0."""
        return 1 - self.total_reduction

    @property
    def l1_ratio_interval(self) -> Interval:
        """Its interval over samples."""
        ends = self.total_reduction_interval
        return None if ends is None else (1 - ends[1], 1 - ends[0])

    def to_dict(self) -> dict[str, Any]:
        """Numbers for summary.json."""
        numbers: dict[str, Any] = plain(
            {
                "improved": self.improved_count,
                "tied": self.tied_count,
                "worsened": self.worsened_count,
                "improved_share": self.improved_share,
                "improved_share_interval": self.improved_share_interval,
                "unflagged_improved_share": self.unflagged_improved_share,
                "total_reduction": self.total_reduction,
                "total_reduction_interval": self.total_reduction_interval,
                "median_reduction": self.median_reduction,
                "baseline_mean_l1": self.baseline_mean.mean(),
                "treatment_mean_l1": self.treatment_mean.mean(),
                "noise_floor_relative_median": self.floor_relative_median,
                "noise_floor_relative_max": self.floor_relative_max,
            }
        )
        return numbers


@dataclass(frozen=True)
class HeadComparison:
    """Two configurations compared head by head.

    Attributes:
        baseline, treatment: configuration labels.
        step: decode step looked at.
        isolated, propagated: the two kinds of perturbation.
        flagged: (layer, head) True where the treatment's mean σ is at most 0.5: no evidence for Theorem 3.
        retained_mass: mean S of baseline and treatment, in [0, 1].
        identity: of the run.
    """

    baseline: str
    treatment: str
    step: int
    isolated: HeadKind
    propagated: HeadKind
    flagged: NDArray[np.bool_]
    retained_mass: tuple[float, float]
    identity: RunIdentity

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        return {
            "baseline": self.baseline,
            "treatment": self.treatment,
            "step": self.step,
            "samples": self.identity.samples,
            "failed_samples": self.identity.failed,
            "heads": int(self.flagged.size),
            "flagged_heads": [f"{layer}-{head}" for layer, head in np.argwhere(self.flagged)],
            "retained_mass_baseline": self.retained_mass[0],
            "retained_mass_treatment": self.retained_mass[1],
            "isolated": self.isolated.to_dict(),
            "propagated": self.propagated.to_dict(),
        }


def summarise(
    trace: Trace, baseline: str, treatment: str, step: int = 0, resamples: int = RESAMPLES, seed: int = 0
) -> HeadComparison:
    """Compare two configurations of a trace head by head, over its complete samples.

    Raises TraceError where the trace has no complete sample, no such configuration, or NaN in a complete sample;
    ConfigError where it has no such step.
    """
    check(trace, ANALYSIS, step)
    sides = (trace.config_index(baseline), trace.config_index(treatment))
    flagged = values(trace, "sigma_stage1", ANALYSIS, step)[:, sides[1]].mean(axis=0) <= EVIDENCE
    mass = values(trace, "retained_mass", ANALYSIS, step).mean(axis=(0, 2, 3))
    kinds = [
        _kind(trace, variable, floor, sides, step, flagged, (resamples, seed))
        for variable, floor in (
            ("perturbation_isolated", "noise_floor_isolated"),
            ("perturbation_propagated", "noise_floor"),
        )
    ]
    return HeadComparison(
        baseline=baseline,
        treatment=treatment,
        step=step,
        isolated=kinds[0],
        propagated=kinds[1],
        flagged=flagged,
        retained_mass=(float(mass[sides[0]]), float(mass[sides[1]])),
        identity=identity(trace, (baseline, treatment)),
    )


def _kind(
    trace: Trace,
    variable: str,
    floor_variable: str,
    sides: tuple[int, int],
    step: int,
    flagged: NDArray[np.bool_],
    bootstrap: tuple[int, int],
) -> HeadKind:
    both = values(trace, variable, ANALYSIS, step)
    floors, norms = (values(trace, name, ANALYSIS, step) for name in (floor_variable, "output_norm"))
    parts = (both[:, sides[0]], both[:, sides[1]], floors)
    baseline, treatment, floor = (part.mean(axis=0) for part in parts)
    verdict = verdicts(baseline, treatment, floor)
    relative = floor / norms.mean(axis=0)

    def share(weights: Floats) -> Floats:
        means = (np.tensordot(weights, part, axes=1) for part in parts)
        return np.asarray((verdicts(*means) == 1).mean(axis=(1, 2)))

    def total(weights: Floats) -> Floats:
        return np.asarray(reduction(*(weights @ part.sum(axis=(1, 2)) for part in parts[:2])))

    samples = len(both)
    return HeadKind(
        baseline_mean=baseline,
        treatment_mean=treatment,
        floor_mean=floor,
        verdict=verdict,
        improved_share=float((verdict == 1).mean()),
        improved_share_interval=interval(share, samples, *bootstrap),
        unflagged_improved_share=float((verdict[~flagged] == 1).mean()) if (~flagged).any() else float("nan"),
        total_reduction=float(reduction(baseline.sum(), treatment.sum())),
        total_reduction_interval=interval(total, samples, *bootstrap),
        median_reduction=median(reduction(baseline, treatment)),
        floor_relative_median=float(np.median(relative)),
        floor_relative_max=float(relative.max()),
    )
