"""How far does each sample's residual stream drift by the last layer? (Paper, figures 3b and 6.)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.arithmetic import plain
from perturbkv.analyses.bootstrap import RESAMPLES, Interval, mean_interval
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.layers import distances
from perturbkv.analyses.naming import setting
from perturbkv.analyses.reading import Floats, check, values
from perturbkv.analyses.verdicts import verdicts
from perturbkv.trace import Trace

ANALYSIS = "layers --per-sample"


@dataclass(frozen=True)
class LastLayer:
    """Drift after the last decoder layer, sample by sample, sorted by the baseline's, largest first.

    Attributes:
        baseline, treatment: configuration labels; `setting` what they share.
        distance: l1, l2 or cosine.
        sample_ids: in the order of the arrays.
        baseline_drift, treatment_drift: (sample,).
        verdict: (sample,) 1 better, 0 tied, −1 worse.
        improved_share: of the samples, in [0, 1], with its interval.
        step: decode step looked at.
        identity: of the run.
    """

    baseline: str
    treatment: str
    distance: str
    sample_ids: tuple[str, ...]
    baseline_drift: Floats
    treatment_drift: Floats
    verdict: NDArray[np.int8]
    improved_share: float
    improved_share_interval: Interval
    step: int
    identity: RunIdentity

    @property
    def setting(self) -> str:
        """What both configurations share."""
        return setting(self.baseline)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        document: dict[str, Any] = plain({name: value for name, value in vars(self).items() if name != "identity"})
        return document


def summarise(
    trace: Trace,
    baseline: str,
    treatment: str,
    distance: str = "l1",
    step: int = 0,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> LastLayer:
    """The last layer's drift of every complete sample under two configurations, by label.

    Raises as `layers.summarise`.
    """
    check(trace, ANALYSIS, step)
    drift = distances(trace, distance, ANALYSIS, step)[:, :, -1]
    first, second = (drift[:, trace.config_index(label)] for label in (baseline, treatment))
    floor = values(trace, "hidden_noise_floor", ANALYSIS, step)[:, -1] * (distance == "l1")
    verdict = verdicts(first, second, floor)
    place = np.argsort(-first, kind="stable")
    names = [name for name, whole in zip(trace.sample_ids, trace.ok, strict=True) if whole]
    improved = (verdict == 1).astype(np.float64)
    return LastLayer(
        baseline=baseline,
        treatment=treatment,
        distance=distance,
        sample_ids=tuple(names[index] for index in place),
        baseline_drift=first[place],
        treatment_drift=second[place],
        verdict=verdict[place],
        improved_share=float(improved.mean()),
        improved_share_interval=mean_interval(improved, resamples, seed),
        step=step,
        identity=identity(trace, (baseline, treatment)),
    )
