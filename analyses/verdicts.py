"""The distances that perturbation and drift are measured in: their unit, and how a trace's variables name them.

Better, tied or worse: rounding is not perturbation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.errors import UnknownNameError


@dataclass(frozen=True)
class Distance:
    """How far what the evicted run gives lies from what the full run gives; less is better. Printed as its unit.

    Attributes:
        unit: as axes and titles write it.
        suffix: what the names of its variables end in.
        angular: whether it is of directions alone: relative already, and growing with the square of the angle.
    """

    unit: str
    suffix: str
    angular: bool = False

    def __str__(self) -> str:
        return self.unit


DISTANCES = {
    "l1": Distance("L1", ""),
    "l2": Distance("L2", "_l2"),
    "cosine": Distance("cosine distance", "_cosine", angular=True),
}


def distance_of(name: str) -> Distance:
    """The distance of this name. Raises UnknownNameError for an unknown one."""
    if name not in DISTANCES:
        raise UnknownNameError(name, "distance", DISTANCES)
    return DISTANCES[name]


TIE_FLOORS = 2
"""A tie is where two perturbations differ by at most this many noise floors (METHOD: the protocol, 4)."""


def verdicts(
    baseline: NDArray[np.float64],
    treatment: NDArray[np.float64],
    floor: NDArray[np.float64],
    distance: str = "l1",
) -> NDArray[np.int8]:
    """1 where the treatment perturbs less, −1 where it perturbs more, 0 for ties; any shape.

    1 − cos grows with the square of the angle, in which noise adds: as its `distance` the roots are compared, or a
    floor of an angle δ would be held against differences of 2 φ δ.
    """
    sides = (baseline, treatment, floor)
    first, second, noise = (np.sqrt(side) for side in sides) if distance_of(distance).angular else sides
    under_noise = np.abs(first - second) <= TIE_FLOORS * noise
    sign: NDArray[np.int8] = np.sign(baseline - treatment).astype(np.int8)
    return np.where(under_noise, np.int8(0), sign)
