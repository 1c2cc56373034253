"""In which order the entries of one layer's prefix would be kept: every score that a selection ranks by, made once.

Configurations that ask for the same score get the same tensor, so that whoever ranks them sees which ones go together.
Equal scores go to the earlier position on every device: orders come from a stable descending sort.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError
from perturbkv.scoring.window_attention import pool, reduce_group, seeded
from perturbkv.selection.policies import registry
from perturbkv.theory import WORK

Score = Float[Tensor, "kept_head prefix"]
_Made = TypeVar("_Made")
OfModel = Callable[[EvictionConfig, Hashable, Callable[[Iterable[Score]], Any]], Any]


@dataclass(frozen=True)
class LayerStatistics:
    """What selections may look at in one layer; prefix = n − window entries.

    Attributes:
        accumulated: the unpooled score, Ā of SnapKV: a row per query head, or per key/value head.
        norms: ν per query head.
        kv_heads: number of key/value heads.
        layer, layers: which of how many.
        sample: the sample's id, for the seed of `random`.
        realised: A of the first decoding query per query head; None where it is not known.
        head_scores: given scores of all query heads of the model, (layer, head); empty where there are none.
        valid: False where a kept set has no entry, as ragged caches that are compressed again are padded on the left.
        of_model: makes something of the pooled scores of all layers for a configuration, once for each key.
    """

    accumulated: Float[Tensor, "rows prefix"]
    norms: Float[Tensor, "head prefix"]
    kv_heads: int
    layer: int
    layers: int
    sample: str
    realised: Float[Tensor, "head prefix"] | None = None
    head_scores: Sequence[Sequence[float]] = ()
    valid: Bool[Tensor, "kept_head prefix"] | None = None
    of_model: OfModel | None = None

    @property
    def prefix(self) -> int:
        """Entries before the window."""
        return self.accumulated.shape[1]

    @property
    def hindsight(self) -> Float[Tensor, "head prefix"]:
        """A of the first decoding query. Raises ConfigError where it is not known."""
        if self.realised is None:
            msg = "a selection by hindsight looks at the next query, which is not known here; choose another selection"
            raise ConfigError(msg)
        return self.realised

    @property
    def begin(self) -> Int[Tensor, " #kept_head"]:
        """Place of each kept set's first entry."""
        if self.valid is None:
            return torch.zeros(1, dtype=torch.int64, device=self.norms.device)
        return self.prefix - self.valid.sum(dim=-1)


@dataclass(frozen=True, eq=False)
class Ranking:
    """An order of every kept set's prefix.

    `order` holds the positions, best first; `ranks` each position's place in it.
    """

    order: Int[Tensor, "kept_head prefix"]
    ranks: Int[Tensor, "kept_head prefix"]


def rank(score: Score) -> Ranking:
    """Descending; ties go to the earlier position."""
    order = score.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(score.shape[-1], device=score.device).expand_as(order)
    return Ranking(order, torch.empty_like(order).scatter_(-1, order, places).to(torch.int32))


def at_ends(place: Tensor, begin: Tensor, end: int, first: Tensor | int, recent: Tensor | int) -> Tensor:
    """Whether a place is one of the `first` ones from `begin` on, or of the `recent` ones before `end`."""
    return ((place >= begin) & (place < begin + first)) | (place >= end - recent)


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

    def kept_heads(self, config: EvictionConfig) -> int:
        """How many kept sets the configuration's granularity makes."""
        return len(self.statistics.norms) if config.granularity.name == "query" else self.statistics.kv_heads

    def first(self, config: EvictionConfig) -> Ranking:
        """Ranking of the whole set, or of stage 1 where there are two."""
        return self.ranking(_FIRST[config.selection.name](self, config))

    def second(self, config: EvictionConfig) -> Ranking | None:
        """Ranking of stage 2; None for a selection without stages."""
        if config.selection.name not in _UNIFORM:
            return None
        return self.ranking(self.second_stage(config, uniform=_UNIFORM[config.selection.name]))

    def ranking(self, score: Score) -> Ranking:
        """The order of a score of ours; places without an entry come last."""
        return self.once(("ranking", id(score)), lambda: rank(self._valid(score)))

    def heads_in_order(self, config: EvictionConfig, first: int, recent: int) -> Int[Tensor, " entry"]:
        """The kept set of every entry of the layer, by descending pooled attention; ties by position, then set.

        The `first` and `recent` entries, which always stay, and places without an entry come last.
        """
        score = self.attention(config)
        heads, prefix = score.shape

        def make() -> Tensor:
            competing = self._valid(score)
            if first or recent:
                place, begin = torch.arange(prefix, device=score.device), self.statistics.begin
                competing = competing.masked_fill(
                    at_ends(place, begin.unsqueeze(-1), prefix, first, recent), -torch.inf
                )
            return competing.T.flatten().sort(descending=True, stable=True).indices % heads

        return self.once(("heads", id(score), first, recent), make)

    def attention(self, config: EvictionConfig, pooled: bool = True) -> Score:
        """Ā reduced over the group, then pooled: Ā'."""
        kept, how = self.kept_heads(config), config.granularity.options.get("reduce", "mean")
        kind, kernel = _pooling(config, pooled)
        reduced = self.once(("attention", kept, how), lambda: reduce_group(self.statistics.accumulated, kept, how))
        return self.once(("pooled", kept, how, kind, kernel), lambda: pool(reduced, kind, kernel))

    def second_stage(self, config: EvictionConfig, uniform: bool) -> Score:
        """(S₂ + ε) ν, with the group's product as configured; `uniform` replaces ν by 1."""
        kept, pooled = self.kept_heads(config), config.selection.options.get("score") == "pooled"
        key = ("stage 2", kept, config.granularity, _pooling(config, pooled), _epsilon(config))
        return self.once((*key, uniform), lambda: self._product(config, pooled, uniform))

    def _product(self, config: EvictionConfig, pooled: bool, uniform: bool) -> Score:
        kept = self.kept_heads(config)
        norms = self.statistics.norms.to(WORK)
        if uniform:
            norms = torch.ones_like(norms)
        if config.granularity.options.get("product") == "mean-of-products":
            scored = self.statistics.accumulated
            per_head = pool(scored, *_pooling(config, pooled)).repeat_interleave(len(norms) // len(scored), dim=0)
            return reduce_group((per_head + _epsilon(config)) * norms, kept)
        return (self.attention(config, pooled) + _epsilon(config)) * reduce_group(norms, kept)

    def value(self, config: EvictionConfig) -> Score:
        """ν alone."""
        kept = self.kept_heads(config)
        return self.once(("value", kept), lambda: reduce_group(self.statistics.norms.to(WORK), kept))

    def hindsight(self, config: EvictionConfig) -> Score:
        """The realised A·ν."""
        kept, given = self.kept_heads(config), self.statistics
        return self.once(("hindsight", kept), lambda: reduce_group(given.hindsight * given.norms.to(WORK), kept))

    def hindsight_attention(self, config: EvictionConfig) -> Score:
        """The realised A alone."""
        kept = self.kept_heads(config)
        return self.once(("hindsight attention", kept), lambda: reduce_group(self.statistics.hindsight, kept))

    def random(self, config: EvictionConfig) -> Score:
        """Uniform numbers that depend on seed, sample and layer alone, not on the device."""
        kept, given, seed = self.kept_heads(config), self.statistics, config.selection["seed"]
        return self.once(
            ("random", kept, seed),
            lambda: seeded(kept, given.prefix, seed, given.sample, given.layer).to(
                given.norms.device, non_blocking=True
            ),
        )

    def position(self, config: EvictionConfig) -> Score:
        """As the policy ranks places."""
        kept, ranked = self.kept_heads(config), registry.build(config.policy).places()

        def make() -> Score:
            place = torch.arange(self.statistics.prefix, device=self.statistics.norms.device)
            return ranked(place).to(WORK).expand(kept, -1)

        return self.once(("position", kept, ranked), make)

    def _valid(self, score: Score) -> Score:
        valid = self.statistics.valid
        return score if valid is None else score.masked_fill(~valid, -torch.inf)


def _pooling(config: EvictionConfig, pooled: bool) -> tuple[str, int]:
    """Kind and kernel, as the policy pools."""
    return registry.build(config.policy).score.pooling(pooled)


def _epsilon(config: EvictionConfig) -> float:
    return float(config.selection.options.get("epsilon", 0.0))


_UNIFORM = {"two-stage": False, "two-stage-uniform": True}
"""Selections of two stages, and whether they take ν ≡ 1."""

_FIRST: dict[str, Callable[[Scores, EvictionConfig], Score]] = {
    "attention": Scores.attention,
    "attention-unpooled": lambda scores, config: scores.attention(config, pooled=False),
    "two-stage": Scores.attention,
    "two-stage-uniform": Scores.attention,
    "value": Scores.value,
    "random": Scores.random,
    "hindsight": Scores.hindsight,
    "hindsight-attention": Scores.hindsight_attention,
    "position": Scores.position,
}
"""Selection -> the score of its whole set, or of stage 1."""
