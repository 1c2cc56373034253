"""The maker of every configuration's cache: of kept sets, or a reader of the full cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from perturbkv.cache.makers import Maker, evicting_maker
from perturbkv.configs.holdings import EVICTED, PAGES_READ, SPARSE_PREFILL, Holding
from perturbkv.pipeline.variants.page_reading import PageReading
from perturbkv.pipeline.variants.reader import Reader
from perturbkv.pipeline.variants.sparse_prefill import LineReading
from perturbkv.selection.resolved_config import ResolvedConfig

_MAKERS: Mapping[Holding, Callable[[ResolvedConfig], Maker]] = {
    EVICTED: evicting_maker,
    PAGES_READ: PageReading,
    SPARSE_PREFILL: LineReading,
}


def maker_of(config: ResolvedConfig) -> Maker:
    """Return the maker of a configuration's cache, the same object in all layers and prompts of a run."""
    return config.once(Maker, lambda: _MAKERS[config.holding](config))


def readers_of(configs: Sequence[ResolvedConfig]) -> list[type[Reader]]:
    """Return the kinds of readers of the full cache that the configurations have, in a fixed order."""
    makers = list(map(maker_of, configs))
    return [kind for kind in (PageReading, LineReading) if any(isinstance(maker, kind) for maker in makers)]
