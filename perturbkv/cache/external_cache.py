"""Positions that an external cache keeps, found by matching its entries with the full cache's (METHOD: Audit, 1).

Bitwise equality comes first, by a hash of each entry's key and value. Every other entry is matched with the nearest
one, and its distance is reported, separately for keys and values: a key that was rotated again still has its value, a
value of another head still its key. A cache is given as transformers' `Cache` or as pairs of tensors per layer;
unreadable ones are refused here, in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from perturbkv.errors import UnreadableCacheError

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer, (batch, kv_head, entry, d_head)."""
LayerEntries = tuple[Tensor, Tensor]
"""Keys and values of one row of a layer, (kv_head, entry, d_head)."""


def layer_tensors(cache: Cache | Layers) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of every layer. Raises UnreadableCacheError where a layer has none."""
    if not isinstance(cache, Cache):
        return [(keys, values) for keys, values in cache]
    layers = getattr(cache, "layers", None)
    if not layers:
        _refuse(f"no keys to look at: {type(cache).__name__} has no layers")
    return [_layer_tensors(layer, index) for index, layer in enumerate(layers)]


def _layer_tensors(layer: object, index: int) -> tuple[Tensor, Tensor]:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    kind = type(layer).__name__
    if not (isinstance(keys, Tensor) and isinstance(values, Tensor)):
        _refuse(f"no keys to look at: layer {index} ({kind}) has no tensors `keys` and `values`")
    reported = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
    if keys.numel() == 0 and reported:
        _refuse(f"no keys to look at: layer {index} ({kind}) says {reported} entries and its `keys` are empty")
    return keys, values


def matching_rows(
    external: Cache | Layers, full: Cache | Layers, row: int = 0, first: int = 0
) -> list[tuple[LayerEntries, LayerEntries]]:
    """Return one row's entries per layer, in an external cache and in the full one, whose shapes are compatible.

    A full cache of one row is used for every row; layers are numbered from `first` in messages. Raises
    UnreadableCacheError with the incompatible shapes.
    """
    theirs, whole = layer_tensors(external), layer_tensors(full)
    if len(theirs) != len(whole):
        _refuse(f"it has {len(theirs)} layers, the full cache {len(whole)}")
    for index, (one, other) in enumerate(zip(theirs, whole, strict=True), start=first):
        _check_shape(index, one, other[0], row)
    _check_lengths(external, theirs, whole[0][0].shape[2])
    return [(_select_row(one, row), _select_row(other, row)) for one, other in zip(theirs, whole, strict=True)]


def _select_row(layer: tuple[Tensor, Tensor], row: int) -> LayerEntries:
    index = row if len(layer[0]) > 1 else 0
    return layer[0][index], layer[1][index]


def _check_shape(index: int, layer: tuple[Tensor, Tensor], full: Tensor, row: int) -> None:
    """Raise UnreadableCacheError unless keys and values are (batch, kv_head, entry, d_head) like the full ones."""
    keys, values = layer
    if keys.ndim != 4 or keys.shape != values.shape:
        shapes = f"keys {tuple(keys.shape)} and values {tuple(values.shape)}"
        _refuse(f"expected keys and values (batch, kv_head, entry, d_head) of one shape in layer {index}, got {shapes}")
    batch, heads, entries, d_head = keys.shape
    if row >= batch:
        _refuse(f"row {row} of a batch was asked for, and layer {index} holds {batch}")
    if heads != full.shape[1]:
        times, rest = divmod(heads, full.shape[1])
        why = f"; each {times} times, as `repeat_kv` before caching makes them?" if times > 1 and not rest else ""
        _refuse(f"layer {index} holds {heads} key/value heads, the model has {full.shape[1]}{why}")
    if d_head != full.shape[3]:
        _refuse(f"keys of layer {index} have {d_head} components, the model's {full.shape[3]}")
    if entries > full.shape[2]:
        _refuse(f"layer {index} keeps {entries} entries, more than the {full.shape[2]} that there were")


def _check_lengths(external: Cache | Layers, layers: Layers, tokens: int) -> None:
    """Raise UnreadableCacheError where the cache reports one length, not the prompt's, that some layers do not have."""
    if not isinstance(external, Cache):
        return
    reported = {int(external.get_seq_length(index)) for index in range(len(layers))}
    lengths = [keys.shape[2] for keys, _ in layers]
    wrong = [index for index, length in enumerate(lengths) if length not in reported]
    if len(reported) == 1 and reported != {tokens} and wrong:
        _refuse(
            f"lengths differ between layers where the cache says that they do not: it says {reported.pop()} entries in "
            f"every layer, and layer {wrong[0]} holds {lengths[wrong[0]]}"
        )


def _refuse(reason: str) -> NoReturn:
    raise UnreadableCacheError(reason)


def bits(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as integers of its item size."""
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
    """The entries of one layer of an external cache per key/value head, in the cache's own order.

    Attributes:
        positions: (entry,) position in the prompt; `NOWHERE` for padding and for an entry that resembles none.
        key_distance, value_distance: (entry,) ‖k − k_j‖₂ relative to the root mean square norm of the head's keys, and
            likewise for values; 0 where bitwise equal.
    """

    positions: tuple[Tensor, ...]
    key_distance: tuple[Tensor, ...]
    value_distance: tuple[Tensor, ...]

    @property
    def duplicates(self) -> list[int]:
        """Number of entries per head whose position an earlier entry has."""
        known = [position[position != NOWHERE] for position in self.positions]
        return [len(position) - len(set(position.tolist())) for position in known]

    @property
    def strangers(self) -> list[int]:
        """Number of entries per head without a position."""
        return [int((position == NOWHERE).sum()) for position in self.positions]

    @property
    def ascending(self) -> list[bool]:
        """Whether the positions of each head's entries are in ascending order."""
        known = [position[position != NOWHERE] for position in self.positions]
        return [bool((position[1:] >= position[:-1]).all()) for position in known]

    @property
    def exact(self) -> bool:
        """Whether every entry equals one of the full cache bitwise, each of another position."""
        far = any(bool(one.any()) for one in (*self.key_distance, *self.value_distance))
        return not far and not any(self.duplicates) and not any(self.strangers)

    def mask(self, tokens: int) -> Bool[Tensor, "kv_head key"]:
        """Return a mask, True at those of `tokens` positions that each head keeps."""
        mask = torch.zeros(len(self.positions), tokens, dtype=torch.bool, device=self.positions[0].device)
        for row, position in zip(mask, self.positions, strict=True):
            row[position[position != NOWHERE]] = True
        return mask


@torch.inference_mode()
def recover(
    external: Cache | Layers, full: Cache | Layers, row: int = 0, padding: int = 0, first: int = 0
) -> list[LayerKept]:
    """Return the positions of a prompt that an external cache keeps, per layer.

    Args:
        external: transformers' `Cache`, or keys and values (batch, kv_head, entry, d_head) per layer.
        full: cache of the same prompt before eviction.
        row: row of the batch; a full cache of a single row is used for every row.
        padding: entries of padding before the prompt in the full cache's row; positions are counted after them.
        first: number of the first layer, where only some are given.

    Raises UnreadableCacheError for a cache without keys, layers whose lengths contradict the cache's own report, more
    entries than the prompt has, and shapes other than the full cache's.
    """
    return [_match_layer(theirs, whole, padding) for theirs, whole in matching_rows(external, full, row, first)]


def _match_layer(theirs: LayerEntries, whole: LayerEntries, padding: int) -> LayerKept:
    heads = [_match_head(*head, padding) for head in zip(*theirs, *whole, strict=True)]
    positions, keys, values = zip(*heads, strict=True)
    return LayerKept(positions, keys, values)


def _match_head(
    key: Float[Tensor, "entry d_head"],
    value: Float[Tensor, "entry d_head"],
    full_key: Float[Tensor, "full_entry d_head"],
    full_value: Float[Tensor, "full_entry d_head"],
    padding: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions of one head's entries, and the distances of keys and values from the entries there."""
    indices = _equal_indices(key, value, full_key, full_value)
    distances = [torch.zeros(len(key), device=key.device) for _ in range(2)]
    left = (indices == NOWHERE).nonzero().squeeze(-1)
    if len(left):
        theirs, whole = _scale(key[left], value[left], full_key, full_value)
        free = torch.ones(len(full_key), dtype=torch.bool, device=key.device)
        free[indices[indices != NOWHERE]] = False
        nearest = _nearest(theirs, whole, free)
        for distance, one, other in zip(distances, theirs, whole, strict=True):
            distance[left] = torch.linalg.vector_norm(one - other[nearest], dim=-1)
        strange = torch.minimum(distances[0][left], distances[1][left]) > STRANGE
        indices[left] = nearest.masked_fill(strange, NOWHERE)
    return (indices - padding).clamp(min=NOWHERE), distances[0], distances[1]


def _equal_indices(key: Tensor, value: Tensor, full_key: Tensor, full_value: Tensor) -> Int[Tensor, " entry"]:
    """Return the index of a bitwise equal entry, else `NOWHERE`.

    Several equal entries get one index each while they last.
    """
    nowhere = torch.full((len(key),), NOWHERE, device=key.device)
    if key.dtype != full_key.dtype or value.dtype != full_value.dtype or not len(key):
        return nowhere
    theirs, whole = torch.cat([key, value], dim=-1), torch.cat([full_key, full_value], dim=-1)
    own, known = _hash(theirs), _hash(whole)
    ordered, indices = known.sort(stable=True)
    begin, end = torch.searchsorted(ordered, own), torch.searchsorted(ordered, own, right=True)
    index = indices[torch.minimum(begin + _occurrence(own), end - 1).clamp(min=0)]
    same = (bits(theirs) == bits(whole[index])).all(dim=-1)
    return torch.where(same & (end > begin), index, nowhere)


def _hash(entries: Float[Tensor, "entry component"]) -> Int[Tensor, " entry"]:
    """Return an integer hash of each entry's bits."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (entries.shape[-1],), generator=generator) | 1
    return (bits(entries).to(torch.int64) * factors.to(entries.device)).sum(dim=-1)


def _occurrence(numbers: Int[Tensor, " entry"]) -> Int[Tensor, " entry"]:
    """Return the number of equal numbers before each."""
    ordered, order = numbers.sort(stable=True)
    first = torch.searchsorted(ordered, ordered)
    counts = torch.arange(len(numbers), device=numbers.device) - first
    return torch.empty_like(counts).scatter_(0, order, counts)


def _scale(key: Tensor, value: Tensor, full_key: Tensor, full_value: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return keys and values of both sides in float32, in units of the full ones' root mean square norm."""
    theirs, whole = [], []
    for one, full in ((key, full_key), (value, full_value)):
        unit = full.float().square().sum(dim=-1).mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        theirs.append(one.float() / unit)
        whole.append(full.float() / unit)
    return theirs, whole


def _nearest(
    theirs: Sequence[Tensor], whole: Sequence[Tensor], free: Bool[Tensor, " full_entry"]
) -> Int[Tensor, " entry"]:
    """Return the index nearest to each entry; of several equally near ones a free one, so that none is used twice."""
    size = max(1, _CHUNK_BYTES // (16 * len(free)))
    nearest = []
    for keys, values in zip(*(torch.split(kind, size) for kind in theirs), strict=True):
        distances = torch.cdist(keys, whole[0]), torch.cdist(values, whole[1])
        cost = torch.minimum(*distances) + _OTHER * torch.maximum(*distances)
        best, index = cost.min(dim=-1)
        ties = cost <= (best + _TIE).unsqueeze(-1)
        nearest.append(_resolve_ties(index, ties, free))
    return torch.cat(nearest)


def _resolve_ties(index: Tensor, ties: Bool[Tensor, "entry full_entry"], free: Bool[Tensor, " full_entry"]) -> Tensor:
    """Replace indices that are taken by the first free tied one; assigned indices are removed from `free`."""
    for entry, wanted in enumerate(index.tolist()):
        if not free[wanted] and len(others := (ties[entry] & free).nonzero()):
            index[entry] = others[0, 0]
        free[index[entry]] = False
    return index
