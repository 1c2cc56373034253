"""Scores and budgets -> which entries stay (METHOD: Select).

Each selection is one function that ranks the prefix; `select` turns a ranking into masks. Equal scores go to the
earlier position on every device: rankings come from a stable descending sort.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.config import EvictionConfig
from perturbkv.policies import registry
from perturbkv.scores import pool, reduce_group
from perturbkv.theory import WORK


@dataclass(frozen=True)
class LayerStatistics:
    """What selections may look at in one layer; prefix = n − window entries.

    Attributes:
        accumulated: Ā per query head.
        norms: ν per query head.
        realised: A of the first decoding query per query head (only `hindsight` looks at it).
        kv_heads: number of key/value heads.
        layer: which layer, for the seed of `random`.
        sample: the sample's id, likewise.
    """

    accumulated: Float[Tensor, "head prefix"]
    norms: Float[Tensor, "head prefix"]
    realised: Float[Tensor, "head prefix"]
    kv_heads: int
    layer: int
    sample: str


@dataclass(frozen=True)
class KeptSets:
    """Which of the n prompt entries stay, per kept set (query head or key/value head).

    `stage1` holds stage 1 and the window: always a subset of `kept`.
    """

    kept: Bool[Tensor, "kept_head key"]
    stage1: Bool[Tensor, "kept_head key"]


Score = Float[Tensor, "kept_head prefix"]


class _Scores:
    """The scores of one configuration, reduced to its granularity."""

    def __init__(self, config: EvictionConfig, statistics: LayerStatistics) -> None:
        self.config, self.statistics = config, statistics
        heads = statistics.accumulated.shape[0]
        self.kept_heads = heads if config.granularity == "query" else statistics.kv_heads

    def reduced(self, per_head: Float[Tensor, "head prefix"], how: str = "mean") -> Score:
        return reduce_group(per_head, self.kept_heads, how)

    def attention(self, pooled: bool) -> Score:
        """Ā reduced over the group, then pooled: Ā'."""
        score = self.reduced(self.statistics.accumulated, self.config.group_score)
        return pool(score, self.config.pool, self.config.kernel) if pooled else score

    def second_stage(self, uniform: bool) -> Score:
        """(S₂ + ε) ν, with the group's product as configured; `uniform` replaces ν by 1."""
        pooled = self.config.stage2_score == "pooled"
        norms = self.statistics.norms.to(WORK)
        if uniform:
            norms = torch.ones_like(norms)
        if self.config.group_product == "product-of-means":
            return (self.attention(pooled) + self.config.epsilon) * self.reduced(norms)
        per_head = self.statistics.accumulated
        if pooled:
            per_head = pool(per_head, self.config.pool, self.config.kernel)
        return self.reduced((per_head + self.config.epsilon) * norms)

    def random(self) -> Score:
        """Uniform numbers that depend on seed, sample and layer alone, not on the device."""
        statistics = self.statistics
        text = f"{self.config.seed}/{statistics.sample}/{statistics.layer}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        shape = (self.kept_heads, statistics.accumulated.shape[1])
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=WORK)
        return drawn.to(statistics.accumulated.device)

    def position(self) -> Score:
        """Sinks first, the earliest of them foremost, then the most recent entries."""
        prefix = self.statistics.accumulated.shape[1]
        place = torch.arange(prefix, device=self.statistics.accumulated.device)
        score = torch.where(place < self.config.sinks, 2 * prefix - place, place)
        return score.to(WORK).expand(self.kept_heads, -1)


_RANKINGS: dict[str, Callable[[_Scores], tuple[Score, Score | None]]] = {
    "attention": lambda scores: (scores.attention(pooled=True), None),
    "attention-unpooled": lambda scores: (scores.attention(pooled=False), None),
    "two-stage": lambda scores: (scores.attention(pooled=True), scores.second_stage(uniform=False)),
    "two-stage-uniform": lambda scores: (scores.attention(pooled=True), scores.second_stage(uniform=True)),
    "value": lambda scores: (scores.reduced(scores.statistics.norms.to(WORK)), None),
    "random": lambda scores: (scores.random(), None),
    "hindsight": lambda scores: (scores.reduced(scores.statistics.realised * scores.statistics.norms.to(WORK)), None),
    "position": lambda scores: (scores.position(), None),
}
"""Selection -> (ranking of the whole set or of stage 1, ranking of stage 2 where there is one)."""


def ranks(score: Score) -> Int[Tensor, "kept_head prefix"]:
    """Place of each entry in the descending order of its head's scores; ties go to the earlier position."""
    order = score.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(score.shape[-1], device=score.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def select(config: EvictionConfig, statistics: LayerStatistics, prompt_tokens: int) -> KeptSets:
    """The entries that one configuration keeps in one layer.

    Raises BudgetError where the budget leaves nothing beside the window.
    """
    kept_tokens = config.tokens(prompt_tokens)
    window = min(config.window, prompt_tokens)
    scores = _Scores(config, statistics)
    budgets = registry.build(config.policy).allocate(config, scores.attention(pooled=True), kept_tokens, window)
    first, second = _RANKINGS[config.selection](scores)
    stage1_counts = _stage1_counts(config, budgets, window)
    rank = ranks(first)
    in_stage1 = rank < stage1_counts.unsqueeze(-1)
    if second is not None:
        rank = ranks(second.masked_fill(in_stage1, torch.inf))
    return KeptSets(
        kept=_with_window(rank < budgets.unsqueeze(-1), window),
        stage1=_with_window(in_stage1, window),
    )


def _stage1_counts(
    config: EvictionConfig, budgets: Int[Tensor, " kept_head"], window: int
) -> Int[Tensor, " kept_head"]:
    """Prefix entries of stage 1, inside each head's own budget."""
    counts = [config.stage1_tokens(prefix + window) for prefix in budgets.tolist()]
    return torch.tensor(counts, device=budgets.device)


def _with_window(prefix: Bool[Tensor, "kept_head prefix"], window: int) -> Bool[Tensor, "kept_head key"]:
    """The window's entries always stay."""
    return torch.cat([prefix, prefix.new_ones(prefix.shape[0], window)], dim=-1)
