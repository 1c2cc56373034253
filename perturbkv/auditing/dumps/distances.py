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
from perturbkv.auditing.reference import entry_distances
from perturbkv.devices import dtype_name

MEDIANS = 4
"""Multiple of a layer's median distance above which an entry differs."""
LARGEST_MEDIAN = 0.3
"""Largest median distance that rounding explains; above it only noise floors count."""
LEAST_BLOCK = 8
"""Smallest block, in tokens, that is judged by itself; smaller ones are judged in groups of 16 neighbours."""
_GROUP_FLOORS = 2
"""Noise floors up to which a block's median is right: decoded tokens beside equal ones need one."""
_ALIASES = {
    "fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16",
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
"""Other names of torch's types."""
_ROUNDING = 0.35
"""Largest median distance that rounding to a floating-point type explains, in units of its ε; it is about 0.2."""
_BITS = {8: 0.015, 7: 0.03, 6: 0.05, 5: 0.1, 4: 0.2, 3: 0.3, 2: 0.3}
"""Bits -> largest median distance that rounding to whole numbers of so many bits, in blocks with a scale, explains."""
_IN_NAME = re.compile(r"(?<![a-z0-9])(?:i?q|u?int|nf)?([2-8])(?![0-9])")
_FARTHEST = 1e3
"""Distance at which an entry that is NaN or infinite counts."""
_LEAST_FACTOR = 0.01
"""Smallest difference of a common factor from 1 that is a fault."""
_NEARER = 0.8
"""Largest ratio of the median distance after division by a common factor to that before."""
_LEAST_ENTRIES = 32
"""Fewest entries from which a common factor is estimated."""
_FEWER_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types that entries of 16 bits may have gone through."""
_NEARLY_ALL = 0.95
"""Share of numbers that counts as all of them."""
_LEAST_TRUNCATED = 0.2
"""Least share of numbers for which rounding towards zero and to the nearest differ."""
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
        key, value: infinite where an entry is NaN or infinite.
        present: whether there is an entry.
    """

    key: Float[Tensor, "kv_head entry"]
    value: Float[Tensor, "kv_head entry"]
    present: Bool[Tensor, "kv_head entry"]


def measure(entries: Entries, known: Pair) -> Distances:
    """Return the distances of entries from the plain model's entries of the tokens that they stand for."""
    present = entries.positions != REMOVED
    key, value = (
        entry_distances(own, _at_positions(full, entries.positions), full)
        for own, full in zip((entries.keys, entries.values), known, strict=True)
    )
    return Distances(key.masked_fill(~present, 0), value.masked_fill(~present, 0), present)


def _at_positions(
    full: Float[Tensor, "kv_head token d_head"], positions: Int[Tensor, "kv_head entry"]
) -> Float[Tensor, "kv_head entry d_head"]:
    """Return the entries at these positions, per head; those of the first token where there is none."""
    return full.float().gather(1, positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, full.shape[-1]))


def mean_distance(entries: Entries, known: Pair) -> float:
    """Return the mean distance of a request's keys and values; one above 1 counts as 1."""
    measured = measure(entries, known)
    return float(torch.stack([measured.key, measured.value])[:, measured.present].clamp(max=1).mean())


def nearest(entries: Entries, every: Sequence[Pair]) -> Pair:
    """Return, of each token, the keys and values in `every` that are nearest to its entries, over all heads."""
    if len(every) == 1:
        return every[0]
    far = []
    for full in every:
        measured = measure(entries, full)
        both = (measured.key + measured.value).clamp(max=_FARTHEST)
        by_token = both.new_zeros(len(both), full[0].shape[1])
        far.append(by_token.scatter_add(1, entries.positions.clamp(min=0), both).sum(dim=0))
    chosen = torch.stack(far).argmin(dim=0)
    tokens = torch.arange(len(chosen), device=chosen.device)
    keys, values = (torch.stack([full[kind] for full in every])[chosen, :, tokens] for kind in range(2))
    return keys.transpose(0, 1), values.transpose(0, 1)


def medians(measured: Sequence[Distances]) -> tuple[float, float]:
    """Return the medians of the distances of a layer's keys and of its values; 0 without entries."""
    found = []
    for kind in ("key", "value"):
        every = torch.cat([getattr(each, kind)[each.present] for each in measured])
        found.append(float(every.median()) if len(every) else 0.0)
    return found[0], found[1]


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
    def of_layer(cls, floors: Sequence[float], medians: Sequence[float], allowed: int) -> Self:
        """Return the limits, given noise floors, median distances, and the floors that are `allowed` to an entry."""
        coarse = [MEDIANS * median if median <= LARGEST_MEDIAN else 0.0 for median in medians]
        single = [max(allowed * floor, more) for floor, more in zip(floors, coarse, strict=True)]
        least = [_GROUP_FLOORS * floor for floor in floors]
        together = [min(one, max(low, more)) for one, low, more in zip(single, least, coarse, strict=True)]
        return cls((single[0], single[1]), (together[0], together[1]))

    def differing(self, entries: Entries, measured: Distances) -> Bool[Tensor, "2 kv_head entry"]:
        """Return which keys, and which values, differ, by themselves or with their neighbours."""
        size = entries.block_size if entries.block_size >= LEAST_BLOCK else 2 * LEAST_BLOCK
        tokens = measured.present.shape[1]
        differing = []
        for distance, single, together in zip((measured.key, measured.value), self.single, self.together, strict=True):
            known = distance.masked_fill(~measured.present, torch.nan)
            groups = nn.functional.pad(known, (0, -tokens % size), value=torch.nan).reshape(len(known), -1, size)
            many = groups.isfinite().sum(dim=-1) >= LEAST_BLOCK
            above = many & (groups.nanmedian(dim=-1).values > together)
            in_group = above.repeat_interleave(size, dim=-1)[:, :tokens] & (distance > together)
            differing.append(measured.present & ((distance > single) | in_group))
        return torch.stack(differing)


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
        there = positions != REMOVED
        own.append((dumped.keys, dumped.values)[kind][heads][there])
        expected.append(_at_positions(known[name][kind][heads], positions)[there])
    return torch.cat(own), torch.cat(expected)


def truncated_heads(
    kind: int, entries: Mapping[str, Entries], known: Mapping[str, Pair], layer: LayerDump
) -> tuple[int, ...]:
    """Return the heads whose keys (`kind` 0) or values (1) were all rounded towards zero to the type of the dump."""
    dtype, scale = layer.tensors[kind][0].dtype, layer.scales[kind]
    found = []
    for head in range(len(next(iter(entries.values())).keys)):
        own, full = _pairs(kind, entries, known, slice(head, head + 1))
        one = scale if scale.ndim == 0 else scale[head]
        cut, nearest_to = changes.round_towards_zero(full / one, dtype), (full / one).to(dtype).float()
        differ = cut != nearest_to
        if len(own) >= LEAST_BLOCK and bool(differ.float().mean() > _LEAST_TRUNCATED):
            same = (cut * one == own).float()
            found += [head] if min(float(same[differ].mean()), float(same.mean())) > _NEARLY_ALL else []
    return tuple(found)


def fewer_bits(layer: LayerDump, kind: int) -> str:
    """Return the type of 8 bits that all keys (`kind` 0) or values (1) in 16 bits went through; empty without one."""
    tensors = layer.tensors[kind]
    numbers = torch.cat([tensor[tensor != 0] for tensor in tensors])
    if tensors[0].dtype.itemsize != 2 or not len(numbers):
        return ""
    for dtype in _FEWER_BITS:
        if bool((numbers.float().to(dtype).float() == numbers.float()).float().mean() > _NEARLY_ALL):
            return dtype_name(dtype)
    return ""


def is_complete(entries: Entries, tokens: int) -> bool:
    """Return whether each of so many tokens has an entry in every head, in order."""
    return torch.equal(entries.positions, torch.arange(tokens).expand(len(entries.positions), -1))


def explained_distance(kind: torch.dtype | str) -> float:
    """Return the largest median distance that a type explains; 0 for a name that is not known.

    Of a floating-point type of torch, also under a name such as `bfloat16`, `bf16` or `fp8`: 0.35 ε. Of other names the
    bits that stand in them count: `q4_0`, `int8`.
    """
    name = dtype_name(kind) if isinstance(kind, torch.dtype) else kind
    known = getattr(torch, _ALIASES.get(name.lower(), name.lower()), None)
    if isinstance(known, torch.dtype):
        try:
            return _ROUNDING * torch.finfo(known).eps
        except (TypeError, NotImplementedError):
            pass
    bits = _IN_NAME.search(name.lower())
    return _BITS[int(bits[1])] if bits else 0.0
