"""Distances of a layer's dumped entries from the plain model's, and from where on they differ."""

from __future__ import annotations

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
_LEAST_FACTOR, _NEARER = 0.01, 0.8
"""Least difference of a common factor from 1, and most of the distance that is left without it."""
_CUT_OFF = 0.95
"""Least share of a layer's numbers that are rounded towards zero where all are."""
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
    measured = (distances(entries, full) for full in every)
    chosen = torch.stack([(each.key + each.value).sum(dim=0) for each in measured]).argmin(dim=0)
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
    if not factor > 0 or abs(factor - 1) < _LEAST_FACTOR:
        return 1.0
    before, after = (
        torch.linalg.vector_norm(dumped_entries / scale - full, dim=-1).nanmedian() for scale in (1.0, factor)
    )
    return factor if bool(after < _NEARER * before) else 1.0


def _pairs(
    kind: int, entries: Mapping[str, Entries], known: Mapping[str, Pair]
) -> tuple[Float[Tensor, "entry d_head"], Float[Tensor, "entry d_head"]]:
    """Return all keys (`kind` 0) or values (1) of a layer, and the plain model's of the same tokens."""
    own, expected = [], []
    for name, dumped in entries.items():
        index = dumped.positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, dumped.keys.shape[-1])
        there = dumped.positions != REMOVED
        own.append((dumped.keys, dumped.values)[kind][there])
        expected.append(known[name][kind].float().gather(1, index)[there])
    return torch.cat(own), torch.cat(expected)


def is_cut_off(kind: int, entries: Mapping[str, Entries], known: Mapping[str, Pair], layer: LayerDump) -> bool:
    """Return whether all keys (`kind` 0) or values (1) of a layer were rounded towards zero to the type of the dump."""
    tensors = layer.stored or next(iter(layer.rows.values()))[:2]
    dtype, scale = tensors[kind % len(tensors)].dtype, layer.scales[kind]
    own, full = _pairs(kind, entries, known)
    return bool((changes.round_towards_zero(full / scale, dtype) * scale == own).float().mean() > _CUT_OFF)


def is_whole(entries: Entries) -> bool:
    """Return whether every token has an entry in every head, in order, and all numbers are finite."""
    in_order = torch.arange(entries.positions.shape[1]).expand_as(entries.positions)
    finite = entries.keys.isfinite().all() & entries.values.isfinite().all()
    return torch.equal(entries.positions, in_order) and bool(finite)
