"""Configurations that read pages, from what a prefill knows of a layer: what they read, and their rows of a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from perturbkv.cache.entries import KeptEntries, borrow
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.prefill import Statistics
from perturbkv.selection.page_selection import Layers, PagedLayer, Reader, ReadGroup, read_groups


def groups(
    adapter: Adapter,
    found: Statistics,
    layer: int,
    configs: Sequence[EvictionConfig],
    keys: Float[Tensor, "kv_head key d_head"],
    queries: Sequence[Float[Tensor, "head d_head"]],
) -> list[ReadGroup]:
    """What each of these configurations that read pages reads in one layer at each step, whose query is given."""
    return read_groups(configs, _paged(adapter, found, layer, keys), queries, found.tokens)


def rows(
    adapter: Adapter,
    found: Statistics,
    layer: int,
    configs: Mapping[int, EvictionConfig],
    keys: Float[Tensor, "kv_head key d_head"],
    values: Float[Tensor, "kv_head key d_head"],
) -> dict[int, KeptEntries]:
    """By their places, the rows of those that read pages: the layer's own entries, borrowed, and who chooses of them.

    A budget that covers the prompt reads everything, as the run does that keeps everything.
    """
    paged, n = _paged(adapter, found, layer, keys), found.tokens
    whole = borrow(keys[:, :n], values[:, :n])
    made = {}
    for place, config in configs.items():
        if config.reads:
            chooses = config.kept_entries(n) < n
            made[place] = replace(whole, reader=Reader(config, paged(config), n)) if chooses else whole
    return made


def _paged(adapter: Adapter, found: Statistics, layer: int, keys: Tensor) -> Layers:
    """One layer of the prompt in pages, made once for each size of them and each window."""
    made: dict[tuple[int, int], PagedLayer] = {}

    def of(config: EvictionConfig) -> PagedLayer:
        key = (config.block, config.window)
        if key not in made:
            statistics = found.scores(layer)(config).statistics
            made[key] = PagedLayer.of(statistics, keys[:, : found.tokens], adapter.scale(layer), config.block)
        return made[key]

    return of
