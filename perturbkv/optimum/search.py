"""How far each of some kept sets of one head is from the best that is known, and from the best there can be.

A kept set that no single swap improves: what stays is exchanged for what went as long as that lowers L.

What searches for best kept sets found, of a whole run.
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
"""Share of L that a swap has to win, so that rounding swaps nothing for ever."""


@dataclass(frozen=True)
class Improved:
    """Where swapping ended.

    Attributes:
        kept: (entry,) the set.
        perturbation: its L.
        settled: whether no swap helps any more; False where time ran out.
    """

    kept: Kept
    perturbation: float
    settled: bool


def improve(entries: HeadEntries, start: Kept, seconds: float) -> Improved:
    """Swap until no swap helps, or for so many seconds; the set never becomes worse.

    Every kept free entry in turn goes for the one whose coming lowers L most.
    """
    end, kept, best = time.monotonic() + seconds, start.copy(), entries.perturbation(start)
    places, unchanged, turn = entries.free[start[entries.free]].tolist(), 0, 0
    while unchanged < len(places):
        if time.monotonic() > end:
            return Improved(kept, best, settled=False)
        slot = turn % len(places)
        found = _with(entries, kept, places[slot])
        coming = int(np.argmin(found))
        turn, unchanged = turn + 1, unchanged + 1
        if found[coming] < best * (1 - LEAST_GAIN):
            kept[places[slot]], kept[coming] = False, True
            places[slot], unchanged, best = coming, 0, entries.perturbation(kept)
    return Improved(kept, best, settled=True)


def _with(entries: HeadEntries, kept: Kept, going: int) -> Floats:
    """(entry,) L where each entry comes for the one that goes; infinite for those that are there."""
    others = kept.copy()
    others[going] = False
    distance = cdist(-entries.moved(others)[None], entries.brings, "cityblock")[0]
    found: Floats = distance / (entries.mass(others) + entries.attention)
    found[kept] = np.inf
    return found


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


PROMPT, PREFIX = "prompt", "prefix"
"""What a search is of: a whole prompt, or a few tokens of it."""


@dataclass(frozen=True)
class FoundSets:
    """The lines of a run, an object per prompt.

    Attributes:
        run: what was run; every budget holds the same methods in the same order, the hindsight ones among them.
        rows: per prompt its name under `sample`, and under `heads` an object per head, budget and part: `part`,
            `budget`, `layer`, `head`, and the fields of `HeadSearch`, whose `perturbation` is in the methods' order.
        asked: how heads were searched.
        made_with: provenance.
    """

    run: RunConfig
    rows: Sequence[Mapping[str, Any]]
    asked: Mapping[str, Any] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of the rows, short."""
        return hashlib.sha256(json.dumps(list(self.rows)).encode()).hexdigest()[:12]
