"""What the pages of one layer are chosen by, for one query: bounds of its logits, and what it really gives each page.

Pages are the blocks before the tail (`configs.blocks`). The softmax of a query's bounds over the pages makes those of
several heads comparable, and leaves each head's own order.

Which pages configurations read that evict nothing: at every step others, as its query chooses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from perturbkv import theory
from perturbkv.selection import ranking
from perturbkv.selection.budgets import Budgets, Rows
from perturbkv.selection.kept_sets import Group, KeptSets, RankingGroup, ranking_groups
from perturbkv.selection.layer_statistics import LayerStatistics, Score
from perturbkv.selection.ranking import Ranking, Scores, rank
from perturbkv.selection.resolved_config import ResolvedConfig
from perturbkv.selection.sparse_lines import LinedGroup
from perturbkv.theory import WORK


@dataclass(frozen=True, eq=False)
class PagedLayer:
    """One layer's prompt in pages.

    Attributes:
        statistics: of the entries before the window.
        keys: of all entries.
        low, high: the smallest and the largest number of each page's keys, channel by channel.
        size: entries of a page.
        scale: factor on the logits.
    """

    statistics: LayerStatistics
    keys: Float[Tensor, "kv_head key d_head"]
    low: Float[Tensor, "kv_head page d_head"]
    high: Float[Tensor, "kv_head page d_head"]
    size: int
    scale: float

    @classmethod
    def of(
        cls, statistics: LayerStatistics, keys: Float[Tensor, "kv_head key d_head"], scale: float, size: int
    ) -> PagedLayer:
        """The pages that are full before the window."""
        count = statistics.prefix // size
        pages = keys[:, : count * size].reshape(len(keys), count, size, keys.shape[-1])
        return cls(statistics, keys, pages.amin(dim=2), pages.amax(dim=2), size, scale)

    def bounds(self, query: Float[Tensor, "head d_head"]) -> Float[Tensor, "head page"]:
        """Scale · Σ_c max(q_c min_c, q_c max_c): no entry of the page has a larger logit (Quest, section 3.3)."""
        asked = query.to(WORK).view(len(self.low), -1, query.shape[-1])
        up, down = asked.clamp(min=0), asked.clamp(max=0)  # which of both ends is the larger is the query's sign
        found = up @ self.high.to(WORK).transpose(1, 2) + down @ self.low.to(WORK).transpose(1, 2)
        return (found * self.scale).flatten(0, 1)

    def realised(self, query: Float[Tensor, "head d_head"]) -> Float[Tensor, "head prefix"]:
        """A over the prompt's entries alone, of those before the window."""
        weights = theory.decode_attention(query, self.keys, self.scale)
        return weights[:, : self.statistics.prefix]


class PageScores(Scores):
    """Scores of a layer's pages for one query; each is computed when it is first asked for."""

    def __init__(self, layer: PagedLayer, query: Float[Tensor, "head d_head"]) -> None:
        super().__init__(layer.statistics)
        self.layer, self.query = layer, query

    def ranking(self, score: Score, config: ResolvedConfig) -> Ranking:
        """The order of a score of pages, best first."""
        return self.once(("ranking", id(score)), lambda: rank(score))

    def attention(self, config: ResolvedConfig, pooled: bool = True) -> Score:
        """Return the softmax of the bounds over the pages, reduced over the group."""
        how = config.granularity.options.get("reduce", "mean")
        return self._once_by("bound", config, how, lambda: self.reduced(config, self._expected(), how))

    def second_stage(self, config: ResolvedConfig, uniform: bool = False) -> Score:
        """Return the same × the largest ν of the page, with the group's product as configured."""
        how, product = (config.granularity.options.get(name, "") for name in ("reduce", "product"))

        def make() -> Score:
            norms = self._largest(config)
            if product == "mean-of-products":
                return self.reduced(config, self._expected() * norms)
            return self.attention(config) * self.reduced(config, norms)

        return self._once_by("refined", config, (how, product, config.euclidean), make)

    def value(self, config: ResolvedConfig) -> Score:
        """Return the largest ν of the page alone."""
        return self._once_by("value", config, config.euclidean, lambda: self.reduced(config, self._largest(config)))

    def random(self, config: ResolvedConfig) -> Score:
        """Return seeded numbers, the same at every step."""
        entries = super().random
        return self._once_by("drawn", config, config.selection["seed"], lambda: self._summed(entries(config)))

    def hindsight(self, config: ResolvedConfig) -> Score:
        """Return Σ A ν of the page under this query."""

        def make() -> Score:
            added = self.layer.realised(self.query) * self.statistics.norms_of(config)
            return self.reduced(config, self._summed(added))

        return self._once_by("given", config, config.euclidean, make)

    def hindsight_attention(self, config: ResolvedConfig) -> Score:
        """Return Σ A of the page under this query."""

        def make() -> Score:
            return self.reduced(config, self._summed(self.layer.realised(self.query)))

        return self._once_by("attended", config, "", make)

    def _once_by(self, name: str, config: ResolvedConfig, how: object, make: Callable[[], Score]) -> Score:
        return self.once((name, self.kept_heads(config), how), make)

    def _expected(self) -> Float[Tensor, "head page"]:
        return self.once("expected", lambda: self.layer.bounds(self.query).softmax(dim=-1))

    def _largest(self, config: ResolvedConfig) -> Float[Tensor, "head page"]:
        norms = self.statistics.norms_of(config)
        return self.once(("largest", config.euclidean), lambda: ranking.block_scores(norms, self.layer.size, "max"))

    def _summed(self, score: Float[Tensor, "rows prefix"]) -> Float[Tensor, "rows page"]:
        return ranking.block_scores(score, self.layer.size, "sum")


Layers = Callable[[ResolvedConfig], PagedLayer]
"""One layer in the pages of a configuration; those with the same pages get the same object."""


@dataclass(frozen=True, eq=False)
class ReadGroup:
    """Configurations that choose pages alike; `steps` are what they read at each decode step.

    What is stored as their kept sets is what they read at the first.
    """

    steps: tuple[RankingGroup, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """Which of the run's configurations they are."""
        return self.steps[0].places

    @property
    def kept_heads(self) -> int:
        """Sets of each configuration."""
        return self.steps[0].kept_heads

    @property
    def budgets(self) -> Budgets:
        """How many pages are read: as many at every step."""
        return self.steps[0].budgets

    def kept_sets(self, rows: Rows = slice(None)) -> KeptSets:
        """Masks of some of the group's configurations at the first step, by their place in it."""
        return self.steps[0].kept_sets(rows)

    def each_step(self, rows: Rows) -> list[KeptSets]:
        """The same at every step."""
        return [step.kept_sets(rows) for step in self.steps]


AnyGroup = Group | ReadGroup | LinedGroup
"""What some configurations keep, read, or look along, in one layer."""


def read_groups(
    configs: Sequence[ResolvedConfig],
    layer: Layers,
    queries: Sequence[Float[Tensor, "head d_head"]],
    prompt_tokens: int,
) -> list[ReadGroup]:
    """What the configurations that read pages read in one layer at each step, whose query is given."""
    places = [place for place, config in enumerate(configs) if config.reads_pages]
    reading = [configs[place] for place in places]
    steps = [_chosen(reading, layer, query, prompt_tokens) for query in queries] if places else []
    return [
        ReadGroup(tuple(replace(step, places=tuple(places[own] for own in step.places)) for step in group))
        for group in zip(*steps, strict=True)
    ]


def _chosen(configs: Sequence[ResolvedConfig], layer: Layers, query: Tensor, tokens: int) -> list[RankingGroup]:
    made: dict[PagedLayer, PageScores] = {}

    def scores(config: ResolvedConfig) -> PageScores:
        paged = layer(config)
        if paged not in made:
            made[paged] = PageScores(paged, query)
        return made[paged]

    return ranking_groups(configs, scores, tokens)


@dataclass(frozen=True, eq=False)
class Reader:
    """What one configuration reads of one layer of `prompt_tokens` entries, whatever query asks."""

    config: ResolvedConfig
    layer: PagedLayer
    prompt_tokens: int

    def __call__(self, query: Float[Tensor, "head query d_head"]) -> Bool[Tensor, "head query key"]:
        """True where a query of a head looks at an entry of the prompt; each chooses for itself."""
        sets = [self._of(one) for one in query.unbind(dim=1)]
        return torch.stack(sets, dim=1).repeat_interleave(len(query) // len(sets[0]), dim=0)

    def _of(self, query: Float[Tensor, "head d_head"]) -> Bool[Tensor, "kept_head key"]:
        (only,) = _chosen([self.config], lambda _: self.layer, query, self.prompt_tokens)
        return only.kept_sets().kept[0]
