"""A prompt read for its answer: each layer is evicted as soon as it is read, and nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from perturbkv.cache import positions, quantisation
from perturbkv.cache.compact import CompactCache, CompactLayer
from perturbkv.cache.entries import KeptEntries, borrow
from perturbkv.cache.gather import keep, lengths
from perturbkv.cache.stand_in import StandIn
from perturbkv.cache.whole import beside
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.finite import FiniteCheck
from perturbkv.pipeline.sample.prefill import Prefill, Statistics, prefill
from perturbkv.pipeline.variants import corrected, page_reading, quantised
from perturbkv.pipeline.variants.sources import sources
from perturbkv.scoring.layer_view import LayerView
from perturbkv.selection import compatibility

_DEFAULT = Resources()


@dataclass(frozen=True)
class Evicted:
    """A prompt whose cache was evicted while it was read.

    Attributes:
        cache: one row per configuration, behind a row that keeps everything where `with_full` asked for it.
        logits: of the context's last position.
        queries: per layer the last queries (head, query, d_head), as many as the largest window.
    """

    cache: CompactCache
    logits: Float[Tensor, " vocab"]
    queries: list[Tensor]


def read_evicting(
    adapter: Adapter,
    context: Sequence[int],
    configs: Sequence[EvictionConfig],
    sample: str,
    *,
    with_full: bool = False,
    layout: str = "ragged",
    head_scores: Sequence[Sequence[float]] = (),
    above: int = 0,
    resources: Resources = _DEFAULT,
) -> Evicted:
    """Prefill, and evict each layer as soon as it is read: at no time does more than one layer's full cache lie there.

    `with_full` puts a row that keeps everything first, for which all layers stay. So they do until the prompt is read
    where a configuration looks at all layers or at a replay; then one is let go after the other. A prompt of at most
    `above` entries is kept whole, for compressions that come later.

    Raises what `positions.check` raises.
    """
    positions.check(configs, adapter.config, adapter.name)
    whole = len(context) <= above
    waits = not whole and any(compatibility.needs_all_layers(config) for config in configs)
    given = sources(adapter, context, [] if whole else configs, {})
    rows = _Rows(adapter, configs, with_full, layout, whole)
    take = rows.remember if waits else rows.take
    read = prefill(adapter, context, configs, resources, sample, head_scores, take, given, whole=waits)
    read.finite.raise_if_not(sample)
    if waits:
        rows.evict_all(read)
    rows.stored.raise_if_not(sample)
    behind = [0] * len(configs) if whole else positions.behind(configs, len(context))
    cache = CompactCache(beside(adapter, rows.layers, read.windows), [*([0] if with_full else []), *behind])
    return Evicted(cache, read.logits, rows.queries)


class _Rows:
    """The rows of the cache to be, layer by layer: one that keeps everything where it is asked for, and `configs`."""

    def __init__(
        self, adapter: Adapter, configs: Sequence[EvictionConfig], with_full: bool, layout: str, whole: bool
    ) -> None:
        self._adapter, self._configs, self._with_full, self._layout = adapter, configs, with_full, layout
        self._whole = whole or not configs
        self._window = max((config.window for config in configs), default=1)
        self.layers: list[CompactLayer] = []
        self.queries: list[Tensor] = []
        self.stored = FiniteCheck()

    def remember(self, found: Statistics, seen: LayerView) -> None:
        """Of a layer that is evicted later its last queries."""
        self.queries.append(seen.queries[:, -self._window :].clone())

    def take(self, found: Statistics, seen: LayerView) -> None:
        """A layer that was read."""
        self.remember(found, seen)
        self._evict(found, seen.layer, seen.keys, seen.values)

    def evict_all(self, read: Prefill) -> None:
        """All layers of a prompt that was read, each let go when it is evicted."""
        for layer in range(len(self._adapter.layers)):
            held = self._adapter.held(read.cache, layer)
            self._evict(read.statistics, layer, held.keys[0], held.values[0])
            held.keys, held.values = held.keys.new_empty(0), held.values.new_empty(0)

    def _evict(self, found: Statistics, layer: int, keys: Tensor, values: Tensor) -> None:
        kept, stand_ins = (self._all(keys, values), {}) if self._whole else self._kept(found, layer, keys, values)
        for row, config in zip(kept, self._configs, strict=True):
            if config.quantised:
                quantised.look(self.stored, self._adapter.layer_indices[layer], row)
        everything = [borrow(keys, values)] if self._with_full else []
        by_row = {place + len(everything): one for place, one in stand_ins.items()}
        rows, heads = [*everything, *kept], self._adapter.heads
        self.layers.append(CompactLayer(rows, heads, found.tokens, self._layout, stand_ins=by_row))

    def _all(self, keys: Tensor, values: Tensor) -> list[KeptEntries]:
        row = borrow(keys, values)
        return [quantisation.quantised(row, one) if one.quantised else row for one in self._configs]

    def _kept(
        self, found: Statistics, layer: int, keys: Tensor, values: Tensor
    ) -> tuple[list[KeptEntries], dict[int, StandIn]]:
        """What each configuration keeps, and what stands in for what it does not."""
        configs = self._configs
        read = page_reading.rows(self._adapter, found, layer, dict(enumerate(configs)), keys, values)
        if len(read) == len(configs):
            return [read[place] for place in range(len(configs))], {}
        chosen = found.groups(configs, layer, keys, values)
        (counts,) = lengths([chosen], len(configs), keys.device)
        kept = keep(chosen, range(len(configs)), counts, keys, values)
        means = found.mean_queries
        made = corrected.corrections(self._adapter, layer, kept.entries, configs, means, (keys, values), found.tokens)
        kept = quantisation.stored(positions.in_cache(kept, configs, self._adapter.frequencies), configs)
        stand_ins = {place: one.stand_in for place, one in made.items()}
        held = kept.entries | read
        return [held[place] for place in range(len(configs))], stand_ins
