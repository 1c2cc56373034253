"""Distances of a layer's dumped entries from the plain model's, and from where on they differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from perturbkv.auditing import changes
from perturbkv.auditing.dumps.dump_file import REMOVED, LayerDump

LEVELS = 4
"""Number of a layer's typical distances up to which an entry is as far from the plain model's as all others."""
MOST_LEVEL = 0.3
"""Largest typical distance, of entries in few bits; above, entries are not the plain model's but for rounding."""
WHOLE_BLOCK = 8
"""Least tokens of a block that is looked at by itself; of smaller ones neighbours are looked at together."""
_TYPICAL = 8
"""Noise floors, as the largest of several distances, lie that far above typical ones, or less."""
_ALIASES = {
    "fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16",
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
"""Other names of torch's types."""
_SHARE = 0.35
"""Largest median distance by rounding, over ε: it is about a fifth."""
_BITS = {8: 0.015, 7: 0.03, 6: 0.05, 5: 0.1, 4: 0.2, 3: 0.3, 2: 0.3}
"""Bits -> largest median distance that rounding to whole numbers of so many bits, in blocks with a scale, explains."""
_IN_NAME = re.compile(r"(?<![a-z0-9])(?:i?q|u?int|nf)?([2-8])(?![0-9])")
_FARTHEST = 1e3
"""Largest distance of an entry that counts; of numbers that are none."""
_LEAST_FACTOR, _NEARER, _LEAST_ENTRIES = 0.01, 0.8, 32
"""Least difference of a common factor from 1, most of the distance that is left without it, least number of entries."""
_FEWER_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types that entries of 16 bits may have gone through."""
_CUT_OFF, _DIFFER = 0.95, 0.2
"""Least share of numbers that are rounded towards zero where all are, of all and of those where it is not rounding to
the nearest, and least share of these."""
Pair = tuple[Float[Tensor, "kv_head entry d_head"], Float[Tensor, "kv_head entry d_head"]]


@dataclass(frozen=True)
class Entries:
    """The dumped entries of a request in one layer.

    Attributes:
        keys, values: as dumped, in float32.
        positions: the token that each entry stands for; `REMOVED` where there is no entry.
        blocks: id of the block that holds each entry; `REMOVED` in rows.
        block_size: tokens of a block; 0 in rows.
    """

    keys: Float[Tensor, "kv_head entry d_head"]
    values: Float[Tensor, "kv_head entry d_head"]
    positions: Int[Tensor, "kv_head entry"]
    blocks: Int[Tensor, " entry"]
    block_size: int = 0


@dataclass(frozen=True)
class Distances:
    """The distances of a request's entries from the plain model's, over the root mean square norm of the head's.

    Attributes:
        key, value: infinite where the number is none.
        present: whether there is an entry.
    """

    key: Float[Tensor, "kv_head entry"]
    value: Float[Tensor, "kv_head entry"]
    present: Bool[Tensor, "kv_head entry"]


def distances(entries: Entries, known: Pair) -> Distances:
    """Return the distances of entries from the plain model's entries of the tokens that they stand for."""
    present, index = entries.positions != REMOVED, entries.positions.clamp(min=0)
    key, value = (
        entry_distances(own, full.float().gather(1, index.unsqueeze(-1).expand(-1, -1, full.shape[-1])), full)
        for own, full in zip((entries.keys, entries.values), known, strict=True)
    )
    return Distances(key.masked_fill(~present, 0), value.masked_fill(~present, 0), present)


def entry_distances(own: Tensor, expected: Tensor, full: Tensor) -> Float[Tensor, "kv_head entry"]:
    """Return distances of entries, over the root mean square norm of all entries of the head."""
    unit = full.float().square().sum(dim=-1).mean(dim=-1, keepdim=True).sqrt()
    distance = torch.linalg.vector_norm(own - expected, dim=-1) / unit.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(distance.isfinite(), distance, torch.inf)


def mean_distance(entries: Entries, known: Pair) -> float:
    """Return the mean distance of a request's keys and values; one above 1 counts as 1."""
    measured = distances(entries, known)
    return float(torch.stack([measured.key, measured.value])[:, measured.present].clamp(max=1).mean())


def nearest(entries: Entries, every: Sequence[Pair]) -> Pair:
    """Return, of each token, the keys and values in `every` that are nearest to its entries, over all heads."""
    if len(every) == 1:
        return every[0]
    far = []
    for full in every:
        measured = distances(entries, full)
        both = (measured.key + measured.value).clamp(max=_FARTHEST)
        by_token = both.new_zeros(len(both), full[0].shape[1])
        far.append(by_token.scatter_add(1, entries.positions.clamp(min=0), both).sum(dim=0))
    chosen = torch.stack(far).argmin(dim=0)
    tokens = torch.arange(len(chosen), device=chosen.device)
    keys, values = (torch.stack([full[kind] for full in every])[chosen, :, tokens] for kind in range(2))
    return keys.transpose(0, 1), values.transpose(0, 1)


def typical(measured: Sequence[Distances]) -> tuple[float, float]:
    """Return the medians of the distances of a layer's keys and of its values; 0 without entries."""
    medians = []
    for kind in ("key", "value"):
        every = torch.cat([getattr(each, kind)[each.present] for each in measured])
        medians.append(float(every.median()) if len(every) else 0.0)
    return medians[0], medians[1]


@dataclass(frozen=True)
class Limits:
    """The distances of a layer's keys, and of its values, above which they differ.

    Attributes:
        single: of one entry: one limit for all, or one for each.
        together: of the median of a block, or of 16 neighbours, in one head.
    """

    single: tuple[float | Float[Tensor, "kv_head entry"], float | Float[Tensor, "kv_head entry"]]
    together: tuple[float, float]

    @classmethod
    def of_layer(cls, floors: Sequence[float], levels: Sequence[float], most: int) -> Self:
        """Return the limits, given noise floors, typical distances, and the most floors of an entry that is right."""
        coarse = [LEVELS * level if level <= MOST_LEVEL else 0.0 for level in levels]
        single = [max(most * floor, more) for floor, more in zip(floors, coarse, strict=True)]
        least = [LEVELS * floor / _TYPICAL for floor in floors]
        together = [min(one, max(low, more)) for one, low, more in zip(single, least, coarse, strict=True)]
        return cls((single[0], single[1]), (together[0], together[1]))

    def far(self, entries: Entries, measured: Distances) -> Bool[Tensor, "kv_head entry"]:
        """Return which entries differ, by themselves or with their neighbours."""
        size = entries.block_size if entries.block_size >= WHOLE_BLOCK else 2 * WHOLE_BLOCK
        tokens = measured.present.shape[1]
        odd = torch.zeros_like(measured.present)
        for distance, single, together in zip((measured.key, measured.value), self.single, self.together, strict=True):
            known = distance.masked_fill(~measured.present, torch.nan)
            groups = nn.functional.pad(known, (0, -tokens % size), value=torch.nan).reshape(len(known), -1, size)
            many = groups.isfinite().sum(dim=-1) >= WHOLE_BLOCK
            above = many & (groups.nanmedian(dim=-1).values > together)
            together_odd = above.repeat_interleave(size, dim=-1)[:, :tokens] & (distance > together)
            odd |= (distance > single) | together_odd
        return odd & measured.present


def common_factor(kind: int, entries: Mapping[str, Entries], known: Mapping[str, Pair]) -> float:
    """Return the constant that all keys (`kind` 0) or values (1) of a layer were multiplied by; 1 without one."""
    dumped_entries, full = _pairs(kind, entries, known)
    factor = float(((dumped_entries * full).sum(dim=-1) / full.square().sum(dim=-1)).nanmedian()) if len(full) else 1.0
    if len(full) < _LEAST_ENTRIES or not factor > 0 or abs(factor - 1) < _LEAST_FACTOR:
        return 1.0
    before, after = (
        torch.linalg.vector_norm(dumped_entries / scale - full, dim=-1).nanmedian() for scale in (1.0, factor)
    )
    return factor if bool(after < _NEARER * before) else 1.0


def _pairs(
    kind: int, entries: Mapping[str, Entries], known: Mapping[str, Pair], heads: slice = slice(None)
) -> tuple[Float[Tensor, "entry d_head"], Float[Tensor, "entry d_head"]]:
    """Return all keys (`kind` 0) or values (1) of a layer, and the plain model's of the same tokens."""
    own, expected = [], []
    for name, dumped in entries.items():
        positions = dumped.positions[heads]
        index = positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, dumped.keys.shape[-1])
        there = positions != REMOVED
        own.append((dumped.keys, dumped.values)[kind][heads][there])
        expected.append(known[name][kind][heads].float().gather(1, index)[there])
    return torch.cat(own), torch.cat(expected)


def heads_cut_off(
    kind: int, entries: Mapping[str, Entries], known: Mapping[str, Pair], layer: LayerDump
) -> tuple[int, ...]:
    """Return the heads whose keys (`kind` 0) or values (1) were all rounded towards zero to the type of the dump."""
    tensors = layer.stored or next(iter(layer.rows.values()))[:2]
    dtype, scale = tensors[kind % len(tensors)].dtype, layer.scales[kind]
    found = []
    for head in range(len(next(iter(entries.values())).keys)):
        own, full = _pairs(kind, entries, known, slice(head, head + 1))
        one = scale if scale.ndim == 0 else scale[head]
        cut, nearest_to = changes.round_towards_zero(full / one, dtype), (full / one).to(dtype).float()
        differ = cut != nearest_to
        if len(own) >= WHOLE_BLOCK and bool(differ.float().mean() > _DIFFER):
            same = (cut * one == own).float()
            found += [head] if min(float(same[differ].mean()), float(same.mean())) > _CUT_OFF else []
    return tuple(found)


def fewer_bits(layer: LayerDump, kind: int) -> str:
    """Return the type of 8 bits that all keys (`kind` 0) or values (1) in 16 bits went through; empty without one."""
    tensors = layer.stored or next(iter(layer.rows.values()))[:2]
    tensor = tensors[kind % len(tensors)]
    numbers = tensor[tensor != 0]
    if tensor.dtype.itemsize != 2 or not len(numbers):
        return ""
    for dtype in _FEWER_BITS:
        if bool((numbers.float().to(dtype).float() == numbers.float()).float().mean() > _CUT_OFF):
            return str(dtype).removeprefix("torch.")
    return ""


def is_complete(entries: Entries) -> bool:
    """Return whether every token has an entry in every head, in order."""
    return torch.equal(entries.positions, torch.arange(entries.positions.shape[1]).expand_as(entries.positions))


def explained_by_name(name: str) -> float:
    """Return the largest median distance that a type of this name explains; 0 for one that is not known.

    Of a floating-point type of torch, under its name or `fp8`, `bf16` and so on: 0.35 ε. Of others the bits that stand
    in the name count: `q4_0`, `int8`.
    """
    known = getattr(torch, _ALIASES.get(name.lower(), name.lower()), None)
    if isinstance(known, torch.dtype):
        try:
            return _SHARE * torch.finfo(known).eps
        except (TypeError, NotImplementedError):
            pass
    bits = _IN_NAME.search(name.lower())
    return _BITS[int(bits[1])] if bits else 0.0
