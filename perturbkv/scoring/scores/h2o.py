"""H2O's score (Zhang et al., 2023, https://arxiv.org/abs/2306.14048): attention of every query of the prompt.

s_j = Σ_{i ≥ j} a_ij over all queries i of the prompt, over their number, so that early entries are seen more often;
neighbours are not pooled. H2O evicts while it reads; here, as for every score, the whole prompt is read first. While a
cache is decoded from, the sum goes on with the attention that each decoded token really gives, in that cache's own run
and among what it then holds. The attention on an entry that went is not given back to others.

The rows of the n × n attention are made in blocks and summed at once; none is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score
from perturbkv.scoring.window_attention import causal_blocks
from perturbkv.theory import WORK


@dataclass(frozen=True)
class H2O(Score):
    """Mean attention of all queries."""

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "mean attention of all queries that were read"
    paper: ClassVar[str] = "https://arxiv.org/abs/2306.14048"
    needs: ClassVar[tuple[str, ...]] = ("queries", "keys")
    accumulates: ClassVar[bool] = True

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the mean attention of all queries on the entry, in at least float32 per row and float64 in sums."""
        dtype = torch.promote_types(layer.queries.dtype, torch.float32)
        total = torch.zeros(layer.heads, layer.entries, dtype=WORK, device=layer.keys.device)
        for heads, _, weights in causal_blocks(layer.queries, layer.keys, layer.softmax, dtype):
            total[heads, : weights.shape[-1]] += weights.sum(dim=1, dtype=WORK)
        return total[:, : layer.prefix] / layer.queries.shape[1]
