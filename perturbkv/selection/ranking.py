"""Rankings of the entries or blocks of one layer's prefix: every score that a selection ranks by, computed once.

Configurations that need the same score get the same tensor, which shows who ranks alike. Equal scores go to the earlier
position on every device: orders come from a stable descending sort. `configs.selections.Blocks` defines blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.configs.selections import UNION, Blocks
from perturbkv.devices import copy_to_device
from perturbkv.errors import ConfigError
from perturbkv.scoring.window_attention import draw_uniform, pool, pool_signed, reduce_group
from perturbkv.selection.layer_budget import rows_by_score
from perturbkv.selection.layer_statistics import LayerStatistics, Score, is_at_ends
from perturbkv.selection.policies import checked
from perturbkv.selection.resolved_config import PrefixCounts, ResolvedConfig
from perturbkv.theory import WORK


def block_scoring(config: ResolvedConfig) -> tuple[int, str]:
    """Return the number of entries per block, and the reduction of their scores to the block's: `sum` or `max`.

    The selection `position` always takes the maximum, so that the block with a sink comes first.
    """
    reduction = "max" if config.selection.name == "position" else config.granularity.options.get("block_score", "sum")
    return config.block, "sum" if config.block == 1 else reduction


def block_scores(
    score: Float[Tensor, "kept_head prefix"], size: int, reduction: str
) -> Float[Tensor, "kept_head block"]:
    """Return the sum or maximum of the scores in every full block of `size` entries; the remainder is left out."""
    if size == 1:
        return score
    heads, prefix = score.shape
    count = prefix // size
    blocks = score[:, : count * size].reshape(heads, count, size)
    return blocks.sum(dim=-1) if reduction == "sum" else blocks.amax(dim=-1)


def block_entries(kept: Bool[Tensor, "config kept_head block"], blocks: Blocks) -> Bool[Tensor, "config kept_head key"]:
    """Return a mask of blocks expanded to entries; the entries of the tail stay."""
    entries = kept if blocks.size == 1 else kept.repeat_interleave(blocks.size, dim=-1)
    tail = entries.new_ones(*entries.shape[:-1], blocks.tail)
    return torch.cat([entries, tail], dim=-1)


_Result = TypeVar("_Result")


@dataclass(frozen=True, eq=False)
class Ranking:
    """An order of every kept set's prefix, by entries or by blocks.

    `order` lists the indices, best first; `ranks` is each index's rank in it.
    """

    order: Int[Tensor, "kept_head prefix"]
    ranks: Int[Tensor, "kept_head prefix"]

    @classmethod
    def from_order(cls, order: Int[Tensor, "kept_head prefix"]) -> Ranking:
        """Return the ranking with the indices `order`, best first."""
        ranks = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        return cls(order, torch.empty_like(order).scatter_(-1, order, ranks).to(torch.int32))

    def to(self, device: torch.device) -> Ranking:
        """Return the ranking on a device; the ranking itself where it is there already."""
        return (
            self
            if self.order.device == device
            else Ranking(copy_to_device(self.order, device), copy_to_device(self.ranks, device))
        )


def rank(score: Score) -> Ranking:
    """Return the ranking by descending score; ties are broken by position, earliest first."""
    return Ranking.from_order(score.sort(dim=-1, descending=True, stable=True).indices)


def rank_union(score: Float[Tensor, "member prefix"], sets: int) -> Ranking:
    """Return the ranking of each of the `sets` groups of members by best rank: the union of the members' own sets.

    An entry's rank in the group is its smallest among the members; ties go to the larger mean score, then to the
    earlier position. So the first entries are the union of the members' first r ones, for every r.
    """
    members = (sets, -1, score.shape[-1])
    best = rank(score).ranks.view(members).amin(dim=1)
    by_mean = score.view(members).mean(dim=1).sort(dim=-1, descending=True, stable=True).indices
    return Ranking.from_order(by_mean.gather(-1, best.gather(-1, by_mean).sort(dim=-1, stable=True).indices))


class Scores:
    """The scores of one layer that selections rank by, from one accumulated score; each is computed on first use."""

    def __init__(self, statistics: LayerStatistics) -> None:
        self.statistics = statistics
        self._results: dict[Hashable, object] = {}

    def once(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """Return the result of `make`, cached by `key`."""
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]  # type: ignore[return-value]

    def kept_heads(self, config: ResolvedConfig) -> int:
        """Return the number of kept sets in the cache; one per key/value head, all equal, where all heads share one."""
        return len(self.statistics.norms) if config.granularity.name == "query" else self.statistics.kv_heads

    def reduce(self, config: ResolvedConfig, score: Tensor, reduction: str = "mean") -> Score:
        """Return scores per kept set, reduced from rows per query head over the heads that share a kept set."""
        return reduce_group(score, self._distinct_sets(config), reduction).expand(self.kept_heads(config), -1)

    def _distinct_sets(self, config: ResolvedConfig) -> int:
        """Return the number of kept sets that may differ: 1 where all heads share one."""
        return 1 if config.shares_heads else self.kept_heads(config)

    def first_ranking(self, config: ResolvedConfig) -> Ranking:
        """Return the ranking of stage 1, or of the whole kept set for a selection without stages."""
        score = self.first_stage(config) if config.has_own_stages else config.selector.first(self, config)
        return self.ranking(score, config)

    def second_ranking(self, config: ResolvedConfig) -> Ranking | None:
        """Return the ranking of stage 2; None for a selection without stages."""
        if config.has_own_stages:
            return self.ranking(self.attention(config), config)
        return config.selector.second and self.ranking(config.selector.second(self, config), config)

    def ranking(self, score: Score, config: ResolvedConfig) -> Ranking:
        """Return the ranking of entries or blocks by descending score; padding comes last.

        With the reduction `union`, the score is the members' own.
        """
        size, block_reduction = block_scoring(config)
        sets = self._distinct_sets(config) if config.reduction == UNION else 0

        def make() -> Ranking:
            scores = block_scores(self._mask_missing(score), size, block_reduction)
            if not sets:
                return rank(scores)
            return Ranking.from_order(rank_union(scores, sets).order.expand(self.kept_heads(config), -1))

        return self.once(("ranking", id(score), size, block_reduction, sets), make)

    def heads_by_score(self, config: ResolvedConfig, counts: PrefixCounts) -> Int[Tensor, " entry"]:
        """Return the kept-set index of every entry (or block) of the layer, sorted by descending competing score.

        Ties go to the earlier index, then to the earlier set. Entries at both ends, which always stay, and indices
        without an entry come last.
        """
        score = self.competing_scores(config, counts)
        key = ("heads", id(score), counts.first, counts.recent)
        return self.once(key, lambda: rows_by_score(self._mask_ends(score, counts, config.block)))

    def competing_scores(self, config: ResolvedConfig, counts: PrefixCounts) -> Score:
        """Return the pooled scores by which the layer's kept sets compete for the budget.

        Entries of a policy's own stage 1 get the layer's largest score.
        """
        pooled, (size, reduction) = self.attention(config), block_scoring(config)
        score = self.once(
            ("blocks", id(pooled), size, reduction), lambda: block_scores(self._mask_missing(pooled), size, reduction)
        )
        if config.first_stage is None or not score.numel():
            return score

        def make() -> Score:
            ranks = rank(self._mask_ends(self.first_stage(config), counts, config.block)).ranks
            return torch.where(ranks < self.stage1_counts(config, counts).unsqueeze(-1), score.max(), score)

        return self.once(("competing", id(score), config.policy, counts), make)

    def first_stage(self, config: ResolvedConfig) -> Score:
        """Return the scores of the policy's own stage 1, per kept set. Raises ConfigError where missing."""
        score = self.statistics.first_stage
        if score is None:
            raise ConfigError(
                f"policy '{config.policy.name}' has a stage 1 of its own, whose scores are not known here"
            )
        return self.once(("own stage 1", self.kept_heads(config)), lambda: self.reduce(config, score))

    def stage1_counts(self, config: ResolvedConfig, counts: PrefixCounts) -> Int[Tensor, " kept_head"]:
        """Return each kept set's number of entries in the policy's own stage 1, without always-kept ones."""
        score, policy = self.first_stage(config), config.system
        competing = counts.competing_slice(score.shape[-1])
        return self.once(
            ("own stage 1", config.policy, self.kept_heads(config), counts),
            lambda: checked.stage1_counts(policy, config, score, competing).clamp(max=counts.free),
        )

    def attention(self, config: ResolvedConfig, pooled: bool = True) -> Score:
        """Return the accumulated score per kept set, reduced over query heads and pooled over positions (Ā').

        A score with its own reduction is pooled before it; with the reduction `union`, the score stays each member's
        own. Without `pooled` nothing is pooled (Ā).
        """
        sets, accumulated = self._distinct_sets(config), self.statistics.accumulated
        kind, kernel = _pooling(config, pooled)
        if own_reduction := config.score.reduces:
            key = ("pooled", sets, own_reduction, kind, kernel)
            return self.once(key, lambda: self.reduce(config, self._pool(config, accumulated, pooled), own_reduction))
        if (name := config.reduction) == UNION:
            return self.once(("pooled", UNION, kind, kernel), lambda: self._pool(config, accumulated, pooled))
        reduced = self.once(("attention", sets, name), lambda: self.reduce(config, accumulated, name))
        return self.once(("pooled", sets, name, kind, kernel), lambda: self._pool(config, reduced, pooled))

    def _pool(self, config: ResolvedConfig, score: Tensor, pooled: bool) -> Score:
        """Return a score pooled over positions with the policy's kind and width; unchanged unless `pooled`."""
        kind, kernel = _pooling(config, pooled)
        if not config.score.signed:
            return pool(score, kind, kernel)
        valid = self.statistics.valid
        valid = torch.ones_like(score, dtype=torch.bool) if valid is None else valid
        return pool_signed(score, kind, kernel, valid.repeat_interleave(len(score) // len(valid), dim=0))

    def second_stage(self, config: ResolvedConfig, uniform: bool) -> Score:
        """Return the score of stage 2: (accumulated score + ε) × value norm ν; `uniform` replaces ν by 1.

        The granularity decides whether a group's heads are averaged before or after the product; with the reduction
        `union`, the product stays each query head's own.
        """
        pooled = config.selection.options.get("score") == "pooled"
        key = ("stage 2", config.granularity, _pooling(config, pooled), _epsilon(config), config.euclidean)
        return self.once((*key, uniform), lambda: self._product(config, pooled, uniform))

    def _product(self, config: ResolvedConfig, pooled: bool, uniform: bool) -> Score:
        """Return the score of stage 2, (accumulated score + ε) × ν, from the pooled or unpooled score."""
        norms = self.statistics.selected_norms(config)
        if uniform:
            norms = torch.ones_like(norms)
        unites = config.reduction == UNION
        if unites or config.granularity.options.get("product") == "mean-of-products":
            score = self.statistics.accumulated
            per_head = pool(score, *_pooling(config, pooled)).repeat_interleave(len(norms) // len(score), dim=0)
            products = (per_head + _epsilon(config)) * norms
            return products if unites else self.reduce(config, products)
        return (self.attention(config, pooled) + _epsilon(config)) * self.reduce(config, norms)

    def value(self, config: ResolvedConfig) -> Score:
        """Return the value norms ν per kept set."""
        key = ("value", self._distinct_sets(config), config.euclidean)
        return self.once(key, lambda: self.reduce(config, self.statistics.selected_norms(config)))

    def hindsight(self, config: ResolvedConfig) -> Score:
        """Return A · ν per kept set, with the attention weights A of the first decoding query."""
        key, statistics = ("hindsight", self._distinct_sets(config), config.euclidean), self.statistics
        return self.once(key, lambda: self.reduce(config, statistics.hindsight * statistics.selected_norms(config)))

    def hindsight_attention(self, config: ResolvedConfig) -> Score:
        """Return the attention weights A of the first decoding query, per kept set."""
        sets = self._distinct_sets(config)
        return self.once(("hindsight attention", sets), lambda: self.reduce(config, self.statistics.hindsight))

    def random(self, config: ResolvedConfig) -> Score:
        """Return uniform random scores determined by seed, sample and layer, the same on every device."""
        sets, statistics, seed = self._distinct_sets(config), self.statistics, config.selection["seed"]

        def make() -> Score:
            numbers = draw_uniform(sets, statistics.prefix, seed, statistics.sample, statistics.layer)
            return copy_to_device(numbers, statistics.norms.device).expand(self.kept_heads(config), -1)

        return self.once(("random", sets, seed), make)

    def position(self, config: ResolvedConfig) -> Score:
        """Return the policy's score by position, identical for all kept sets."""
        kept_heads, score_positions = self.kept_heads(config), config.system.position_score()

        def make() -> Score:
            positions = torch.arange(self.statistics.prefix, device=self.statistics.norms.device)
            return score_positions(positions).to(WORK).expand(kept_heads, -1)

        return self.once(("position", kept_heads, score_positions), make)

    def _mask_ends(self, score: Score, counts: PrefixCounts, size: int) -> Score:
        """Return the score with −∞ for the always-kept entries at both ends, which do not compete."""
        if not counts.always:
            return score
        prefix, begin = score.shape[-1], (self.statistics.begin // size).unsqueeze(-1)
        index = torch.arange(prefix, device=score.device)
        return score.masked_fill(is_at_ends(index, begin, prefix, counts.first, counts.recent), -torch.inf)

    def _mask_missing(self, score: Score) -> Score:
        """Return the score with −∞ at padding, where a kept set has no entry."""
        valid = self.statistics.valid
        if valid is None:
            return score
        return score.masked_fill(~valid.repeat_interleave(len(score) // len(valid), dim=0), -torch.inf)


def _pooling(config: ResolvedConfig, pooled: bool) -> tuple[str, int]:
    """Return (kind, width) of the pooling of the policy's score; ("none", 1) unless `pooled`."""
    return config.pooling if pooled else ("none", 1)


def _epsilon(config: ResolvedConfig) -> float:
    """Return the ε of the selection; 0 for a selection without ε."""
    return float(config.selection.options.get("epsilon", 0.0))
