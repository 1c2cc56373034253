"""The optimal kept set of a small head, with proof: integer programs inside Dinkelbach's iteration (1967).

A fraction N(x) / D(x) is at least λ everywhere exactly where min N(x) − λ D(x) ≥ 0, and that minimum, with N an L1 norm
of a sum and D a sum, is a mixed-integer linear program, which HiGHS solves to a proven bound. Its best set gives the
next λ. Where time runs out first, the program's bound F < 0 still proves N / D ≥ λ + F / min D.

The isolated perturbation of one head is such a fraction of sums over its kept entries (METHOD: the quantities). With `o
= Σ A 𝒱` and `S` the retained mass, `L = ‖o − Σ N A 𝒱 / S‖₁ = ‖S o − Σ N A 𝒱‖₁ / S = ‖Σ N A (o − 𝒱)‖₁ / S`: both sides
of the fraction are sums over single entries, so that swapping two entries costs two vectors.
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
    """The entries that one head's decoding query attends to: those of the prompt, and the decoding token's.

    Attributes:
        attention: (entry,) attention weights A, float64.
        projected: (entry, d_model) values after the output projection, 𝒱 = V W_O^h, float64.
        always: (entry,) True for entries that always stay: the window and the decoding token.
        sink: weight of the head's sink, an entry without a value that always stays; 0 where there is none.
    """

    attention: Floats
    projected: Floats
    always: Kept
    sink: float = 0.0

    @cached_property
    def output(self) -> Floats:
        """(d_model,) the head's output with the full cache, o_h = Σ A 𝒱."""
        return np.asarray(self.attention @ self.projected)

    @cached_property
    def contributions(self) -> Floats:
        """(entry, d_model) contribution of a kept entry to `numerator`, A (o − 𝒱)."""
        return self.attention[:, None] * (self.output - self.projected)

    @cached_property
    def free(self) -> NDArray[np.int64]:
        """(free,) indices of the free entries: those that are not `always` kept."""
        return np.flatnonzero(~self.always)

    def numerator(self, kept: Kept) -> Floats:
        """Return (d_model,) S o − Σ N A 𝒱 of a kept set; its L1 norm divided by the retained mass S is L."""
        return np.asarray(kept @ self.contributions + self.sink * self.output)

    def mass(self, kept: Kept) -> float:
        """Return the retained mass S = Σ N A of a kept set, the sink included."""
        return float(kept @ self.attention + self.sink)

    def perturbation(self, kept: Kept) -> float:
        """Return a kept set's isolated perturbation L: the L1 norm of the change to the head's output."""
        return float(np.abs(self.numerator(kept)).sum() / self.mass(kept))

    def with_free(self, indices: NDArray[np.int64]) -> Kept:
        """Return (entry,) the kept set of the free entries at `indices` and all entries that are always kept."""
        kept = self.always.copy()
        kept[indices] = True
        return kept


GAP_TOLERANCE = 1e-4
"""A set counts as optimal where the proven lower bound is at most this share of its L below it."""
_UNIT = 1e4
"""Value that L is scaled to, so that the solver's absolute tolerances are negligible."""
_TOLERANCE = 1e-6
"""Tolerance of HiGHS for constraints and objective."""


@dataclass(frozen=True)
class Proof:
    """The best kept set that a search found for a size, and a proven lower bound of L for all sets of the size.

    Attributes:
        kept: (entry,) the best set.
        perturbation: its L.
        lower: lower bound of L over all sets of this size, the solver's tolerance subtracted.
        seconds: duration of the search.
    """

    kept: Kept
    perturbation: float
    lower: float
    seconds: float

    @property
    def closed(self) -> bool:
        """True if the set is proven optimal, to within `GAP_TOLERANCE` of its L."""
        return self.lower >= self.perturbation * (1 - GAP_TOLERANCE)


def best_set(entries: HeadEntries, start: Kept, seconds: float) -> Proof:
    """Return the best kept set of the size of `start` found in a time limit, with a proven lower bound of L.

    Raises ValueError where `start` lacks an entry that always stays.
    """
    if not start[entries.always].all():
        raise ValueError("expected a set that holds all that always stays")
    begin, kept, value, lower = time.monotonic(), start, entries.perturbation(start), 0.0
    smallest = _smallest_mass(entries, int(start.sum()))
    while value > 0 and (left := seconds - (time.monotonic() - begin)) > 0:
        solution, least = _solve(entries, int(start.sum()), value, left)
        lower = max(lower, value + min(0.0, least) / smallest)
        if solution is None or entries.perturbation(solution) >= value * (1 - GAP_TOLERANCE**2):
            break
        kept, value = solution, entries.perturbation(solution)
    return Proof(kept, value, min(lower, value), time.monotonic() - begin)


def _smallest_mass(entries: HeadEntries, size: int) -> float:
    """Return the smallest retained mass S of all kept sets of a size."""
    fixed = float(entries.attention[entries.always].sum()) + entries.sink
    free = size - int(entries.always.sum())
    return fixed + float(np.sort(entries.attention[entries.free])[:free].sum())


def _solve(entries: HeadEntries, size: int, ratio: float, seconds: float) -> tuple[Kept | None, float]:
    """Return the kept set of a size that minimises ‖Σ N A (o − 𝒱)‖₁ − λ S for λ = `ratio`, and a proven lower bound.

    None for the set where time runs out before there is one. Variables are free entries and model dimensions. The
    latter are bounded from below by both signs of the numerator's vector, so that their sum is its L1 norm.
    """
    free, model = entries.free, entries.projected.shape[1]
    scale = _UNIT / ratio
    contributions = scale * entries.contributions[free].T
    fixed = scale * entries.numerator(entries.always)
    both = csr_array(np.block([[contributions, -np.eye(model)], [-contributions, -np.eye(model)]]))
    counted = np.concatenate([np.ones(len(free)), np.zeros(model)])
    free_kept = size - int(entries.always.sum())
    program = {
        "c": np.concatenate([-scale * ratio * entries.attention[free], np.ones(model)]),
        "integrality": counted,
        "bounds": Bounds(np.zeros(len(counted)), np.where(counted > 0, 1, np.inf)),
        "constraints": [
            LinearConstraint(both, -np.inf, np.concatenate([-fixed, fixed])),
            LinearConstraint(csr_array(counted[None]), free_kept, free_kept),
        ],
    }
    solution = _run_highs(program, seconds)
    constant = scale * ratio * entries.mass(entries.always)
    proven = -np.inf if solution.mip_dual_bound is None else solution.mip_dual_bound - (model + 1) * _TOLERANCE
    kept = None if solution.x is None else entries.with_free(free[solution.x[: len(free)] > 1 / 2])
    return kept, (proven - constant) / scale


def _run_highs(program: Mapping[str, Any], seconds: float) -> Any:
    """Return HiGHS's result for an integer program; after a "Solve error", the result without presolve."""
    options = {"time_limit": seconds, "mip_rel_gap": 0.0}
    with _silence_stdout():
        solution = milp(**program, options=options)
        if solution.mip_dual_bound is None:
            solution = milp(**program, options={**options, "presolve": False})
        return solution


@contextmanager
def _silence_stdout() -> Iterator[None]:
    """Discard all output to the process's stdout within the block, including native libraries' output."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
