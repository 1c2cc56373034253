"""The entries that a row of an evicted cache keeps of one layer: where they lie until the cache copies them out.

From selections to entries: where in a layer's full cache the entries lie that some configurations keep.

Positions inside an evicted cache (StreamingLLM, section 3.2): kept keys as if they stood at 0 … b − 1.

Rotations compose: a key that was cached as R(p) k becomes R(j) k by R(j − p), whatever factor its length carries beside
(YaRN's). Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.layer_types import FULL, is_mixed
from perturbkv.devices import on_device
from perturbkv.errors import ModelError
from perturbkv.selection.page_selection import AnyGroup
from perturbkv.selection.policies import registry
from perturbkv.theory import WORK

Reader = Callable[[Float[Tensor, "head query d_head"]], Bool[Tensor, "head query key"]]
"""Of a row that holds everything: from queries to the entries that each looks at."""


@dataclass(frozen=True, eq=False)
class KeptEntries:
    """The kept entries of one configuration in one layer: where they lie, until a cache copies them out.

    Attributes:
        keys, values: (place, d_head), of this row alone or shared with others.
        index: places of the kept entries, one kept set after the other.
        lengths: entries of each kept set.
        rectangle: keys and values (kept_head, kept, d_head) of a row that keeps all of them, and borrows them.
        reader: what such a row looks at; None: at all of them.
    """

    keys: Float[Tensor, "place d_head"]
    values: Float[Tensor, "place d_head"]
    index: Int[Tensor, " kept"]
    lengths: list[int]
    rectangle: tuple[Tensor, Tensor] | None = None
    reader: Reader | None = None

    @classmethod
    def of(cls, keys: Sequence[Tensor], values: Sequence[Tensor]) -> KeptEntries:
        """Entries that lie in one tensor (kept, d_head) per kept set."""
        together = torch.cat(list(keys))
        index = torch.arange(len(together), device=together.device)
        return cls(together, torch.cat(list(values)), index, [len(piece) for piece in keys])

    def sets(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each kept set: copies, or views of what is borrowed."""
        if self.rectangle is not None:
            return list(zip(*self.rectangle, strict=True))
        return [(self.keys[kept], self.values[kept]) for kept in torch.split(self.index, self.lengths)]


def borrow(keys: Float[Tensor, "kv_head key d_head"], values: Float[Tensor, "kv_head key d_head"]) -> KeptEntries:
    """All entries, as a view: the run that keeps everything reads the full cache itself."""
    nothing = keys[0, :0]
    lengths = [keys.shape[1]] * keys.shape[0]
    return KeptEntries(nothing, nothing, torch.empty(0, dtype=torch.int64), lengths, (keys, values))


@dataclass(frozen=True, eq=False)
class EntryPool:
    """Where the entries of all rows lie: `index` lists their places, segment after segment."""

    keys: Float[Tensor, "place d_head"]
    values: Float[Tensor, "place d_head"]
    index: Int[Tensor, " entry"]

    @property
    def entry_bytes(self) -> int:
        """Of one entry's key and value."""
        return self.keys.shape[-1] * (self.keys.itemsize + self.values.itemsize)

    def take(self, places: Int[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
        """Copies of the entries that the index lists at these places."""
        chosen = self.index[places.flatten()]
        return tuple(  # type: ignore[return-value]
            kind.index_select(0, chosen).view(*places.shape, -1) for kind in (self.keys, self.values)
        )


def pool_entries(rows: Sequence[KeptEntries]) -> EntryPool:
    """One pile of all rows; what several share is there once, and what all share is not copied."""
    apart = {id(row.keys): row for row in rows}
    if len(apart) == 1:
        return EntryPool(rows[0].keys, rows[0].values, torch.cat([row.index for row in rows]))
    keys, values = torch.cat([row.keys for row in apart.values()]), torch.cat([row.values for row in apart.values()])
    starts = dict(zip(apart, accumulate([len(row.keys) for row in apart.values()], initial=0), strict=False))
    return EntryPool(keys, values, torch.cat([row.index + starts[id(row.keys)] for row in rows]))


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


COMPOSING = ("default", "linear", "llama3", "yarn")
"""transformers' `rope_type`s whose frequencies are the same at every length of the text."""


def check_positions(configs: Iterable[EvictionConfig], model_config: Any, name: str) -> None:
    """Raise ModelError where a configuration moves keys and the model's rotations do not compose."""
    if not any(registry.build(config.policy).in_cache for config in configs):
        return
    rotations = model_config.rope_parameters
    if is_mixed(model_config) and FULL not in rotations:
        msg = (
            f"positions=in-cache expects rotations of the evicted layers' own, got those of model '{name}', which its "
            "sliding layers share; use positions=kept"
        )
        raise ModelError(msg)
    if (kind := rotations.get(FULL, rotations)["rope_type"]) not in COMPOSING:
        msg = (
            f"positions=in-cache expects rotary frequencies of the type {', '.join(COMPOSING)}, got '{kind}' of "
            f"model '{name}', which change with the length of the text; use positions=kept"
        )
        raise ModelError(msg)


def positions_behind(configs: Iterable[EvictionConfig], n: int) -> list[int]:
    """By how much each configuration's next position lies before n: n − min(b, n) in the cache, else 0."""
    return [n - config.kept_entries(n) if registry.build(config.policy).in_cache else 0 for config in configs]


def positions_in_cache(kept: Kept, configs: Sequence[EvictionConfig], frequencies: Float[Tensor, " frequency"]) -> Kept:
    """The same entries, the keys of configurations that ask for it turned to where they stand in their cache.

    `frequencies` are the model's own, in radians per position. `position` stays the prompt's.
    """
    pieces = torch.split(kept.position, [sum(kept.entries[place].lengths) for place in kept.order])
    moved = {
        place: move_positions(kept.entries[place], position, frequencies)
        for place, position in zip(kept.order, pieces, strict=True)
        if registry.build(configs[place].policy).in_cache
    }
    return replace(kept, entries=kept.entries | moved)


def move_positions(
    entries: KeptEntries, position: Int[Tensor, " kept"], frequencies: Float[Tensor, " frequency"]
) -> KeptEntries:
    """Copies of the entries of kept sets of one length, as StreamingLLM's are, from `position` to 0, 1, … in each."""
    stands = torch.arange(entries.lengths[0], device=position.device).repeat(len(entries.lengths))
    angle = _angles(stands, frequencies) - _angles(position, frequencies)
    index = torch.arange(len(position), device=position.device)
    keys = turned(entries.keys[entries.index], angle)
    return KeptEntries(keys, entries.values[entries.index], index, entries.lengths)


def _angles(position: Int[Tensor, " kept"], frequencies: Tensor) -> Float[Tensor, "kept frequency"]:
    """Angles of rotation, rounded as the model rounds them, so that their difference is what lies between two keys."""
    work = torch.promote_types(frequencies.dtype, torch.float32)
    own = frequencies.to(position.device, work, non_blocking=True)
    return (position.to(work).unsqueeze(-1) * own).to(WORK)


def turned(keys: Float[Tensor, "entry d_head"], angle: Float[Tensor, "entry frequency"]) -> Tensor:
    """Keys rotated by angles in radians, component i with i + frequencies, as transformers pairs them (`rotate_half`).

    Components behind those stay as they are: Phi-3's, where only a part of a head is rotary.
    """
    half, cosine, sine = angle.shape[-1], angle.cos(), angle.sin()
    first, second, rest = torch.split(keys, [half, half, keys.shape[-1] - 2 * half], dim=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat([*(piece.to(keys.dtype) for piece in rotated), rest], dim=-1)
