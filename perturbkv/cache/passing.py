"""Blocks that hold no entries: each time they are attended to they copy them out of the full cache, and let them go.

Where a cache serves a single pass, so the copies of a whole model need not lie in memory at once, and on a CPU each
block is attended to while it is still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.cache.blocks import Block, Kernel, Packed, Segment, of_rows, packed, padded, places_of
from perturbkv.cache.entries import EntryPool


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
