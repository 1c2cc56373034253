"""The entries of an audited cache: which of the prompt's it keeps, and how they differ from the full cache's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.measurements import Floats

Integers = NDArray[np.int64]
FLOORS = 6
"""Number of noise floors above which a distance is a difference; chosen in docs/results/audit.md (METHOD: Audit)."""
MOST_ROUNDED = 0.5
"""Error of a key or value, over the root mean square norm of the head's, above which it is not its own, rounded."""
CHANGES: Mapping[str, str] = {
    "row": "entries of another prompt of the batch",
    "infinite": "keys or values that are infinite or NaN",
    "head": "entries of another head",
    "mismatch": "values of other entries than their keys",
    "rotation": "keys rotated to other positions, or with another base",
    "scale": "keys or values times a constant",
    "clipped": "keys or values whose largest numbers are cut off, as where a type of 8 bits ends",
    "quantised": "keys or values that went through 8, 4 or 2 bits",
    "rounded": "keys or values that are nearer to their own originals than to any other",
    "changed": "keys or values that differ otherwise",
}
"""Kind of a change -> its meaning; the first is looked for first."""
ROUNDING = ("rounded", "quantised")
"""Kinds of changes that leave every entry nearer to its own original than to any other."""
UNMEASURED = "unmeasured"
"""Kind of a change to what no eviction touches: a window or recurrent state."""
_SETS = ("layer", "kept set")


@record
class Alteration(Record):
    """A change to the keys or values of a kept set."""

    layer: int = column("from 0")
    head: int = column("kept set")
    kind: str = column("kind of the change")
    what: str = column("what was done to keys or values, where it is known")
    entry: int = column("position in the prompt of the first entry concerned; −1 where it is of none")


@record
class CacheEntries(Record):
    """The entries in the cache of one prompt at the first forward pass after the eviction.

    Distances are those of an entry from the full cache's, over the root mean square norm of the head's entries; floors
    the same between two ways of prefilling the prompt.

    Attributes:
        kept_sets: per layer and kept set, positions in the prompt, ascending.
        tokens: n of the prompt.
        kv_heads: key/value heads of a layer of the model; a cache may have a kept set per query head.
        first_duplicate, first_hidden: (layer, kept_head) first position of `duplicates` and of `hidden`; −1 for none.
        distances: (kind, layer, kept_head) largest distance of keys and of values.
        floors: (kind, layer) their noise floors.
        evicted: entries, of the prompt or of tokens decoded since, that are not attended to, summed over kept sets, the
            most of all forward passes.
        evicted_new: those of tokens decoded since.
    """

    kept_sets: tuple[tuple[Integers, ...], ...]
    tokens: int
    kv_heads: int
    padded: Integers = column("entries of padding that are attended to", dims=_SETS)
    strangers: Integers = column("entries like none of the prompt's", dims=_SETS)
    zeros: Integers = column("entries of nothing: neither key nor value", dims=_SETS)
    duplicates: Integers = column("entries whose position another one has", dims=_SETS)
    first_duplicate: Integers
    hidden: Integers = column("entries of the prompt that the cache holds and a mask hides", dims=_SETS)
    first_hidden: Integers
    unordered: tuple[int, ...] = column("layers whose entries lie in another order than in the prompt")
    distances: Floats
    floors: Floats
    altered: tuple[Alteration, ...] = column("entries that are not the full cache's")
    repeated: tuple[int, ...] = column("layers that hold every entry once per query head", default=())
    changed: tuple[int, ...] = column("forward passes at which entries of the prompt went or changed", default=())
    evicted: int = 0
    evicted_new: int = 0

    @derived(key="held_share", heading="#cache\nshare")
    def cache_share(self) -> float:
        """Entries over those of the full cache."""
        return sum(map(sum, self.kept)) / (len(self.kept) * self.kv_heads * self.tokens)

    @derived()
    def kept(self) -> list[list[int]]:
        """(layer, kept set) entries of the prompt."""
        return [[len(kept_set) for kept_set in layer] for layer in self.kept_sets]

    @derived()
    def without_first(self) -> int:
        """Kept sets that lack the first entry, a sink."""
        return sum(0 not in kept_set for kept_set in self._all_sets)

    @derived()
    def without_last(self) -> int:
        """Kept sets that lack the most recent entry."""
        return sum(self.tokens - 1 not in kept_set for kept_set in self._all_sets)

    @property
    def held_in_first_layer(self) -> int:
        """Entries that the first layer holds, whatever they are, the most of its kept sets."""
        others = self.strangers[0] + self.zeros[0] + self.duplicates[0]
        return max(len(kept_set) + int(more) for kept_set, more in zip(self.kept_sets[0], others, strict=True))

    @derived(dims=("layer",))
    def key_floors(self) -> Floats:
        """Distance of the worst key from the full cache's, in noise floors."""
        return _largest_in_floors(self.distances[0], self.floors[0])

    @derived(dims=("layer",))
    def value_floors(self) -> Floats:
        """Distance of the worst value from the full cache's, in noise floors."""
        return _largest_in_floors(self.distances[1], self.floors[1])

    @derived(heading="#per set", json=False)
    def per_set(self) -> str:
        """Entries per kept set, fewest and most."""
        return _range_text([count for layer in self.kept for count in layer])

    @derived(heading="#first", json=False)
    def leading_entries(self) -> str:
        """Entries of the prompt's beginning that a kept set holds without a gap."""
        return _range_text([count_without_gap(kept_set) for kept_set in self._all_sets])

    @derived(heading="#last", json=False)
    def trailing_entries(self) -> str:
        """Entries of the prompt's end that a kept set holds without a gap."""
        return _range_text([count_without_gap(self.tokens - 1 - kept_set[::-1]) for kept_set in self._all_sets])

    @derived(heading="odd", json=False)
    def oddities(self) -> str:
        """Oddities of the entries: padding, duplicates, another order, changes."""
        named = (
            (self.padded, "padding"),
            (self.strangers, "unlike any"),
            (self.duplicates, "twice"),
            (self.hidden, "hidden by a mask"),
        )
        words = [f"{int(counts.sum())} {word}" for counts, word in named if counts.sum()]
        words += ["in another order"] if self.unordered else []
        words += [f"changes from step {self.changed[0]} on"] if self.changed else []
        return ", ".join(words)

    @property
    def set_count(self) -> int:
        """Number of kept sets of all layers."""
        return len(self._all_sets)

    @property
    def _all_sets(self) -> list[Integers]:
        """The kept sets of all layers."""
        return [kept_set for layer in self.kept_sets for kept_set in layer]


def _largest_in_floors(distance: Floats, floor: Floats) -> Floats:
    """Return each layer's largest distance over kept sets, in noise floors, (layer,); 0 where the distance is 0.

    `distance` is (layer, kept_head), `floor` (layer,).
    """
    largest = distance.max(axis=-1)
    return np.asarray(np.divide(largest, floor, out=np.zeros_like(largest), where=largest > 0))


def count_without_gap(distances: Integers) -> int:
    """Return how many entries follow one another from an end of the prompt on, from their ascending distances to it."""
    has_gap = np.append(distances != np.arange(len(distances)), True)
    return int(has_gap.argmax())


def _range_text(counts: Sequence[int]) -> str:
    """Return the least and the largest count as text: '12–48', or '12' where they are equal."""
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low}–{high}"
