"""A kept set that no single swap improves: what stays is exchanged for what went as long as that lowers L."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from scipy.spatial.distance import cdist

from perturbkv.optimum.entries import Floats, HeadEntries, Kept

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
