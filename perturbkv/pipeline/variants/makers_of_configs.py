"""The maker of every configuration's cache: of kept sets, or a reader of the full cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from perturbkv.cache.makers import Maker, maker_of_kept_sets
from perturbkv.configs.cache_contents import EVICTED, PAGES_READ, SPARSE_PREFILL, CacheContents
from perturbkv.pipeline.variants.page_reading import PagedCacheReader
from perturbkv.pipeline.variants.reader import Reader
from perturbkv.pipeline.variants.sparse_prefill import SparsePrefillReader
from perturbkv.selection.resolved_config import ResolvedConfig

_MAKERS: Mapping[CacheContents, Callable[[ResolvedConfig], Maker]] = {
    EVICTED: maker_of_kept_sets,
    PAGES_READ: PagedCacheReader,
    SPARSE_PREFILL: SparsePrefillReader,
}


def maker_of(config: ResolvedConfig) -> Maker:
    """Return the maker of a configuration's cache, the same object in all layers and prompts of a run."""
    return config.once(Maker, lambda: _MAKERS[config.cache_contents](config))


def readers_of(configs: Sequence[ResolvedConfig]) -> list[type[Reader]]:
    """Return the kinds of readers of the full cache that the configurations have, in a fixed order."""
    makers = list(map(maker_of, configs))
    return [
        kind for kind in (PagedCacheReader, SparsePrefillReader) if any(isinstance(maker, kind) for maker in makers)
    ]
