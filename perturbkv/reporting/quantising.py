"""Numbers in two bytes each: logarithms of what is positive, equal steps of shares, codes of their own for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats

Codes = NDArray[np.uint16]
LOG, LINEAR = "log", "linear"
NOT_A_NUMBER, INFINITE = 65534, 65535
_LAST = 65533
"""The largest code of a number."""
_LOG_STEP = 0.0019
"""Half a step is 0.095 % of a value: less would spend bytes on digits that nobody reads."""
_LINEAR_STEP = 1.9e-4


@dataclass(frozen=True)
class Scale:
    """What a code stands for.

    Attributes:
        kind: `log`: exp(low + (code − 1) · step), and 0 is 0; `linear`: low + code · step.
        low, step: as these formulas say.
    """

    kind: str
    low: float
    step: float

    def to_dict(self) -> dict[str, Any]:
        """As the page's JSON holds it."""
        return dict(vars(self))


def log_scale(values: Floats) -> Scale:
    """The scale of values that are 0 or positive; negative ones, which only rounding makes, count as 0.

    Errors are at most 0.1 % of a value where the largest is at most e¹²⁴ times the smallest.
    """
    held = np.log(values[np.isfinite(values) & (values > 0)])
    low, high = (float(held.min()), float(held.max())) if held.size else (0.0, 0.0)
    return Scale(LOG, low, max(_LOG_STEP, (high - low) / (_LAST - 1)))


def linear_scale(values: Floats) -> Scale:
    """The scale of shares. Errors are at most 0.0001 where they spread over at most 12."""
    held = values[np.isfinite(values)]
    low, high = (float(held.min()), float(held.max())) if held.size else (0.0, 0.0)
    return Scale(LINEAR, low, max(_LINEAR_STEP, (high - low) / _LAST))


def encode(values: Floats, scale: Scale) -> Codes:
    """The code of each value, of any shape."""
    if scale.kind == LOG:
        positive = np.isfinite(values) & (values > 0)
        places = np.round((np.log(np.where(positive, values, 1.0)) - scale.low) / scale.step) + 1
        found = np.where(positive, np.clip(places, 1, _LAST), 0)
    else:
        found = np.clip(np.round((np.where(np.isfinite(values), values, scale.low) - scale.low) / scale.step), 0, _LAST)
    found = np.where(np.isnan(values), NOT_A_NUMBER, np.where(np.isposinf(values), INFINITE, found))
    return found.astype(np.uint16)


def logarithm_below_one(shares: Floats, step: float, largest: int) -> NDArray[np.int64]:
    """Codes of shares: 0 of 0 and of what is no number, else that of exp((code − largest) · step), at least 1."""
    held = np.isfinite(shares) & (shares > 0)
    places = largest + np.round(np.log(np.where(held, shares, 1.0)) / step)
    return np.where(held, np.clip(places, 1, largest), 0).astype(np.int64)


def four_a_byte(verdicts: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Verdicts 1, 0 and −1 as 1, 0 and 2 in two bits each, the first in the lowest bits of the first byte."""
    flat = np.where(verdicts < 0, 2, verdicts).astype(np.uint8).reshape(-1)
    padded = np.concatenate([flat, np.zeros(-len(flat) % 4, dtype=np.uint8)]).reshape(-1, 4)
    return np.asarray((padded << np.arange(0, 8, 2, dtype=np.uint8)).sum(axis=1), dtype=np.uint8)
