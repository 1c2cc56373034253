"""Attention over blocks of kept entries: blocks with bounded padding, or packed for CUDA's variable-length kernel.

A *segment* is one kept set of one row. Attention over a block gives each query its output and the log-sum-exp of its
logits, by which it is merged with the attention over decoded tokens. A passing block stores no entries, but copies them
from the full cache on each use: where a cache serves few passes, the copies of a whole model are never in memory at
once, and on a CPU each block is still in the processor's cache. A reader's block belongs to a row that keeps everything
and attends to the entries that the reader selects for each query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.cache.entries import EntryPool, Reader, entry_bytes
from perturbkv.devices import to_device
from perturbkv.theory import Softmax

Kernel = Callable[..., tuple[Tensor, Tensor]]
"""A variable-length attention, as `ragged.variable_length_attention` returns."""
Attended = tuple[Float[Tensor, "segment group query d_value"], Float[Tensor, "segment group query"]]
"""Attention outputs of every segment's queries, and the log-sum-exps of their logits."""


@dataclass(frozen=True)
class Segment:
    """A kept set of one row of a batch.

    Attributes:
        row: index of the row.
        head: index of the kept set in the row.
        group: number of query heads that share the kept set, the first of them `group · head`.
        length: number of entries.
        start: index of the first entry in `EntryPool.index`.
    """

    row: int
    head: int
    group: int
    length: int
    start: int = 0


@dataclass(frozen=True, eq=False)
class Block:
    """Segments of similar length, padded to the longest.

    `padding` is True for padding, None without any; `query_index` is what `query_indices` returns.
    """

    segments: list[Segment]
    keys: Float[Tensor, "segment longest d_key"]
    values: Float[Tensor, "segment longest d_value"]
    padding: Bool[Tensor, "segment longest"] | None
    query_index: tuple[Int[Tensor, "segment 1"], Int[Tensor, "segment group"]]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, padding included."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry's key and value."""
        return entry_bytes(self.keys, self.values)

    def entries(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (entry, …) of the segment at `index`, as views."""
        length = self.segments[index].length
        return self.keys[index, :length], self.values[index, :length]

    def keep_rows(self, rows: Sequence[int]) -> Block | None:
        """Return the block restricted to `rows`, renumbered by their index in `rows`; None without segments.

        Entries are copied where segments are dropped.
        """
        kept, segments = segments_of_rows(self.segments, rows)
        if not kept:
            return None
        indices = query_indices(segments, self.keys.device)
        if len(kept) == len(self.segments):  # no segment is dropped
            return replace(self, segments=segments, query_index=indices)
        chosen, longest = to_device(kept, self.keys.device), segments[0].length
        keys, values = (kind[chosen, :longest] for kind in (self.keys, self.values))
        padding = None if self.padding is None else self.padding[chosen, :longest]
        return Block(segments, keys, values, padding, indices)

    def attend(self, query: Float[Tensor, "row head query d_key"], softmax: Softmax) -> Attended:
        """Return attention outputs and the log-sum-exps of the logits."""
        grouped = query[self.query_index]
        return attend_segments(grouped, self.keys, self.values, softmax, self.exclusion_mask(grouped))

    def exclusion_mask(self, queries: Float[Tensor, "segment group query d_key"]) -> Tensor | None:
        """Return a mask, True for the entries that the queries do not attend to; None where they attend to all.

        It has the shape (segment, group · query, longest), or (segment, 1, longest) where it is the same for all
        queries of a segment, as for padding.
        """
        return None if self.padding is None else self.padding.unsqueeze(1)


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """Concatenated segments without padding, for CUDA's variable-length attention.

    That attention knows no soft cap, and no gradient flows through its log-sum-exps: a layer with a cap, and a backward
    pass, attend segment by segment, without it.

    Attributes:
        segments: the segments, in the order of their entries.
        keys, values: (entry, 1, …), one segment after the other.
        offsets: index of each segment's first entry, then the end of the last segment.
        device_offsets: the same as a tensor on the device.
        lengths: number of entries per segment where other entries lie between segments; else None.
        query_index: what `query_indices` returns.
        kernel: the variable-length attention.
    """

    segments: list[Segment]
    keys: Tensor
    values: Tensor
    offsets: list[int]
    device_offsets: Int[Tensor, " segment_and_end"]
    lengths: Int[Tensor, " segment"] | None
    query_index: tuple[Int[Tensor, "segment 1"], Int[Tensor, "segment group"]]
    kernel: Kernel

    @property
    def nbytes(self) -> int:
        """Bytes of the segments' entries."""
        return sum(segment.length for segment in self.segments) * self.entry_bytes

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry's key and value."""
        return entry_bytes(self.keys, self.values)

    def entries(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (entry, …) of the segment at `index`, as views."""
        entries = slice(self.offsets[index], self.offsets[index] + self.segments[index].length)
        return self.keys[entries, 0], self.values[entries, 0]

    def keep_rows(self, rows: Sequence[int]) -> PackedBlock | None:
        """Return the segments of `rows`, renumbered by their index in `rows`; None without segments.

        Nothing is copied: entries of other rows stay in memory.
        """
        kept, segments = segments_of_rows(self.segments, rows)
        if not kept:
            return None
        lengths = [segment.length for segment in segments]
        first, end = self.offsets[kept[0]], self.offsets[kept[-1]] + lengths[-1]
        offsets = [*(self.offsets[index] - first for index in kept), end - first]
        device_offsets, counts = (to_device(numbers, self.keys.device, torch.int32) for numbers in (offsets, lengths))
        keys, values, indices = self.keys[first:end], self.values[first:end], query_indices(segments, self.keys.device)
        return PackedBlock(segments, keys, values, offsets, device_offsets, counts, indices, self.kernel)

    def attend(self, query: Float[Tensor, "row head query d_key"], softmax: Softmax) -> Attended:
        """Return attention outputs and the log-sum-exps of the logits."""
        if softmax.cap is not None or query.requires_grad:
            return self._attend_without_kernel(query, softmax)
        grouped = query[self.query_index].transpose(1, 2)  # (segment, query, group, d_key)
        segments, queries, group, d_key = grouped.shape
        query_starts = torch.arange(segments + 1, device=query.device, dtype=torch.int32) * queries
        longest = max(segment.length for segment in self.segments)
        flat_queries = grouped.reshape(-1, group, d_key)
        layout = (query_starts, self.device_offsets, queries, longest)
        output, logsumexp = self.kernel(flat_queries, self.keys, self.values, *layout, softmax.scale, self.lengths)
        logsumexp = logsumexp.view(group, segments, queries).transpose(0, 1)
        return output.view(segments, queries, group, -1).transpose(1, 2), logsumexp

    def _attend_without_kernel(self, query: Float[Tensor, "row head query d_key"], softmax: Softmax) -> Attended:
        """Return what `attend` does, of plain products, one segment after the other."""
        outputs, sums = [], []
        for index, own in enumerate(torch.split(query[self.query_index], 1)):
            keys, values = self.entries(index)
            output, logsumexp = attend_segments(own, keys.unsqueeze(0), values.unsqueeze(0), softmax)
            outputs.append(output)
            sums.append(logsumexp)
        return torch.cat(outputs), torch.cat(sums)


def attend_segments(
    query: Float[Tensor, "segment group query d_key"],
    keys: Float[Tensor, "segment entry d_key"],
    values: Float[Tensor, "segment entry d_value"],
    softmax: Softmax,
    excluded: Bool[Tensor, "segment *queries entry"] | None = None,
) -> Attended:
    """Return attention outputs over every segment's entries but the `excluded` ones, and the logits' log-sum-exps."""
    work = torch.promote_types(query.dtype, torch.float32)
    segments, group, queries, d_key = query.shape
    logits = softmax.logits_of_scaled(query.to(work).reshape(segments, group * queries, d_key), keys.to(work))
    if excluded is not None:
        logits.masked_fill_(excluded, -torch.inf)
    logsumexp = logits.logsumexp(dim=-1)
    output = (logits - logsumexp.unsqueeze(-1)).exp_() @ values.to(work)
    return output.view(segments, group, queries, -1), logsumexp.view(segments, group, queries)


def segments_of_rows(segments: Sequence[Segment], rows: Sequence[int]) -> tuple[list[int], list[Segment]]:
    """Return the indices of the segments of `rows`, and these segments with rows renumbered by index in `rows`."""
    renumbered = {row: index for index, row in enumerate(rows)}
    kept = [index for index, segment in enumerate(segments) if segment.row in renumbered]
    return kept, [replace(segments[index], row=renumbered[segments[index].row]) for index in kept]


def query_indices(segments: list[Segment], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the index pair (rows, heads) that gathers every segment's queries from a tensor (row, head, …)."""
    rows = to_device([[segment.row] for segment in segments], device)
    first = to_device([[segment.head * segment.group] for segment in segments], device)
    return rows, first + torch.arange(segments[0].group, device=device)


def padded_block(kept: EntryPool, segments: list[Segment]) -> Block:
    """Return a padded copy of the segments, longest first; padding repeats a segment's last entry and is masked."""
    longest, device = segments[0].length, kept.keys.device
    lengths = to_device([[segment.length] for segment in segments], device)
    starts = to_device([[segment.start] for segment in segments], device)
    index = torch.arange(longest, device=device)
    keys, values = kept.take(starts + torch.minimum(index, lengths - 1))
    padding = index >= lengths if segments[-1].length < longest else None
    return Block(segments, keys, values, padding, query_indices(segments, device))


def packed_block(kept: EntryPool, segments: list[Segment], kernel: Kernel) -> PackedBlock:
    """Return a copy of the segments without padding, for the variable-length attention `kernel`."""
    device, offsets = kept.keys.device, list(accumulate([segment.length for segment in segments], initial=0))
    device_offsets = to_device(offsets, device)
    shift = to_device([segment.start for segment in segments], device) - device_offsets[:-1]  # from copy to pool
    shift_of_entry = shift.repeat_interleave(device_offsets.diff(), output_size=offsets[-1])
    keys, values = kept.take(shift_of_entry + torch.arange(offsets[-1], device=device))
    return PackedBlock(
        segments, keys.unsqueeze(1), values.unsqueeze(1), offsets, device_offsets.to(torch.int32), None,
        query_indices(segments, device), kernel,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class PassingBlock:
    """Segments whose entries are copied from the pool in each attention call, and not stored in between.

    `kernel` is the variable-length attention that the copy uses; None: the copy is a padded `Block`.
    """

    kept: EntryPool
    segments: list[Segment]
    kernel: Kernel | None

    @cached_property
    def query_index(self) -> tuple[Int[Tensor, "segment 1"], Int[Tensor, "segment group"]]:
        """Index pair (rows, heads) that gathers every segment's queries from a tensor (row, head, …)."""
        return query_indices(self.segments, self.kept.keys.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the temporary copy, padding included."""
        lengths = [segment.length for segment in self.segments]
        return self.kept.entry_bytes * (sum(lengths) if self.kernel else max(lengths) * len(lengths))

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry's key and value."""
        return self.kept.entry_bytes

    def to_block(self) -> Block | PackedBlock:
        """Return a block with its own copy of the entries."""
        if self.kernel is None:
            return padded_block(self.kept, self.segments)
        return packed_block(self.kept, self.segments, self.kernel)

    def entries(self, index: int) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values (entry, …) of the segment at `index`."""
        return self.to_block().entries(index)

    def keep_rows(self, rows: Sequence[int]) -> PassingBlock | None:
        """Return the block restricted to `rows`, renumbered by their index in `rows`; None without segments."""
        _, segments = segments_of_rows(self.segments, rows)
        return replace(self, segments=segments) if segments else None

    def attend(self, query: Float[Tensor, "row head query d_key"], softmax: Softmax) -> Attended:
        """Return attention outputs and the log-sum-exps of the logits."""
        return self.to_block().attend(query, softmax)


@dataclass(frozen=True, eq=False)
class ReaderBlock(Block):
    """The block of one row that keeps all entries and attends to those that its `reader` selects for each query."""

    reader: Reader

    def exclusion_mask(
        self, queries: Float[Tensor, "segment group query d_key"]
    ) -> Bool[Tensor, "segment group_query longest"]:
        """Return the mask of the entries that the reader excludes, per head of the group and query."""
        attended = self.reader(queries.detach().flatten(0, 1))
        return ~attended.view(queries.shape[0], -1, attended.shape[-1])
