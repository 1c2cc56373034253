"""How does the residual stream drift from layer to layer, baseline against treatment? (Paper, figures 3a, 5.).

How far does each sample's residual stream drift by the last layer? (Paper, figures 3b and 6.).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.measurements import Floats, at_step, held_shares, values
from perturbkv.analyses.pairing import OfPair, Pair
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain, ratio
from perturbkv.analyses.stats.intervals import POSITIVE, RATIO, Band, Scalar
from perturbkv.analyses.verdicts import distance_of, equal_layers, verdicts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.schema import VARIABLES
from perturbkv.trace import Trace

ANALYSIS = "layers"


@dataclass(frozen=True, repr=False)
class LayerDrift(OfPair):
    """Drift of the residual stream after each decoder layer, two configurations that share everything but selection.

    Attributes:
        baseline, treatment: the configurations.
        distance: l1, l2 or cosine.
        baseline_mean, treatment_mean: (layer,) mean drift over samples, in the distance's unit, with intervals.
        baseline_median, treatment_median: (layer,) the median over samples, with intervals: a single prompt can make
            most of a mean.
        baseline_relative, treatment_relative: (layer,) drift over the full-cache stream's norm; None where the trace
            holds no norm of the distance.
        ratio: (layer,) treatment / baseline of the means; NaN where the baseline does not drift.
        ratio_interval: over samples; None for one sample.
        verdict: (layer,) 1 better, 0 tied, −1 worse.
        noise_floor: (layer,) the distance's, mean over samples; None where the trace holds none: then only what is
            equal is tied.
        held: entries that each side's cache holds over those of the full cache; NaN where the trace does not tell.
        step: decode step looked at.
        identity: of the run.
    """

    baseline: EvictionConfig
    treatment: EvictionConfig
    distance: str
    baseline_mean: Floats
    treatment_mean: Floats
    baseline_interval: Band
    treatment_interval: Band
    baseline_median: Floats
    treatment_median: Floats
    baseline_median_interval: Band
    treatment_median_interval: Band
    baseline_relative: Floats | None
    treatment_relative: Floats | None
    ratio: Floats
    ratio_interval: Band
    verdict: NDArray[np.int8]
    noise_floor: Floats | None
    held: tuple[float, float]
    step: int
    identity: RunIdentity

    def __post_init__(self) -> None:
        shapes = {array.shape for array in (self.baseline_mean, self.treatment_mean, self.ratio, self.verdict)}
        if len(shapes) != 1:
            msg = f"expected (layer,) arrays of one shape, got {sorted(shapes)}"
            raise TraceError(msg)

    @property
    def floored(self) -> bool:
        """Whether the trace holds the distance's noise floor."""
        return self.noise_floor is not None

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        document: dict[str, Any] = plain(
            {
                "baseline": self.baseline,
                "treatment": self.treatment,
                "distance": self.distance,
                "step": self.step,
                "samples": self.identity.samples,
                "held_over_full_baseline": self.held[0],
                "held_over_full_treatment": self.held[1],
                "baseline_drift": self.baseline_mean,
                "baseline_drift_interval": self.baseline_interval,
                "treatment_drift": self.treatment_mean,
                "treatment_drift_interval": self.treatment_interval,
                "baseline_median_drift": self.baseline_median,
                "baseline_median_drift_interval": self.baseline_median_interval,
                "treatment_median_drift": self.treatment_median,
                "treatment_median_drift_interval": self.treatment_median_interval,
                "baseline_relative_drift": self.baseline_relative,
                "treatment_relative_drift": self.treatment_relative,
                "ratio": self.ratio,
                "ratio_interval": self.ratio_interval,
                "verdict": self.verdict,
                "noise_floor_known": self.floored,
                "noise_floor": self.noise_floor,
            }
        )
        return document


def summarise(
    trace: Trace, baseline: EvictionConfig, treatment: EvictionConfig, distance: str = "l1", step: int = 0
) -> LayerDrift:
    """Drift after each layer of two configurations.

    Raises TraceError and ConfigError as `measurements.at_step`, TraceError for a configuration that the trace does not
    hold, UnknownNameError for an unknown distance.
    """
    held = at_step(trace, ANALYSIS, step)
    first, second = sides(held, (baseline, treatment), distance, ANALYSIS, step)
    means, norms = (first.mean(axis=0), second.mean(axis=0)), _norms(held, distance, step)
    over, each = drift_ratio(first, second), floors(held, distance, ANALYSIS, step)
    floor = None if each is None else each.mean(axis=0)
    return LayerDrift(
        baseline=baseline,
        treatment=treatment,
        distance=distance,
        baseline_mean=means[0],
        treatment_mean=means[1],
        baseline_interval=mean_drift(first)[1],
        treatment_interval=mean_drift(second)[1],
        baseline_median=np.median(first, axis=0),
        treatment_median=np.median(second, axis=0),
        baseline_median_interval=intervals.of_medians(first),
        treatment_median_interval=intervals.of_medians(second),
        baseline_relative=None if norms is None else np.asarray(ratio(means[0], norms)),
        treatment_relative=None if norms is None else np.asarray(ratio(means[1], norms)),
        ratio=over[0],
        ratio_interval=over[1],
        verdict=verdicts(*means, np.zeros_like(means[0]) if floor is None else floor, distance),
        noise_floor=floor,
        held=held_sides(held, (baseline, treatment), ANALYSIS),
        step=step,
        identity=identity(trace, (baseline, treatment), step),
    )


def mean_drift(each: Floats) -> tuple[Floats, Band]:
    """(layer,) mean of (sample, layer) drift, with its interval."""
    return each.mean(axis=0), intervals.band(lambda weights: weights @ each, len(each), POSITIVE)


def drift_ratio(baseline: Floats, treatment: Floats) -> tuple[Floats, Band]:
    """(layer,) the treatment's mean drift over the baseline's, of (sample, layer), with its interval; NaN over 0."""
    found = np.asarray(ratio(treatment.mean(axis=0), baseline.mean(axis=0)))
    return found, intervals.band(lambda weights: ratio(weights @ treatment, weights @ baseline), len(baseline), RATIO)


def sides(trace: Trace, pair: Pair, distance: str, analysis: str, step: int) -> tuple[Floats, Floats]:
    """(sample, layer) drift of two configurations, exactly equal where all kept sets up to the layer are."""
    first, second = (trace.config_index(config.label()) for config in pair)
    drift = distances(trace, distance, analysis, step)
    same = equal_layers(trace, first, second)
    return drift[:, first], np.where(same, drift[:, first], drift[:, second])


def held_sides(trace: Trace, pair: Pair, analysis: str) -> tuple[float, float]:
    """Entries that two configurations' caches hold over those of the full cache; NaN where the trace does not tell."""
    shares = held_shares(trace, analysis)
    first, second = (float(shares[trace.config_index(config.label())]) for config in pair)
    return first, second


def distances(trace: Trace, distance: str, analysis: str, step: int) -> Floats:
    """(sample, config, layer) drift. Raises UnknownNameError for a distance that no trace holds."""
    distance_of(distance)
    return values(trace, f"hidden_drift_{distance}", analysis, step)


def floors(trace: Trace, distance: str, analysis: str, step: int) -> Floats | None:
    """(sample, layer) noise floor of a distance; None in an older trace, which holds it in L1 alone."""
    name = f"hidden_noise_floor{distance_of(distance).suffix}"
    return None if VARIABLES[name].optional and name not in trace.arrays else values(trace, name, analysis, step)


def _norms(trace: Trace, distance: str, step: int) -> Floats | None:
    """(layer,) mean norm of the full-cache stream; a cosine is relative already."""
    name = f"hidden_norm{distance_of(distance).suffix}"
    return values(trace, name, ANALYSIS, step).mean(axis=0) if name in trace.arrays else None


LAST_LAYER_ANALYSIS = "layers --per-sample"


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


def summarise_last_layer(
    trace: Trace, baseline: EvictionConfig, treatment: EvictionConfig, distance: str = "l1", step: int = 0
) -> LastLayer:
    """The last layer's drift of every complete sample under two configurations.

    Raises as `drift.summarise`.
    """
    held = at_step(trace, LAST_LAYER_ANALYSIS, step)
    first, second = (side[:, -1] for side in sides(held, (baseline, treatment), distance, LAST_LAYER_ANALYSIS, step))
    floor = floors(held, distance, LAST_LAYER_ANALYSIS, step)
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
        held=held_sides(held, (baseline, treatment), LAST_LAYER_ANALYSIS),
        step=step,
        identity=identity(trace, (baseline, treatment), step),
    )
