"""Configurations that read pages, from what a prefill knows of a layer: what they read, and their rows of a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from perturbkv.cache.entries import KeptEntries, borrow
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.selection.page_selection import PagedLayer, PageGroup, PageReader, PagesOfConfig, page_groups
from perturbkv.selection.resolved_config import ResolvedConfig


def groups(
    layer: FullLayer, configs: Sequence[ResolvedConfig], queries: Sequence[Float[Tensor, "head d_head"]]
) -> list[PageGroup]:
    """Return what the configurations that read pages read in one layer at each step, whose query is given."""
    return page_groups(configs, _paged(layer), queries, layer.tokens)


def rows(layer: FullLayer, configs: Mapping[int, ResolvedConfig]) -> dict[int, KeptEntries]:
    """Return the rows of those that read pages, by index: the layer's own entries, borrowed, and who chooses of them.

    A budget that covers the prompt reads everything, as the run does that keeps everything.
    """
    paged, n = _paged(layer), layer.tokens
    whole = borrow(layer.prompt_keys, layer.prompt_values)
    made = {}
    for index, config in configs.items():
        if config.reads_pages:
            chooses = config.kept_entries(n) < n
            made[index] = replace(whole, reader=PageReader(config, paged(config), n)) if chooses else whole
    return made


def _paged(layer: FullLayer) -> PagesOfConfig:
    """Return what gives the layer in pages, made once for each size of them and each window."""
    made: dict[tuple[int, int], PagedLayer] = {}

    def of(config: ResolvedConfig) -> PagedLayer:
        key = (config.block, config.window)
        if key not in made:
            statistics = layer.statistics.scores(layer.index)(config).statistics
            made[key] = PagedLayer.from_keys(statistics, layer.prompt_keys, layer.scale, config.block)
        return made[key]

    return of
