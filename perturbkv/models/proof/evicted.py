"""Whether decoding from an evicted cache equals a forward pass in which the evicted entries are masked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from perturbkv.models.attention_facts import Facts, LayerFacts, RefusedError, measured_layers
from perturbkv.models.interface import AttentionFunction, implementation, intercept
from perturbkv.models.proof.calls import LOGIT_ERRORS, probe_text, read_tokens, recompute
from perturbkv.models.proof.masks import pattern, visible
from perturbkv.models.proof.parts import observe_part

_ERRORS = LOGIT_ERRORS | {torch.float32: 1e-3}
"""Relative rounding error that logits of an evicted cache may have after `_LAYERS` layers; it grows with their number
up to `LOGIT_ERRORS`."""
_LAYERS = 8


@torch.no_grad()
def check_evicted(model: Any, facts: Facts) -> None:
    """Raise RefusedError unless decoding from an evicted cache equals a forward pass in which the evicted are masked.

    As in the toolkit's own decoding, the cache is another object, it gives a layer its new entries alone, and attention
    finds the others. Each query head of a measured layer keeps other entries; what no head of a group keeps is NaN.
    """
    ids, layers = probe_text(model), model.get_submodule(facts.path)
    attentions = {
        index: layers[index].get_submodule(layer.attention) for index, layer in enumerate(facts.layers) if layer.attends
    }
    kept, generator = dict[int, Tensor](), torch.Generator().manual_seed(0)
    for index in measured_layers(facts.layers):
        if (owner := facts.layers[index].owner) is not None:
            kept[index] = kept[owner]
            continue
        held = torch.rand(facts.layers[index].heads, ids.shape[1], generator=generator) < 0.4
        held[:, -1] = True
        kept[index] = held.to(ids.device)
    naive = _NaiveAttention(
        facts.layers, {id(module): index for index, module in attentions.items()}, kept, ids.shape[1]
    )
    with intercept(implementation(model), list(attentions.values()), naive):
        expected = read_tokens(model, ids)[0, -1].double()
    cache = DynamicCache(config=model.config)
    calls, _ = observe_part(model, ids[:, :-1], cache, attentions)
    for index, call in calls:
        if (owner := facts.layers[index].owner) is not None:
            naive.entries[index] = naive.entries[owner]
            continue
        cached = cache.layers[index]
        read = (call.key, call.value) if facts.layers[index].latent else (cached.keys, cached.values)
        if index in kept:
            _empty_evicted(read, kept[index])
        if type(cached) in (DynamicLayer, DynamicSlidingWindowLayer):
            naive.entries[index] = read
            cache.layers[index] = _NewAlone(cached.get_seq_length())
    evicted = DynamicCache(config=model.config)
    evicted.layers = cache.layers
    with intercept(implementation(model), list(attentions.values()), naive):
        found = read_tokens(model, ids[:, -1:], evicted)[0, -1].double()
    error = min(_ERRORS[model.dtype] * max(1, len(facts.layers) / _LAYERS), LOGIT_ERRORS[model.dtype])
    bound = error * float((expected - expected.mean()).norm())
    if bool(expected.isfinite().all()) and not float((found - expected).norm()) <= bound:
        raise RefusedError("evicted", "decodes from an evicted cache otherwise than with the evicted entries masked")


@dataclass
class _NaiveAttention:
    """Attention whose last query sees what its heads keep: an attention replacement.

    Attributes:
        layers: facts of all layers.
        indices: identity of an attention module -> its layer.
        kept: layer -> which tokens of the text each head's last query sees (head, token).
        tokens: number of the text's tokens.
        entries: layer -> keys and values of the earlier tokens, where the cache gives the new ones alone.
    """

    layers: Sequence[LayerFacts]
    indices: Mapping[int, int]
    kept: Mapping[int, Tensor]
    tokens: int
    entries: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return softmax attention over the entries that each query sees, and no weights."""
        query, key, value, mask = args[:4]
        index = self.indices[id(module)]
        if index in self.entries:
            key, value = (torch.cat(pair, dim=2) for pair in zip(self.entries[index], (key, value), strict=True))
            layer, tokens = self.layers[index], torch.arange(self.tokens, device=key.device)
            mask = pattern(layer.kind, layer.window, tokens[-1:], tokens[-key.shape[2] :]).unsqueeze(0)
        seen = visible(mask, query, key).expand(*query.shape[:2], -1, -1).clone()
        if index in self.kept:
            seen[:, :, -1] &= self.kept[index][:, -key.shape[2] :].to(seen.device)
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        found = recompute(query, key, value.nan_to_num(), seen, scale, kwargs.get("softcap"), kwargs.get("s_aux"))
        return found.to(query.dtype).contiguous(), None


class _NewAlone(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer as those of an evicted cache: its update gives the new tokens alone, and it shows no entries."""

    is_sliding = False

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen, self.keys, self.values, self.is_initialized = seen, None, None, True

    def lazy_initialization(self, *states: Tensor) -> None:
        """Do nothing, as nothing is stored."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new tokens' keys and values."""
        self.seen += key_states.shape[2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the position of the next token."""
        return self.seen

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return (length, offset) of transformers' mask, which is not looked at."""
        queries = len(query_length) if isinstance(query_length, Tensor) else query_length
        return self.seen + queries, 0

    def get_max_length(self) -> int:
        """Return −1, as the length is unlimited."""
        return -1

    get_max_cache_shape = get_max_length


def _empty_evicted(read: tuple[Tensor, Tensor], kept: Tensor) -> None:
    """Set to NaN the keys and values that no query head of a group keeps; `kept` is (head, token)."""
    _, kv_heads, entries, _ = read[0].shape
    held = kept.view(kv_heads, -1, kept.shape[1]).any(dim=1)[:, -entries - 1 : -1].to(read[0].device)
    for tensor in read:
        tensor[0].masked_fill_(~held.unsqueeze(-1), math.nan)
