"""The best kept set of a small head, proven: integer programs inside Dinkelbach's iteration (1967).

A fraction N(x) / D(x) is at least λ everywhere just where min N(x) − λ D(x) ≥ 0, and that minimum, with N an L1 norm
of a sum and D a sum, is a mixed-integer linear program, which HiGHS solves to a proven bound. Its best set gives the
next λ. Where the time ends first, the program's bound F < 0 still proves N / D ≥ λ + F / min D.

The isolated perturbation of one head as a fraction of sums over its kept entries (METHOD: the quantities).

With `o = Σ A 𝒱` and `S` the retained mass, `L = ‖o − Σ N A 𝒱 / S‖₁ = ‖S o − Σ N A 𝒱‖₁ / S = ‖Σ N A (o − 𝒱)‖₁ / S`:
both sides of the fraction are sums of what single entries bring, so that swapping two entries costs two vectors.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Floats = NDArray[np.float64]
Kept = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class HeadEntries:
    """What one head's decoding query attends to.

    Attributes:
        attention: (entry,) A, float64, of the prompt and the decoding token itself.
        projected: (entry, d_model) 𝒱 = V W_O^h, float64.
        always: (entry,) True for what stays whatever is chosen: the window and the decoding token.
        sink: weight of the head's sink, an entry without a value that always stays; 0 where there is none.
    """

    attention: Floats
    projected: Floats
    always: Kept
    sink: float = 0.0

    @cached_property
    def output(self) -> Floats:
        """(d_model,) o_h = Σ A 𝒱."""
        return np.asarray(self.attention @ self.projected)

    @cached_property
    def brings(self) -> Floats:
        """(entry, d_model) A (o − 𝒱): what each kept entry adds to the numerator's vector."""
        return self.attention[:, None] * (self.output - self.projected)

    @cached_property
    def free(self) -> NDArray[np.int64]:
        """(free,) places that may go."""
        return np.flatnonzero(~self.always)

    def moved(self, kept: Kept) -> Floats:
        """(d_model,) S o − Σ N A 𝒱, the numerator's vector."""
        return np.asarray(kept @ self.brings + self.sink * self.output)

    def mass(self, kept: Kept) -> float:
        """S = Σ N A, the sink with it."""
        return float(kept @ self.attention + self.sink)

    def perturbation(self, kept: Kept) -> float:
        """L of a kept set, (entry,) True where an entry stays: the L1 norm of what the head's output moves by."""
        return float(np.abs(self.moved(kept)).sum() / self.mass(kept))

    def of_free(self, places: NDArray[np.int64]) -> Kept:
        """(entry,) the set of these free places and of all that always stays."""
        kept = self.always.copy()
        kept[places] = True
        return kept


CLOSED = 1e-4
"""A set is called optimal where the proven lower bound is at most this share of its L below it."""
_UNIT = 1e4
"""What L is scaled to, so that the solver's absolute tolerances are small beside it."""
_TOLERANCE = 1e-6
"""Of HiGHS: by how much a constraint, and the objective, may be missed."""


@dataclass(frozen=True)
class Proof:
    """What is known of the least L that any set of a size has.

    Attributes:
        kept: (entry,) the best set found.
        perturbation: its L.
        lower: no set of its size has a lower L, rounding of the solver allowed for.
        seconds: that it took.
    """

    kept: Kept
    perturbation: float
    lower: float
    seconds: float

    @property
    def closed(self) -> bool:
        """Whether the set found is proven to be the best, to within `CLOSED` of its L."""
        return self.lower >= self.perturbation * (1 - CLOSED)


@dataclass(frozen=True)
class _Solved:
    """One program: the set it found, if any, and the proven least value of N − λ D."""

    kept: Kept | None
    least: float


def best_set(entries: HeadEntries, start: Kept, seconds: float) -> Proof:
    """The best set of as many entries as `start` keeps, searched for so many seconds from `start` on.

    Raises ValueError where `start` lets go of what always stays, or L is 0 everywhere.
    """
    if not start[entries.always].all():
        msg = "expected a set that holds all that always stays"
        raise ValueError(msg)
    begun, kept, value, lower = time.monotonic(), start, entries.perturbation(start), 0.0
    smallest = _smallest_mass(entries, int(start.sum()))
    while value > 0 and (left := seconds - (time.monotonic() - begun)) > 0:
        found = _solve(entries, int(start.sum()), value, left)
        lower = max(lower, value + min(0.0, found.least) / smallest)
        better = np.inf if found.kept is None else entries.perturbation(found.kept)
        if better >= value * (1 - CLOSED**2):
            break
        kept, value = found.kept if found.kept is not None else kept, better
    return Proof(kept, value, min(lower, value), time.monotonic() - begun)


def _smallest_mass(entries: HeadEntries, size: int) -> float:
    """The least S of a set of this size."""
    settled = float(entries.attention[entries.always].sum()) + entries.sink
    free = size - int(entries.always.sum())
    return settled + float(np.sort(entries.attention[entries.free])[:free].sum())


def _solve(entries: HeadEntries, size: int, ratio: float, seconds: float) -> _Solved:
    """The least ‖Σ N A (o − 𝒱)‖₁ − λ S over the sets of a size: a variable per free entry, and one per model dimension.

    The latter are bounded from below by both signs of the numerator's vector, so that their sum is its L1 norm.
    """
    free, model = entries.free, entries.projected.shape[1]
    scale = _UNIT / ratio
    brings = scale * entries.brings[free].T
    settled = scale * entries.moved(entries.always)
    both = csr_array(np.block([[brings, -np.eye(model)], [-brings, -np.eye(model)]]))
    counted = np.concatenate([np.ones(len(free)), np.zeros(model)])
    wanted = size - int(entries.always.sum())
    program = {
        "c": np.concatenate([-scale * ratio * entries.attention[free], np.ones(model)]),
        "integrality": counted,
        "bounds": Bounds(np.zeros(len(counted)), np.where(counted > 0, 1, np.inf)),
        "constraints": [
            LinearConstraint(both, -np.inf, np.concatenate([-settled, settled])),
            LinearConstraint(csr_array(counted[None]), wanted, wanted),
        ],
    }
    found = _with_highs(program, seconds)
    constant = scale * ratio * entries.mass(entries.always)
    proven = -np.inf if found.mip_dual_bound is None else found.mip_dual_bound - (model + 1) * _TOLERANCE
    return _Solved(_set(entries, found.x), (proven - constant) / scale)


def _with_highs(program: Mapping[str, Any], seconds: float) -> Any:
    """The solver's answer; without its presolve where what that leaves cannot be taken back ("Solve error")."""
    options = {"time_limit": seconds, "mip_rel_gap": 0.0}
    with _unheard():
        found = milp(**program, options=options)
        return found if found.mip_dual_bound is not None else milp(**program, options={**options, "presolve": False})


@contextmanager
def _unheard() -> Iterator[None]:
    """What the solver writes to the process's stdout, past Python's, is no result of ours."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _set(entries: HeadEntries, solution: Floats | None) -> Kept | None:
    if solution is None:
        return None
    chosen = solution[: len(entries.free)] > 1 / 2
    return entries.of_free(entries.free[chosen])
