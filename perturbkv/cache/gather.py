"""From selections to entries: where in a layer's full cache the entries lie that some configurations keep."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from perturbkv.cache.entries import KeptEntries
from perturbkv.devices import on_device
from perturbkv.selection.reading import AnyGroup

_GATHERS_BITS = 0x8040201008040201 - 2**64
"""A bit every ninth place: byte i of what it is multiplied with reaches bit 63 − i. As a signed number."""
Lengths = list[list[int]]
"""Entries that each kept set of each configuration keeps in one layer."""


@dataclass(frozen=True, eq=False)
class Kept:
    """What a batch of configurations keeps in one layer.

    Attributes:
        order: the configurations, as `position` lists them.
        position: kept positions, ascending within each kept set, one set after the other.
        entries: where each configuration's entries lie.
        masks: the kept sets of `order` as bits, the first entry the highest bit of the first byte.
    """

    order: tuple[int, ...]
    position: Int[Tensor, " kept"]
    entries: dict[int, KeptEntries]
    masks: UInt8[Tensor, "kept_set byte"]


def lengths(layers: Sequence[Sequence[AnyGroup]], configs: int, device: torch.device) -> list[Lengths]:
    """Kept entries per kept set, for every layer. One transfer from the device brings them all."""
    counts = [group.budgets.kept_entries for found in layers for group in found]
    flat = torch.cat([count.flatten().to(device, non_blocking=True) for count in counts]).tolist()
    numbers = iter(flat)
    result = []
    for found in layers:
        layer: Lengths = [[] for _ in range(configs)]
        for group in found:
            for place in group.places:
                layer[place] = [next(numbers) for _ in range(group.kept_heads)]
        result.append(layer)
    return result


def keep(
    found: Sequence[AnyGroup],
    batch: Collection[int],
    lengths: Lengths,
    key: Float[Tensor, "kv_head key d_head"],
    value: Float[Tensor, "kv_head key d_head"],
) -> Kept:
    """The entries that the configurations of `batch` keep of a layer's full cache; copied by who lays them out."""
    masks, order = [], []
    for group in found:
        rows = [row for row, place in enumerate(group.places) if place in batch]
        if rows:
            chosen = slice(None) if len(rows) == len(group.places) else on_device(rows, key.device)
            masks.append(group.kept_sets(chosen).kept.flatten(0, 1))
            order += [group.places[row] for row in rows]
    kept = torch.cat(masks)
    segment, position = _nonzero(kept, sum(sum(lengths[place]) for place in order))
    starts = on_device([start for place in order for start in _starts(len(lengths[place]), *key.shape[:2])], key.device)
    pieces = torch.split(starts[segment] + position, [sum(lengths[place]) for place in order])
    keys, values = key.flatten(0, 1), value.flatten(0, 1)
    entries = {
        place: KeptEntries(keys, values, index, lengths[place]) for place, index in zip(order, pieces, strict=True)
    }
    return Kept(tuple(order), position.to(torch.int32), entries, in_bits(kept))


def in_bits(mask: Bool[Tensor, "row key"]) -> UInt8[Tensor, "row byte"]:
    """Eight entries in a byte, the first one the highest bit, on the device: a transfer of an eighth.

    Each number of eight bytes 0 or 1 becomes one byte by a product whose highest byte has all eight bits.
    """
    whole = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8))
    return ((whole.contiguous().view(torch.int64) * _GATHERS_BITS) >> 56).to(torch.uint8)


def _starts(kept_heads: int, kv_heads: int, keys: int) -> list[int]:
    """Where the entries of each kept set's key/value head begin, all heads' one after the other."""
    return [head * kv_heads // kept_heads * keys for head in range(kept_heads)]


def _nonzero(mask: Bool[Tensor, "row key"], count: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the `count` true places, row by row; CUDA is not waited for."""
    places = torch.nonzero_static(mask, size=count) if mask.is_cuda else mask.nonzero()
    row, column = places.unbind(dim=-1)
    return row, column
