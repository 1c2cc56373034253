"""How far each of some kept sets of one head is from the best that is known, and from the best there can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perturbkv.optimum.entries import HeadEntries, Kept
from perturbkv.optimum.exact import Proof, best_set
from perturbkv.optimum.swaps import Improved, improve

_STARTS = 20
"""Random sets that a small head's search begins from, beside the given ones."""


@dataclass(frozen=True)
class HeadSearch:
    """What was found of one head.

    Attributes:
        entries, kept: how many there are, and how many stay in every set; the decoding token in both.
        perturbation: L of each given set.
        improved: L of the best given set after swaps, or of the best of all starts of a small head.
        settled: whether no swap improves that set.
        best: the least L that is known, in L1.
        lower: L that no set of this size is below; None where no proof was tried.
        closed: whether `best` is proven to be the least.
        positions: what the best known set keeps, ascending.
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
    """Swaps from the best of the given sets, until none helps or for so many seconds.

    Raises ValueError where the sets differ in size.
    """
    found = [entries.perturbation(kept) for kept in _of_one_size(sets)]
    better = improve(entries, sets[int(np.argmin(found))], seconds)
    return _told(entries, found, better, better.kept, better.perturbation, None)


def prove(entries: HeadEntries, sets: Sequence[Kept], seconds: float, seed: int) -> HeadSearch:
    """The best of all sets of this size, by swaps from the given and from random sets, then by integer programs.

    Raises ValueError where the sets differ in size.
    """
    found = [entries.perturbation(kept) for kept in _of_one_size(sets)]
    draw, free = np.random.default_rng(seed), int(sets[0].sum() - entries.always.sum())
    starts = [*sets, *(entries.of_free(draw.choice(entries.free, free, replace=False)) for _ in range(_STARTS))]
    improved = min((improve(entries, start, seconds) for start in starts), key=lambda one: one.perturbation)
    proof = best_set(entries, improved.kept, seconds)
    return _told(entries, found, improved, proof.kept, proof.perturbation, proof)


def _of_one_size(sets: Sequence[Kept]) -> Sequence[Kept]:
    sizes = sorted({int(kept.sum()) for kept in sets})
    if len(sizes) != 1:
        msg = f"expected kept sets of one size, got {sizes}"
        raise ValueError(msg)
    return sets


def _told(
    entries: HeadEntries, found: Sequence[float], improved: Improved, kept: Kept, best: float, proof: Proof | None
) -> HeadSearch:
    return HeadSearch(
        entries=len(kept),
        kept=int(kept.sum()),
        perturbation=tuple(found),
        improved=improved.perturbation,
        settled=improved.settled,
        best=best,
        lower=None if proof is None else proof.lower,
        closed=proof is not None and proof.closed,
        positions=tuple(np.flatnonzero(kept).tolist()),
    )
