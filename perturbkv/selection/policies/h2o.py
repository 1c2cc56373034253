"""H2O (Zhang et al., 2023, https://arxiv.org/abs/2306.14048): heavy hitters of all queries, and recent entries.

Attention is accumulated over every query of the prompt, causally, so that early entries are seen more often; that is
H2O's own score. Half of the budget is the most recent entries (`recent` = 0.5, as in their experiments; never fewer
than the window). Neighbours are not pooled. H2O evicts while it reads; here, as for every policy, the whole prompt is
read first.

The rows of the n × n attention are made in blocks and summed at once; none is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.budget import whole_entries
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.scoring.window_attention import causal_rows
from perturbkv.selection.policies.base import LayerAttention, Unpooled, Votes, option
from perturbkv.theory import WORK

_BLOCK_ENTRIES = 2**20
"""Attention weights of one block."""


@dataclass(frozen=True)
class AllVotes:
    """Mean over all queries' softmax rows, for the entries before the window."""

    window: int

    def __call__(self, seen: LayerAttention) -> Float[Tensor, "head prefix"]:
        """Ā of the whole prompt; rows in float32 or better, sums in float64."""
        heads, queries, d_head = seen.query.shape
        kv_heads, keys, _ = seen.key.shape
        group, dtype = heads // kv_heads, torch.promote_types(seen.query.dtype, torch.float32)
        block = max(1, _BLOCK_ENTRIES // (group * keys))
        total = torch.zeros(kv_heads, group, keys, dtype=WORK, device=seen.key.device)
        for kv_head, rows in enumerate(seen.query.view(kv_heads, group, queries, d_head)):
            for start in range(0, queries, block):
                end = min(start + block, queries)
                weights = causal_rows(
                    rows[:, start:end].to(dtype), seen.key[kv_head, :end].to(dtype), seen.scale, start
                )
                total[kv_head, :, :end] += weights.sum(dim=1, dtype=WORK)
        return total.flatten(0, 1)[:, : max(0, keys - self.window)] / queries


@dataclass(frozen=True)
class H2O(Unpooled):
    """All queries vote, uniform budgets, a share of them recent."""

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "all queries vote; half of the budget is recent entries"
    paper: ClassVar[str] = "https://arxiv.org/abs/2306.14048"
    carries_history: ClassVar[bool] = True
    recent: float = option(0.5, "share of b that is most recent entries", high=1)

    def votes(self, config: EvictionConfig) -> Votes:
        """Every query."""
        return AllVotes(config.window)

    def recent_entries(self, config: EvictionConfig, kept: int) -> int:
        """⌊recent · b⌋ entries, at least the window and what is protected."""
        return max(super().recent_entries(config, kept), int(whole_entries(self.recent * kept)))
