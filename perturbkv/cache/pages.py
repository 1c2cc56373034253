"""A row that holds everything and reads some of it: which entries, its reader says for each query anew."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from perturbkv.cache.blocks import Block
from perturbkv.cache.entries import Reader


@dataclass(frozen=True, eq=False)
class ReadBlock(Block):
    """The segments of one row, its key/value heads in their order; what is not read counts as gone."""

    reader: Reader

    def unseen(self, asked: Float[Tensor, "segment group query d_head"]) -> Bool[Tensor, "segment asked longest"]:
        """True where a query does not look at an entry."""
        read = self.reader(asked.flatten(0, 1))
        return ~read.view(asked.shape[0], -1, read.shape[-1])
