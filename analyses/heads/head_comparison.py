"""Perturbation of two configurations head by head, isolated and propagated (paper, figure 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Derived, Record, attribute, column, derived, interval, long_form, record
from perturbkv.analyses.conclusions import Case
from perturbkv.analyses.identity import RunIdentity, identity_at
from perturbkv.analyses.measurements import EVIDENCE, Floats, Measurements, only_evicts
from perturbkv.analyses.names import PairRecord
from perturbkv.analyses.stats import intervals, permutation
from perturbkv.analyses.stats.arithmetic import half_share, median, quantiles, ratio
from perturbkv.analyses.stats.intervals import RATIO, OptionalInterval, share_kind
from perturbkv.analyses.stats.permutation import SignFlips
from perturbkv.analyses.text import STEP, decimal
from perturbkv.analyses.verdicts import (
    TIE_FLOORS,
    distance_of,
    equal_isolated,
    equal_propagated,
    ratio_verdict,
    verdicts,
)
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace

ANALYSIS = "heads"
EQUAL_SETS = {"isolated": equal_isolated, "propagated": equal_propagated}
"""Kind of perturbation -> where kept sets imply that two configurations have the same."""
HEADS = ("layer", "head")
"""Axes of arrays per query head."""
_NAMED_HEADS = 5
"""Most heads that are named as those which gain or lose most."""


@record
class HeadKind(Record, section="heads of a kind"):
    """A baseline against a treatment head by head, in isolated or in propagated perturbation.

    Attributes:
        name: isolated, propagated, or empty where the kind has no name.
        baseline_mean, treatment_mean, noise_floor: (layer, head) means over samples, in the distance's unit.
        verdict: (layer, head) of these means: 1 improved, 0 tied, −1 worsened.
        differences: (sample, layer, head) baseline − treatment, 0 where they are tied.
        sample_sums: (sample,) sums over heads of the baseline and of the treatment.
    """

    name: str = column("isolated or propagated", heading="kind", json=False)
    baseline_mean: Floats = column("of each head", dims=HEADS, json=False)
    treatment_mean: Floats = column("the same of the treatment", dims=HEADS, json=False)
    noise_floor: Floats = column("noise floor of each head", dims=HEADS, json=False)
    verdict: NDArray[np.int8] = column("1 better, 0 tied, −1 worse", dims=HEADS, json=False)
    better_share: float = column(
        "mean over samples of each sample's share of better heads", unit="share", heading="#heads\nbetter"
    )
    better_share_interval: OptionalInterval = interval()
    unflagged_better_share: float = column("the same of the heads with σ > 0.5; NaN where there is none", unit="share")
    sum_ratio: float = column(
        "treatment over baseline, summed over heads and samples; NaN where the baseline's sum is 0",
        heading="#sum over\nbaseline's",
    )
    sum_ratio_interval: OptionalInterval = interval()
    median_ratio: float = column("the median head's treatment over baseline", heading="#median\nhead's")
    median_ratio_interval: OptionalInterval = interval()
    half_share: float = column(
        "share of the heads that carries half of the baseline's sum",
        unit="share",
        key="half_of_the_sum_in_share_of_heads",
    )
    differences: Floats
    sample_sums: tuple[Floats, Floats]
    floor_relative_median: float = column("noise floor over ‖o_h‖, the median head", key="noise_floor_relative_median")
    floor_relative_max: float = column("the same of the head where it is largest", key="noise_floor_relative_max")

    @derived()
    def sign_flips(self) -> SignFlips:
        """Heads that are better or worse beyond chance; above 0: better."""
        return permutation.sign_flip_tests(self.differences)

    @derived()
    def improved(self) -> int:
        """Heads whose mean over samples is lower than the baseline's by more than rounding."""
        return int((self.verdict == 1).sum())

    @derived()
    def tied(self) -> int:
        """Heads whose means differ by at most two noise floors."""
        return int((self.verdict == 0).sum()) if self.is_known else 0

    @derived()
    def worsened(self) -> int:
        """Heads whose mean over samples is higher than the baseline's by more than rounding."""
        return int((self.verdict == -1).sum())

    @derived(key="baseline_mean")
    def baseline_overall(self) -> float:
        """Mean over heads and samples, in the distance's unit."""
        return float(self.baseline_mean.mean())

    @derived(key="treatment_mean")
    def treatment_overall(self) -> float:
        """Mean over heads and samples of the treatment."""
        return float(self.treatment_mean.mean())

    @property
    def is_known(self) -> bool:
        """True if both sides have this perturbation; not every cache of the user's has an isolated one."""
        return not np.isnan(self.treatment_mean - self.baseline_mean).any()

    @property
    def sum_verdict(self) -> str:
        """The verdict on the ratio of sums, ALIKE where every head ties in every sample."""
        return ratio_verdict(self.sum_ratio, self.sum_ratio_interval, not self.differences.any())

    def case(self, name: str = "") -> Case:
        """Return the ratio of sums as a named case of a comparison, tied where every head ties in every sample."""
        return Case.ratio(name, self.sum_ratio, self.sum_ratio_interval, not self.differences.any())

    def records(self, layers: Sequence[int], **labels: Any) -> Iterator[dict[str, Any]]:
        """Yield a row per layer and head: labels, both sides' means over samples, their noise floor, the verdict."""
        return long_form(labels, {"layer": layers, "head": range(self.verdict.shape[1])}, self.arrays(*HEADS))


def compare_kind(
    baseline: Floats,
    treatment: Floats,
    floor: Floats,
    norm: Floats,
    flagged: NDArray[np.bool_],
    distance: str = "l1",
    name: str = "",
) -> HeadKind:
    """Compare (sample, layer, head) perturbations of two configurations; differences within noise are ties.

    Args:
        baseline: (sample, layer, head), as all but `flagged`.
        treatment: likewise.
        floor: noise floor.
        norm: ‖o_h‖ in the distance's unit.
        flagged: (layer, head) True where σ ≤ 0.5.
        distance: a key of `HEAD_DISTANCES`.
        name: of the kind.
    """
    samples = len(baseline)
    baseline_mean, treatment_mean, floor_mean = (part.mean(axis=0) for part in (baseline, treatment, floor))
    by_sample = verdicts(baseline, treatment, floor, distance)
    better = (by_sample == 1).reshape(samples, -1)
    better_heads, better_interval = better_share(by_sample)
    if np.isnan(treatment_mean - baseline_mean).any():  # of somebody's cache that has none
        better, better_heads, better_interval = np.full(better.shape, np.nan), np.nan, None
    sums, sums_interval = sum_ratio(baseline, treatment)
    relative_median, relative_max = floor_over_norm(floor, norm)

    def weighted_median(weights: Floats) -> Floats:
        first, second = (weights @ part.reshape(samples, -1) for part in (baseline, treatment))
        return np.asarray(quantiles(ratio(second, first), (0.5,), axis=1)[0])

    return HeadKind(
        name=name,
        baseline_mean=baseline_mean,
        treatment_mean=treatment_mean,
        noise_floor=floor_mean,
        verdict=verdicts(baseline_mean, treatment_mean, floor_mean, distance),
        better_share=better_heads,
        better_share_interval=better_interval,
        unflagged_better_share=float(better[:, ~flagged.reshape(-1)].mean()) if not flagged.all() else float("nan"),
        sum_ratio=sums,
        sum_ratio_interval=sums_interval,
        median_ratio=median(ratio(treatment_mean, baseline_mean)),
        median_ratio_interval=intervals.of_statistic(weighted_median, samples, RATIO),
        half_share=half_share(baseline_mean),
        differences=np.where(by_sample == 0, 0, baseline - treatment),
        sample_sums=(baseline.sum(axis=(1, 2)), treatment.sum(axis=(1, 2))),
        floor_relative_median=relative_median,
        floor_relative_max=relative_max,
    )


def sum_ratio(baseline: Floats, treatment: Floats) -> tuple[float, OptionalInterval]:
    """Return Σ treatment over Σ baseline of (sample, layer, head) values with its interval; NaN for a baseline of 0."""
    first, second = (part.sum(axis=(1, 2)) for part in (baseline, treatment))
    value = float(ratio(treatment.mean(axis=0).sum(), baseline.mean(axis=0).sum()))
    return value, intervals.of_ratio(second, first)


def better_share(verdict: NDArray[np.int8]) -> tuple[float, OptionalInterval]:
    """Return the share of (sample, layer, head) verdicts that are 1, with its interval over samples."""
    better = (verdict == 1).reshape(len(verdict), -1)
    return float(better.mean()), intervals.of_mean(better.mean(axis=1), share_kind(better.shape[1]))


def floor_over_norm(floor: Floats, norm: Floats) -> tuple[float, float]:
    """Return mean noise floor over mean ‖o_h‖, of the median head and the largest; both are (sample, layer, head)."""
    middle, largest = quantiles(ratio(floor.mean(axis=0), norm.mean(axis=0)), (0.5, 1.0))
    return float(middle), float(largest)


@record
class ChangedLoss(Record, section="changed loss"):
    """The loss by eviction alone, and what moving keys, quantising or correcting adds to it, of one configuration.

    Of isolated perturbations in L1, summed over heads and samples. Both parts may exceed the whole together.
    """

    config: EvictionConfig = column("a configuration that also moves keys, quantises or corrects")
    whole_ratio: float = column("the whole loss over that of eviction alone", heading="#whole over\neviction's")
    whole_ratio_interval: OptionalInterval = interval()
    change_ratio: float = column(
        "distance between evicted and changed outputs, over the loss of eviction alone",
        heading="#change over\neviction's",
    )
    change_ratio_interval: OptionalInterval = interval()

    def note(self, name: str) -> str:
        """Return both ratios as a sentence about the configuration `name`."""
        whole = decimal(self.whole_ratio, self.whole_ratio_interval)
        shift = decimal(self.change_ratio, self.change_ratio_interval)
        config = self.config
        done = {"moving keys": config.in_cache, "few bits": config.quantised, "correcting": config.corrected,
                "holding other entries": config.is_external}  # fmt: skip
        what = " and ".join(change for change, is_done in done.items() if is_done)
        return f"{name}, isolated: {whole} times the loss of eviction alone; {what} shifts by {shift} times that."


def changed_losses(measured: Measurements, configs: Sequence[EvictionConfig]) -> tuple[ChangedLoss, ...]:
    """Return the parts of the loss of each configuration that does more than evict; empty in a trace without such.

    One from which nothing is evicted, or whose eviction loses no more than rounding, has none to compare with.
    """
    if "perturbation_change" not in measured:
        return ()
    losses, evicting = [], only_evicts(measured.trace)
    for config in configs:
        index = measured.index(config)
        if evicting[index] or np.isnan(measured["perturbation_change"][:, index]).any():
            continue
        whole, eviction, change = (
            measured[f"perturbation_{name}"][:, index] for name in ("isolated", "eviction", "change")
        )
        if (eviction > TIE_FLOORS * measured["noise_floor_isolated"]).any():
            losses.append(ChangedLoss(config, *sum_ratio(eviction, whole), *sum_ratio(eviction, change)))
    return tuple(losses)


@record
class HeadComparison(PairRecord, Record, section="comparison"):
    """A pair of configurations compared head by head.

    Attributes:
        flagged: (layer, head) True where the treatment's mean σ is at most 0.5: no evidence for Theorem 3.
        retained_mass, cache_shares: of baseline and treatment.
        prefill_seconds: of baseline's and treatment's own prefills, and of the full one; NaN where there is none.
        identity: of the run.
    """

    baseline: EvictionConfig = column("what is compared with")
    treatment: EvictionConfig = column("what is compared")
    distance: str = column("l1, l2, cosine or effect")
    step: int | None = column(STEP)
    isolated: HeadKind = column("each layer cut on its own")
    propagated: HeadKind = column("every earlier layer's error included")
    flagged: NDArray[np.bool_] = column("True where the treatment's mean σ ≤ 0.5", dims=HEADS, json=False)
    retained_mass: tuple[float, float]
    cache_shares: tuple[float, float]
    prefill_seconds: tuple[float, float, float]
    identity: RunIdentity

    samples: ClassVar[Derived[int]] = attribute("identity.samples", "Complete samples that have the step")
    failed_samples: ClassVar[Derived[int]] = attribute("identity.failed", "Samples that failed")
    samples_ended_before_step: ClassVar[Derived[int]] = attribute(
        "identity.ended", "Complete samples whose text ends before the step"
    )

    @derived()
    def heads(self) -> int:
        """Query heads of all layers."""
        return int(self.flagged.size)

    @derived(json=False)
    def flagged_count(self) -> int:
        """Heads whose treatment's mean σ ≤ 0.5."""
        return int(self.flagged.sum())

    @derived()
    def flagged_heads(self) -> list[str]:
        """Heads, as layer-head, whose treatment's mean σ ≤ 0.5: no evidence for Theorem 3."""
        return [self._name(place) for place in np.argwhere(self.flagged)]

    @derived()
    def gain_most(self) -> list[str]:
        """Heads, as layer-head, whose propagated mean is lower than the baseline's by most, at most five."""
        return self._largest(self.propagated.baseline_mean - self.propagated.treatment_mean, 1)

    @derived()
    def lose_most(self) -> list[str]:
        """Heads, as layer-head, whose propagated mean is higher than the baseline's by most, at most five."""
        return self._largest(self.propagated.treatment_mean - self.propagated.baseline_mean, -1)

    def _largest(self, difference: Floats, verdict: int) -> list[str]:
        """Return the names of the five heads of a verdict whose difference (layer, head) is largest, that one first."""
        places = np.argwhere(self.propagated.verdict == verdict)
        order = np.argsort(-difference[tuple(places.T)], kind="stable")
        return [self._name(place) for place in places[order[:_NAMED_HEADS]]]

    def _name(self, place: NDArray[np.int64]) -> str:
        """Return a head as layer-head, by its indices in the arrays."""
        return f"{self.identity.layer(place[0])}-{place[1]}"

    retained_mass_baseline: ClassVar[Derived[float]] = attribute(
        "retained_mass.0", "Mean S of the baseline, a share of the attention", unit="share"
    )
    retained_mass_treatment: ClassVar[Derived[float]] = attribute(
        "retained_mass.1", "Mean S of the treatment", unit="share"
    )
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
    prefill_seconds_baseline: ClassVar[Derived[float | None]] = attribute(
        "prefill_seconds.0",
        "Duration of the baseline's own prefill, mean over samples; null where it has none",
        unit="s",
    )
    prefill_seconds_treatment: ClassVar[Derived[float | None]] = attribute(
        "prefill_seconds.1",
        "Duration of the treatment's own prefill, mean over samples; null where it has none",
        unit="s",
        heading="#prefill\ns",
    )
    prefill_seconds_full: ClassVar[Derived[float | None]] = attribute(
        "prefill_seconds.2",
        "Duration of the full prefill; null where no configuration of the trace has a prefill of its own",
        unit="s",
    )


def summarise(
    trace: Trace, baseline: EvictionConfig, treatment: EvictionConfig, step: int | None = None, distance: str = "l1"
) -> HeadComparison:
    """Compare two configurations of a trace head by head, over its complete samples that have the step.

    Raises TraceError where the trace has no complete sample, no such configuration, lacks the distance, or holds NaN
    in a complete sample; ConfigError where it has no such step, UnknownNameError for an unknown distance.
    """
    return compare_pair(Measurements(trace, ANALYSIS, step), identity_at(trace, (baseline, treatment), step), distance)


def compare_pair(measured: Measurements, about: RunIdentity, distance: str = "l1") -> HeadComparison:
    """Compare the two configurations of `about`, baseline and treatment, head by head. Raises as `summarise`."""
    distance_of(distance)  # raises before anything is read
    baseline, treatment = about.configs
    sides = (measured.index(baseline), measured.index(treatment))
    flagged = measured["sigma_stage1"][:, sides[1]].mean(axis=0) <= EVIDENCE
    mass = measured["retained_mass"].mean(axis=(0, 2, 3))
    shares, (seconds, full) = measured.cache_shares, measured.prefill_seconds
    isolated, propagated = (_head_kind(measured, kind, distance, sides, flagged) for kind in ("isolated", "propagated"))
    return HeadComparison(
        baseline=baseline,
        treatment=treatment,
        distance=distance,
        step=measured.step,
        isolated=isolated,
        propagated=propagated,
        flagged=flagged,
        retained_mass=(float(mass[sides[0]]), float(mass[sides[1]])),
        cache_shares=(float(shares[sides[0]]), float(shares[sides[1]])),
        prefill_seconds=(float(seconds[sides[0]]), float(seconds[sides[1]]), full),
        identity=about,
    )


def _head_kind(
    measured: Measurements, kind: str, distance: str, sides: tuple[int, int], flagged: NDArray[np.bool_]
) -> HeadKind:
    """Return the comparison of `sides` (indices of baseline, treatment) in `isolated` or `propagated` perturbation."""
    both, floor = compared_perturbation(measured, kind, distance, sides)
    unit = distance_of(distance)
    norm = np.ones_like(floor) if unit.angular or unit.of_text else measured[f"output_norm{unit.suffix}"]
    return compare_kind(*both, floor, norm, flagged, distance, kind)


def compared_perturbation(
    measured: Measurements, kind: str, distance: str, sides: tuple[int, int]
) -> tuple[tuple[Floats, Floats], Floats]:
    """Return the perturbation of baseline and treatment, and the noise floor: (sample, layer, head) each.

    Where kept sets imply equality, the treatment has the baseline's values. `kind` is isolated or propagated. Raises
    TraceError for what the trace lacks.
    """
    values, floor = perturbation_and_floor(measured, kind, distance)
    return select_sides(values, sides, EQUAL_SETS[kind](measured.trace, *sides)), floor


def perturbation_and_floor(measured: Measurements, kind: str, distance: str) -> tuple[Floats, Floats]:
    """Return a kind of perturbation, (sample, config, layer, head), and its noise floor, (sample, layer, head).

    Raises as `compared_perturbation`.
    """
    unit = distance_of(distance)
    floor = floor_name(kind, distance)
    if unit.of_text:
        return measured.sizes(f"effect_{kind}"), measured[floor]
    return measured[f"perturbation_{kind}{unit.suffix}"], measured[floor]


def floor_name(kind: str, distance: str) -> str:
    """Return the name of the variable of the noise floor of `kind` (isolated or propagated) in a distance."""
    unit = distance_of(distance)
    return f"{'effect_' if unit.of_text else ''}noise_floor{'_isolated' if kind == 'isolated' else ''}{unit.suffix}"


def select_sides(values: Floats, sides: tuple[int, int], same: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the values of baseline and treatment, (sample, layer, head); the baseline's in both where `same`.

    Args:
        values: (sample, config, layer, head).
        sides: indices of baseline and treatment.
        same: (sample, layer, head) True where kept sets imply equal values.
    """
    baseline = values[:, sides[0]]
    return baseline, np.where(same, baseline, values[:, sides[1]])
