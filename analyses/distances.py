"""The distances that perturbation and drift are measured in: their unit, and how a trace's variables name them."""

from __future__ import annotations

from dataclasses import dataclass

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
