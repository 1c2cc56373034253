"""The model's own cache of a prompt, where some layers hold a sliding window, and what a compact cache takes of it.

Layers that are measured keep everything; the others their window and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from perturbkv.cache.compact import CompactLayer
from perturbkv.cache.sliding import SlidingLayer, Window
from perturbkv.models.adapter import Adapter


class _OwnWindow(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """transformers' layer, which keeps a view of everything it was given; this one copies its window out of that."""

    keys: Tensor
    values: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Everything that the new queries may see."""
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values = self.keys.clone(), self.values.clone()
        return found


def full_cache(adapter: Adapter) -> DynamicCache:
    """The model's own cache, empty: measured layers keep everything, others their window."""
    if not adapter.is_mixed:
        return DynamicCache()
    cache = DynamicCache(config=adapter.config)
    cache.layers = [_OwnWindow(layer.sliding_window) if layer.is_sliding else layer for layer in cache.layers]
    return cache


def windows(adapter: Adapter, cache: Cache) -> dict[int, Window]:
    """What the layers that are not measured hold now, by their indices; what is decoded later leaves it as it is."""
    others = sorted(set(range(len(adapter.every_layer))) - set(adapter.layer_indices))
    found = {index: cache.layers[index] for index in others}
    return {
        index: Window(held.keys[0], held.values[0], held.cumulative_length, held.sliding_window)
        for index, held in found.items()
    }


def put_back(cache: Cache, held: Mapping[int, Window]) -> None:
    """Make the layers that are not measured hold what they held when `windows` looked."""
    for index, window in held.items():
        layer: Any = cache.layers[index]
        layer.keys, layer.values = window.keys.unsqueeze(0), window.values.unsqueeze(0)
        layer.cumulative_length = window.seen


def restored(adapter: Adapter, entries: Sequence[tuple[Tensor, Tensor]], held: Mapping[int, Window]) -> DynamicCache:
    """A full cache of these entries of the measured layers (kv_head, entry, d_head), and of the others' windows."""
    cache = full_cache(adapter)
    for index, (keys, values) in zip(adapter.layer_indices, entries, strict=True):
        cache.update(keys.unsqueeze(0), values.unsqueeze(0), index)
    for index, window in held.items():
        cache.layers[index].update(window.keys.unsqueeze(0), window.values.unsqueeze(0))
    put_back(cache, held)
    return cache


def beside(
    adapter: Adapter, compacted: Sequence[CompactLayer], held: Mapping[int, Window]
) -> list[CompactLayer | SlidingLayer]:
    """The layers of a compact cache: the measured ones, and the others' windows where they stand."""
    rows = compacted[0].batch
    found: dict[int, CompactLayer | SlidingLayer] = dict(zip(adapter.layer_indices, compacted, strict=True))
    found |= {index: SlidingLayer(window, adapter.heads, rows) for index, window in held.items()}
    return [found[index] for index in sorted(found)]
