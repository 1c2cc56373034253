"""Whole blocks, as engines keep them: a block table has no half blocks (https://arxiv.org/abs/2309.06180, section 4.1).

Blocks begin at the positions 0, `size`, 2 · `size`, … of the prompt. A block that holds an entry of the window, or one
that is protected, is held whole, and all of its entries count: they take its memory, and decoding attends to them. Of
the last block only the entries that are there count, as the tokens decoded next fill it up. The blocks that hold the
window's entries are the *tail*; the budget pays for it first, and what is left of b buys whole blocks:

    held = tail + size · ⌊(b − tail) / size⌋ ≤ b

so that at most size − 1 entries of b are not used, and never more than b are held. The protected ends take their blocks
out of these; budgets by layer, stages and α share out blocks where otherwise they share out entries. With blocks of one
entry the tail is the window and all is as without blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Blocks:
    """How n entries fall into blocks.

    Attributes:
        size: entries of a block.
        before: blocks before the tail, all of them full.
        tail: entries of the blocks that hold the window's, which always stay.
    """

    size: int
    before: int
    tail: int

    @classmethod
    def of(cls, tokens: int, window: int, size: int) -> Self:
        """Of a prompt of `tokens` entries."""
        before = max(0, tokens - window) // size
        return cls(size, before, tokens - before * size)

    @property
    def tail_blocks(self) -> int:
        """Blocks of the tail, the last one full or not."""
        return -(-self.tail // self.size)

    def first(self, entries: int) -> int:
        """Blocks that hold the first `entries`."""
        return -(-entries // self.size)

    def recent(self, entries: int) -> int:
        """Blocks before the tail that hold some of the most recent `entries`."""
        return max(0, -((self.tail - entries) // self.size))

    def bought(self, entries: int) -> int:
        """Blocks beside the tail that a budget of `entries` pays for."""
        return (entries - self.tail) // self.size

    def held(self, blocks: int) -> int:
        """Entries of so many blocks and the tail."""
        return blocks * self.size + self.tail


def most_always(first: int, recent: int, size: int) -> int:
    """Entries, at the most, of the blocks that hold the `first` entries and the `recent` ones of a prompt."""
    return -(-first // size) * size + recent + size - 1
