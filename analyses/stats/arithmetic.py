"""Ratios and medians where some denominators are 0 and some values absent."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def ratio(numerator: Any, denominator: Any) -> Any:
    """Return numerator / denominator; NaN where the denominator is 0."""
    bottom = np.asarray(denominator, dtype=np.float64)
    return np.asarray(numerator, dtype=np.float64) / np.where(bottom == 0, np.nan, bottom)


def quantiles(array: NDArray[np.float64], levels: tuple[float, ...], axis: int | None = None) -> NDArray[np.float64]:
    """Return (level, …) quantiles along an axis, or of all numbers, ignoring NaN; NaN if all are NaN."""
    flat = array.reshape(-1) if axis is None else np.moveaxis(array, axis, 0)
    result = np.full((len(levels), *flat.shape[1:]), np.nan)
    known = ~np.isnan(flat).all(axis=0) if len(flat) else np.zeros(flat.shape[1:], dtype=bool)
    if known.any():
        result[:, known] = np.nanquantile(flat[:, known], levels, axis=0)
    return result


def half_share(parts: NDArray[np.float64]) -> float:
    """Return the smallest share of the parts that sums to half of the total; NaN for a total of 0."""
    largest = np.sort(parts.reshape(-1))[::-1].cumsum()
    return float((np.argmax(largest >= largest[-1] / 2) + 1) / largest.size) if largest[-1] > 0 else float("nan")


def median(array: NDArray[np.float64]) -> float:
    """Return the median, ignoring NaN; NaN if all numbers are NaN."""
    return float(quantiles(array, (0.5,))[0])
