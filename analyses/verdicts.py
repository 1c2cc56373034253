"""Better, tied or worse: what a verdict is measured in, and when a difference is a tie (METHOD: the protocol, 4).

Rounding is not perturbation: a difference of a few noise floors is a tie. What follows from equal kept sets is equal,
whatever rounding says; what is propagated follows from them only where both configurations have the entries at the same
positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import UnknownNameError
from perturbkv.trace import Trace


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
    """Return the distance of this name. Raises UnknownNameError for an unknown one."""
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
    """Return 1 where the treatment perturbs less, −1 where it perturbs more, 0 for ties; any shape.

    1 − cos grows with the square of the angle, in which noise adds: as its `distance` the roots are compared, or a
    floor of an angle δ would be held against differences of 2 φ δ.
    """
    sides = (baseline, treatment, floor)
    first, second, noise = (np.sqrt(side) for side in sides) if distance_of(distance).angular else sides
    under_noise = np.abs(first - second) <= TIE_FLOORS * noise
    sign: NDArray[np.int8] = np.sign(baseline - treatment).astype(np.int8)
    return np.where(under_noise, np.int8(0), sign)


Same = NDArray[np.bool_]


def equal_isolated(trace: Trace, first: int, second: int) -> Same:
    """Return (sample, layer, head) True where the head's own sets are equal: so is its isolated perturbation.

    Only where both configurations store them alike, in as many bits, and correct alike for what went; and not of pages
    that each step and each run reads anew, of which a trace holds those of the full run's first step, nor of lines, of
    which it holds what the prompt's last query looks at.
    """
    return np.asarray(trace.same_kept(first, second) & _stored_alike(trace, first, second)[:, None, None])


def equal_propagated(trace: Trace, first: int, second: int) -> Same:
    """(sample, layer, head) True where also all sets of earlier layers are equal: so is what reaches the head."""
    same = _alike(trace, first, second)
    before = np.ones((len(same), 1), dtype=bool)
    return np.asarray(same & np.concatenate([before, _layers(same)[:, :-1]], axis=1)[:, :, None])


def equal_layers(trace: Trace, first: int, second: int) -> Same:
    """Return (sample, layer) True where all sets up to the layer are equal: so is the residual stream after it."""
    return _layers(_alike(trace, first, second))


def equal_whole(trace: Trace, first: int, second: int) -> Same:
    """Return (sample,) True where all sets are equal: so are the final norm, the logits and every later token."""
    return np.asarray(equal_layers(trace, first, second)[:, -1])


def _alike(trace: Trace, first: int, second: int) -> Same:
    """Return (sample, layer, head) True where the sets are equal and decoding sees them at the same positions."""
    same, (one, other) = equal_isolated(trace, first, second), (trace.run.configs[place] for place in (first, second))
    moved = trace.arrays["evicted"][trace.ok][:, first] != 0  # what keeps everything has the prompt's positions
    return same if _positions(one) == _positions(other) else np.asarray(same & ~moved[:, None, None])


def _stored_alike(trace: Trace, first: int, second: int) -> Same:
    """(sample,) True where equal kept sets are the same cache: corrections that differ are alike where nothing went."""
    one, other = (trace.run.configs[place] for place in (first, second))
    whole = trace.arrays["evicted"][trace.ok][:, first] == 0
    alike = one.precision == other.precision and one.evicts and other.evicts
    return np.asarray(np.where(whole, one.precision == other.precision, alike & (one.correction == other.correction)))


def _positions(config: EvictionConfig) -> str:
    """Where decoding sees the kept keys: an option of the one policy that may move them."""
    return str(config.policy.options.get("positions", "kept"))


def _layers(same: Same) -> Same:
    return np.asarray(np.logical_and.accumulate(same.all(axis=2), axis=1))
