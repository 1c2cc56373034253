"""Configurations that attend to selected pages: the pages they select per step, and their rows of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from perturbkv.cache.entries import GatheredSet, borrow
from perturbkv.cache.makers import Entries, PrefilledLayer
from perturbkv.configs.precision import FULL_BITS
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.variants.reader import Reader
from perturbkv.selection.page_selection import PagedLayer, PageGroup, PageReader, page_groups
from perturbkv.selection.resolved_config import ResolvedConfig


@dataclass(frozen=True)
class PagedCacheReader(Reader):
    """The reader of the pages that each query selects."""

    config: ResolvedConfig

    @classmethod
    def groups(
        cls, layer: FullLayer, configs: Sequence[ResolvedConfig], queries: Sequence[Float[Tensor, "head d_head"]]
    ) -> list[PageGroup]:
        """Return the groups of the page-reading configurations in one layer, from one query per step."""
        return page_groups(configs, lambda config: _paged_layer(layer, config), queries, layer.tokens)

    def make(self, layer: PrefilledLayer, kept: GatheredSet) -> Entries:
        """Return all entries, with a reader that selects pages; none where the budget covers the prompt."""
        n, config, row, bounds = layer.tokens, self.config, borrow(layer.prompt_keys, layer.prompt_values), 0
        read, (kv_heads, _, d_head) = config.kept_entries(n), layer.prompt_keys.shape
        if read < n:
            row = replace(row, reader=PageReader(config, _paged_layer(layer, config), n))
            bounds = config.blocks(n).full
        heads = layer.adapter.heads if config.granularity.name == "query" else kv_heads
        return Entries(row, 2 * FULL_BITS * d_head * kv_heads * (n + bounds), heads * read)


def _paged_layer(layer: PrefilledLayer, config: ResolvedConfig) -> PagedLayer:
    """Return a layer split into a configuration's pages, once per page size and window."""
    return layer.once(
        ("pages", config.block, config.window),
        lambda: PagedLayer.from_keys(layer.statistics_of(config), layer.prompt_keys, layer.scale, config.block),
    )
