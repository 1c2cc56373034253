"""Drift of the residual stream of two configurations: after each layer, and of each sample after the last layer.

Paper, figures 3a, 3b, 5 and 6.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.columns import Derived, Record, attribute, column, derived, interval, record
from perturbkv.analyses.conclusions import Case
from perturbkv.analyses.identity import RunIdentity, identity_at
from perturbkv.analyses.measurements import Floats, Measurements
from perturbkv.analyses.names import PairRecord
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import POSITIVE, RATIO, Band, OptionalInterval
from perturbkv.analyses.verdicts import DISTANCES, distance_of, equal_layers, verdicts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.schema import VARIABLES
from perturbkv.trace import Trace

ANALYSIS = "layers"
LAYER = ("layer",)
SAMPLE = ("sample",)


@record
class DriftPair(PairRecord, Record):
    """Drift of a pair of configurations.

    Attributes:
        cache_shares: of baseline and treatment.
        identity: of the run.
    """

    baseline: EvictionConfig = column("what is compared with")
    treatment: EvictionConfig = column("what is compared")
    distance: str = column("l1, l2 or cosine")
    step: int | None = column(text.STEP)
    cache_shares: tuple[float, float]
    identity: RunIdentity

    cache_share_baseline: ClassVar[Derived[float]] = attribute(
        "cache_shares.0",
        "Entries that the baseline's cache holds over those of the full cache",
        key="held_over_full_baseline",
    )
    cache_share: ClassVar[Derived[float]] = attribute(
        "cache_shares.1",
        "Entries that the treatment's cache holds over those of the full cache",
        key="held_over_full_treatment",
        heading="#cache\nshare",
    )


@record
class LayerRatio(Record):
    """Drift of both sides after one layer: medians over samples, and the ratio of the means."""

    baseline_median: float = column(
        "the baseline's drift, median over samples", heading="#baseline's\ndrift, median", text=text.three_digits
    )
    treatment_median: float = column("the treatment's", heading="#drift,\nmedian", text=text.three_digits)
    mean_ratio: float = column("the treatment's mean drift over the baseline's", heading="#mean over\nbaseline's")
    mean_ratio_interval: OptionalInterval = interval()
    tied: bool = column("whether the means differ by at most two noise floors", json=False)


@record
class LayerDrift(DriftPair, section="drift"):
    """Drift of the residual stream after each decoder layer, of configurations that differ in selection alone.

    Attributes:
        noise_floor: None where the trace holds none of the distance: then only what is equal is tied.
    """

    baseline_drift: Floats = column("mean over samples, in the distance's unit", dims=LAYER)
    baseline_drift_interval: Band = interval()
    treatment_drift: Floats = column("mean over samples of the treatment", dims=LAYER)
    treatment_drift_interval: Band = interval()
    baseline_median_drift: Floats = column("median over samples: a single prompt can make most of a mean", dims=LAYER)
    baseline_median_drift_interval: Band = interval()
    treatment_median_drift: Floats = column("median over samples of the treatment", dims=LAYER)
    treatment_median_drift_interval: Band = interval()
    baseline_relative_drift: Floats | None = column(
        "mean drift over the mean norm of the full cache's stream; null where the trace holds no such norm", dims=LAYER
    )
    treatment_relative_drift: Floats | None = column("relative drift of the treatment", dims=LAYER)
    ratio: Floats = column("treatment over baseline, of the means; null where the baseline does not drift", dims=LAYER)
    ratio_interval: Band = interval()
    verdict: NDArray[np.int8] = column("1 drifts less, 0 tied, −1 more; of the means, without a test", dims=LAYER)
    noise_floor: Floats | None = column("mean over samples, in the distance's unit", dims=LAYER)

    samples: ClassVar[Derived[int]] = attribute("identity.samples", "Complete samples that have the step")

    @derived()
    def noise_floor_known(self) -> bool:
        """True if the trace holds the distance's noise floor."""
        return self.noise_floor is not None

    @derived(heading="#layers\n+ / = / −", json=False)
    def layer_counts(self) -> str:
        """Layers after which the treatment drifts less / as much / more, by the means, without a test."""
        return text.verdict_counts(self.verdict)

    def after(self, layer: int) -> LayerRatio:
        """Return both sides' median drift after the layer at an index, with the ratio of means."""
        return LayerRatio(
            baseline_median=float(self.baseline_median_drift[layer]),
            treatment_median=float(self.treatment_median_drift[layer]),
            mean_ratio=float(self.ratio[layer]),
            mean_ratio_interval=text.interval_at(self.ratio_interval, layer),
            tied=bool(self.verdict[layer] == 0),
        )

    def case(self, name: str = "") -> Case:
        """Return the ratio of mean drifts after the last layer as a named case of a comparison."""
        last = self.after(-1)
        return Case.ratio(name, last.mean_ratio, last.mean_ratio_interval, last.tied)


def summarise(
    trace: Trace, baseline: EvictionConfig, treatment: EvictionConfig, distance: str = "l1", step: int | None = None
) -> LayerDrift:
    """Compare the drift of two configurations of a trace after each layer.

    Raises TraceError where the trace has no complete sample or no such configuration, ConfigError where it has no such
    step, UnknownNameError for an unknown distance.
    """
    return compare_layers(
        Measurements(trace, ANALYSIS, step), identity_at(trace, (baseline, treatment), step), distance
    )


def compare_layers(measured: Measurements, about: RunIdentity, distance: str = "l1") -> LayerDrift:
    """Compare the drift of the two configurations of an identity after each layer. Raises as `summarise`."""
    first, second = _both_drifts(measured, about, distance)
    name = f"hidden_norm{distance_of(distance).suffix}"
    means = first.mean(axis=0), second.mean(axis=0)
    norms = measured[name].mean(axis=0) if name in measured else None  # cosine has none
    (mean_ratio, mean_ratio_interval), noise = drift_ratio(first, second), drift_floors(measured, distance)
    floor = None if noise is None else noise.mean(axis=0)
    return LayerDrift(
        baseline=about.configs[0],
        treatment=about.configs[1],
        distance=distance,
        step=measured.step,
        cache_shares=_cache_shares(measured, about),
        identity=about,
        baseline_drift=means[0],
        baseline_drift_interval=intervals.of_means(first, POSITIVE),
        treatment_drift=means[1],
        treatment_drift_interval=intervals.of_means(second, POSITIVE),
        baseline_median_drift=np.median(first, axis=0),
        baseline_median_drift_interval=intervals.of_medians(first),
        treatment_median_drift=np.median(second, axis=0),
        treatment_median_drift_interval=intervals.of_medians(second),
        baseline_relative_drift=None if norms is None else np.asarray(ratio(means[0], norms)),
        treatment_relative_drift=None if norms is None else np.asarray(ratio(means[1], norms)),
        ratio=mean_ratio,
        ratio_interval=mean_ratio_interval,
        verdict=verdicts(*means, np.zeros_like(means[0]) if floor is None else floor, distance),
        noise_floor=floor,
    )


def drift_ratio(baseline: Floats, treatment: Floats) -> tuple[Floats, Band]:
    """Return the ratio of mean (sample, layer) drifts, (layer,), with its interval; NaN where the baseline's is 0."""
    means = np.asarray(ratio(treatment.mean(axis=0), baseline.mean(axis=0)))
    return means, intervals.of_statistics(
        lambda weights: ratio(weights @ treatment, weights @ baseline), len(baseline), RATIO
    )


def drift_values(measured: Measurements, distance: str) -> Floats:
    """Return the drift in a distance, (sample, config, layer). Raises UnknownNameError for an unknown distance."""
    distance_of(distance, DISTANCES)
    return measured[f"hidden_drift_{distance}"]


def drift_floors(measured: Measurements, distance: str) -> Floats | None:
    """Return the noise floor of drift in a distance, (sample, layer); None where the trace lacks it."""
    name = f"hidden_noise_floor{distance_of(distance).suffix}"
    return None if VARIABLES[name].optional and name not in measured else measured[name]


def _both_drifts(measured: Measurements, about: RunIdentity, distance: str) -> tuple[Floats, Floats]:
    """Return the drift of baseline and treatment, (sample, layer), identical where all kept sets so far are equal.

    Baseline and treatment are the two configurations of `about`.
    """
    first, second = map(measured.index, about.configs)
    drift = drift_values(measured, distance)
    same = equal_layers(measured.trace, first, second)
    return drift[:, first], np.where(same, drift[:, first], drift[:, second])


def _cache_shares(measured: Measurements, about: RunIdentity) -> tuple[float, float]:
    """Return the cache shares of an identity's two configurations."""
    first, second = (float(measured.cache_shares[measured.index(config)]) for config in about.configs)
    return first, second


LAST_LAYER_ANALYSIS = "layers --per-sample"


@record
class LastLayer(DriftPair, section="sample drift"):
    """Drift after the last decoder layer, sample by sample, sorted by the baseline's, largest first."""

    sample_ids: tuple[str, ...] = column("the baseline's largest drift first")
    baseline_drift: Floats = column("after the last layer, in the distance's unit", dims=SAMPLE)
    treatment_drift: Floats = column("after the last layer, of the treatment", dims=SAMPLE)
    verdict: NDArray[np.int8] = column("1 drifts less, 0 tied, −1 more", dims=SAMPLE)
    mean_ratio: float = column(
        "treatment over baseline, summed over samples; null where the baseline does not drift",
        heading="#sum over\nbaseline's",
    )
    mean_ratio_interval: OptionalInterval = interval()
    improved_share: float = column(
        "share of the samples that drift less", unit="share", heading="#share that\ndrifts less"
    )
    improved_share_interval: OptionalInterval = interval("exact (Clopper–Pearson)")

    @derived(heading="#samples\n+ / = / −", json=False)
    def sample_counts(self) -> str:
        """Samples that drift less / as much / more than the baseline."""
        return text.verdict_counts(self.verdict)


def compare_samples(measured: Measurements, about: RunIdentity, distance: str = "l1") -> LastLayer:
    """Compare the last layer's drift of an identity's two configurations by sample. Raises as `summarise`."""
    first, second = (side[:, -1] for side in _both_drifts(measured, about, distance))
    floor = drift_floors(measured, distance)
    verdict = verdicts(first, second, np.zeros_like(first) if floor is None else floor[:, -1], distance)
    order = np.argsort(-first, kind="stable")
    improved = verdict == 1
    return LastLayer(
        baseline=about.configs[0],
        treatment=about.configs[1],
        distance=distance,
        step=measured.step,
        cache_shares=_cache_shares(measured, about),
        identity=about,
        sample_ids=tuple(measured.sample_ids[index] for index in order),
        baseline_drift=first[order],
        treatment_drift=second[order],
        verdict=verdict[order],
        mean_ratio=float(ratio(second.sum(), first.sum())),
        mean_ratio_interval=intervals.of_ratio(second, first),
        improved_share=float(improved.mean()),
        improved_share_interval=intervals.of_share(improved),
    )
