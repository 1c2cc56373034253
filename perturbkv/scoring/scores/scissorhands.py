"""Scissorhands (Liu et al., 2023, https://arxiv.org/abs/2305.17118): entries that were important stay important.

An entry is important to a query that gives it more than the average weight, 1 / (entries seen). Its score is the share
of the last `history` queries to which it was important (their Algorithm 2 counts the queries to which it was
not, and drops the largest counts). `history` = 400 and a recent window of 10 as in their section 5. Neighbours are not
pooled; the counts tie often, and ties go to the earlier position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.option import option
from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score
from perturbkv.scoring.window_attention import causal_blocks
from perturbkv.theory import WORK


@dataclass(frozen=True)
class Scissorhands(Score):
    """Share of queries that give an entry more than the average weight."""

    name: ClassVar[str] = "scissorhands"
    summary: ClassVar[str] = "how often the last queries gave an entry more than the average weight"
    paper: ClassVar[str] = "https://arxiv.org/abs/2305.17118"
    needs: ClassVar[tuple[str, ...]] = ("queries", "keys")
    own_window: ClassVar[int | None] = 10
    history: int = option(400, "last queries whose votes count", low=1)

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the share of the last `history` queries with above-average attention on the entry, per query head."""
        keys, rows = layer.entries, min(self.history, layer.queries.shape[1])
        average = 1 / torch.arange(keys - rows + 1, keys + 1, dtype=WORK, device=layer.keys.device)
        votes = torch.zeros(layer.heads, keys, dtype=WORK, device=layer.keys.device)
        last = layer.queries[:, -rows:]
        for heads, queries, weights in causal_blocks(last, layer.keys, layer.softmax, WORK):
            important = weights > average[queries].unsqueeze(-1)
            votes[heads, : weights.shape[-1]] += important.sum(dim=1)
        return votes[:, : layer.prefix] / rows
