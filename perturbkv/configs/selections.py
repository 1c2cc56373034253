"""How the kept entries are taken from scores, for which heads together, and each way's options (METHOD: Select)."""

from __future__ import annotations

from collections.abc import Mapping

from perturbkv.configs.alpha_table import AlphaOption
from perturbkv.configs.option import Option

GIVEN = "given"
"""What stands in a selection's place where the kept sets come from outside."""
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
ASKED = {name: what for name, what in SELECTIONS.items() if name != GIVEN}
"""Those that can be asked for."""
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
_NORM = {"norm": Option(L1, "of ν, the projected value: l1 or l2", known=(L1, L2), later=True)}
"""`l1`: ν = ‖V_i W_O^h‖₁ (paper, Theorem 2). `l2`: ‖·‖₂, of which no bound of the paper speaks (its appendix G)."""
_TABLES = {"alpha": AlphaOption(0.25, "share of stage 1, 0 to 1, or a file of shares per layer or head", high=1)}
_OWN: Mapping[str, Mapping[str, Option]] = {
    "two-stage": {
        **_TABLES,
        **_SCORE,
        "epsilon": Option(0.0, "added to the score before the norm multiplies it"),
        **_NORM,
    },
    "two-stage-uniform": {**_TABLES, **_SCORE},
    "value": _NORM,
    "hindsight": _NORM,
    "random": {"seed": Option(0, "of the random numbers")},
}
STAGED = ("two-stage", "two-stage-uniform")
"""Selections of two stages: what their second stage ranks is not what the first ranks."""
SELECTION_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    name: {} if name == GIVEN else {**_STAGE1, **_OWN.get(name, {})} for name in SELECTIONS
}
"""Of `given` none: its kept sets come without an order, so that all of them is stage 1."""
GRANULARITIES = {
    "query": "one kept set per query head",
    "kv": "one kept set per key/value head",
    "layer": "one kept set for all heads of a layer, as engines of one block table keep it",
}
_BLOCKS = {
    "block": Option(1, "entries of a block, which stays or goes whole; 1: single entries", low=1),
    "block_score": Option("sum", "of a block's entries: sum or max", known=("sum", "max")),
}
"""Blocks lie as an engine's block table has them (PagedAttention, https://arxiv.org/abs/2309.06180, section 4.1):
`configs.blocks`."""
_GROUP = {
    "reduce": Option("mean", "scores of a group, before pooling: mean or max", known=("mean", "max")),
    "product": Option(
        "product-of-means",
        "stage 2 of a group: mean(Ā)·mean(ν), or the mean of Ā_h·ν_h",
        known=("product-of-means", "mean-of-products"),
    ),
}
"""The group of `layer` is all of its query heads."""
GRANULARITY_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "query": _BLOCKS,
    "kv": {**_GROUP, **_BLOCKS},
    "layer": {**_GROUP, **_BLOCKS},
}
