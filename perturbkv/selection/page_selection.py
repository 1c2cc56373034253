"""Selection of the pages that configurations read which evict nothing: at every step those that its query chooses.

Pages are the blocks before the tail (`configs.selections.Blocks`). They are chosen by bounds of the query's logits, or
by the attention that it really gives them. The softmax of a query's bounds over the pages makes those of several heads
comparable, and preserves each head's own order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from perturbkv import theory
from perturbkv.selection.budgets import Budgets, Rows
from perturbkv.selection.kept_sets import Group, KeptSets, RankingGroup, ranking_groups
from perturbkv.selection.layer_statistics import LayerStatistics, Score
from perturbkv.selection.ranking import Ranking, Scores, block_scores, rank
from perturbkv.selection.resolved_config import ResolvedConfig
from perturbkv.selection.sparse_lines import SparsePrefillGroup
from perturbkv.theory import WORK


@dataclass(frozen=True, eq=False)
class PagedLayer:
    """One layer's prompt in pages.

    Attributes:
        statistics: scores and norms of the entries before the window.
        keys: keys of all entries.
        low, high: minimum and maximum of each page's keys, channel by channel.
        size: entries of a page.
        softmax: how logits become weights.
    """

    statistics: LayerStatistics
    keys: Float[Tensor, "kv_head key d_key"]
    low: Float[Tensor, "kv_head page d_key"]
    high: Float[Tensor, "kv_head page d_key"]
    size: int
    softmax: theory.Softmax

    @classmethod
    def from_keys(
        cls, statistics: LayerStatistics, keys: Float[Tensor, "kv_head key d_key"], softmax: theory.Softmax, size: int
    ) -> PagedLayer:
        """Return the layer divided into full pages of `size` entries before the window."""
        count = statistics.prefix // size
        pages = keys[:, : count * size].reshape(len(keys), count, size, keys.shape[-1])
        return cls(statistics, keys, pages.amin(dim=2), pages.amax(dim=2), size, softmax)

    def bounds(self, query: Float[Tensor, "head d_key"]) -> Float[Tensor, "head page"]:
        """Return an upper bound of each page's logits: scale · Σ_c max(q_c min_c, q_c max_c) (Quest, section 3.3).

        A soft cap grows with the logit, so that the capped bound is one of the capped logits.
        """
        grouped = query.to(WORK).view(len(self.low), -1, query.shape[-1])
        positive, negative = grouped.clamp(min=0), grouped.clamp(max=0)  # the sign decides which end gives the maximum
        bounds = positive @ self.high.to(WORK).transpose(1, 2) + negative @ self.low.to(WORK).transpose(1, 2)
        return self.softmax.cap_logits(bounds * self.softmax.scale).flatten(0, 1)

    def attention_weights(self, query: Float[Tensor, "head d_key"]) -> Float[Tensor, "head prefix"]:
        """Return A, the query's attention weights on the entries before the window, of a softmax over all entries.

        It is over the entries alone, without the heads' sinks.
        """
        weights = theory.decode_attention(query, self.keys, replace(self.softmax, sinks=None))
        return weights[:, : self.statistics.prefix]


class PageScores(Scores):
    """Scores of a layer's pages for one query; each is computed on first use."""

    def __init__(self, layer: PagedLayer, query: Float[Tensor, "head d_key"]) -> None:
        super().__init__(layer.statistics)
        self.layer = layer
        self.query = query

    def ranking(self, score: Score, config: ResolvedConfig) -> Ranking:
        """Return the ranking of the pages by descending score."""
        return self.once(("ranking", id(score)), lambda: rank(score))

    def attention(self, config: ResolvedConfig, pooled: bool = True) -> Score:
        """Return each page's softmax weight of the logit bounds, reduced over the group of query heads."""
        reduction = config.granularity.options.get("reduce", "mean")
        return self._compute_once(
            "bound", config, reduction, lambda: self.reduce(config, self._page_weights(), reduction)
        )

    def second_stage(self, config: ResolvedConfig, uniform: bool = False) -> Score:
        """Return the score of stage 2: `attention` times the page's largest value norm ν."""
        reduction, product = (config.granularity.options.get(name, "") for name in ("reduce", "product"))

        def make() -> Score:
            norms = self._largest_norms(config)
            if product == "mean-of-products":
                return self.reduce(config, self._page_weights() * norms)
            return self.attention(config) * self.reduce(config, norms)

        return self._compute_once("refined", config, (reduction, product, config.euclidean), make)

    def value(self, config: ResolvedConfig) -> Score:
        """Return the largest value norm ν of each page."""
        return self._compute_once(
            "value", config, config.euclidean, lambda: self.reduce(config, self._largest_norms(config))
        )

    def random(self, config: ResolvedConfig) -> Score:
        """Return seeded random scores of the pages, the same at every step."""
        entries = super().random
        return self._compute_once("drawn", config, config.selection["seed"], lambda: self._page_sums(entries(config)))

    def hindsight(self, config: ResolvedConfig) -> Score:
        """Return Σ A ν over the entries of each page, with the query's true attention weights A."""

        def make() -> Score:
            added = self.layer.attention_weights(self.query) * self.statistics.selected_norms(config)
            return self.reduce(config, self._page_sums(added))

        return self._compute_once("given", config, config.euclidean, make)

    def hindsight_attention(self, config: ResolvedConfig) -> Score:
        """Return Σ A over the entries of each page, with the query's true attention weights A."""

        def make() -> Score:
            return self.reduce(config, self._page_sums(self.layer.attention_weights(self.query)))

        return self._compute_once("attended", config, "", make)

    def _compute_once(self, name: str, config: ResolvedConfig, options: object, make: Callable[[], Score]) -> Score:
        """Return the result of `make`, cached by name, number of kept sets and `options`."""
        return self.once((name, self.kept_heads(config), options), make)

    def _page_weights(self) -> Float[Tensor, "head page"]:
        """Return each page's softmax weight of the logit bounds, per query head."""
        return self.once("expected", lambda: self.layer.bounds(self.query).softmax(dim=-1))

    def _largest_norms(self, config: ResolvedConfig) -> Float[Tensor, "head page"]:
        """Return the largest value norm ν of each page, per query head."""
        norms = self.statistics.selected_norms(config)
        return self.once(("largest", config.euclidean), lambda: block_scores(norms, self.layer.size, "max"))

    def _page_sums(self, score: Float[Tensor, "rows prefix"]) -> Float[Tensor, "rows page"]:
        """Return the score summed over the entries of each page."""
        return block_scores(score, self.layer.size, "sum")


PagesOfConfig = Callable[[ResolvedConfig], PagedLayer]
"""Function from a configuration to one layer in pages; the same object for configurations with the same pages."""


@dataclass(frozen=True, eq=False)
class PageGroup:
    """Configurations with the same ranking of pages.

    The entries that they read at the first step are stored as their kept sets.

    Attributes:
        steps: at each decode step the group with the pages that they read.
    """

    steps: tuple[RankingGroup, ...]

    @property
    def config_indices(self) -> tuple[int, ...]:
        """Indices of the configurations in the run."""
        return self.steps[0].config_indices

    @property
    def kept_heads(self) -> int:
        """Number of kept sets per configuration."""
        return self.steps[0].kept_heads

    @property
    def budgets(self) -> Budgets:
        """Numbers of pages that a step reads."""
        return self.steps[0].budgets

    def kept_sets(self, rows: Rows = slice(None)) -> KeptSets:
        """Return the masks of entries read at the first step, for the configurations in the slice `rows`."""
        return self.steps[0].kept_sets(rows)

    def kept_sets_per_step(self, rows: Rows) -> list[KeptSets]:
        """Return the masks of entries read by the configurations in the slice `rows`: one for each step."""
        return [step.kept_sets(rows) for step in self.steps]


AnyGroup = Group | PageGroup | SparsePrefillGroup
"""Configurations with the entries of one layer that they keep, read, or attend to in the prefill."""


def page_groups(
    configs: Sequence[ResolvedConfig],
    layer: PagesOfConfig,
    queries: Sequence[Float[Tensor, "head d_key"]],
    prompt_tokens: int,
) -> list[PageGroup]:
    """Return the groups of the page-reading configurations in one layer, with one query per step.

    `layer` is called per configuration; configurations that read no pages are left out.
    """
    indices = [index for index, config in enumerate(configs) if config.reads_pages]
    readers = [configs[index] for index in indices]
    steps = [_page_ranking_groups(readers, layer, query, prompt_tokens) for query in queries] if indices else []

    def with_run_indices(step: RankingGroup) -> RankingGroup:
        return replace(step, config_indices=tuple(indices[index] for index in step.config_indices))

    return [PageGroup(tuple(map(with_run_indices, group))) for group in zip(*steps, strict=True)]


def _page_ranking_groups(
    configs: Sequence[ResolvedConfig], layer: PagesOfConfig, query: Tensor, tokens: int
) -> list[RankingGroup]:
    """Return the groups of the page-reading configurations with equal page rankings, for one query."""

    @functools.cache
    def page_scores(paged: PagedLayer) -> PageScores:
        return PageScores(paged, query)

    return ranking_groups(configs, lambda config: page_scores(layer(config)), tokens)


@dataclass(frozen=True, eq=False)
class PageReader:
    """Function from queries to the entries that a configuration reads in one layer of `prompt_tokens` entries."""

    config: ResolvedConfig
    layer: PagedLayer
    prompt_tokens: int

    def __call__(self, query: Float[Tensor, "head query d_key"]) -> Bool[Tensor, "head query key"]:
        """Return the mask of the prompt's entries that each query of each head reads."""
        sets = [self._kept_sets(each) for each in query.unbind(dim=1)]
        return torch.stack(sets, dim=1).repeat_interleave(len(query) // len(sets[0]), dim=0)

    def _kept_sets(self, query: Float[Tensor, "head d_key"]) -> Bool[Tensor, "kept_head key"]:
        """Return the mask of the entries in the pages read for one query."""
        (group,) = _page_ranking_groups([self.config], lambda _: self.layer, query, self.prompt_tokens)
        return group.kept_sets().kept[0]
