"""One kind of perturbation, isolated or propagated, of two configurations, head by head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import intervals, sign_flips
from perturbkv.analyses.arithmetic import half_share, median, plain, quantiles, ratio
from perturbkv.analyses.intervals import RATIO, Scalar, share_of
from perturbkv.analyses.reading import Floats
from perturbkv.analyses.sign_flips import Decided
from perturbkv.analyses.verdicts import verdicts
from perturbkv.errors import TraceError


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
        decided: which heads are better or worse beyond chance.
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
    decided: Decided
    floor_relative_median: float
    floor_relative_max: float

    def __post_init__(self) -> None:
        shapes = {array.shape for array in (self.baseline_mean, self.treatment_mean, self.floor_mean, self.verdict)}
        if len(shapes) != 1:
            msg = f"expected (layer, head) arrays of one shape, got {sorted(shapes)}"
            raise TraceError(msg)

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


def compare(
    baseline: Floats, treatment: Floats, floor: Floats, norm: Floats, flagged: NDArray[np.bool_], distance: str = "l1"
) -> HeadKind:
    """(sample, layer, head) each but `flagged` (layer, head): what is equal in both is a tie, and so is noise."""
    samples, *shape = baseline.shape
    heads = int(np.prod(shape))
    means = [part.mean(axis=0) for part in (baseline, treatment, floor)]
    each = verdicts(baseline, treatment, floor, distance)
    better = (each == 1).reshape(samples, -1)
    relative = quantiles(ratio(means[2], norm.mean(axis=0)), (0.5, 1.0))

    def total(weights: Floats) -> Floats:
        return np.asarray(ratio(weights @ treatment.sum(axis=(1, 2)), weights @ baseline.sum(axis=(1, 2))))

    def middle(weights: Floats) -> Floats:
        first, second = (weights @ part.reshape(samples, -1) for part in (baseline, treatment))
        return np.asarray(quantiles(ratio(second, first), (0.5,), axis=1)[0])

    return HeadKind(
        baseline_mean=means[0],
        treatment_mean=means[1],
        floor_mean=means[2],
        verdict=verdicts(means[0], means[1], means[2], distance),
        better_share=float(better.mean()),
        better_share_interval=intervals.of_mean(better.mean(axis=1), share_of(heads)),
        unflagged_better_share=float(better[:, ~flagged.reshape(-1)].mean()) if not flagged.all() else float("nan"),
        sum_ratio=float(ratio(means[1].sum(), means[0].sum())),
        sum_ratio_interval=intervals.scalar(total, samples, RATIO),
        median_ratio=median(ratio(means[1], means[0])),
        median_ratio_interval=intervals.scalar(middle, samples, RATIO),
        half_share=half_share(means[0]),
        decided=sign_flips.decide(np.where(each == 0, 0, baseline - treatment)),
        floor_relative_median=float(relative[0]),
        floor_relative_max=float(relative[1]),
    )
