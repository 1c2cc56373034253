"""Which heads does a selection help? Perturbation per head, baseline against treatment (paper, figure 2).

One kind of perturbation, isolated or propagated, of two configurations, head by head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.measurements import EVIDENCE, Floats, at_step, held_shares, prefill_seconds, values
from perturbkv.analyses.pairing import OfPair
from perturbkv.analyses.stats import intervals, permutation
from perturbkv.analyses.stats.arithmetic import half_share, median, plain, quantiles, ratio
from perturbkv.analyses.stats.intervals import RATIO, Scalar, share_of
from perturbkv.analyses.stats.permutation import Decided
from perturbkv.analyses.verdicts import distance_of, equal_isolated, equal_propagated, verdicts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace


@dataclass(frozen=True)
class HeadKind:
    """One kind of perturbation, isolated or propagated.

    Attributes:
        baseline_mean, treatment_mean: (layer, head) mean over samples, in the distance's unit.
        floor_mean: (layer, head) mean noise floor.
        verdict: (layer, head) of these means: 1 improved, 0 tied, −1 worsened.
        better_share: mean over samples of each sample's share of heads that are better, in [0, 1].
        unflagged_better_share: the same of the heads with σ > 0.5; NaN where there is none.
        sum_ratio: Σ treatment over Σ baseline, over heads and samples; NaN where the baseline's is 0.
        median_ratio: the median head's treatment over baseline.
        half_share: the share of heads that carry half of the baseline's sum.
        differences: (sample, layer, head) baseline − treatment, 0 where they are tied.
        floor_relative_median, floor_relative_max: noise floor over the norm of o_h, over heads.
    """

    baseline_mean: Floats
    treatment_mean: Floats
    floor_mean: Floats
    verdict: NDArray[np.int8]
    better_share: float
    better_share_interval: Scalar
    unflagged_better_share: float
    sum_ratio: float
    sum_ratio_interval: Scalar
    median_ratio: float
    median_ratio_interval: Scalar
    half_share: float
    differences: Floats
    floor_relative_median: float
    floor_relative_max: float

    def __post_init__(self) -> None:
        shapes = {array.shape for array in (self.baseline_mean, self.treatment_mean, self.floor_mean, self.verdict)}
        if len(shapes) != 1:
            msg = f"expected (layer, head) arrays of one shape, got {sorted(shapes)}"
            raise TraceError(msg)

    @cached_property
    def decided(self) -> Decided:
        """Which heads are better or worse beyond chance; tested when it is first asked for."""
        return permutation.decide(self.differences)

    @property
    def improved_count(self) -> int:
        """Heads whose treatment perturbs less, by their means."""
        return int((self.verdict == 1).sum())

    @property
    def tied_count(self) -> int:
        """Heads whose means differ by no more than noise."""
        return int((self.verdict == 0).sum())

    @property
    def worsened_count(self) -> int:
        """Heads whose treatment perturbs more, by their means."""
        return int((self.verdict == -1).sum())

    def to_dict(self) -> dict[str, Any]:
        """Numbers for summary.json."""
        shown = ("better_share", "unflagged_better_share", "sum_ratio", "median_ratio")
        found: dict[str, Any] = {
            "improved": self.improved_count,
            "tied": self.tied_count,
            "worsened": self.worsened_count,
            **{name: value for name, value in vars(self).items() if name.removesuffix("_interval") in shown},
            "half_of_the_sum_in_share_of_heads": self.half_share,
            "sign_flips": self.decided.to_dict(),
            "baseline_mean": self.baseline_mean.mean(),
            "treatment_mean": self.treatment_mean.mean(),
            "noise_floor_relative_median": self.floor_relative_median,
            "noise_floor_relative_max": self.floor_relative_max,
        }
        numbers: dict[str, Any] = plain(found)
        return numbers

    def records(self, named: Callable[[int], int]) -> list[dict[str, Any]]:
        """A row per layer, by what `named` says, and head: both sides' means over samples, their floor, the verdict."""
        return [
            {
                "layer": named(layer),
                "head": head,
                "baseline_mean": float(self.baseline_mean[layer, head]),
                "treatment_mean": float(self.treatment_mean[layer, head]),
                "floor_mean": float(self.floor_mean[layer, head]),
                "verdict": int(verdict),
            }
            for layer, heads in enumerate(self.verdict)
            for head, verdict in enumerate(heads)
        ]


def compare_kind(
    baseline: Floats, treatment: Floats, floor: Floats, norm: Floats, flagged: NDArray[np.bool_], distance: str = "l1"
) -> HeadKind:
    """(sample, layer, head) each but `flagged` (layer, head): what is equal in both is a tie, and so is noise."""
    samples = len(baseline)
    means = [part.mean(axis=0) for part in (baseline, treatment, floor)]
    each = verdicts(baseline, treatment, floor, distance)
    better = (each == 1).reshape(samples, -1)
    relative = floor_over_norm(floor, norm)
    share, total = better_share(each), sum_ratio(baseline, treatment)

    def middle(weights: Floats) -> Floats:
        first, second = (weights @ part.reshape(samples, -1) for part in (baseline, treatment))
        return np.asarray(quantiles(ratio(second, first), (0.5,), axis=1)[0])

    return HeadKind(
        baseline_mean=means[0],
        treatment_mean=means[1],
        floor_mean=means[2],
        verdict=verdicts(means[0], means[1], means[2], distance),
        better_share=share[0],
        better_share_interval=share[1],
        unflagged_better_share=float(better[:, ~flagged.reshape(-1)].mean()) if not flagged.all() else float("nan"),
        sum_ratio=total[0],
        sum_ratio_interval=total[1],
        median_ratio=median(ratio(means[1], means[0])),
        median_ratio_interval=intervals.scalar(middle, samples, RATIO),
        half_share=half_share(means[0]),
        differences=np.where(each == 0, 0, baseline - treatment),
        floor_relative_median=relative[0],
        floor_relative_max=relative[1],
    )


def sum_ratio(baseline: Floats, treatment: Floats) -> tuple[float, Scalar]:
    """Σ treatment over Σ baseline of (sample, layer, head) values, with its interval; NaN where the baseline's is 0."""
    first, second = (part.sum(axis=(1, 2)) for part in (baseline, treatment))

    def total(weights: Floats) -> Floats:
        return np.asarray(ratio(weights @ second, weights @ first))

    found = float(ratio(treatment.mean(axis=0).sum(), baseline.mean(axis=0).sum()))
    return found, intervals.scalar(total, len(baseline), RATIO)


def better_share(verdict: NDArray[np.int8]) -> tuple[float, Scalar]:
    """Mean over samples of each one's share of heads that are better, with its interval; of (sample, layer, head)."""
    better = (verdict == 1).reshape(len(verdict), -1)
    return float(better.mean()), intervals.of_mean(better.mean(axis=1), share_of(better.shape[1]))


def floor_over_norm(floor: Floats, norm: Floats) -> tuple[float, float]:
    """Median and largest over heads of the mean noise floor over the mean norm of o_h, (sample, layer, head) each."""
    middle, most = quantiles(ratio(floor.mean(axis=0), norm.mean(axis=0)), (0.5, 1.0))
    return float(middle), float(most)


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
    return compare_kind(*both, floor, norm, flagged, distance)


def perturbed(
    trace: Trace, kind: str, distance: str, sides: tuple[int, int], step: int
) -> tuple[tuple[Floats, Floats], Floats]:
    """Baseline and treatment, and their noise floor: (sample, layer, head) each. `kind` is isolated or propagated.

    Where the kept sets say that both are equal, the treatment is the baseline. Raises TraceError for what the trace
    lacks.
    """
    found, floor = with_floor(trace, kind, distance, step)
    same = {"isolated": equal_isolated, "propagated": equal_propagated}[kind](trace, *sides)
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
