"""Caches as other people write them: the plain one, kept sets, rounded and merged entries, and caches that go on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from perturbkv.models.forward import run_with_cache


def plain(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    cache = DynamicCache()
    run_with_cache(model, input_ids, cache)
    return cache


def kept(model: Any, input_ids: Tensor, attention_mask: Tensor, positions: Sequence[Any] = ()) -> Cache:
    """`positions[layer][kv_head]`, in the order in which they are stored."""
    cache = plain(model, input_ids, attention_mask)
    for layer, sets in zip(cache.layers, positions, strict=True):
        layer.keys = torch.stack([layer.keys[0, head, own] for head, own in enumerate(sets)]).unsqueeze(0)
        layer.values = torch.stack([layer.values[0, head, own] for head, own in enumerate(sets)]).unsqueeze(0)
    return cache


def recent(model: Any, input_ids: Tensor, attention_mask: Tensor, budget: int) -> Cache:
    cache = plain(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, -budget:], layer.values[:, :, -budget:]
    return cache


def rounded(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    cache = plain(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = (32 * layer.keys).round() / 32, (16 * layer.values).round() / 16
    cache.nbytes = 1000
    return cache


def merged(model: Any, input_ids: Tensor, attention_mask: Tensor, weighs: bool = False) -> Cache:
    """Every second entry and the one after it as their mean, with log 2 on its logit if it weighs as two."""
    cache = plain(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = (
            kind[:, :, : kind.shape[2] // 2 * 2].unflatten(2, (-1, 2)).mean(dim=3)
            for kind in (layer.keys, layer.values)
        )
        if weighs:
            layer.bias = torch.full_like(layer.keys[..., 0], 2.0).log()
    return cache


class Window(DynamicLayer):
    """A layer that forgets all but the `most` last entries whenever it gets new ones; these see all that it had."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.seen = most, 0

    def update(self, key_states: Tensor, value_states: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *more, **named)
        self.seen += key_states.shape[2]
        self.keys, self.values = keys[:, :, -self.most :], values[:, :, -self.most :]
        return keys, values

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: Any, *more: Any) -> tuple[int, int]:
        held = self.keys.shape[2] if self.is_initialized else 0
        new = query_length if isinstance(query_length, int) else len(query_length)  # positions, in older transformers
        return held + new, self.seen - held


class Forgetting(Cache):
    def __init__(self, most: int = 12) -> None:
        super().__init__(layer_class_to_replicate=partial(Window, most))


def own_prefill(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """The prompt read in halves, the second without all but the last four entries of the first."""
    cache, half = DynamicCache(), input_ids.shape[1] // 2
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
    run_with_cache(model, input_ids[:, :half], cache, position_ids=positions[:, :half])
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, -4:], layer.values[:, :, -4:]
    run_with_cache(model, input_ids[:, half:], cache, position_ids=positions[:, half:])
    return cache


def in_place(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """The recent entries, with new tokens right behind them: keys turned to 0, 1, … by the model's own angles."""
    cache = recent(model, input_ids, attention_mask, 12)
    gone = input_ids.shape[1] - 12
    cosine, sine = model.model.rotary_emb(cache.layers[0].values, torch.tensor([[-gone]]))
    for layer in cache.layers:
        first, second = layer.keys.chunk(2, dim=-1)
        layer.keys = layer.keys * cosine + torch.cat([-second, first], dim=-1) * sine
    return cache


def _decode_in_place(model: Any, cache: Cache, token: Tensor, step: int) -> Tensor:
    positions = 12 + step + torch.arange(token.shape[1]).unsqueeze(0)
    logits: Tensor = run_with_cache(model, token, cache, position_ids=positions).logits
    return logits


in_place.decode = _decode_in_place  # type: ignore[attr-defined]
