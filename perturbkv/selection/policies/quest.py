"""Quest (Tang et al., 2024, https://arxiv.org/abs/2406.10774): every query looks at the pages that may matter to it.

Nothing is evicted. Of each page of `page` = 16 entries (their section 4.1) the cache knows the smallest and the largest
number of each channel of its keys, which bound every logit in it: `Σ_c max(q_c min_c, q_c max_c)` (their section 3.3,
algorithm 1). At each step each head looks at the pages with the largest bounds, at the tail and at what was decoded.

What differs here: the budget pays for the tail, the blocks of the window's entries, before it buys pages; all layers
choose, where the paper reads the first two whole; with granularity `kv` the heads of a group choose together, by the
mean (or maximum) of the bounds' softmax over the pages. `two-stage` is no part of the paper: ⌊α · pages⌋ by the bound,
the rest by the bound's softmax × the page's largest ν, which bounds A·ν in it up to the softmax' own constant.
`hindsight` and `hindsight-attention` know every logit of the query at hand: ΣA·ν, or ΣA, of each page. `random` draws
its pages once, for all steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perturbkv.configs.cache_contents import PAGE_SIZE
from perturbkv.configs.option import option
from perturbkv.selection.policies.base import NonEvicting


@dataclass(frozen=True)
class Quest(NonEvicting):
    """Equally many pages for every head, chosen again at every step."""

    name: ClassVar[str] = "quest"
    summary: ClassVar[str] = "evicts nothing: each query reads the pages that its keys' bounds favour"
    chooses: ClassVar[str] = "pages"
    instead: ClassVar[str] = "reads pages of the model's own cache"
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.10774"
    selections: ClassVar[tuple[str, ...]] = (
        "attention", "two-stage", "value", "random", "hindsight", "hindsight-attention",
    )  # fmt: skip
    page: int = option(PAGE_SIZE, "entries of a page, which is read whole or not at all", low=1)
