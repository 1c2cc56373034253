"""Kept entries side by side, and attention over them: blocks with bounded padding, or packed for CUDA's kernel.

A *segment* is one kept set of one row. Attention over a block gives each query its output and the log-sum-exp of its
logits, by which it is joined with the attention over what was decoded since.

Blocks that hold no entries: each time they are attended to they copy them out of the full cache, and let them go.

Where a cache serves a single pass, so the copies of a whole model need not lie in memory at once, and on a CPU each
block is attended to while it is still in the processor's cache.

A row that holds everything and reads some of it: which entries, its reader says for each query anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.cache.entries import EntryPool, Reader
from perturbkv.devices import on_device

Kernel = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Segment:
    """One kept set of one row.

    `group` query heads read it, from `group · head` on; its `length` entries are listed from `start` on.
    """

    row: int
    head: int
    group: int
    length: int
    start: int = 0


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

    @property
    def entry_bytes(self) -> int:
        """Of one entry's key and value."""
        return self.keys.shape[-1] * (self.keys.itemsize + self.values.itemsize)

    def entries(self, place: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one segment, as views."""
        length = self.segments[place].length
        return self.keys[place, :length], self.values[place, :length]

    def only(self, rows: Sequence[int]) -> Block | None:
        """The segments of these rows, a row called by its place among them; None where there are none.

        Where others go, these are copied.
        """
        kept, segments = of_rows(self.segments, rows)
        if not kept:
            return None
        places = places_of(segments, self.keys.device)
        if len(kept) == len(self.segments):
            return replace(self, segments=segments, places=places)
        chosen, longest = on_device(kept, self.keys.device), segments[0].length
        keys, values = (kind[chosen, :longest] for kind in (self.keys, self.values))
        padding = None if self.padding is None else self.padding[chosen, :longest]
        return Block(segments, keys, values, padding, places)

    def attend(self, query: Float[Tensor, "row head query d_head"], scale: float) -> tuple[Tensor, Tensor]:
        """Outputs (segment, group, query, d_head) and log-sum-exps (segment, group, query) of its heads."""
        work = torch.promote_types(query.dtype, torch.float32)
        asked = query[self.places]
        segments, group, queries, d_head = asked.shape
        scaled = (asked.to(work) * scale).reshape(segments, group * queries, d_head)
        logits = scaled @ self.keys.to(work).transpose(1, 2)
        if (unseen := self.unseen(asked)) is not None:
            logits.masked_fill_(unseen, -torch.inf)
        total = logits.logsumexp(dim=-1)
        output = (logits - total.unsqueeze(-1)).exp_() @ self.values.to(work)
        return output.view(segments, group, queries, d_head), total.view(segments, group, queries)

    def unseen(
        self, asked: Float[Tensor, "segment group query d_head"]
    ) -> (
        Bool[
            Tensor,
            (
                segment  # asked longest
            ),
        ]
        | None
    ):
        """True where a segment's queries do not look: at its padding; None where they look everywhere."""
        return None if self.padding is None else self.padding.unsqueeze(1)


@dataclass(frozen=True, eq=False)
class Packed:
    """Segments one behind the other, no padding, for CUDA's variable-length attention: keys (entry, 1, d_head).

    `begins` says where each segment begins, and where the last ends. `lengths` is there where the entries between two
    segments are not theirs: how many of those from its beginning on each segment has.
    """

    segments: list[Segment]
    keys: Tensor
    values: Tensor
    begins: list[int]
    starts: Int[Tensor, " segment_and_end"]
    lengths: Int[Tensor, " segment"] | None
    places: tuple[Int[Tensor, "segment 1"], Int[Tensor, "segment group"]]
    kernel: Kernel

    @property
    def nbytes(self) -> int:
        """Bytes of the segments' entries; there is no padding."""
        entries = sum(segment.length for segment in self.segments)
        return entries * self.entry_bytes

    @property
    def entry_bytes(self) -> int:
        """Of one entry's key and value."""
        return self.keys.shape[-1] * (self.keys.itemsize + self.values.itemsize)

    def entries(self, place: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one segment, as views."""
        own = slice(self.begins[place], self.begins[place] + self.segments[place].length)
        return self.keys[own, 0], self.values[own, 0]

    def only(self, rows: Sequence[int]) -> Packed | None:
        """The segments of these rows where they lie, a row called by its place among them; None where there are none.

        What lies between them is passed over, and stays.
        """
        kept, segments = of_rows(self.segments, rows)
        if not kept:
            return None
        lengths = [segment.length for segment in segments]
        first, end = self.begins[kept[0]], self.begins[kept[-1]] + lengths[-1]
        begins = [*(self.begins[place] - first for place in kept), end - first]
        starts, used = (on_device(numbers, self.keys.device, torch.int32) for numbers in (begins, lengths))
        keys, values, places = self.keys[first:end], self.values[first:end], places_of(segments, self.keys.device)
        return Packed(segments, keys, values, begins, starts, used, places, self.kernel)

    def attend(self, query: Float[Tensor, "row head query d_head"], scale: float) -> tuple[Tensor, Tensor]:
        """Outputs (segment, group, query, d_head) and log-sum-exps (segment, group, query) of its heads."""
        asked = query[self.places].transpose(1, 2)  # (segment, query, group, d_head)
        segments, queries, group, d_head = asked.shape
        asked_starts = torch.arange(segments + 1, device=query.device, dtype=torch.int32) * queries
        longest = max(segment.length for segment in self.segments)
        rows, places = asked.reshape(-1, group, d_head), (asked_starts, self.starts, queries, longest)
        output, total = self.kernel(rows, self.keys, self.values, *places, scale, self.lengths)
        totals = total.view(group, segments, queries).transpose(0, 1)
        return output.view(segments, queries, group, d_head).transpose(1, 2), totals


def of_rows(segments: Sequence[Segment], rows: Sequence[int]) -> tuple[list[int], list[Segment]]:
    """Where the segments of these rows stand, and what they are with their rows called by their place in `rows`."""
    named = {row: place for place, row in enumerate(rows)}
    kept = [place for place, segment in enumerate(segments) if segment.row in named]
    return kept, [replace(segments[place], row=named[segments[place].row]) for place in kept]


def places_of(segments: list[Segment], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index of each segment's queries among (row, head, …)."""
    rows = on_device([[segment.row] for segment in segments], device)
    first = on_device([[segment.head * segment.group] for segment in segments], device)
    return rows, first + torch.arange(segments[0].group, device=device)


def padded(kept: EntryPool, segments: list[Segment]) -> Block:
    """A block; behind its last entry a segment repeats it, and attention passes over that."""
    longest, device = segments[0].length, kept.keys.device
    lengths = on_device([[segment.length] for segment in segments], device)
    starts = on_device([[segment.start] for segment in segments], device)
    place = torch.arange(longest, device=device)
    keys, values = kept.take(starts + torch.minimum(place, lengths - 1))
    padding = place >= lengths if segments[-1].length < longest else None
    return Block(segments, keys, values, padding, places_of(segments, device))


def packed(kept: EntryPool, segments: list[Segment], kernel: Kernel) -> Packed:
    """Segments one behind the other."""
    device, begins = kept.keys.device, list(accumulate([segment.length for segment in segments], initial=0))
    starts = on_device(begins, device)
    shift = on_device([segment.start for segment in segments], device) - starts[:-1]
    shifts = shift.repeat_interleave(starts.diff(), output_size=begins[-1])
    keys, values = kept.take(shifts + torch.arange(begins[-1], device=device))
    return Packed(
        segments, keys.unsqueeze(1), values.unsqueeze(1), begins, starts.to(torch.int32), None,
        places_of(segments, device), kernel,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class PassingBlock:
    """Segments of similar length, and where their entries lie; `kernel` as of the block that is made of them."""

    kept: EntryPool
    segments: list[Segment]
    kernel: Kernel | None

    @cached_property
    def places(self) -> tuple[Int[Tensor, "segment 1"], Int[Tensor, "segment group"]]:
        """Index of each segment's queries among (row, head, …)."""
        return places_of(self.segments, self.kept.keys.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the block while it is there, padding included."""
        lengths = [segment.length for segment in self.segments]
        return self.kept.entry_bytes * (sum(lengths) if self.kernel else max(lengths) * len(lengths))

    @property
    def entry_bytes(self) -> int:
        """Of one entry's key and value."""
        return self.kept.entry_bytes

    def made(self) -> Block | Packed:
        """The block itself: copies of the entries."""
        if self.kernel is None:
            return padded(self.kept, self.segments)
        return packed(self.kept, self.segments, self.kernel)

    def entries(self, place: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one segment."""
        return self.made().entries(place)

    def only(self, rows: Sequence[int]) -> PassingBlock | None:
        """The segments of these rows, a row called by its place among them; None where there are none."""
        _, segments = of_rows(self.segments, rows)
        return replace(self, segments=segments) if segments else None

    def attend(self, query: Float[Tensor, "row head query d_head"], scale: float) -> tuple[Tensor, Tensor]:
        """Outputs (segment, group, query, d_head) and log-sum-exps (segment, group, query) of its heads."""
        return self.made().attend(query, scale)


@dataclass(frozen=True, eq=False)
class ReadBlock(Block):
    """The segments of one row, its key/value heads in their order; what is not read counts as gone."""

    reader: Reader

    def unseen(self, asked: Float[Tensor, "segment group query d_head"]) -> Bool[Tensor, "segment asked longest"]:
        """True where a query does not look at an entry."""
        read = self.reader(asked.flatten(0, 1))
        return ~read.view(asked.shape[0], -1, read.shape[-1])
