"""Which positions a foreign cache keeps: its keys and values, matched with those of the full cache (METHOD: Audit, 1).

Equal to the bit comes first, by a hash of each entry's key and value. What is left goes to the nearest entry, and how
far that lies is reported, for keys and values apart: a key that was rotated again still has its value, a value of
another head still its key.

A cache that is not ours, as keys and values per layer: transformers' `Cache` classes, or pairs of tensors.

What cannot be read is refused here, in one line, so that nothing behind asks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from perturbkv.errors import UnreadableError

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer, (batch, kv_head, entry, d_head)."""
LayerEntries = tuple[Tensor, Tensor]
"""Keys and values of one row of a layer, (kv_head, entry, d_head)."""


def layers_of(cache: Cache | Layers) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer. Raises UnreadableError where a layer shows none."""
    if not isinstance(cache, Cache):
        return [(keys, values) for keys, values in cache]
    held = getattr(cache, "layers", None)
    if not held:
        _refuse(f"no keys to look at: {type(cache).__name__} has no layers")
    return [_shown(layer, place) for place, layer in enumerate(held)]


def _shown(layer: object, place: int) -> tuple[Tensor, Tensor]:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    kind = type(layer).__name__
    if not (isinstance(keys, Tensor) and isinstance(values, Tensor)):
        _refuse(f"no keys to look at: layer {place} ({kind}) has no tensors `keys` and `values`")
    said = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
    if keys.numel() == 0 and said:
        _refuse(f"no keys to look at: layer {place} ({kind}) says {said} entries and its `keys` are empty")
    return keys, values


def rows(
    foreign: Cache | Layers, full: Cache | Layers, row: int = 0, first: int = 0
) -> list[tuple[LayerEntries, LayerEntries]]:
    """Per layer one row's entries in a foreign cache and in the full one, whose shapes fit each other.

    A full cache of one row stands for whichever row; layers are called from `first` on.

    Raises UnreadableError with what does not fit.
    """
    theirs, whole = layers_of(foreign), layers_of(full)
    if len(theirs) != len(whole):
        _refuse(f"it has {len(theirs)} layers, the full cache {len(whole)}")
    for place, (one, other) in enumerate(zip(theirs, whole, strict=True), start=first):
        _check_shape(place, one, other[0], row)
    _check_lengths(foreign, theirs, whole[0][0].shape[2])
    return [(_row(one, row), _row(other, row)) for one, other in zip(theirs, whole, strict=True)]


def _row(layer: tuple[Tensor, Tensor], row: int) -> LayerEntries:
    place = row if len(layer[0]) > 1 else 0
    return layer[0][place], layer[1][place]


def _check_shape(place: int, layer: tuple[Tensor, Tensor], full: Tensor, row: int) -> None:
    """Raise UnreadableError unless keys and values are (batch, kv_head, entry, d_head) like the full ones."""
    keys, values = layer
    if keys.ndim != 4 or keys.shape != values.shape:
        shapes = f"keys {tuple(keys.shape)} and values {tuple(values.shape)}"
        _refuse(f"expected keys and values (batch, kv_head, entry, d_head) of one shape in layer {place}, got {shapes}")
    batch, heads, entries, d_head = keys.shape
    if row >= batch:
        _refuse(f"row {row} of a batch was asked for, and layer {place} holds {batch}")
    if heads != full.shape[1]:
        times, rest = divmod(heads, full.shape[1])
        why = f"; each {times} times, as `repeat_kv` before caching makes them?" if times > 1 and not rest else ""
        _refuse(f"layer {place} holds {heads} key/value heads, the model has {full.shape[1]}{why}")
    if d_head != full.shape[3]:
        _refuse(f"keys of layer {place} have {d_head} components, the model's {full.shape[3]}")
    if entries > full.shape[2]:
        _refuse(f"layer {place} keeps {entries} entries, more than the {full.shape[2]} that there were")


def _check_lengths(foreign: Cache | Layers, layers: Layers, tokens: int) -> None:
    """Raise UnreadableError where the cache says one length for all layers, not the prompt's, and holds others."""
    if not isinstance(foreign, Cache):
        return
    said = {int(foreign.get_seq_length(place)) for place in range(len(layers))}
    held = [keys.shape[2] for keys, _ in layers]
    wrong = [place for place, length in enumerate(held) if length not in said]
    if len(said) == 1 and said != {tokens} and wrong:
        _refuse(
            f"lengths differ between layers where the cache says that they do not: it says {said.pop()} entries in "
            f"every layer, and layer {wrong[0]} holds {held[wrong[0]]}"
        )


def _refuse(reason: str) -> NoReturn:
    raise UnreadableError(reason)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as whole numbers of its size."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


NOWHERE = -1
"""The position of an entry that has none."""
STRANGE = 0.5
"""An entry whose key and value both lie farther from every other's than this has no position."""
_OTHER = 0.1
"""Weight of the farther of key and value where the nearest entry is looked for."""
_TIE = 1e-3
"""Nearer than this is rounding."""
_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class LayerKept:
    """What one layer of a foreign cache keeps, per key/value head, entries in the cache's own order.

    Attributes:
        positions: (entry,) of each in the prompt; `NOWHERE` for padding and for what is like no entry.
        key_distance, value_distance: (entry,) ‖k − k_j‖₂ over the root mean square norm of the head's keys, and
            likewise of values; 0 where equal to the bit.
    """

    positions: tuple[Tensor, ...]
    key_distance: tuple[Tensor, ...]
    value_distance: tuple[Tensor, ...]

    @property
    def duplicates(self) -> list[int]:
        """Entries per head whose position another entry before them has."""
        placed = [one[one != NOWHERE] for one in self.positions]
        return [len(one) - len(set(one.tolist())) for one in placed]

    @property
    def strangers(self) -> list[int]:
        """Entries per head that have no position."""
        return [int((one == NOWHERE).sum()) for one in self.positions]

    @property
    def ascending(self) -> list[bool]:
        """Whether each head's entries that have a position come in its order."""
        placed = [one[one != NOWHERE] for one in self.positions]
        return [bool((one[1:] >= one[:-1]).all()) for one in placed]

    @property
    def exact(self) -> bool:
        """Whether every entry equals the full cache's to the bit, each of another position."""
        far = any(bool(one.any()) for one in (*self.key_distance, *self.value_distance))
        return not far and not any(self.duplicates) and not any(self.strangers)

    def mask(self, tokens: int) -> Bool[Tensor, "kv_head key"]:
        """True at the positions that each head keeps of `tokens`."""
        found = torch.zeros(len(self.positions), tokens, dtype=torch.bool, device=self.positions[0].device)
        for row, position in zip(found, self.positions, strict=True):
            row[position[position != NOWHERE]] = True
        return found


@torch.inference_mode()
def recover(
    foreign: Cache | Layers, full: Cache | Layers, row: int = 0, padding: int = 0, first: int = 0
) -> list[LayerKept]:
    """Per layer, which positions of a prompt a foreign cache keeps.

    Args:
        foreign: transformers' `Cache`, or keys and values (batch, kv_head, entry, d_head) per layer.
        full: the same prompt's, before anything was evicted.
        row: of the batch; a full cache of a single row stands for every row.
        padding: entries of padding before the prompt in the full cache's row; positions count from behind them.

        first: what the first layer is called, where only some are given.

    Raises UnreadableError for a cache without keys to look at, layers whose lengths contradict what the cache says,
    more entries than there were, and other shapes than the full cache's.
    """
    return [_layer(theirs, whole, padding) for theirs, whole in rows(foreign, full, row, first)]


def _layer(theirs: LayerEntries, whole: LayerEntries, padding: int) -> LayerKept:
    found = [_head(*head, padding) for head in zip(*theirs, *whole, strict=True)]
    positions, keys, values = zip(*found, strict=True)
    return LayerKept(positions, keys, values)


def _head(
    key: Float[Tensor, "entry d_head"],
    value: Float[Tensor, "entry d_head"],
    full_key: Float[Tensor, "place d_head"],
    full_value: Float[Tensor, "place d_head"],
    padding: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of one head's entries, and how far keys and values lie from those there."""
    places = _equal(key, value, full_key, full_value)
    distances = [torch.zeros(len(key), device=key.device) for _ in range(2)]
    left = (places == NOWHERE).nonzero().squeeze(-1)
    if len(left):
        theirs, whole = _scaled(key[left], value[left], full_key, full_value)
        free = torch.ones(len(full_key), dtype=torch.bool, device=key.device)
        free[places[places != NOWHERE]] = False
        nearest = _nearest(theirs, whole, free)
        for distance, one, other in zip(distances, theirs, whole, strict=True):
            distance[left] = torch.linalg.vector_norm(one - other[nearest], dim=-1)
        strange = torch.minimum(distances[0][left], distances[1][left]) > STRANGE
        places[left] = nearest.masked_fill(strange, NOWHERE)
    return (places - padding).clamp(min=NOWHERE), distances[0], distances[1]


def _equal(key: Tensor, value: Tensor, full_key: Tensor, full_value: Tensor) -> Int[Tensor, " entry"]:
    """Where an entry lies that is equal to the bit, else `NOWHERE`; equal ones take one place each while there are."""
    nowhere = torch.full((len(key),), NOWHERE, device=key.device)
    if key.dtype != full_key.dtype or value.dtype != full_value.dtype or not len(key):
        return nowhere
    theirs, whole = torch.cat([key, value], dim=-1), torch.cat([full_key, full_value], dim=-1)
    own, known = _hash(theirs), _hash(whole)
    ordered, places = known.sort(stable=True)
    begin, end = torch.searchsorted(ordered, own), torch.searchsorted(ordered, own, right=True)
    place = places[torch.minimum(begin + _occurrence(own), end - 1).clamp(min=0)]
    same = (bits(theirs) == bits(whole[place])).all(dim=-1)
    return torch.where(same & (end > begin), place, nowhere)


def _hash(entries: Float[Tensor, "entry component"]) -> Int[Tensor, " entry"]:
    """One whole number for each entry's bits."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (entries.shape[-1],), generator=generator) | 1
    return (bits(entries).to(torch.int64) * factors.to(entries.device)).sum(dim=-1)


def _occurrence(numbers: Int[Tensor, " entry"]) -> Int[Tensor, " entry"]:
    """How many equal ones come before each."""
    ordered, order = numbers.sort(stable=True)
    first = torch.searchsorted(ordered, ordered)
    counts = torch.arange(len(numbers), device=numbers.device) - first
    return torch.empty_like(counts).scatter_(0, order, counts)


def _scaled(key: Tensor, value: Tensor, full_key: Tensor, full_value: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of both sides in float32, in units of the full ones' root mean square norm."""
    theirs, whole = [], []
    for one, full in ((key, full_key), (value, full_value)):
        unit = full.float().square().sum(dim=-1).mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        theirs.append(one.float() / unit)
        whole.append(full.float() / unit)
    return theirs, whole


def _nearest(theirs: Sequence[Tensor], whole: Sequence[Tensor], free: Bool[Tensor, " place"]) -> Int[Tensor, " entry"]:
    """The place nearest to each entry; of several equally near ones a free place, so that none is given twice."""
    size = max(1, _CHUNK_BYTES // (16 * len(free)))
    found = []
    for keys, values in zip(*(torch.split(kind, size) for kind in theirs), strict=True):
        near, far = _ordered(torch.cdist(keys, whole[0]), torch.cdist(values, whole[1]))
        cost = near + _OTHER * far
        best, place = cost.min(dim=-1)
        ties = cost <= (best + _TIE).unsqueeze(-1)
        found.append(_apart(place, ties, free))
    return torch.cat(found)


def _ordered(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return torch.minimum(one, other), torch.maximum(one, other)


def _apart(place: Tensor, ties: Bool[Tensor, "entry place"], free: Bool[Tensor, " place"]) -> Tensor:
    """The places, those that are taken replaced by the first free one as near; `free` loses what is given."""
    for entry, wanted in enumerate(place.tolist()):
        if not free[wanted] and len(others := (ties[entry] & free).nonzero()):
            place[entry] = others[0, 0]
        free[place[entry]] = False
    return place
