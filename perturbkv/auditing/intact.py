"""Whether what one prompt's cache keeps is the full cache's, entry by entry (METHOD: Audit, 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from perturbkv.audit_trace import Entries, Integers
from perturbkv.auditing import alterations
from perturbkv.auditing.kept_entries import Reading
from perturbkv.auditing.reference import EntryFloors
from perturbkv.cache.external_cache import NOWHERE, recover

FLOORS = 4
"""More noise floors than this are a difference (METHOD: Audit)."""
_KEYS = 0


class Judge:
    """Says of one row's entries, as they were at the first forward pass, whether they are the full cache's."""

    def __init__(self, reading: Reading, row: int, floors: EntryFloors) -> None:
        self.reading, self.row, self.floors = reading, row, floors
        self.found, self.attended = reading.first[row], reading.attended[row]
        self.padding = reading.situation.padding[row]

    def entries(self) -> Entries:
        """Everything that METHOD's points 1 and 2 ask for."""
        layers = range(len(self.found))
        return Entries(
            kept=tuple(tuple(self._sets(layer, self._kept)) for layer in layers),
            padded=self._numbers(lambda layer: self._sets(layer, self._of_padding)),
            strangers=self._numbers(lambda layer: self._sets(layer, _strangers)),
            duplicates=self._numbers(lambda layer: self._sets(layer, _duplicates)),
            unordered=self._numbers(lambda layer: self.found[layer].ascending) == 0,
            key_distance=self._numbers(lambda layer: self._far(layer, self.found[layer].key_distance)),
            value_distance=self._numbers(lambda layer: self._far(layer, self.found[layer].value_distance)),
            key_floor=self.floors.key.double().numpy(),
            value_floor=self.floors.value.double().numpy(),
            altered=tuple(tuple(self._altered(layer)) for layer in layers),
            repeated=tuple(layer for layer in layers if self._is_repeated(layer)),
            changed=tuple(self.reading.changed[self.row]),
        )

    def _numbers(self, of: Callable[[int], Any]) -> NDArray[Any]:
        return np.array([list(of(layer)) for layer in range(len(self.found))])

    def _sets(self, layer: int, of: Callable[[Tensor, Tensor], Any]) -> list[Any]:
        pairs = zip(self.found[layer].positions, self.attended[layer], strict=True)
        return [of(places, seen) for places, seen in pairs]

    def _far(self, layer: int, distances: Sequence[Tensor]) -> list[float]:
        """The largest distance of each head's entries that are attended to."""
        pairs = zip(distances, self.attended[layer], strict=True)
        return [float(one[seen].amax()) if bool(seen.any()) else 0.0 for one, seen in pairs]

    def _kept(self, places: Int[Tensor, " entry"], seen: Bool[Tensor, " entry"]) -> Integers:
        own = places[seen & (places >= self.padding)] - self.padding
        return np.unique(own.cpu().numpy())

    def _of_padding(self, places: Int[Tensor, " entry"], seen: Bool[Tensor, " entry"]) -> int:
        return int(((places >= 0) & (places < self.padding) & seen).sum())

    def _is_repeated(self, layer: int) -> bool:
        """Whether a layer holds every entry once per query head, and all of a group keep the same."""
        adapter, positions = self.reading.adapter, self.found[layer].positions
        group = adapter.heads // adapter.kv_heads
        if group == 1 or len(positions) != adapter.heads:
            return False
        return all(torch.equal(one, positions[head - head % group]) for head, one in enumerate(positions))

    def _altered(self, layer: int) -> list[str]:
        """What was done to keys and values of each head."""
        found = self.found[layer]
        kinds = (
            ("keys", self._far(layer, found.key_distance), self.floors.key),
            ("values", self._far(layer, found.value_distance), self.floors.value),
        )
        said = []
        for head in range(len(found.positions)):
            far = [kind for kind, (_, distance, floor) in enumerate(kinds) if distance[head] > FLOORS * floor[layer]]
            if far and self._mismatched(layer, head):
                said.append("values of other entries than their keys")
            else:
                said.append(", ".join(f"{kinds[k][0]} {self._words(layer, head, k) or 'changed'}" for k in far))
        return said

    def _mismatched(self, layer: int, head: int) -> bool:
        """Whether all keys and all values are the full cache's to the bit, and do not belong together."""
        seen = self.attended[layer][head]
        alone = [
            recover([(_single(theirs[self.row, head, seen]),) * 2], [(_single(self._own(full, layer, head)),) * 2])[0]
            for theirs, full in zip(self.reading.held[layer], self.reading.full[layer], strict=True)
        ]
        exact = not any(bool(one.key_distance[0].any()) for one in alone)
        return exact and not torch.equal(alone[0].positions[0], alone[1].positions[0])

    def _own(self, full: Tensor, layer: int, head: int) -> Tensor:
        """The full cache's entries (entry, d_head) of the head that a kept set is of."""
        return full[self.row][head * full.shape[1] // len(self.found[layer].positions)]

    def _words(self, layer: int, head: int, kind: int) -> str:
        """The known alteration of a head's keys or values; empty where none is known."""
        places = self.found[layer].positions[head]
        theirs = self.reading.held[layer][kind][self.row, head]
        placed = (places >= 0) & self.attended[layer][head]
        theirs, places = theirs[placed], places[placed]
        if not len(places):
            return ""
        full = self.reading.full[layer][kind][self.row]
        own = self._own(self.reading.full[layer][kind], layer, head)
        other = alterations.of_head(theirs, full[:, places])
        if other is not None:
            return f"of head {other}"
        if kind == _KEYS and (turned := self._rotation(theirs, own[places], places)):
            return turned
        return alterations.quantised(theirs, own[places], own)

    def _rotation(self, theirs: Tensor, own: Tensor, places: Int[Tensor, " entry"]) -> str:
        frequencies, most = self.reading.adapter.frequencies, 2 * self.reading.situation.entries
        return alterations.rotation(theirs, own, places - self.padding, frequencies, most)


def _strangers(places: Int[Tensor, " entry"], seen: Bool[Tensor, " entry"]) -> int:
    return int((places[seen] == NOWHERE).sum())


def _duplicates(places: Int[Tensor, " entry"], seen: Bool[Tensor, " entry"]) -> int:
    placed = places[seen & (places != NOWHERE)]
    return len(placed) - len(set(placed.tolist()))


def _single(entries: Float[Tensor, "entry d_head"]) -> Float[Tensor, "1 1 entry d_head"]:
    return entries[None, None]
