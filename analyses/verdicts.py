"""Better, tied or worse: rounding is not perturbation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TIE_FLOORS = 2
"""A tie is where two perturbations differ by at most this many noise floors (METHOD: the protocol, 4)."""


def verdicts(
    baseline: NDArray[np.float64], treatment: NDArray[np.float64], floor: NDArray[np.float64]
) -> NDArray[np.int8]:
    """1 where the treatment perturbs less, −1 where it perturbs more, 0 for ties; any shape."""
    under_noise = np.abs(baseline - treatment) <= TIE_FLOORS * floor
    sign: NDArray[np.int8] = np.sign(baseline - treatment).astype(np.int8)
    return np.where(under_noise, np.int8(0), sign)
