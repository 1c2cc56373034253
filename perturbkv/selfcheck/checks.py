"""What one check says: a distance from its reference, and the bound that it has to keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from perturbkv.errors import PerturbkvError


@dataclass(frozen=True)
class Check:
    """One comparison with a reference.

    Attributes:
        name: of the check.
        distance: the largest relative distance found; None where it could not be measured.
        bound: the largest allowed.
        rule: what the bound is, in words.
        reason: why it was not measured.
        needed: False where what would be checked is not there, and something else that is checked takes its place.
    """

    name: str
    distance: float | None
    bound: float
    rule: str
    reason: str = ""
    needed: bool = True

    @property
    def equal(self) -> bool:
        """Whether it was measured and keeps the bound; NaN does not."""
        return self.distance is not None and self.distance <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """As JSON; a distance that is no number is told as text."""
        distance = self.distance
        finite = distance is None or abs(distance) < float("inf")
        return {**asdict(self), "distance": distance if finite else str(distance), "equal": self.equal}


def tried(name: str, rule: str, work: Callable[[], list[Check]]) -> list[Check]:
    """What `work` finds; one check that was not measured where it fails, so that the others go on."""
    try:
        return work()
    except (PerturbkvError, RuntimeError) as error:  # torch's own are RuntimeErrors: no memory, no such kernel
        said = " ".join(str(error).split()) or type(error).__name__
        return [Check(name, None, 0.0, rule, said[:200])]
