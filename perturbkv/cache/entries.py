"""Kept entries of one layer: views into the full cache, gathered from kept sets, with optional positions in the cache.

Codes of kept sets, as `perturbkv.kept_codec` defines them, are computed on the device where the sets were chosen.

Positions inside an evicted cache (StreamingLLM, section 3.2) count a head's kept keys 0 … b − 1, and the next token b.
Rotary attention depends on distances alone, so that keys at n − b … n − 1 before a token at n are the same cache: here
keys move up to the prompt's end, and queries stay where they are, in every layer and head, however many each keeps.
Rotations compose: a key that was cached as R(p) k becomes R(j) k by R(j − p), whatever factor it carries in addition
(YaRN's). Nothing here but `kept_lengths` waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.layer_types import FULL
from perturbkv.devices import copy_to_device, to_device
from perturbkv.errors import ModelError
from perturbkv.selection.page_selection import AnyGroup
from perturbkv.theory import WORK

Reader = Callable[[Float[Tensor, "head query d_key"]], Bool[Tensor, "head query key"]]
"""Function from queries to a mask of the entries that each query attends to, for a row that keeps everything."""


@dataclass(frozen=True, eq=False)
class KeptEntries:
    """The kept entries of one configuration in one layer, as indices until a cache copies them.

    Attributes:
        keys, values: of this row alone or shared with other rows.
        index: indices of the kept entries into `source`, one kept set after the other.
        lengths: number of entries of each kept set.
        rectangle: keys and values (kept_head, kept, …) of a row that keeps everything, as views of the full cache.
        reader: selects the entries that a row with a `rectangle` attends to; None: all of them.
        latents: of how many tokens a cache of latents stores one, as some set keeps an entry that is made of it, and
            how many numbers it has; (0, 0) where a cache stores the entries themselves.
    """

    keys: Float[Tensor, "source d_key"]
    values: Float[Tensor, "source d_value"]
    index: Int[Tensor, " kept"]
    lengths: list[int]
    rectangle: tuple[Tensor, Tensor] | None = None
    reader: Reader | None = None
    latents: tuple[int, int] = (0, 0)

    @property
    def stored_entries(self) -> int:
        """Number of entries, of all sets together, or of latents that a cache stores."""
        return self.latents[0] or sum(self.lengths)

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of components of a key and of a value."""
        return self.keys.shape[-1], self.values.shape[-1]

    @classmethod
    def of(cls, keys: Sequence[Tensor], values: Sequence[Tensor]) -> KeptEntries:
        """Return the kept entries given by keys and values, one tensor (kept, …) per kept set."""
        joint = torch.cat(list(keys))
        index = torch.arange(len(joint), device=joint.device)
        return cls(joint, torch.cat(list(values)), index, [len(kept) for kept in keys])

    def sets(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values (kept, …) per kept set: copies, or views for a row with a `rectangle`."""
        if self.rectangle is not None:
            return list(zip(*self.rectangle, strict=True))
        return [(self.keys[kept], self.values[kept]) for kept in torch.split(self.index, self.lengths)]


def borrow(
    keys: Float[Tensor, "kv_head key d_key"], values: Float[Tensor, "kv_head key d_value"], latent: int = 0
) -> KeptEntries:
    """Return all entries of a layer of the full cache as a row's kept entries, without copying.

    `latent` is the number of components of the latents that the cache stores in their place; 0: it stores them.
    """
    no_index, lengths = torch.empty(0, dtype=torch.int64), [keys.shape[1]] * keys.shape[0]
    latents = (keys.shape[1], latent) if latent else (0, 0)
    return KeptEntries(keys[0, :0], values[0, :0], no_index, lengths, rectangle=(keys, values), latents=latents)


def entry_bytes(keys: Tensor, values: Tensor) -> int:
    """Return the bytes of one entry's key and value, out of tensors of entries (…, components)."""
    return keys.shape[-1] * keys.itemsize + values.shape[-1] * values.itemsize


@dataclass(frozen=True, eq=False)
class GatheredSet:
    """The kept set of one configuration in one layer.

    Attributes:
        entries: its entries, of the full cache.
        position: their positions in the prompt, ascending within each kept set, one set after the other; empty for
            all entries.
    """

    entries: KeptEntries
    position: Int[Tensor, " kept"]

    @classmethod
    def of_all(
        cls, keys: Float[Tensor, "kv_head key d_key"], values: Float[Tensor, "kv_head key d_value"], latent: int = 0
    ) -> GatheredSet:
        """Return all entries of a layer, of which the cache stores latents as in `borrow`."""
        entries = borrow(keys, values, latent)
        return cls(entries, entries.index)


@dataclass(frozen=True, eq=False)
class EntryPool:
    """Keys and values of all rows of one layer; `index` lists each row's entries, one kept set after the other."""

    keys: Float[Tensor, "source d_key"]
    values: Float[Tensor, "source d_value"]
    index: Int[Tensor, " entry"]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry's key and value."""
        return entry_bytes(self.keys, self.values)

    def take(self, indices: Int[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values (*shape, …) of the entries listed in `index` at `indices`."""
        chosen = self.index[indices.flatten()]
        return tuple(  # type: ignore[return-value]
            kind.index_select(0, chosen).view(*indices.shape, -1) for kind in (self.keys, self.values)
        )


def pool_entries(rows: Sequence[KeptEntries]) -> EntryPool:
    """Return a common pool of the entries of all rows.

    Tensors shared by several rows are stored once, and one shared by all is not copied.
    """
    distinct = {id(row.keys): row for row in rows}
    if len(distinct) == 1:
        return EntryPool(rows[0].keys, rows[0].values, torch.cat([row.index for row in rows]))
    keys, values = (
        torch.cat([row.keys for row in distinct.values()]),
        torch.cat([row.values for row in distinct.values()]),
    )
    starts = dict(zip(distinct, accumulate([len(row.keys) for row in distinct.values()], initial=0), strict=False))
    return EntryPool(keys, values, torch.cat([row.index + starts[id(row.keys)] for row in rows]))


_BIT_GATHERING_FACTOR = 0x8040201008040201 - 2**64
"""A bit at every ninth position, as a signed number: a product with it moves byte i to bit 63 − i."""
Lengths = list[list[int]]
"""Numbers of kept entries in one layer, per configuration and kept set."""


@dataclass(frozen=True, eq=False)
class KeptBatch:
    """The entries that a batch of configurations keeps in one layer.

    Attributes:
        order: indices of the configurations, in the order of `position` and `masks`.
        position: kept positions in the prompt, ascending within each kept set, one set after the other.
        entries: index of a configuration -> its kept entries.
        masks: the kept sets as bits, the first entry the highest bit of the first byte.
    """

    order: tuple[int, ...]
    position: Int[Tensor, " kept"]
    entries: dict[int, KeptEntries]
    masks: UInt8[Tensor, "kept_set byte"]

    def sets(self) -> dict[int, GatheredSet]:
        """Return index of a configuration -> its kept set."""
        counts = [sum(self.entries[index].lengths) for index in self.order]
        positions = torch.split(self.position, counts)
        return {
            index: GatheredSet(self.entries[index], position)
            for index, position in zip(self.order, positions, strict=True)
        }


def kept_lengths(layers: Sequence[Sequence[AnyGroup]], configs: int, device: torch.device) -> list[Lengths]:
    """Return each layer's numbers of kept entries for `configs` configurations, in one transfer from the device.

    `layers` are the groups of each layer; a configuration in none of them has an empty list.
    """
    counts = [group.budgets.kept_entries for groups in layers for group in groups]
    numbers = iter(torch.cat([copy_to_device(count.flatten(), device) for count in counts]).tolist())
    result = []
    for groups in layers:
        lengths: Lengths = [[] for _ in range(configs)]
        for group in groups:
            for index in group.config_indices:
                lengths[index] = [next(numbers) for _ in range(group.kept_heads)]
        result.append(lengths)
    return result


def gather_kept(
    groups: Sequence[AnyGroup],
    batch: Collection[int],
    lengths: Lengths,
    key: Float[Tensor, "kv_head key d_key"],
    value: Float[Tensor, "kv_head key d_value"],
    latent: int = 0,
) -> KeptBatch:
    """Return the entries that a batch of configurations keeps in one layer of the full cache.

    Waits for the device where the cache stores latents: for of how many tokens a configuration keeps any entry.

    Args:
        groups: the layer's groups, with the kept sets of all configurations.
        batch: indices of the batch's configurations; those in no group are left out.
        lengths: the layer's numbers of kept entries, of all configurations.
        key: keys of the layer in the full cache.
        value: its values.
        latent: number of components of the latents that the cache stores in their place; 0: it stores them.
    """
    masks, order = [], []
    for group in groups:
        if rows := [row for row, config in enumerate(group.config_indices) if config in batch]:
            chosen = slice(None) if len(rows) == len(group.config_indices) else to_device(rows, key.device)
            masks.append(group.kept_sets(chosen).kept.flatten(0, 1))
            order += [group.config_indices[row] for row in rows]
    kept, counts = torch.cat(masks), [sum(lengths[config]) for config in order]
    kept_set, position = _nonzero(kept, sum(counts))
    kv_heads, tokens = key.shape[:2]
    starts = [
        head * kv_heads // len(lengths[config]) * tokens for config in order for head in range(len(lengths[config]))
    ]
    indices = torch.split(to_device(starts, key.device)[kept_set] + position, counts)
    keys, values = key.flatten(0, 1), value.flatten(0, 1)  # head by head, as `starts` counts them
    latents = [(0, 0)] * len(order)
    if latent:
        sets = torch.split(kept, [len(lengths[config]) for config in order])
        latents = [(tokens, latent) for tokens in torch.stack([each.any(dim=0).sum() for each in sets]).tolist()]
    entries = {
        config: KeptEntries(keys, values, index, lengths[config], latents=of_config)
        for config, index, of_config in zip(order, indices, latents, strict=True)
    }
    return KeptBatch(tuple(order), position.to(torch.int32), entries, pack_bits(kept))


def pack_bits(mask: Bool[Tensor, "row key"]) -> UInt8[Tensor, "row byte"]:
    """Return the mask as bits, eight entries per byte, the first entry the highest bit; computed on the device.

    Eight mask bytes, read as one integer, become a byte by a product whose highest byte has all eight bits.
    """
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8))
    return ((padded.contiguous().view(torch.int64) * _BIT_GATHERING_FACTOR) >> 56).to(torch.uint8)


def _nonzero(mask: Bool[Tensor, "row key"], count: int) -> tuple[Tensor, Tensor]:
    """Return row and column indices of the `count` true elements, row by row, without synchronising with CUDA."""
    indices = torch.nonzero_static(mask, size=count) if mask.is_cuda else mask.nonzero()
    row, column = indices.unbind(dim=-1)
    return row, column


_BITS = 7
"""Bits of a number in a byte of LEB128."""


def encode_kept_sets(
    position: Int[Tensor, " kept"], counts: Sequence[int], masks: UInt8[Tensor, "kept_set byte"]
) -> tuple[UInt8[Tensor, "kept_set byte"], Int[Tensor, " kept_set"]]:
    """Return the codes of kept sets, each at the beginning of a row as long as a mask, and their byte lengths.

    A code gets as many bytes as its set's bit mask, which none exceeds.

    Args:
        position: kept positions in the prompt, ascending within each set, one set after the other.
        counts: number of kept entries of each set.
        masks: the sets as bits.
    """
    (sets, size), device = masks.shape, masks.device
    few = [index for index, count in enumerate(counts) if count < size]  # a gap takes a byte at least
    gaps, of_set = _position_gaps(position, counts, few)
    longest = max(1, -(-(8 * size).bit_length() // _BITS))  # bytes of the largest gap
    widths = torch.ones_like(gaps)  # bytes of each gap
    for byte in range(1, longest):
        widths += gaps >= 1 << _BITS * byte
    gap_bytes = torch.zeros(sets, dtype=torch.int64, device=device).index_add_(0, of_set, widths.to(torch.int64))
    is_short = torch.zeros(sets, dtype=torch.bool, device=device)
    is_short.index_fill_(0, to_device(few, device, torch.int64), True)
    is_short &= gap_bytes < size
    lengths = gap_bytes.where(is_short, size)
    before = gap_bytes.cumsum(dim=0) - gap_bytes
    place = widths.cumsum(dim=0) - widths - before[of_set] + of_set * size  # of each gap's first byte
    beyond = sets * size  # where what belongs to no code is written
    codes = torch.cat([masks.masked_fill(is_short.unsqueeze(-1), 0).flatten(), masks.new_zeros(1)])
    has_code = is_short[of_set]
    for byte in range(longest):  # LEB128: seven bits each, the lowest first, the eighth set where another byte follows
        value = (gaps >> _BITS * byte & 127) | (widths > byte + 1).to(gaps.dtype) << _BITS
        index = (place + byte).where(has_code & (widths > byte), beyond)
        codes.scatter_(0, index, value.to(torch.uint8))
    return codes[:-1].view(sets, size), lengths


def _position_gaps(
    position: Int[Tensor, " kept"], counts: Sequence[int], sets: Sequence[int]
) -> tuple[Int[Tensor, " gap"], Int[Tensor, " gap"]]:
    """Return each position minus the one before it in its set, the first as it is, and the index of its set.

    Only of the kept sets with the indices `sets`; `position` and `counts` are those of all, as in `encode_kept_sets`.
    """
    parts, device = torch.split(position, list(counts)), position.device
    chosen = torch.cat([parts[index] for index in sets]) if sets else position[:0]
    of_set = to_device(list(sets), device, torch.int64).repeat_interleave(
        to_device([counts[index] for index in sets], device, torch.int64), output_size=len(chosen)
    )
    begins_set = torch.ones_like(of_set, dtype=torch.bool)
    begins_set[1:] = of_set[1:] != of_set[:-1]
    return chosen - chosen.roll(1).masked_fill_(begins_set, 0), of_set


COMPOSING_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary frequencies (transformers' `rope_type`) that are independent of the text's length."""


def check_positions(configs: Iterable[EvictionConfig], model_config: Any, name: str) -> None:
    """Raise ModelError for a configuration with positions in the cache, if the model's rotations do not compose.

    `name` is that of the model, for the message.
    """
    rotations = getattr(model_config, "rope_parameters", None)
    if not rotations or not any(config.in_cache for config in configs):
        return  # without rotations it is refused when the model is there
    if (kind := rotations.get(FULL, rotations)["rope_type"]) not in COMPOSING_ROPE_TYPES:
        raise ModelError(
            f"positions=in-cache expects rotary frequencies of the type {', '.join(COMPOSING_ROPE_TYPES)}, got "
            f"'{kind}' of model '{name}', which change with the length of the text; use positions=kept"
        )


def close_gaps(
    entries: KeptEntries, position: Int[Tensor, " kept"], ends: Sequence[int], frequencies: Float[Tensor, " frequency"]
) -> KeptEntries:
    """Return copies of the entries, with keys rotated from their positions to those right before the end of their set.

    Args:
        entries: the entries, of kept sets with gaps between positions.
        position: their positions, one set after the other.
        ends: per kept set the position after its last entry's new one.
        frequencies: of the rotation, in radians per position.
    """
    new = positions_before(ends, entries.lengths, position.device)
    keys = rotate_keys(entries.keys[entries.index], _angles(new, frequencies) - _angles(position, frequencies))
    index = torch.arange(len(position), device=position.device)
    return KeptEntries(keys, entries.values[entries.index], index, entries.lengths)


def positions_before(ends: Sequence[int], lengths: Sequence[int], device: torch.device) -> Int[Tensor, " kept"]:
    """Return, for each set, as many consecutive positions as its length, up to its end − 1, one set after the other."""
    starts = accumulate(lengths[:-1], initial=0)
    shift = [end - length - start for end, length, start in zip(ends, lengths, starts, strict=True)]
    of_entry = to_device(shift, device).repeat_interleave(to_device(list(lengths), device), output_size=sum(lengths))
    return torch.arange(sum(lengths), device=device) + of_entry


def _angles(position: Int[Tensor, " kept"], frequencies: Tensor) -> Float[Tensor, "kept frequency"]:
    """Return the rotary angles in radians, rounded as in the model, in the dtype `WORK`."""
    work = torch.promote_types(frequencies.dtype, torch.float32)
    return (position.to(work).unsqueeze(-1) * copy_to_device(frequencies, position.device, work)).to(WORK)


def rotate_keys(keys: Float[Tensor, "... entry d_key"], angle: Float[Tensor, "entry frequency"]) -> Tensor:
    """Return the keys rotated by `angle` radians, with components paired as in transformers' `rotate_half`.

    Components after the rotary ones are unchanged, as in Phi-3, where only a part of a head is rotary.
    """
    half, cosine, sine = angle.shape[-1], angle.cos(), angle.sin()
    first, second, rest = torch.split(keys, [half, half, keys.shape[-1] - 2 * half], dim=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat([*(components.to(keys.dtype) for components in rotated), rest], dim=-1)
