"""DefensiveKV (Feng et al., 2025, https://arxiv.org/abs/2510.13334; code: FFY0/DefensiveKV): worst cases compete.

Its score is `scoring/scores/defensive.py`. It has a stage 1 of its own, in place of a share α: of every kept set, by
the unpooled mean attention of window and group, the entries strictly before the cumulative mass `mass` − bias, at most
⌊b (n − w) / n⌋ − w: the released bound is a share of the entries before the window, a little below the b − w that would
fit. Mass is a share of the set's entries before the window. The bias is named for the window, and is in the released
code the mass that the window's queries give the last w entries *before* it, the mean over them and the layer's heads.
Both are followed here. `mass` = 0.9 as released.

The rest of the layer's budget goes to its largest scores, whichever kept set they are of, with no floor: stage 1
competes with the layer's largest score, so that it comes first.

Its own stage 1 holds with the selection `attention`, and is what σ is measured on; every other selection has the same
budgets and its own stages. Entries that are protected stay and do not compete; neither count nor mass is theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import option
from perturbkv.scoring.score import Score, window_queries_option
from perturbkv.scoring.scores import defensive
from perturbkv.scoring.scores.snapkv import SnapKV
from perturbkv.selection.layer_budget import LayerBudget
from perturbkv.selection.policies.base import BY_SCORE, Policy
from perturbkv.theory import WORK


@dataclass(frozen=True)
class DefensiveKV(Policy):
    """Mean attention up to a mass, then the largest scores of the layer."""

    name: ClassVar[str] = "defensive"
    summary: ClassVar[str] = "mean attention up to a mass, then worst cases; a layer's heads compete"
    paper: ClassVar[str] = "https://arxiv.org/abs/2510.13334"
    selections: ClassVar[tuple[str, ...]] = (
        "attention",
        *(name for name in BY_SCORE if name not in ("attention", "attention-unpooled")),
    )
    budgets: ClassVar[str] = "by head"
    competes: ClassVar[bool] = True
    own_window: ClassVar[int | None] = 32
    own_defaults: ClassVar[tuple[str, ...]] = ("pool", "kernel")
    score_options: ClassVar[tuple[str, ...]] = ("pool", "kernel", "window_queries")
    pool: str = option("average", "pooling of each query's attention over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip
    kernel: int = option(5, "odd width of the pooling", low=1, high=65_535, odd=True)
    mass: float = option(0.9, "cumulative attention that stage 1 reaches, the bias inside", high=1)
    window_queries: str = window_queries_option()

    @property
    def score(self) -> Score:
        """DefensiveKV's score: the largest attention weight over the window's queries."""
        return defensive.Defensive(pool=self.pool, kernel=self.kernel, window_queries=self.window_queries)

    @property
    def first_stage(self) -> Score:
        """Score of stage 1: the unpooled mean attention of the window."""
        return SnapKV(pool="none", kernel=1, window_queries=self.window_queries)

    def stage1_counts(
        self, config: EvictionConfig, scores: Float[Tensor, "kept_head prefix"], competing: slice
    ) -> Int[Tensor, " kept_head"]:
        """Return each kept set's stage-1 size: the number of top scores with a cumulative share below `mass` − bias.

        It is at most the released code's bound (see the module). `competing` is the slice of entries that count.
        """
        prefix, window = scores.shape[-1], config.window
        most = prefix * config.allowed_entries(prefix + window) // (prefix + window) - window
        bias = scores[:, -window:].sum(dim=-1).mean()
        ordered = scores[:, competing].sort(dim=-1, descending=True).values
        share = ordered / ordered.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(WORK).tiny)
        return (share.cumsum(dim=-1) < self.mass - bias).sum(dim=-1).clamp(max=max(0, most))

    def allocate(self, config: EvictionConfig, available: LayerBudget) -> Int[Tensor, " kept_head"]:
        """Return each kept set's number of entries among the layer's highest competing scores."""
        return available.counts_among_layer_top()
