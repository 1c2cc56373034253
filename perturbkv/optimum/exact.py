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
"""A kept set as a mask (entry,)."""


@dataclass(frozen=True, eq=False)
class HeadEntries:
    """The entries that one head's decoding query attends to: those of the prompt, and the decoding token's.

    Attributes:
        attention: (entry,) attention weights A, float64.
        projected: (entry, d_model) values after the output projection, 𝒱 = V W_O^h, float64.
        always_kept: (entry,) True for entries that always stay: the window and the decoding token.
        sink: weight of the head's sink, an entry without a value that always stays; 0 where there is none.
    """

    attention: Floats
    projected: Floats
    always_kept: Kept
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
    def free_indices(self) -> NDArray[np.int64]:
        """(free,) indices of the free entries: those that are not always kept."""
        return np.flatnonzero(~self.always_kept)

    def numerator(self, kept: Kept) -> Floats:
        """Return (d_model,) S o − Σ N A 𝒱 of a kept set; its L1 norm divided by the retained mass S is L."""
        return np.asarray(kept @ self.contributions + self.sink * self.output)

    def mass(self, kept: Kept) -> float:
        """Return the retained mass S = Σ N A of a kept set, the sink included."""
        return float(kept @ self.attention + self.sink)

    def perturbation(self, kept: Kept) -> float:
        """Return a kept set's isolated perturbation L: the L1 norm of the change to the head's output."""
        return float(np.abs(self.numerator(kept)).sum() / self.mass(kept))

    def kept_set(self, indices: NDArray[np.int64]) -> Kept:
        """Return (entry,) the kept set of the entries at `indices` and all entries that are always kept."""
        kept = self.always_kept.copy()
        kept[indices] = True
        return kept


GAP_TOLERANCE = 1e-4
"""A set counts as optimal where the proven lower bound is at most this share of its L below it."""
_SCALED_VALUE = 1e4
"""Value that L is scaled to, so that the solver's absolute tolerances are negligible."""
_TOLERANCE = 1e-6
"""Tolerance of HiGHS for constraints and objective."""


@dataclass(frozen=True)
class Proof:
    """The best kept set that a search found for a size, and a proven lower bound of L for all sets of the size.

    Attributes:
        kept: (entry,) the best set.
        perturbation: its L.
        lower_bound: of L over all sets of this size, the solver's tolerance subtracted.
        seconds: duration of the search.
    """

    kept: Kept
    perturbation: float
    lower_bound: float
    seconds: float

    @property
    def is_optimal(self) -> bool:
        """True if the set is proven optimal, to within `GAP_TOLERANCE` of its L."""
        return self.lower_bound >= self.perturbation * (1 - GAP_TOLERANCE)


def best_set(entries: HeadEntries, start: Kept, seconds: float) -> Proof:
    """Return the best kept set of the size of `start` found in so many seconds, with a proven lower bound of L.

    It is `start` itself where none better is found. Raises ValueError where `start` lacks an entry that always stays.
    """
    if not start[entries.always_kept].all():
        raise ValueError("expected a set that holds all that always stays")
    begin, size = time.monotonic(), int(start.sum())
    kept, best, lower_bound = start, entries.perturbation(start), 0.0
    smallest_mass = _smallest_mass(entries, size)
    while best > 0 and (left := seconds - (time.monotonic() - begin)) > 0:
        solution, program_bound = _solve(entries, size, best, left)
        lower_bound = max(lower_bound, best + min(0.0, program_bound) / smallest_mass)
        if solution is None or entries.perturbation(solution) >= best * (1 - GAP_TOLERANCE**2):  # no gain but rounding
            break
        kept, best = solution, entries.perturbation(solution)
    return Proof(kept, best, min(lower_bound, best), time.monotonic() - begin)


def _smallest_mass(entries: HeadEntries, size: int) -> float:
    """Return the smallest retained mass S of all kept sets of a size."""
    fixed = float(entries.attention[entries.always_kept].sum()) + entries.sink
    free_kept = size - int(entries.always_kept.sum())
    return fixed + float(np.sort(entries.attention[entries.free_indices])[:free_kept].sum())


def _solve(entries: HeadEntries, size: int, ratio: float, seconds: float) -> tuple[Kept | None, float]:
    """Return the kept set of a size that minimises ‖Σ N A (o − 𝒱)‖₁ − λ S for λ = `ratio`, and a bound of the minimum.

    The bound is proven: no set of the size is below it; −∞ where the solver has none. None for the set where time runs
    out before there is one. Variables are free entries and model dimensions. The latter are bounded from below by both
    signs of the numerator's vector, so that their sum is its L1 norm.
    """
    free, d_model = entries.free_indices, entries.projected.shape[1]
    scale = _SCALED_VALUE / ratio
    contributions = scale * entries.contributions[free].T
    fixed = scale * entries.numerator(entries.always_kept)
    both_signs = csr_array(np.block([[contributions, -np.eye(d_model)], [-contributions, -np.eye(d_model)]]))
    is_entry = np.concatenate([np.ones(len(free)), np.zeros(d_model)])  # 1 for variables that are 0 or 1
    free_kept = size - int(entries.always_kept.sum())
    program = {
        "c": np.concatenate([-scale * ratio * entries.attention[free], np.ones(d_model)]),
        "integrality": is_entry,
        "bounds": Bounds(np.zeros(len(is_entry)), np.where(is_entry > 0, 1, np.inf)),
        "constraints": [
            LinearConstraint(both_signs, -np.inf, np.concatenate([-fixed, fixed])),
            LinearConstraint(csr_array(is_entry[None]), free_kept, free_kept),
        ],
    }
    solution = _run_highs(program, seconds)
    constant = scale * ratio * entries.mass(entries.always_kept)
    proven = -np.inf if solution.mip_dual_bound is None else solution.mip_dual_bound - (d_model + 1) * _TOLERANCE
    kept = None if solution.x is None else entries.kept_set(free[solution.x[: len(free)] > 1 / 2])
    return kept, (proven - constant) / scale


def _run_highs(program: Mapping[str, Any], seconds: float) -> Any:
    """Return HiGHS's result for an integer program in so many seconds; after a "Solve error", that without presolve.

    `program` are the other arguments of `scipy.optimize.milp`.
    """
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
