"""Search for a head's best kept set: local search by swaps, and proofs by integer programs.

A set is locally optimal where no exchange of one kept entry for one evicted entry lowers L. `SearchResults` holds the
results of a whole run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from perturbkv.configs.run import RunConfig
from perturbkv.optimum.exact import Floats, HeadEntries, Kept, Proof, best_set

LEAST_GAIN = 1e-12
"""Smallest relative reduction of L by a swap, so that rounding does not swap forever."""


@dataclass(frozen=True)
class LocalSearch:
    """The result of a local search for a kept set by swaps.

    Attributes:
        kept: (entry,) the best kept set.
        perturbation: its L.
        settled: whether no swap lowers its L; False where time ran out.
    """

    kept: Kept
    perturbation: float
    settled: bool


def improve_by_swaps(entries: HeadEntries, start: Kept, seconds: float) -> LocalSearch:
    """Return the kept set reached from `start` by swaps that lower L, until no swap does or the time limit.

    Every kept free entry in turn is exchanged for the evicted entry that lowers L most.
    """
    end, kept, best = time.monotonic() + seconds, start.copy(), entries.perturbation(start)
    kept_free = entries.free_indices[start[entries.free_indices]].tolist()
    unchanged, turn = 0, 0  # turns without a swap, and all turns
    while unchanged < len(kept_free):
        if time.monotonic() > end:
            return LocalSearch(kept, best, settled=False)
        slot = turn % len(kept_free)
        perturbations = _perturbations_after_swaps(entries, kept, kept_free[slot])
        entering = int(np.argmin(perturbations))
        turn, unchanged = turn + 1, unchanged + 1
        if perturbations[entering] < best * (1 - LEAST_GAIN):
            kept[kept_free[slot]], kept[entering] = False, True
            kept_free[slot], unchanged, best = entering, 0, entries.perturbation(kept)
    return LocalSearch(kept, best, settled=True)


def _perturbations_after_swaps(entries: HeadEntries, kept: Kept, leaving: int) -> Floats:
    """Return (entry,) L after replacing the entry `leaving` by another entry; infinite for kept entries."""
    remaining = kept.copy()
    remaining[leaving] = False
    distance = cdist(-entries.numerator(remaining)[None], entries.contributions, "cityblock")[0]
    perturbations: Floats = distance / (entries.mass(remaining) + entries.attention)
    perturbations[kept] = np.inf
    return perturbations


_STARTS = 20
"""Number of random sets from which `search_head_with_proof` starts, besides the methods' own."""


@dataclass(frozen=True)
class HeadSearch:
    """The result of a search on one head.

    Attributes:
        entries: number of entries, the decoding token included.
        kept: number of kept entries, the decoding token included.
        perturbation: L of each method's set.
        improved: the smallest L after swaps, from the best of the methods' sets or, in a proof, from every start.
        settled: whether no swap lowers `improved`.
        best: the smallest known L.
        lower: lower bound of L over all sets of this size; None where no proof was tried.
        closed: whether `best` is proven to be the minimum.
        positions: positions of the entries in the best known set, ascending.
    """

    entries: int
    kept: int
    perturbation: tuple[float, ...]
    improved: float
    settled: bool
    best: float
    lower: float | None
    closed: bool
    positions: tuple[int, ...]


def search_head(entries: HeadEntries, sets: Sequence[Kept], seconds: float) -> HeadSearch:
    """Return the best kept set reached by swaps from the best of several sets, within a time limit.

    Raises ValueError where the sets differ in size.
    """
    perturbations = [entries.perturbation(kept) for kept in _check_equal_sizes(sets)]
    better = improve_by_swaps(entries, sets[int(np.argmin(perturbations))], seconds)
    return _head_search(perturbations, better, better.kept, better.perturbation, None)


def search_head_with_proof(entries: HeadEntries, sets: Sequence[Kept], seconds: float, seed: int) -> HeadSearch:
    """Return the best kept set found: by swaps from the given and random sets, then by integer programs with proof.

    Swaps from one set, and the programs, take at most so many seconds each; `seed` draws the random sets. Raises
    ValueError where the sets differ in size.
    """
    perturbations = [entries.perturbation(kept) for kept in _check_equal_sizes(sets)]
    draw, free_kept = np.random.default_rng(seed), int(sets[0].sum() - entries.always_kept.sum())
    drawn = (draw.choice(entries.free_indices, free_kept, replace=False) for _ in range(_STARTS))
    starts = [*sets, *map(entries.kept_set, drawn)]
    improved = min(
        (improve_by_swaps(entries, start, seconds) for start in starts), key=lambda result: result.perturbation
    )
    proof = best_set(entries, improved.kept, seconds)
    return _head_search(perturbations, improved, proof.kept, proof.perturbation, proof)


def _check_equal_sizes(sets: Sequence[Kept]) -> Sequence[Kept]:
    """Return the kept sets unchanged. Raises ValueError if their sizes differ."""
    sizes = sorted({int(kept.sum()) for kept in sets})
    if len(sizes) != 1:
        raise ValueError(f"expected kept sets of one size, got {sizes}")
    return sets


def _head_search(
    perturbations: Sequence[float],
    improved: LocalSearch,
    kept: Kept,
    best: float,
    proof: Proof | None,
) -> HeadSearch:
    """Return a search's result: the `perturbations` of its sets, the improved set, and the best set with its L, `best`.

    `proof` is None where no proof was tried.
    """
    return HeadSearch(
        entries=len(kept),
        kept=int(kept.sum()),
        perturbation=tuple(perturbations),
        improved=improved.perturbation,
        settled=improved.settled,
        best=best,
        lower=None if proof is None else proof.lower_bound,
        closed=proof is not None and proof.is_optimal,
        positions=tuple(np.flatnonzero(kept).tolist()),
    )


PROMPT, PREFIX = "prompt", "prefix"
"""Values of `part` in a row: the search covered the whole prompt, or its first tokens."""


@dataclass(frozen=True)
class SearchResults:
    """The search results of a run, one object per prompt.

    Attributes:
        run: configuration of the run; every budget has the same methods in the same order.
        rows: per prompt its id under `sample`, and under `heads` an object per head, budget and part: `part`, `budget`,
            `layer`, `head`, and the fields of `HeadSearch`, whose `perturbation` is in the methods' order.
        settings: settings of the search.
        made_with: provenance.
    """

    run: RunConfig
    rows: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)
