"""The entries that a row of an evicted cache keeps of one layer: where they lie until the cache copies them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Reader = Callable[[Float[Tensor, "head query d_head"]], Bool[Tensor, "head query key"]]
"""Of a row that holds everything: from queries to the entries that each looks at."""


@dataclass(frozen=True, eq=False)
class KeptEntries:
    """The kept entries of one configuration in one layer: where they lie, until a cache copies them out.

    Attributes:
        keys, values: (place, d_head), of this row alone or shared with others.
        index: places of the kept entries, one kept set after the other.
        lengths: entries of each kept set.
        rectangle: keys and values (kept_head, kept, d_head) of a row that keeps all of them, and borrows them.
        reader: what such a row looks at; None: at all of them.
    """

    keys: Float[Tensor, "place d_head"]
    values: Float[Tensor, "place d_head"]
    index: Int[Tensor, " kept"]
    lengths: list[int]
    rectangle: tuple[Tensor, Tensor] | None = None
    reader: Reader | None = None

    @classmethod
    def of(cls, keys: Sequence[Tensor], values: Sequence[Tensor]) -> KeptEntries:
        """Entries that lie in one tensor (kept, d_head) per kept set."""
        together = torch.cat(list(keys))
        index = torch.arange(len(together), device=together.device)
        return cls(together, torch.cat(list(values)), index, [len(piece) for piece in keys])

    def sets(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each kept set: copies, or views of what is borrowed."""
        if self.rectangle is not None:
            return list(zip(*self.rectangle, strict=True))
        return [(self.keys[kept], self.values[kept]) for kept in torch.split(self.index, self.lengths)]


def borrow(keys: Float[Tensor, "kv_head key d_head"], values: Float[Tensor, "kv_head key d_head"]) -> KeptEntries:
    """All entries, as a view: the run that keeps everything reads the full cache itself."""
    nothing = keys[0, :0]
    lengths = [keys.shape[1]] * keys.shape[0]
    return KeptEntries(nothing, nothing, torch.empty(0, dtype=torch.int64), lengths, (keys, values))


@dataclass(frozen=True, eq=False)
class EntryPool:
    """Where the entries of all rows lie: `index` lists their places, segment after segment."""

    keys: Float[Tensor, "place d_head"]
    values: Float[Tensor, "place d_head"]
    index: Int[Tensor, " entry"]

    @property
    def entry_bytes(self) -> int:
        """Of one entry's key and value."""
        return self.keys.shape[-1] * (self.keys.itemsize + self.values.itemsize)

    def take(self, places: Int[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
        """Copies of the entries that the index lists at these places."""
        chosen = self.index[places.flatten()]
        return tuple(  # type: ignore[return-value]
            kind.index_select(0, chosen).view(*places.shape, -1) for kind in (self.keys, self.values)
        )


def pool_entries(rows: Sequence[KeptEntries]) -> EntryPool:
    """One pile of all rows; what several share is there once, and what all share is not copied."""
    apart = {id(row.keys): row for row in rows}
    if len(apart) == 1:
        return EntryPool(rows[0].keys, rows[0].values, torch.cat([row.index for row in rows]))
    keys, values = torch.cat([row.keys for row in apart.values()]), torch.cat([row.values for row in apart.values()])
    starts = dict(zip(apart, accumulate([len(row.keys) for row in apart.values()], initial=0), strict=False))
    return EntryPool(keys, values, torch.cat([row.index + starts[id(row.keys)] for row in rows]))
