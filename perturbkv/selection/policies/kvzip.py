"""KVzip (Kim et al., 2025, https://arxiv.org/abs/2505.23416; code: snu-mllab/KVzip, NVIDIA/kvpress).

Its score looks at a replay of the context (`scoring/scores/kvzip.py`). `across` says whose entries compete:

- `model` (released: one threshold over all layers and heads; no safeguard): the largest scores of all layers.
- `layer` (kvpress, `layerwise=True`): every layer keeps as much, its heads compete.
- `head` (released, `pair-uniform`): every head keeps as much.

The released threshold drops what equals it; here ties go to the earlier position, then to the earlier layer and head,
and the model keeps L · H · b entries, to the entry. No selection is left out, but the score asks for a replay whatever
the selection, as budgets look at it. A cache that decoding has filled cannot be compressed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import option
from perturbkv.scoring.score import Score
from perturbkv.scoring.scores import kvzip
from perturbkv.selection.layer_budget import LayerBudget
from perturbkv.selection.policies.base import BY_SCORE, Policy


@dataclass(frozen=True)
class KVzip(Policy):
    """Largest weights of entries in a replay of the context."""

    name: ClassVar[str] = "kvzip"
    summary: ClassVar[str] = "what a replay of the context attends to; all layers' heads compete"
    paper: ClassVar[str] = "https://arxiv.org/abs/2505.23416"
    selections: ClassVar[tuple[str, ...]] = ("attention", *(name for name in BY_SCORE if name != "attention"))
    budgets: ClassVar[str] = "by head"
    competes: ClassVar[bool] = True
    whole_model: ClassVar[bool] = True
    own_window: ClassVar[int | None] = 1
    score_options: ClassVar[tuple[str, ...]] = ("chunk", "wording")
    chunk: int = option(2000, "tokens of the context that one pass of the replay repeats", low=1)
    sinks: int = option(4, "first entries, which always stay and every pass sees")
    wording: str = option("released", "who worded what asks for a part: released, or kvpress",
                          known=("released", "kvpress"))  # fmt: skip
    across: str = option("model", "whose entries compete for a budget: model, layer or head",
                         known=("model", "layer", "head"))  # fmt: skip

    @property
    def score(self) -> Score:
        """KVzip's score: the largest attention weight of an entry in the replay."""
        return kvzip.KVzip(chunk=self.chunk, sinks=self.sinks, wording=self.wording)

    def allocate(self, config: EvictionConfig, available: LayerBudget) -> Int[Tensor, " kept_head"]:
        """Return the number of entries per kept set: equal, or by the highest scores of the layer or of the model."""
        if self.across == "head":
            return available.equal_counts(available.free)
        if self.across == "layer":
            return available.counts_among_layer_top()
        return available.counts_among_model_top()
