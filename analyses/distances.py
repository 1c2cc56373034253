"""The distances that perturbation and drift are measured in, and how a trace's variables name them."""

from __future__ import annotations

from perturbkv.errors import UnknownNameError

DISTANCES = {"l1": "L1", "l2": "L2", "cosine": "cosine distance"}


def suffix(distance: str) -> str:
    """What a variable's name ends in where not L1 is its distance. Raises UnknownNameError for an unknown one."""
    if distance not in DISTANCES:
        raise UnknownNameError(distance, "distance", DISTANCES)
    return "" if distance == "l1" else f"_{distance}"
