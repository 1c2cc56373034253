"""How far does each sample's residual stream drift by the last layer? (Paper, figures 3b and 6.)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.layers.drift import floors, held_sides, sides
from perturbkv.analyses.measurements import Floats, at_step
from perturbkv.analyses.pairing import OfPair
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain, ratio
from perturbkv.analyses.stats.intervals import RATIO, Scalar
from perturbkv.analyses.verdicts import verdicts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace

ANALYSIS = "layers --per-sample"


@dataclass(frozen=True, repr=False)
class LastLayer(OfPair):
    """Drift after the last decoder layer, sample by sample, sorted by the baseline's, largest first.

    Attributes:
        baseline, treatment: the configurations.
        distance: l1, l2 or cosine.
        sample_ids: in the order of the arrays.
        baseline_drift, treatment_drift: (sample,).
        verdict: (sample,) 1 better, 0 tied, −1 worse.
        mean_ratio: Σ treatment over Σ baseline, over samples; NaN where the baseline does not drift; with its interval.
        improved_share: of the samples, in [0, 1], with its exact interval.
        held: entries that each side's cache holds over those of the full cache; NaN where the trace does not tell.
        step: decode step looked at.
        identity: of the run.
    """

    baseline: EvictionConfig
    treatment: EvictionConfig
    distance: str
    sample_ids: tuple[str, ...]
    baseline_drift: Floats
    treatment_drift: Floats
    verdict: NDArray[np.int8]
    mean_ratio: float
    mean_ratio_interval: Scalar
    improved_share: float
    improved_share_interval: Scalar
    held: tuple[float, float]
    step: int
    identity: RunIdentity

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        document: dict[str, Any] = plain(
            {
                **{name: value for name, value in vars(self).items() if name not in ("identity", "held")},
                "held_over_full_baseline": self.held[0],
                "held_over_full_treatment": self.held[1],
            }
        )
        return document


def summarise(
    trace: Trace, baseline: EvictionConfig, treatment: EvictionConfig, distance: str = "l1", step: int = 0
) -> LastLayer:
    """The last layer's drift of every complete sample under two configurations.

    Raises as `layers.summarise`.
    """
    held = at_step(trace, ANALYSIS, step)
    first, second = (side[:, -1] for side in sides(held, (baseline, treatment), distance, ANALYSIS, step))
    floor = floors(held, distance, ANALYSIS, step)
    verdict = verdicts(first, second, np.zeros_like(first) if floor is None else floor[:, -1], distance)
    place = np.argsort(-first, kind="stable")
    names = [name for name, whole in zip(held.sample_ids, held.ok, strict=True) if whole]
    improved = verdict == 1
    return LastLayer(
        baseline=baseline,
        treatment=treatment,
        distance=distance,
        sample_ids=tuple(names[index] for index in place),
        baseline_drift=first[place],
        treatment_drift=second[place],
        verdict=verdict[place],
        mean_ratio=float(ratio(second.sum(), first.sum())),
        mean_ratio_interval=intervals.scalar(
            lambda weights: np.asarray(ratio(weights @ second, weights @ first)), len(first), RATIO
        ),
        improved_share=float(improved.mean()),
        improved_share_interval=intervals.of_samples(improved),
        held=held_sides(held, (baseline, treatment), ANALYSIS),
        step=step,
        identity=identity(trace, (baseline, treatment), step),
    )
