"""Scores and budgets -> which entries stay (METHOD: Select).

Each selection is one function that ranks the prefix; `select` turns a ranking into masks. Equal scores go to the
earlier position on every device: rankings come from a stable descending sort.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.eviction import EvictionConfig
from perturbkv.policies import registry
from perturbkv.policies.base import Room
from perturbkv.scores import pool, reduce_group, seeded
from perturbkv.theory import WORK


@dataclass(frozen=True)
class LayerStatistics:
    """What selections may look at in one layer; prefix = n − window entries.

    Attributes:
        accumulated: Ā per query head.
        norms: ν per query head.
        realised: A of the first decoding query per query head (only `hindsight` looks at it).
        kv_heads: number of key/value heads.
        layer, layers: which of how many.
        sample: the sample's id, for the seed of `random`.
        head_scores: given scores of all query heads of the model (only `headkv` looks at them).
        valid: False where a kept set has no entry, as ragged caches that are compressed again are padded on the left.
    """

    accumulated: Float[Tensor, "head prefix"]
    norms: Float[Tensor, "head prefix"]
    realised: Float[Tensor, "head prefix"]
    kv_heads: int
    layer: int
    layers: int
    sample: str
    head_scores: Float[Tensor, "layer head"] | None = None
    valid: Bool[Tensor, "kept_head prefix"] | None = None


@dataclass(frozen=True)
class KeptSets:
    """Which of the n prompt entries stay, per kept set (query head or key/value head).

    `stage1` holds stage 1 and the window: always a subset of `kept`.
    """

    kept: Bool[Tensor, "kept_head key"]
    stage1: Bool[Tensor, "kept_head key"]

    def positions(self) -> list[Int[Tensor, " kept"]]:
        """Kept positions of each kept set, ascending."""
        return [row.nonzero().squeeze(-1) for row in self.kept]


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
        prefix = statistics.accumulated.shape[1]
        drawn = seeded(self.kept_heads, prefix, self.config.seed, statistics.sample, statistics.layer)
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

    Raises BudgetError where the budget leaves nothing beside the window, ConfigError where headkv has no scores.
    """
    kept_tokens = config.tokens(prompt_tokens)
    window = min(config.window, prompt_tokens)
    policy, scores = registry.build(config.policy), _Scores(config, statistics)
    budgets = policy.allocate(config, _room(scores, kept_tokens, window))
    first, second = _RANKINGS[config.selection](scores)
    valid = torch.ones_like(first, dtype=torch.bool) if statistics.valid is None else statistics.valid
    budgets = torch.minimum(budgets, valid.sum(dim=-1))
    recent = min(policy.recent(config, kept_tokens), kept_tokens) - window
    forced = _last(valid, torch.minimum(budgets, torch.full_like(budgets, max(0, recent))))
    rank = ranks(_certain(first, forced, valid))
    in_stage1 = rank < _stage1_counts(config, budgets, forced.sum(dim=-1), window).unsqueeze(-1)
    if second is not None:
        rank = ranks(_certain(second, in_stage1, valid))
    return KeptSets(
        kept=_with_window(rank < budgets.unsqueeze(-1), window),
        stage1=_with_window(in_stage1, window),
    )


def _room(scores: _Scores, kept: int, window: int) -> Room:
    """What the policy may look at, reduced to the configuration's granularity."""
    pooled, statistics = scores.attention(pooled=True), scores.statistics
    prefix = pooled.shape[1]
    if statistics.valid is not None:
        pooled, prefix = pooled.masked_fill(~statistics.valid, -torch.inf), sys.maxsize
    given = statistics.head_scores
    if given is not None:
        given = given.view(statistics.layers, scores.kept_heads, -1).mean(dim=-1)
    return Room(pooled, kept, window, statistics.layer, statistics.layers, prefix, given)


def _last(
    valid: Bool[Tensor, "kept_head prefix"], counts: Int[Tensor, " kept_head"]
) -> Bool[Tensor, "kept_head prefix"]:
    """The last `counts` entries of the prefix, which is aligned at its end."""
    from_end = torch.arange(valid.shape[1], 0, -1, device=valid.device)
    return valid & (from_end <= counts.unsqueeze(-1))


def _certain(score: Score, first: Bool[Tensor, "kept_head prefix"], valid: Bool[Tensor, "kept_head prefix"]) -> Score:
    """Scores that put `first` before all others, and places without an entry behind them."""
    return score.masked_fill(first, torch.inf).masked_fill(~valid, -torch.inf)


def _stage1_counts(
    config: EvictionConfig, budgets: Int[Tensor, " kept_head"], forced: Int[Tensor, " kept_head"], window: int
) -> Int[Tensor, " kept_head"]:
    """Prefix entries of stage 1, inside each head's own budget; entries that always stay are part of it."""
    counts = [
        recent + config.stage1_tokens(prefix + window, window + recent)
        for prefix, recent in zip(budgets.tolist(), forced.tolist(), strict=True)
    ]
    return torch.tensor(counts, device=budgets.device)


def _with_window(prefix: Bool[Tensor, "kept_head prefix"], window: int) -> Bool[Tensor, "kept_head key"]:
    """The window's entries always stay."""
    return torch.cat([prefix, prefix.new_ones(prefix.shape[0], window)], dim=-1)
