"""Percentile bootstrap over samples: the one way that intervals are made here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEVEL = 0.95


def resample(samples: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """(resample, sample) indices drawn with replacement."""
    return np.random.default_rng(seed).integers(0, samples, size=(resamples, samples))


def interval(
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    samples: int,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float] | None:
    """95 % percentile interval; None for a single sample, of which nothing can be resampled.

    `statistic` maps weights (resample, sample), each row the counts of a resample divided by their sum, to one value
    per resample: means over samples are then matrix products. NaN values are left out.
    """
    if samples < 2:
        return None
    drawn = resample(samples, resamples, seed)
    counts = np.apply_along_axis(np.bincount, 1, drawn, minlength=samples)
    values = statistic(counts / samples)
    tail = 50 * (1 - LEVEL)
    low, high = np.nanpercentile(values, [tail, 100 - tail])
    return float(low), float(high)
