"""Kept sets of different lengths, and attention over them: blocks with bounded padding, or packed for CUDA's kernel.

A *segment* is one kept set of one row. Attention over a block gives each query its output and the log-sum-exp of its
logits, by which it is joined with the attention over what was decoded since.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

Kernel = Callable[..., tuple[Tensor, Tensor]]
SLACK = 1 / 8
"""Most padding of a block, as a share of the entries in it."""


@dataclass(frozen=True)
class KeptEntries:
    """The kept entries of one configuration in one layer: one tensor per kept set, (kept, d_head).

    `rectangle` holds keys and values (kept_head, kept, d_head) where they lie in one piece already, which is then
    borrowed instead of copied.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    rectangle: tuple[Tensor, Tensor] | None = None

    @property
    def lengths(self) -> list[int]:
        """Entries per kept set."""
        return [len(keys) for keys in self.keys]


def gather(
    key: Float[Tensor, "kv_head key d_head"], value: Float[Tensor, "kv_head key d_head"], positions: Sequence[Tensor]
) -> KeptEntries:
    """Copy the kept entries out of a layer's full cache; the copies share no memory with it.

    `positions` holds one (kept,) per kept set.
    """
    sharing = len(positions) // key.shape[0]
    keys = tuple(key[head // sharing, kept] for head, kept in enumerate(positions))
    return KeptEntries(keys, tuple(value[head // sharing, kept] for head, kept in enumerate(positions)))


def borrow(keys: Float[Tensor, "kv_head key d_head"], values: Float[Tensor, "kv_head key d_head"]) -> KeptEntries:
    """All entries, as a view: the run that keeps everything reads the full cache itself."""
    return KeptEntries(tuple(keys), tuple(values), (keys, values))


@dataclass(frozen=True)
class Segment:
    """One kept set of one row: which query heads read it (`group` of them from `group · head` on), how long it is."""

    row: int
    head: int
    group: int
    length: int


@dataclass(frozen=True, eq=False)
class Block:
    """Segments of similar length, padded to the longest: keys and values (segment, longest, d_head)."""

    segments: list[Segment]
    keys: Tensor
    values: Tensor
    padding: Bool[Tensor, "segment longest"] | None
    places: tuple[Int[Tensor, "segment 1"], Int[Tensor, "segment group"]]

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.keys.nbytes + self.values.nbytes

    def entries(self, place: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one segment, as views."""
        length = self.segments[place].length
        return self.keys[place, :length], self.values[place, :length]

    def attend(self, query: Float[Tensor, "row head query d_head"], scale: float) -> tuple[Tensor, Tensor]:
        """Outputs (segment, group, query, d_head) and log-sum-exps (segment, group, query) of its heads."""
        work = torch.promote_types(query.dtype, torch.float32)
        asked = query[self.places].to(work) * scale
        segments, group, queries, d_head = asked.shape
        logits = asked.reshape(segments, group * queries, d_head) @ self.keys.to(work).transpose(1, 2)
        if self.padding is not None:
            logits.masked_fill_(self.padding.unsqueeze(1), -torch.inf)
        total = logits.logsumexp(dim=-1)
        output = (logits - total.unsqueeze(-1)).exp_() @ self.values.to(work)
        return output.view(segments, group, queries, d_head), total.view(segments, group, queries)


@dataclass(frozen=True, eq=False)
class Packed:
    """Segments one behind the other, no padding, for CUDA's variable-length attention: keys (entry, 1, d_head)."""

    segments: list[Segment]
    keys: Tensor
    values: Tensor
    starts: Int[Tensor, " segment_and_end"]
    places: tuple[Int[Tensor, "segment 1"], Int[Tensor, "segment group"]]
    kernel: Kernel

    @property
    def nbytes(self) -> int:
        """Bytes held; there is no padding."""
        return self.keys.nbytes + self.values.nbytes

    def entries(self, place: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one segment, as views."""
        start = sum(segment.length for segment in self.segments[:place])
        end = start + self.segments[place].length
        return self.keys[start:end, 0], self.values[start:end, 0]

    def attend(self, query: Float[Tensor, "row head query d_head"], scale: float) -> tuple[Tensor, Tensor]:
        """Outputs (segment, group, query, d_head) and log-sum-exps (segment, group, query) of its heads."""
        asked = query[self.places].transpose(1, 2)  # (segment, query, group, d_head)
        segments, queries, group, d_head = asked.shape
        asked_starts = torch.arange(segments + 1, device=query.device, dtype=torch.int32) * queries
        longest = max(segment.length for segment in self.segments)
        output, total = self.kernel(
            asked.reshape(-1, group, d_head), self.keys, self.values, asked_starts, self.starts, queries, longest, scale
        )
        totals = total.view(group, segments, queries).transpose(0, 1)
        return output.view(segments, queries, group, d_head).transpose(1, 2), totals


def build(rows: Sequence[KeptEntries], heads: int, slack: float) -> list[Block | Packed]:
    """Blocks of all rows of one layer; `heads` query heads. `slack` bounds the padding, 0 allows none."""
    blocks: list[Block | Packed] = [
        _borrowed(row, entries, heads) for row, entries in enumerate(rows) if entries.rectangle is not None
    ]
    found = [s for s in _segments(rows, heads) if s.length > 0 and rows[s.row].rectangle is None]
    found.sort(key=lambda s: (s.group, -s.length, s.row, s.head))
    kernel = kernel_for(rows[0].keys[0])
    if kernel is None:
        return blocks + [_padded(rows, segments) for segments in _buckets(found, slack)]
    groups = [list(alike) for _, alike in groupby(found, key=lambda s: s.group)]
    return blocks + [_pack(rows, segments, kernel) for segments in groups]


def _segments(rows: Sequence[KeptEntries], heads: int) -> list[Segment]:
    return [
        Segment(row, head, heads // len(entries.keys), length)
        for row, entries in enumerate(rows)
        for head, length in enumerate(entries.lengths)
    ]


def _buckets(found: Sequence[Segment], slack: float) -> list[list[Segment]]:
    """Segments, longest first in each group size; a new bucket where padding would exceed the bound."""
    buckets: list[list[Segment]] = []
    held = 0
    for segment in found:
        last = buckets[-1] if buckets else []
        held += segment.length
        if last and last[0].group == segment.group and last[0].length * (len(last) + 1) <= (1 + slack) * held:
            last.append(segment)
        else:
            buckets.append([segment])
            held = segment.length
    return buckets


def _padded(rows: Sequence[KeptEntries], segments: list[Segment]) -> Block:
    longest = segments[0].length
    keys, values = (
        torch.stack([F.pad(piece, (0, 0, 0, longest - len(piece))) for piece in pieces])
        for pieces in ([rows[s.row].keys[s.head] for s in segments], [rows[s.row].values[s.head] for s in segments])
    )
    lengths = torch.tensor([segment.length for segment in segments], device=keys.device)
    padding = torch.arange(longest, device=keys.device) >= lengths.unsqueeze(-1)
    return Block(segments, keys, values, padding if segments[-1].length < longest else None, _places(segments, keys))


def _borrowed(row: int, entries: KeptEntries, heads: int) -> Block:
    assert entries.rectangle is not None
    keys, values = entries.rectangle
    group = heads // len(keys)
    segments = [Segment(row, head, group, keys.shape[1]) for head in range(len(keys))]
    return Block(segments, keys, values, None, _places(segments, keys))


def _places(segments: list[Segment], like: Tensor) -> tuple[Tensor, Tensor]:
    """Index of each segment's queries among (row, head, …)."""
    rows = torch.tensor([[segment.row] for segment in segments], device=like.device)
    first = torch.tensor([[segment.head * segment.group] for segment in segments], device=like.device)
    return rows, first + torch.arange(segments[0].group, device=like.device)


def _pack(rows: Sequence[KeptEntries], segments: list[Segment], kernel: Kernel) -> Packed:
    keys = torch.cat([rows[s.row].keys[s.head] for s in segments]).unsqueeze(1)
    values = torch.cat([rows[s.row].values[s.head] for s in segments]).unsqueeze(1)
    ends = torch.tensor([0] + [segment.length for segment in segments], device=keys.device).cumsum(0)
    return Packed(segments, keys, values, ends.to(torch.int32), _places(segments, keys), kernel)


def kernel_for(like: Tensor) -> Kernel | None:
    """Torch's variable-length attention where it takes such entries (CUDA, 16 bits), None elsewhere."""
    fits = like.device.type == "cuda" and like.dtype in (torch.float16, torch.bfloat16)
    return variable_length_attention() if fits else None


@functools.cache
def variable_length_attention() -> Kernel | None:
    """Torch's own variable-length attention with log-sum-exps; None where its version has none that groups queries."""
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    if not {"return_aux", "scale", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters):
        return None

    def attend(query: Tensor, key: Tensor, value: Tensor, *sizes: Any) -> tuple[Tensor, Tensor]:
        *places, scale = sizes
        found = varlen_attn(
            query, key, value, *places, return_aux=AuxRequest(lse=True), scale=scale, enable_gqa=query.shape[1] > 1
        )
        return found[0], found[1]

    return attend
