"""Kept sets of different lengths laid out: segments of similar length share a block, and padding stays bounded."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perturbkv.cache.blocks import Block, Kernel, Packed, PassingBlock, ReadBlock, Segment, packed, padded, places_of
from perturbkv.cache.entries import KeptEntries, Reader, pool_entries
from perturbkv.configs.resources import CHUNK_BYTES
from perturbkv.devices import on_device, working_bytes

AnyBlock = Block | Packed | PassingBlock


def build(rows: Sequence[KeptEntries], heads: int, slack: float, passing: bool = False) -> list[AnyBlock]:
    """Blocks of all rows of one layer; `heads` query heads. `slack` bounds the padding, 0 allows none.

    `passing` ones copy their entries out whenever they are attended to, in the working memory, and hold none. Rows that
    borrow go through the kernel of the others, so that what they show is rounding of these (METHOD, protocol 4).
    """
    kernel = kernel_for(rows[0].keys)
    blocks: list[AnyBlock] = [
        _borrowed(row, entries.rectangle, heads, kernel, entries.reader)
        for row, entries in enumerate(rows)
        if entries.rectangle is not None
    ]
    found = sorted(_segments(rows, heads), key=lambda s: (s.group, -s.length, s.row, s.head))
    if not found:
        return blocks
    kept = pool_entries([entries for entries in rows if entries.rectangle is None])
    most = working_bytes(kept.keys.device, CHUNK_BYTES) / kept.entry_bytes if passing else math.inf
    parts = _buckets(found, slack if kernel is None else math.inf, most)
    if passing:
        return blocks + [PassingBlock(kept, segments, kernel) for segments in parts]
    return blocks + [packed(kept, segments, kernel) if kernel else padded(kept, segments) for segments in parts]


def _segments(rows: Sequence[KeptEntries], heads: int) -> list[Segment]:
    """The kept sets that hold anything, where rows that borrow are none."""
    found, start = [], 0
    for row, entries in enumerate(rows):
        if entries.rectangle is not None:
            continue
        group = heads // len(entries.lengths)
        for head, length in enumerate(entries.lengths):
            found.append(Segment(row, head, group, length, start))
            start += length
    return [segment for segment in found if segment.length > 0]


def _buckets(found: Sequence[Segment], slack: float, most: float) -> list[list[Segment]]:
    """Segments, longest first in each group size; a new bucket where padding, or `most` entries, would be exceeded."""
    buckets: list[list[Segment]] = []
    held = 0
    for segment in found:
        last = buckets[-1] if buckets else []
        held += segment.length
        padded_to = last[0].length * (len(last) + 1) if last else 0
        if last and last[0].group == segment.group and padded_to <= min((1 + slack) * held, most):
            last.append(segment)
        else:
            buckets.append([segment])
            held = segment.length
    return buckets


def _borrowed(
    row: int, rectangle: tuple[Tensor, Tensor], heads: int, kernel: Kernel | None, reader: Reader | None
) -> Block | Packed:
    """A row that keeps everything, its entries read where they lie; with a `reader`, those that it says."""
    keys, values = rectangle
    kv_heads, length = keys.shape[:2]
    segments = [Segment(row, head, heads // kv_heads, length) for head in range(kv_heads)]
    places = places_of(segments, keys.device)
    if reader is not None:
        return ReadBlock(segments, keys, values, None, places, reader)
    if kernel is None:
        return Block(segments, keys, values, None, places)
    if keys.stride() != values.stride() or keys.stride()[1:] != (keys.shape[-1], 1):
        keys, values = keys.contiguous(), values.contiguous()  # no cache of transformers lies so
    apart = keys.stride(0) // keys.shape[-1]
    begins = [*(head * apart for head in range(kv_heads)), (kv_heads - 1) * apart + length]
    flat_keys, flat_values = (
        kind.as_strided((begins[-1], 1, kind.shape[-1]), (kind.shape[-1], kind.shape[-1], 1)) for kind in (keys, values)
    )
    starts, lengths = (on_device(numbers, keys.device, torch.int32) for numbers in (begins, [length] * kv_heads))
    return Packed(segments, flat_keys, flat_values, begins, starts, lengths, places, kernel)


def kernel_for(like: Tensor) -> Kernel | None:
    """Torch's variable-length attention where it takes such entries (CUDA, 16 bits), None elsewhere."""
    fits = like.device.type == "cuda" and like.dtype in (torch.float16, torch.bfloat16)
    return variable_length_attention() if fits else None


@functools.cache
def variable_length_attention() -> Kernel | None:
    """Torch's own variable-length attention with log-sum-exps; None where its version lacks what we need of it."""
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    if not {"return_aux", "scale", "enable_gqa", "seqused_k"} <= set(inspect.signature(varlen_attn).parameters):
        return None

    def attend(query: Tensor, key: Tensor, value: Tensor, *sizes: Any) -> tuple[Tensor, Tensor]:
        *places, scale, lengths = sizes
        found = varlen_attn(
            query, key, value, *places, return_aux=AuxRequest(lse=True), scale=scale, enable_gqa=query.shape[1] > 1,
            seqused_k=lengths,
        )  # fmt: skip
        return found[0], found[1]

    return attend
