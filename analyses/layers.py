"""How does the residual stream drift from layer to layer, baseline against treatment? (Paper, figures 3a, 5.)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.arithmetic import plain, ratio, reduction
from perturbkv.analyses.bootstrap import RESAMPLES, intervals
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.naming import setting
from perturbkv.analyses.reading import Floats, check, values
from perturbkv.analyses.verdicts import verdicts
from perturbkv.errors import TraceError, UnknownNameError
from perturbkv.trace import Trace

ANALYSIS = "layers"
DISTANCES = {"l1": "L1", "l2": "L2", "cosine": "cosine distance"}


@dataclass(frozen=True)
class LayerDrift:
    """Drift of the residual stream after each decoder layer, two configurations that share everything but selection.

    Attributes:
        baseline, treatment: configuration labels; `setting` what they share.
        distance: l1, l2 or cosine.
        baseline_mean, treatment_mean: (layer,) mean drift over samples, in the distance's unit.
        baseline_interval, treatment_interval: (2, layer) over samples; None for one sample.
        baseline_relative, treatment_relative: (layer,) drift over the full-cache stream's norm; None unless L1.
        reduction: (layer,) 1 − treatment / baseline of the means; NaN where the baseline does not drift.
        reduction_interval: (2, layer) over samples; None for one sample.
        verdict: (layer,) 1 better, 0 tied, −1 worse. The noise floor is known for L1; elsewhere only equal is tied.
        step: decode step looked at.
        identity: of the run.
    """

    baseline: str
    treatment: str
    distance: str
    baseline_mean: Floats
    treatment_mean: Floats
    baseline_interval: Floats | None
    treatment_interval: Floats | None
    baseline_relative: Floats | None
    treatment_relative: Floats | None
    reduction: Floats
    reduction_interval: Floats | None
    verdict: NDArray[np.int8]
    step: int
    identity: RunIdentity

    def __post_init__(self) -> None:
        shapes = {array.shape for array in (self.baseline_mean, self.treatment_mean, self.reduction, self.verdict)}
        if len(shapes) != 1:
            msg = f"expected (layer,) arrays of one shape, got {sorted(shapes)}"
            raise TraceError(msg)

    @property
    def setting(self) -> str:
        """What both configurations share."""
        return setting(self.baseline)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        document: dict[str, Any] = plain(
            {
                "baseline": self.baseline,
                "treatment": self.treatment,
                "distance": self.distance,
                "step": self.step,
                "baseline_drift": self.baseline_mean,
                "baseline_drift_interval": self.baseline_interval,
                "treatment_drift": self.treatment_mean,
                "treatment_drift_interval": self.treatment_interval,
                "baseline_relative_drift": self.baseline_relative,
                "treatment_relative_drift": self.treatment_relative,
                "reduction": self.reduction,
                "reduction_interval": self.reduction_interval,
                "verdict": self.verdict,
            }
        )
        return document


def summarise(
    trace: Trace,
    baseline: str,
    treatment: str,
    distance: str = "l1",
    step: int = 0,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> LayerDrift:
    """Drift after each layer of two configurations, by label.

    Raises TraceError and ConfigError as `reading.check`, TraceError for an unknown label, UnknownNameError for an
    unknown distance.
    """
    check(trace, ANALYSIS, step)
    drift = distances(trace, distance, ANALYSIS, step)
    first, second = (drift[:, trace.config_index(label)] for label in (baseline, treatment))
    means, norms = (first.mean(axis=0), second.mean(axis=0)), _norms(trace, distance, step)
    bootstrap = (len(first), resamples, seed)
    return LayerDrift(
        baseline=baseline,
        treatment=treatment,
        distance=distance,
        baseline_mean=means[0],
        treatment_mean=means[1],
        baseline_interval=intervals(lambda weights: weights @ first, *bootstrap),
        treatment_interval=intervals(lambda weights: weights @ second, *bootstrap),
        baseline_relative=None if norms is None else np.asarray(ratio(means[0], norms)),
        treatment_relative=None if norms is None else np.asarray(ratio(means[1], norms)),
        reduction=np.asarray(reduction(*means)),
        reduction_interval=intervals(
            lambda weights: np.asarray(reduction(weights @ first, weights @ second)), *bootstrap
        ),
        verdict=verdicts(*means, _floor(trace, distance, step)),
        step=step,
        identity=identity(trace, (baseline, treatment)),
    )


def distances(trace: Trace, distance: str, analysis: str, step: int) -> Floats:
    """(sample, config, layer) drift. Raises UnknownNameError for a distance that no trace holds."""
    if distance not in DISTANCES:
        raise UnknownNameError(distance, "distance", DISTANCES)
    return values(trace, f"hidden_drift_{distance}", analysis, step)


def _norms(trace: Trace, distance: str, step: int) -> Floats | None:
    """(layer,) mean norm of the full-cache stream, which traces hold in L1."""
    return values(trace, "hidden_norm", ANALYSIS, step).mean(axis=0) if distance == "l1" else None


def _floor(trace: Trace, distance: str, step: int) -> Floats:
    """(layer,) mean noise floor, which traces hold in L1; 0 for other distances."""
    floor = values(trace, "hidden_noise_floor", ANALYSIS, step).mean(axis=0)
    return floor if distance == "l1" else np.zeros_like(floor)
