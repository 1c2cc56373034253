"""Configurations that attend to selected pages: the pages they select per step, and their rows of a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from perturbkv.cache.entries import KeptEntries, borrow
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.selection.page_selection import PagedLayer, PageGroup, PageReader, PagesOfConfig, page_groups
from perturbkv.selection.resolved_config import ResolvedConfig


def read_page_groups(
    layer: FullLayer, configs: Sequence[ResolvedConfig], queries: Sequence[Float[Tensor, "head d_head"]]
) -> list[PageGroup]:
    """Return the entries that page-reading configurations attend to in one layer, for each step's query."""
    return page_groups(configs, _page_maker(layer), queries, layer.tokens)


def cache_rows(layer: FullLayer, configs: Mapping[int, ResolvedConfig]) -> dict[int, KeptEntries]:
    """Return the cache rows of page-reading configurations: the layer's entries, borrowed, with a reader.

    Where the budget covers the prompt there is no reader, as in the row that keeps everything.
    """
    paged, n = _page_maker(layer), layer.tokens
    whole = borrow(layer.prompt_keys, layer.prompt_values)
    made = {}
    for index, config in configs.items():
        if config.reads_pages:
            chooses = config.kept_entries(n) < n
            made[index] = replace(whole, reader=PageReader(config, paged(config), n)) if chooses else whole
    return made


def _page_maker(layer: FullLayer) -> PagesOfConfig:
    """Return a function from a configuration to the layer in pages, computed once per page size and window."""
    made: dict[tuple[int, int], PagedLayer] = {}

    def of(config: ResolvedConfig) -> PagedLayer:
        key = (config.block, config.window)
        if key not in made:
            statistics = layer.statistics.scores(layer.index)(config).statistics
            made[key] = PagedLayer.from_keys(statistics, layer.prompt_keys, layer.scale, config.block)
        return made[key]

    return of
