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

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.scoring.window_attention import causal_rows
from perturbkv.selection.policies.base import LayerAttention, Unpooled, Votes, option
from perturbkv.theory import WORK


@dataclass(frozen=True)
class ImportanceVotes:
    """Share of the last `history` queries that give an entry before the window more than the average weight."""

    window: int
    history: int

    def __call__(self, seen: LayerAttention) -> Float[Tensor, "head prefix"]:
        """How often each entry was important."""
        heads, queries, d_head = seen.query.shape
        kv_heads, keys, _ = seen.key.shape
        rows = min(self.history, queries)
        average = 1 / torch.arange(keys - rows + 1, keys + 1, dtype=WORK, device=seen.key.device)
        last = seen.query[:, -rows:].view(kv_heads, heads // kv_heads, rows, d_head)
        shares = []
        for kv_head, group in enumerate(last):
            weights = causal_rows(group.to(WORK), seen.key[kv_head].to(WORK), seen.scale, keys - rows)
            important = weights[..., : max(0, keys - self.window)] > average.unsqueeze(-1)
            shares.append(important.to(WORK).mean(dim=-2))
        return torch.cat(shares)


@dataclass(frozen=True)
class Scissorhands(Unpooled):
    """The history of the important votes, uniform budgets."""

    name: ClassVar[str] = "scissorhands"
    summary: ClassVar[str] = "how often the last queries gave an entry more than the average weight"
    paper: ClassVar[str] = "https://arxiv.org/abs/2305.17118"
    own_window: ClassVar[int | None] = 10
    carries_history: ClassVar[bool] = True
    votes_alone: ClassVar[tuple[str, ...]] = ("history", *Unpooled.votes_alone)
    history: int = option(400, "last queries whose votes count", low=1)

    def votes(self, config: EvictionConfig) -> Votes:
        """The last `history` queries."""
        return ImportanceVotes(config.window, self.history)
