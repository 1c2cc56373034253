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
    """Return the groups of the page-reading configurations in one layer, from one query per step."""
    return page_groups(configs, _page_maker(layer), queries, layer.tokens)


def cache_rows(layer: FullLayer, configs: Mapping[int, ResolvedConfig]) -> dict[int, KeptEntries]:
    """Return index -> cache row of the page-reading configurations: all entries, with a reader that selects pages.

    Where the budget covers the prompt there is no reader, as in the row that keeps everything.
    """
    paged, n = _page_maker(layer), layer.tokens
    everything = borrow(layer.prompt_keys, layer.prompt_values)
    rows = {}
    for index, config in configs.items():
        if config.reads_pages:
            selects = config.kept_entries(n) < n
            rows[index] = replace(everything, reader=PageReader(config, paged(config), n)) if selects else everything
    return rows


def _page_maker(layer: FullLayer) -> PagesOfConfig:
    """Return a function from a configuration to the layer split into pages, cached by page size and window."""
    layers: dict[tuple[int, int], PagedLayer] = {}

    def paged_layer(config: ResolvedConfig) -> PagedLayer:
        key = (config.block, config.window)
        if key not in layers:
            statistics = layer.statistics.scores(layer.index)(config).statistics
            layers[key] = PagedLayer.from_keys(statistics, layer.prompt_keys, layer.scale, config.block)
        return layers[key]

    return paged_layer
