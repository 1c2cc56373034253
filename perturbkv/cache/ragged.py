"""Layout of kept sets of different lengths: segments of similar length share a block, so that padding is bounded."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perturbkv.cache.blocks import (
    Block,
    Kernel,
    PackedBlock,
    PassingBlock,
    ReaderBlock,
    Segment,
    packed_block,
    padded_block,
    query_indices,
)
from perturbkv.cache.entries import KeptEntries, Reader, pool_entries
from perturbkv.configs.resources import CHUNK_BYTES
from perturbkv.devices import to_device, working_bytes

AnyBlock = Block | PackedBlock | PassingBlock


def build_blocks(rows: Sequence[KeptEntries], heads: int, slack: float, passing: bool = False) -> list[AnyBlock]:
    """Return the blocks that store the rows of one layer with `heads` query heads.

    Padding is at most `slack` times the entries. `passing` blocks store no entries and copy them on every use, within
    the working memory. Rows that keep everything use the kernel of the other rows, so that they show that kernel's
    rounding (METHOD, protocol 4).
    """
    kernel = kernel_for(rows[0].keys, rows[0].values)
    blocks: list[AnyBlock] = [
        _borrowed_block(row, entries.rectangle, heads, kernel, entries.reader)
        for row, entries in enumerate(rows)
        if entries.rectangle is not None
    ]
    ordered = sorted(_segments(rows, heads), key=lambda s: (s.group, -s.length, s.row, s.head))
    if not ordered:
        return blocks
    kept = pool_entries([entries for entries in rows if entries.rectangle is None])
    most = working_bytes(kept.keys.device, CHUNK_BYTES) / kept.entry_bytes if passing else math.inf
    buckets = _buckets(ordered, slack if kernel is None else math.inf, most)  # a kernel needs no padding
    if passing:
        return blocks + [PassingBlock(kept, segments, kernel) for segments in buckets]
    return blocks + [
        packed_block(kept, segments, kernel) if kernel else padded_block(kept, segments) for segments in buckets
    ]


def _segments(rows: Sequence[KeptEntries], heads: int) -> list[Segment]:
    """Return the nonempty kept sets as segments, except for rows that keep everything."""
    segments, start = [], 0
    for row, entries in enumerate(rows):
        if entries.rectangle is not None:
            continue
        group = heads // len(entries.lengths)
        for head, length in enumerate(entries.lengths):
            segments.append(Segment(row, head, group, length, start))
            start += length
    return [segment for segment in segments if segment.length > 0]


def _buckets(segments: Sequence[Segment], slack: float, most: float) -> list[list[Segment]]:
    """Split segments, sorted by group size and descending length, into the runs that become a block each.

    A new run starts at another group size, and where padding would exceed `slack` times the entries of the run, or
    entries and padding together `most`.
    """
    buckets: list[list[Segment]] = []
    entries = 0
    for segment in segments:
        last = buckets[-1] if buckets else []
        entries += segment.length
        padded_to = last[0].length * (len(last) + 1) if last else 0
        if last and last[0].group == segment.group and padded_to <= min((1 + slack) * entries, most):
            last.append(segment)
        else:
            buckets.append([segment])
            entries = segment.length
    return buckets


def _borrowed_block(
    row: int, rectangle: tuple[Tensor, Tensor], heads: int, kernel: Kernel | None, reader: Reader | None
) -> Block | PackedBlock:
    """Return the block of a row that keeps everything, as a view of the full cache.

    `rectangle` are the row's keys and values (kv_head, entry, …); `reader` selects entries per query, if any.
    """
    keys, values = rectangle
    kv_heads, length = keys.shape[:2]
    segments = [Segment(row, head, heads // kv_heads, length) for head in range(kv_heads)]
    indices = query_indices(segments, keys.device)
    if reader is not None:
        return ReaderBlock(segments, keys, values, None, indices, reader)
    if kernel is None:
        return Block(segments, keys, values, None, indices)
    if keys.stride() != values.stride() or keys.stride()[1:] != (keys.shape[-1], 1):
        keys, values = keys.contiguous(), values.contiguous()  # no cache of transformers has such strides
    stride = keys.stride(0) // keys.shape[-1]  # entries from one head to the next, unused ones of the cache among them
    offsets = [*(head * stride for head in range(kv_heads)), (kv_heads - 1) * stride + length]
    flat_keys, flat_values = (
        kind.as_strided((offsets[-1], 1, kind.shape[-1]), (kind.shape[-1], kind.shape[-1], 1))
        for kind in (keys, values)
    )
    device_offsets, lengths = (
        to_device(numbers, keys.device, torch.int32) for numbers in (offsets, [length] * kv_heads)
    )
    return PackedBlock(segments, flat_keys, flat_values, offsets, device_offsets, lengths, indices, kernel)


_WIDEST_HEAD = 256
"""Largest number of components of a head that the variable-length attention takes."""


def kernel_for(keys: Tensor, values: Tensor) -> Kernel | None:
    """Return torch's variable-length attention where it takes tensors like these, else None.

    It takes 16 bits on a GPU from Ampere on, and keys and values of equally many components, at most 256 and a multiple
    of 8.
    """
    if keys.device.type != "cuda" or keys.dtype not in (torch.float16, torch.bfloat16):
        return None
    if keys.shape[-1] % 8 or keys.shape[-1] > _WIDEST_HEAD or values.shape[-1] != keys.shape[-1]:
        return None
    return variable_length_attention() if torch.cuda.get_device_capability(keys.device) >= (8, 0) else None


@functools.cache
def variable_length_attention() -> Kernel | None:
    """Return torch's flash attention over segments, with log-sum-exps (head, query); None where torch is without it.

    It is the operator below `torch.nn.attention.varlen`, whose function takes fewer arguments in older versions.
    """
    if not torch.backends.cuda.is_flash_attention_available():
        return None

    def attend(query: Tensor, key: Tensor, value: Tensor, *sizes: Any) -> tuple[Tensor, Tensor]:
        *layout, scale, lengths = sizes
        dropout, is_causal, returns_mask = 0.0, False, False
        output, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *layout, dropout, is_causal, returns_mask, scale=scale, seqused_k=lengths
        )
        return output, logsumexp

    return attend
