"""Selections, granularities, blocks, and presets (METHOD: Select).

*Blocks.* Entries may be kept in whole blocks, as engines do: a block table has no half blocks
(https://arxiv.org/abs/2309.06180, section 4.1). Blocks begin at the positions 0, `size`, 2 · `size`, … of the prompt. A
block with a window entry or a protected entry is kept whole, and all of its entries count: they take memory, and
decoding attends to them. The last block counts only the entries that it has, as decoded tokens fill it up. The blocks
of the window's entries are the *tail*; the budget pays for it first, and the rest of b buys whole blocks:

    held = tail + size · ⌊(b − tail) / size⌋ ≤ b

so at most size − 1 entries of b are unused, and never more than b are kept. Protected blocks come out of the same
budget; layer budgets, stages and α then distribute blocks instead of entries. With blocks of one entry the tail is the
window and nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from perturbkv.configs.alpha_table import AlphaOption
from perturbkv.configs.choice import Choice
from perturbkv.configs.option import Option

PROMPT = "prompt"
"""Value of the option `keep` of policies: the prompt's entries stay while the cache is compressed again."""
GIVEN = "given"
"""Name of the selection where kept sets come from outside."""
SELECTIONS = {
    "attention": "Top-k of the policy's score; of snapkv pooled window attention (the baseline)",
    "attention-unpooled": "Top-k of the policy's score without its pooling (control)",
    "two-stage": "⌊α(b−w)⌋ by the score, the rest by score × projected value norm (the paper's)",
    "two-stage-uniform": "two-stage with ν ≡ 1: what un-pooling the second stage alone brings (control)",
    "value": "Top-k of the projected value norm alone (control)",
    "random": "a seeded random set (control)",
    "hindsight": "Top-k of the realised A·ν of the decoding query: what knowing the query would bring (control)",
    "hindsight-attention": "Top-k of the realised A of the decoding query: without ν, the query known (control)",
    "position": "by position, as the policy says (streaming-llm only)",
    GIVEN: "what a policy from outside kept itself (names with a colon only)",
}
SELECTABLE = {name: what for name, what in SELECTIONS.items() if name != GIVEN}
"""Selections that a user can choose."""
_STAGE1 = {
    "alpha": Option(0.25, "share of stage 1, 0 to 1; without stages: of its own ranking, for the bounds", high=1),
    "split": Option("prefix", "what alpha is a share of: prefix (b − w), or total (b, the window in stage 1)",
                    known=("prefix", "total")),
}  # fmt: skip
"""α (paper, section 4.2: 0.25). Where αb < w and `split` is total, kvpress lets the window entries that stage 1 has no
room for compete by (1 + max Ā' + ε) ν and may drop one whose ν is tiny; here the window always stays."""
_SCORE = {
    "score": Option("accumulated", "S₂ of stage 2: accumulated (unpooled) or pooled", known=("accumulated", "pooled"))
}
"""`accumulated`: unpooled Ā (paper, Algorithm 2, line 9); `pooled`: Ā' (the authors' released code)."""
L1, L2 = "l1", "l2"
_NORM = {"norm": Option(L1, "of ν, the projected value: l1 or l2", known=(L1, L2), new=True)}
"""`l1`: ν = ‖V_i W_O^h‖₁ (paper, Theorem 2). `l2`: ‖·‖₂, of which no bound of the paper speaks (its appendix G)."""
GATE = "gate"
FIRST_STEP = -1
"""In the place of a number of queries: the query of the first decode step, whose gate hindsight knows."""
_GATE = {
    GATE: Option(
        "window",
        "that ν takes where a model has one: the window's mean size (window), or none, the paper's ν",
        known=("window", "none"),
        omitted=True,
    )
}
"""Gates between attention and projection are of the decoding query, which a selection does not know."""
_TABLES = {"alpha": AlphaOption(0.25, "share of stage 1, 0 to 1, or a file of shares per layer or head", high=1)}
_OWN_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "two-stage": {
        **_TABLES,
        **_SCORE,
        "epsilon": Option(0.0, "added to the score before the norm multiplies it"),
        **_NORM,
        **_GATE,
    },
    "two-stage-uniform": {**_TABLES, **_SCORE},
    "value": {**_NORM, **_GATE},
    "hindsight": _NORM,
    "random": {"seed": Option(0, "of the random numbers")},
}
STAGED = ("two-stage", "two-stage-uniform")
"""Selections of two stages, the second of which ranks by another quantity than the first."""
SCORED = ("attention", "attention-unpooled", *STAGED)
"""Selections that rank by the policy's score."""
SELECTION_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    name: {} if name == GIVEN else {**_STAGE1, **_OWN_OPTIONS.get(name, {})} for name in SELECTIONS
}
"""Selection -> its options; `given` has none: its kept sets come without an order, so that stage 1 is all of them."""
WINDOW_QUERIES = "window_queries"
ALL_QUERIES, TEXT_QUERIES = "all", "text"
GRANULARITIES = {
    "query": "one kept set per query head",
    "kv": "one kept set per key/value head",
    "layer": "one kept set for all heads of a layer, as engines of one block table keep it",
    "head": "one kept set per key/value head for all measured layers together",
    "model": "one kept set for all heads of all measured layers, as engines of one list of tokens keep it",
}
"""`head` and `model` are the sets of `per_head` and `union`, eviction modes of TensorRT-LLM's KV-cache compression
(https://github.com/NVIDIA/TensorRT-LLM/pull/16957). Layers whose window slides are not measured, and share no set."""
_SHARED_BY_HEADS, _SHARED_BY_LAYERS = ("layer", "model"), ("head", "model")


def shares_heads(granularity: Choice) -> bool:
    """Return whether all heads of a layer have one kept set."""
    return granularity.name in _SHARED_BY_HEADS


def shares_layers(granularity: Choice) -> bool:
    """Return whether all measured layers have the same kept sets."""
    return granularity.name in _SHARED_BY_LAYERS


UNION = "union"


def reduction(granularity: Choice) -> str:
    """Return how the scores of a group are combined: `mean`, `max` or `union`."""
    return str(granularity.options.get("reduce", "mean"))


_BLOCKS = {
    "block": Option(1, "entries of a block, which stays or goes whole; 1: single entries", low=1),
    "block_score": Option("sum", "of a block's entries: sum or max", known=("sum", "max")),
}
"""Blocks lie as an engine's block table has them (PagedAttention, https://arxiv.org/abs/2309.06180, section 4.1):
`Blocks`."""
_GROUP = {
    "reduce": Option(
        "mean",
        "scores of a group: their mean or max, before pooling, or union: each entry has its best rank in the group",
        known=("mean", "max", UNION),
    ),
    "product": Option(
        "product-of-means",
        "stage 2 of a group: mean(Ā)·mean(ν), or the mean of Ā_h·ν_h",
        known=("product-of-means", "mean-of-products"),
    ),
}
"""The group is all query heads that share a kept set: for `layer` those of the layer, for `head` those of a key/value
head in all measured layers, for `model` all of them.

`union`: the members' own first r entries united, for the largest r with which no more entries are kept than the budget
has; what is left of the budget goes to those of rank r + 1, by the group's mean score, then to the earlier position. It
depends on no member's scale. In TensorRT-LLM's mode of this name the united entries are ranked again by their largest
score, normalised per head, which is a `max`: an entry among the budget's largest is among those of its own head.
"""
GRANULARITY_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    name: _BLOCKS if name == "query" else {**_GROUP, **_BLOCKS} for name in GRANULARITIES
}


@dataclass(frozen=True)
class Blocks:
    """A division of a prompt's entries into blocks.

    Attributes:
        size: entries of a block.
        full: blocks before the tail, all of them full.
        tail: entries of the blocks that hold the window, which always stay.
    """

    size: int
    full: int
    tail: int

    @classmethod
    def divide(cls, tokens: int, window: int, size: int) -> Self:
        """Return a prompt of `tokens` entries divided into blocks of `size` entries, with the window in the tail."""
        full = max(0, tokens - window) // size
        return cls(size, full, tokens - full * size)

    @property
    def tail_blocks(self) -> int:
        """Number of blocks in the tail, including a last partial block."""
        return -(-self.tail // self.size)

    def first_blocks(self, entries: int) -> int:
        """Return the number of blocks that contain the first `entries` entries."""
        return -(-entries // self.size)

    def recent_blocks(self, entries: int) -> int:
        """Return the number of blocks before the tail that contain any of the most recent `entries` entries."""
        return max(0, -((self.tail - entries) // self.size))

    def affordable_blocks(self, entries: int) -> int:
        """Return the number of blocks besides the tail that fit a budget of `entries` entries."""
        return (entries - self.tail) // self.size

    def kept_entries(self, blocks: int) -> int:
        """Return the number of entries in `blocks` full blocks plus the tail."""
        return blocks * self.size + self.tail


def max_protected_entries(first: int, recent: int, size: int) -> int:
    """Return the most entries that blocks of `size` entries with the `first` first and `recent` last ones can hold."""
    return -(-first // size) * size + recent + size - 1


PROMPT_QUERIES = 32
"""Largest number of prompt queries at which isolated quantities are measured."""


_RELEASED = {
    "alpha": 0.5,
    "split": "total",
    "score": "pooled",
    "epsilon": 1e-4,
    "pool": "average",
    "kernel": 5,
    "granularity": "kv",
    "safeguard": "guaranteed",
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "paper-v2": {"alpha": 0.5, "score": "pooled", "epsilon": 1e-4, "granularity": "kv"},
    "released-v2": _RELEASED,
    "kvpress": {**_RELEASED, "window": 64, "line": "total"},
}
"""METHOD's table of presets, as differences from the defaults (`paper`); each goes to the choices that have the
option.
"""
