"""Percentile bootstrap over samples: the one way that intervals are made here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.arithmetic import quantiles

RESAMPLES = 2000
LEVEL = 0.95

Floats = NDArray[np.float64]
Interval = tuple[float, float] | None


def resample(samples: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """(resample, sample) indices drawn with replacement."""
    return np.random.default_rng(seed).integers(0, samples, size=(resamples, samples))


def intervals(
    statistic: Callable[[Floats], Floats], samples: int, resamples: int = RESAMPLES, seed: int = 0
) -> Floats | None:
    """(2, …) ends of 95 % percentile intervals; None for a single sample, of which nothing can be resampled.

    `statistic` maps weights (resample, sample), each row the counts of a resample divided by their sum, to values
    (resample, …): means over samples are then matrix products. NaN values are left out.
    """
    if samples < 2:
        return None
    drawn = resample(samples, resamples, seed)
    counts = np.apply_along_axis(np.bincount, 1, drawn, minlength=samples)
    tail = (1 - LEVEL) / 2
    return quantiles(statistic(counts / samples), (tail, 1 - tail), axis=0)


def interval(
    statistic: Callable[[Floats], Floats], samples: int, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """The interval of one number: `statistic` gives one value per resample. None where there is none."""
    ends = intervals(statistic, samples, resamples, seed)
    return None if ends is None or np.isnan(ends).any() else (float(ends[0]), float(ends[1]))


def mean_interval(per_sample: Floats, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """The interval of the mean over samples of (sample,) values; samples that are NaN are left out."""
    held = per_sample[~np.isnan(per_sample)]
    return interval(lambda weights: weights @ held, len(held), resamples, seed)
