"""Vertical-slash (MInference 1.0: Jiang et al., 2024, https://arxiv.org/abs/2407.02490): a prefill along some lines.

Each head's attention map of the prompt is thought to hold vertical lines, entries that all later queries look at, and
slash lines, at one distance from every query (their section 3.1). Which ones, the attention of the last `last` = 64
queries says (their algorithm 1): its sums over columns choose verticals, its sums along diagonals slashes. A query at
position p looks at the verticals up to p and at p − d for each slash d. Nothing is evicted: the prefill leaves a whole
cache, whose keys and values are what it could compute, and decoding looks at all of it.

What differs here: the budget b counts the most entries that a query looks at, the local band of the window's w offsets
and the `first` = 4 entries among them; their code has 100 offsets and 30 entries that are always in. Of what is left
⌊`vertical` · (b − w − first)⌋ lines are vertical; they search for each head offline which of three patterns it gets and
how many lines of each kind. Lines are single entries, not blocks of 64 as their kernel has them, and the masked prefill
is computed exactly, which shows what is lost and not how fast a sparse kernel is. `two-stage` is no part of the paper:
⌊α · verticals⌋ by ΣA, the rest by ΣA·ν of the line's entries, and slashes likewise. `random` draws its lines.

Their sums count all weights, as `sums=all` does: a first entry that every query looks at lends its weight to one slash
per last query. That hardly matters to thousands of lines and fills dozens: `sums=free`, no part of the paper either,
leaves out what every query looks at anyway, the first entries and the band.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import option
from perturbkv.selection.policies.base import NonEvicting


@dataclass(frozen=True)
class VerticalSlash(NonEvicting):
    """Equally many lines for every head, chosen once from the prompt's last queries."""

    name: ClassVar[str] = "vertical-slash"
    summary: ClassVar[str] = "evicts nothing: a prefill of its own looks at some entries and offsets"
    chooses: ClassVar[str] = "lines"
    instead: ClassVar[str] = "reads the prompt in a prefill of its own"
    paper: ClassVar[str] = "https://arxiv.org/abs/2407.02490"
    selections: ClassVar[tuple[str, ...]] = ("attention", "two-stage", "random")
    score_options: ClassVar[tuple[str, ...]] = ("last", "sums")
    ranks: ClassVar[bool] = False
    vertical: float = option(0.5, "share of the chosen lines that are entries; the others are offsets", high=1)
    last: int = option(64, "last queries, whose attention says which lines", low=1)
    first: int = option(4, "first entries that every query looks at")
    sums: str = option("all", "of the last queries' attention: all, or free of what every query looks at anyway",
                       known=("all", "free"))  # fmt: skip
    seed: int = option(0, "of the queries at which isolated quantities are measured")

    def first_entries(self, config: EvictionConfig, kept: int) -> int:
        """Return the number of first entries attended to by every query."""
        return self.first
