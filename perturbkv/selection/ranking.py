"""In which order the entries of one layer's prefix would be kept: every score that a selection ranks by, made once.

Configurations that ask for the same score get the same tensor, so that whoever ranks them sees which ones go together.
Equal scores go to the earlier position on every device: orders come from a stable descending sort.

Scores of whole blocks, and the entries of the blocks that stay. `configs.blocks` says how entries lie in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.configs.selections import Blocks
from perturbkv.errors import ConfigError
from perturbkv.scoring.window_attention import pool, pool_signed, reduce_group, seeded
from perturbkv.selection.layer_budget import in_order
from perturbkv.selection.layer_statistics import LayerStatistics, Score, at_ends
from perturbkv.selection.resolved_config import Ends, ResolvedConfig
from perturbkv.theory import WORK


def block_scoring(config: ResolvedConfig) -> tuple[int, str]:
    """Entries of a block, and how their scores become one.

    By position a block is as good as its best place: the one that holds a sink comes first.
    """
    how = "max" if config.selection.name == "position" else config.granularity.options.get("block_score", "sum")
    return config.block, "sum" if config.block == 1 else how


def block_scores(score: Float[Tensor, "kept_head prefix"], size: int, how: str) -> Float[Tensor, "kept_head block"]:
    """Sum or maximum of each full block's entries before the window; those behind the last full one always stay."""
    if size == 1:
        return score
    heads, prefix = score.shape
    count = prefix // size
    blocks = score[:, : count * size].reshape(heads, count, size)
    return blocks.sum(dim=-1) if how == "sum" else blocks.amax(dim=-1)


def block_entries(kept: Bool[Tensor, "config kept_head block"], blocks: Blocks) -> Bool[Tensor, "config kept_head key"]:
    """Every entry of the blocks that stay, and the tail."""
    each = kept if blocks.size == 1 else kept.repeat_interleave(blocks.size, dim=-1)
    tail = each.new_ones(*each.shape[:-1], blocks.tail)
    return torch.cat([each, tail], dim=-1)


_Made = TypeVar("_Made")


@dataclass(frozen=True, eq=False)
class Ranking:
    """An order of every kept set's prefix, by entries or by blocks.

    `order` holds the positions, best first; `ranks` each position's place in it.
    """

    order: Int[Tensor, "kept_head prefix"]
    ranks: Int[Tensor, "kept_head prefix"]


def rank(score: Score) -> Ranking:
    """Descending; ties go to the earlier position."""
    order = score.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(score.shape[-1], device=score.device).expand_as(order)
    return Ranking(order, torch.empty_like(order).scatter_(-1, order, places).to(torch.int32))


class Scores:
    """The scores of one layer for one way to accumulate attention; each is computed when it is first asked for."""

    def __init__(self, statistics: LayerStatistics) -> None:
        self.statistics = statistics
        self._made: dict[Hashable, object] = {}

    def once(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """What `make` gives, made once for each `key`."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]

    def kept_heads(self, config: ResolvedConfig) -> int:
        """How many kept sets a cache holds; a layer's one kept set is that of every key/value head."""
        return len(self.statistics.norms) if config.granularity.name == "query" else self.statistics.kv_heads

    def reduced(self, config: ResolvedConfig, score: Tensor, how: str = "mean") -> Score:
        """Scores of query heads, reduced over those that share a kept set."""
        return reduce_group(score, self._sets(config), how).expand(self.kept_heads(config), -1)

    def _sets(self, config: ResolvedConfig) -> int:
        """How many kept sets may differ."""
        return 1 if config.granularity.name == "layer" else self.kept_heads(config)

    def first(self, config: ResolvedConfig) -> Ranking:
        """Ranking of the whole set, or of stage 1 where there are two."""
        score = self.first_stage(config) if config.has_own_stages else config.selector.first(self, config)
        return self.ranking(score, config)

    def second(self, config: ResolvedConfig) -> Ranking | None:
        """Ranking of stage 2; None where there are no stages."""
        if config.has_own_stages:
            return self.ranking(self.attention(config), config)
        return config.selector.second and self.ranking(config.selector.second(self, config), config)

    def ranking(self, score: Score, config: ResolvedConfig) -> Ranking:
        """The order of a score of ours, of its entries or blocks; places without an entry come last."""
        size, how = block_scoring(config)
        return self.once(("ranking", id(score), size, how), lambda: rank(block_scores(self._valid(score), size, how)))

    def heads_in_order(self, config: ResolvedConfig, ends: Ends) -> Int[Tensor, " entry"]:
        """The kept set of every entry or block of the layer, by descending competing score; ties by place, then set.

        Those at both ends, which always stay, and places without an entry come last.
        """
        score = self.competing(config, ends)
        key = ("heads", id(score), ends.first, ends.recent)
        return self.once(key, lambda: in_order(self._inner(score, ends, config.block)))

    def competing(self, config: ResolvedConfig, ends: Ends) -> Score:
        """What entries or blocks compete by: the pooled score, and the layer's largest for those of an own stage 1."""
        pooled, (size, how) = self.attention(config), block_scoring(config)
        score = self.once(("blocks", id(pooled), size, how), lambda: block_scores(self._valid(pooled), size, how))
        if config.system.first_stage is None or not score.numel():
            return score

        def make() -> Score:
            ranks = rank(self._inner(self.first_stage(config), ends, config.block)).ranks
            return torch.where(ranks < self.first_counts(config, ends).unsqueeze(-1), score.max(), score)

        return self.once(("competing", id(score), config.policy, ends), make)

    def first_stage(self, config: ResolvedConfig) -> Score:
        """What the policy's own stage 1 ranks by, the group's mean. Raises ConfigError where it was not computed."""
        given = self.statistics.first_stage
        if given is None:
            msg = f"policy '{config.policy.name}' has a stage 1 of its own, whose scores are not known here"
            raise ConfigError(msg)
        return self.once(("own stage 1", self.kept_heads(config)), lambda: self.reduced(config, given))

    def first_counts(self, config: ResolvedConfig, ends: Ends) -> Int[Tensor, " kept_head"]:
        """Entries of the policy's own stage 1 beside those at both ends, no more than the budget shares out."""
        score, policy = self.first_stage(config), config.system
        places = ends.competing(score.shape[-1])
        return self.once(
            ("own stage 1", config.policy, self.kept_heads(config), ends),
            lambda: policy.first_counts(config, score, places).clamp(max=ends.free),
        )

    def attention(self, config: ResolvedConfig, pooled: bool = True) -> Score:
        """Ā reduced over the group, then pooled: Ā'. A score that reduces by itself is pooled first."""
        sets, given = self._sets(config), self.statistics.accumulated
        kind, kernel = _pooling(config, pooled)
        if own := config.system.score.reduces:
            key = ("pooled", sets, own, kind, kernel)
            return self.once(key, lambda: self.reduced(config, self._pooled(config, given, pooled), own))
        how = config.granularity.options.get("reduce", "mean")
        reduced = self.once(("attention", sets, how), lambda: self.reduced(config, given, how))
        return self.once(("pooled", sets, how, kind, kernel), lambda: self._pooled(config, reduced, pooled))

    def _pooled(self, config: ResolvedConfig, score: Tensor, pooled: bool) -> Score:
        """Pooled as the policy says."""
        kind, kernel = _pooling(config, pooled)
        if not config.system.score.signed:
            return pool(score, kind, kernel)
        valid = self.statistics.valid
        there = torch.ones_like(score, dtype=torch.bool) if valid is None else valid
        return pool_signed(score, kind, kernel, there.repeat_interleave(len(score) // len(there), dim=0))

    def second_stage(self, config: ResolvedConfig, uniform: bool) -> Score:
        """(S₂ + ε) ν, with the group's product as configured; `uniform` replaces ν by 1."""
        pooled = config.selection.options.get("score") == "pooled"
        key = ("stage 2", config.granularity, _pooling(config, pooled), _epsilon(config), config.euclidean)
        return self.once((*key, uniform), lambda: self._product(config, pooled, uniform))

    def _product(self, config: ResolvedConfig, pooled: bool, uniform: bool) -> Score:
        norms = self.statistics.norms_of(config)
        if uniform:
            norms = torch.ones_like(norms)
        if config.granularity.options.get("product") == "mean-of-products":
            scored = self.statistics.accumulated
            per_head = pool(scored, *_pooling(config, pooled)).repeat_interleave(len(norms) // len(scored), dim=0)
            return self.reduced(config, (per_head + _epsilon(config)) * norms)
        return (self.attention(config, pooled) + _epsilon(config)) * self.reduced(config, norms)

    def value(self, config: ResolvedConfig) -> Score:
        """ν alone."""
        key = ("value", self._sets(config), config.euclidean)
        return self.once(key, lambda: self.reduced(config, self.statistics.norms_of(config)))

    def hindsight(self, config: ResolvedConfig) -> Score:
        """The realised A·ν."""
        key, given = ("hindsight", self._sets(config), config.euclidean), self.statistics
        return self.once(key, lambda: self.reduced(config, given.hindsight * given.norms_of(config)))

    def hindsight_attention(self, config: ResolvedConfig) -> Score:
        """The realised A alone."""
        sets = self._sets(config)
        return self.once(("hindsight attention", sets), lambda: self.reduced(config, self.statistics.hindsight))

    def random(self, config: ResolvedConfig) -> Score:
        """Uniform numbers that depend on seed, sample and layer alone, not on the device."""
        sets, given, seed = self._sets(config), self.statistics, config.selection["seed"]

        def make() -> Score:
            drawn = seeded(sets, given.prefix, seed, given.sample, given.layer)
            return drawn.to(given.norms.device, non_blocking=True).expand(self.kept_heads(config), -1)

        return self.once(("random", sets, seed), make)

    def position(self, config: ResolvedConfig) -> Score:
        """As the policy ranks places."""
        kept, ranked = self.kept_heads(config), config.system.places()

        def make() -> Score:
            place = torch.arange(self.statistics.prefix, device=self.statistics.norms.device)
            return ranked(place).to(WORK).expand(kept, -1)

        return self.once(("position", kept, ranked), make)

    def _inner(self, score: Score, ends: Ends, size: int) -> Score:
        """What always stays competes with none."""
        if not ends.always:
            return score
        prefix, begin = score.shape[-1], (self.statistics.begin // size).unsqueeze(-1)
        place = torch.arange(prefix, device=score.device)
        return score.masked_fill(at_ends(place, begin, prefix, ends.first, ends.recent), -torch.inf)

    def _valid(self, score: Score) -> Score:
        valid = self.statistics.valid
        return score if valid is None else score.masked_fill(~valid, -torch.inf)


def _pooling(config: ResolvedConfig, pooled: bool) -> tuple[str, int]:
    """Kind and kernel, as the policy pools."""
    return config.system.score.pooling(pooled)


def _epsilon(config: ResolvedConfig) -> float:
    return float(config.selection.options.get("epsilon", 0.0))
