"""Distance of a head's kept sets from the best known set and from a proven bound: local search by swaps, and proofs.

A set is locally optimal where no exchange of one kept entry for one evicted entry lowers L. `SearchResults` holds the
results of a whole run.
"""

from __future__ import annotations

import hashlib
import json
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
    """The result of a local search.

    Attributes:
        kept: (entry,) the set.
        perturbation: its L.
        settled: whether no swap improves it; False where time ran out.
    """

    kept: Kept
    perturbation: float
    settled: bool


def improve(entries: HeadEntries, start: Kept, seconds: float) -> LocalSearch:
    """Swap entries until no swap helps, or for so many seconds; L never increases.

    Every kept free entry in turn is exchanged for the entry that lowers L most.
    """
    end, kept, best = time.monotonic() + seconds, start.copy(), entries.perturbation(start)
    indices, unchanged, turn = entries.free[start[entries.free]].tolist(), 0, 0
    while unchanged < len(indices):
        if time.monotonic() > end:
            return LocalSearch(kept, best, settled=False)
        slot = turn % len(indices)
        perturbations = _swap_perturbations(entries, kept, indices[slot])
        entering = int(np.argmin(perturbations))
        turn, unchanged = turn + 1, unchanged + 1
        if perturbations[entering] < best * (1 - LEAST_GAIN):
            kept[indices[slot]], kept[entering] = False, True
            indices[slot], unchanged, best = entering, 0, entries.perturbation(kept)
    return LocalSearch(kept, best, settled=True)


def _swap_perturbations(entries: HeadEntries, kept: Kept, leaving: int) -> Floats:
    """Return (entry,) L after each entry replaces the one that leaves; infinite for entries that are kept already."""
    others = kept.copy()
    others[leaving] = False
    distance = cdist(-entries.numerator(others)[None], entries.contributions, "cityblock")[0]
    perturbations: Floats = distance / (entries.mass(others) + entries.attention)
    perturbations[kept] = np.inf
    return perturbations


_STARTS = 20
"""Number of random sets from which the search of a small head starts, besides the given ones."""


@dataclass(frozen=True)
class HeadSearch:
    """The result of a search on one head.

    Attributes:
        entries, kept: number of entries, and of entries in every set; both include the decoding token.
        perturbation: L of each given set.
        improved: L of the best given set after swaps, or of the best of all starts of a small head.
        settled: whether no swap improves that set.
        best: the smallest known L, in L1.
        lower: lower bound of L over all sets of this size; None where no proof was tried.
        closed: whether `best` is proven to be the minimum.
        positions: positions in the best known set, ascending.
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


def search(entries: HeadEntries, sets: Sequence[Kept], seconds: float) -> HeadSearch:
    """Improve the best of the given sets by swaps, until none helps or for so many seconds.

    Raises ValueError where the sets differ in size.
    """
    perturbations = [entries.perturbation(kept) for kept in _check_equal_sizes(sets)]
    better = improve(entries, sets[int(np.argmin(perturbations))], seconds)
    return _head_search(entries, perturbations, better, better.kept, better.perturbation, None)


def prove(entries: HeadEntries, sets: Sequence[Kept], seconds: float, seed: int) -> HeadSearch:
    """Return the best of all sets of this size, by swaps from the given and from random sets, then by integer programs.

    Raises ValueError where the sets differ in size.
    """
    perturbations = [entries.perturbation(kept) for kept in _check_equal_sizes(sets)]
    draw, free = np.random.default_rng(seed), int(sets[0].sum() - entries.always.sum())
    starts = [*sets, *(entries.with_free(draw.choice(entries.free, free, replace=False)) for _ in range(_STARTS))]
    improved = min((improve(entries, start, seconds) for start in starts), key=lambda result: result.perturbation)
    proof = best_set(entries, improved.kept, seconds)
    return _head_search(entries, perturbations, improved, proof.kept, proof.perturbation, proof)


def _check_equal_sizes(sets: Sequence[Kept]) -> Sequence[Kept]:
    sizes = sorted({int(kept.sum()) for kept in sets})
    if len(sizes) != 1:
        msg = f"expected kept sets of one size, got {sizes}"
        raise ValueError(msg)
    return sets


def _head_search(
    entries: HeadEntries,
    perturbations: Sequence[float],
    improved: LocalSearch,
    kept: Kept,
    best: float,
    proof: Proof | None,
) -> HeadSearch:
    return HeadSearch(
        entries=len(kept),
        kept=int(kept.sum()),
        perturbation=tuple(perturbations),
        improved=improved.perturbation,
        settled=improved.settled,
        best=best,
        lower=None if proof is None else proof.lower,
        closed=proof is not None and proof.closed,
        positions=tuple(np.flatnonzero(kept).tolist()),
    )


PROMPT, PREFIX = "prompt", "prefix"
"""Part of a sample that a search covers: the whole prompt, or its first tokens."""


@dataclass(frozen=True)
class SearchResults:
    """The search results of a run, one object per prompt.

    Attributes:
        run: configuration of the run; every budget has the same methods in the same order, the hindsight ones included.
        rows: per prompt its id under `sample`, and under `heads` an object per head, budget and part: `part`, `budget`,
            `layer`, `head`, and the fields of `HeadSearch`, whose `perturbation` is in the methods' order.
        settings: settings of the search.
        made_with: provenance.
    """

    run: RunConfig
    rows: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Short digest of the rows."""
        return hashlib.sha256(json.dumps(list(self.rows)).encode()).hexdigest()[:12]
