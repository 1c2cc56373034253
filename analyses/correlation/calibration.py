"""How often an answer is lost, and how much of its score goes, at how much perturbation: a curve in quantile bins.

Nothing is fitted. The bins hold answers of all prompts, so that a curve also shows what tells prompts apart; each bin's
interval is over the prompts in it, whose answers are not independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import Kind, Scalar, share_of
from perturbkv.errors import ConfigError

BINS = 5
_DROP = Kind(3 / 8, limits=(-1, 1))
"""A mean of what answers lose of a score from 0 to 1."""


@dataclass(frozen=True)
class Bin:
    """Answers of similar perturbation.

    Attributes:
        low, high: the least and the largest perturbation in it.
        middle: the median one.
        answers, prompts: how many answers, of how many prompts.
        lost: share of the answers that are lost; its interval, over prompts.
        drop: mean of what they lose of the score, in [−1, 1]; its interval.
    """

    low: float
    high: float
    middle: float
    answers: int
    prompts: int
    lost: float
    lost_interval: Scalar
    drop: float
    drop_interval: Scalar


def check_bins(bins: int) -> int:
    """The number of bins. Raises ConfigError for fewer than two."""
    if bins < 2:
        msg = f"expected at least 2 bins of a calibration curve, got {bins}"
        raise ConfigError(msg)
    return bins


def curve(measured: Floats, lost: NDArray[np.bool_], drop: Floats, bins: int = BINS) -> tuple[Bin, ...]:
    """Bins of (prompt, config) arrays, least perturbed first; equal perturbations are never parted.

    Prompts without a measure (NaN) are left out.
    """
    known = measured[~np.isnan(measured)]
    if not len(known):
        return ()
    edges = np.quantile(known, np.arange(1, bins) / bins, method="inverted_cdf")
    places = np.where(np.isnan(measured), -1, np.searchsorted(np.unique(edges), measured, side="left"))
    return tuple(_bin(measured, lost, drop, places == place) for place in np.unique(places[places >= 0]))


def _bin(measured: Floats, lost: NDArray[np.bool_], drop: Floats, inside: NDArray[np.bool_]) -> Bin:
    held = measured[inside]
    lost_share, lost_interval = _mean(lost, inside, share_of(0))
    mean_drop, drop_interval = _mean(drop, inside, _DROP)
    return Bin(
        low=float(held.min()),
        high=float(held.max()),
        middle=float(np.median(held)),
        answers=len(held),
        prompts=int(inside.any(axis=1).sum()),
        lost=lost_share,
        lost_interval=lost_interval,
        drop=mean_drop,
        drop_interval=drop_interval,
    )


def _mean(values: NDArray[np.generic], inside: NDArray[np.bool_], kind: Kind) -> tuple[float, Scalar]:
    """The mean of the answers in a bin, a ratio of sums over prompts, with its interval."""
    there = inside.any(axis=1)
    top = np.where(inside, values, 0)[there].sum(axis=1, dtype=np.float64)
    count = inside[there].sum(axis=1)
    sure = float(count.sum() ** 2 / (count**2).sum())  # as many prompts of equally many answers
    found = intervals.scalar(lambda weights: np.asarray(ratio(weights @ top, weights @ count)), len(top), kind, sure)
    return float(top.sum() / count.sum()), found
