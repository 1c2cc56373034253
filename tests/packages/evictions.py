"""Caches of five packages, as their users make them: `perturbkv audit tests/packages/evictions.py:TinyKVCache`."""

from __future__ import annotations

from typing import Any

from adaptivekv import AdaptiveKVCache
from kvquant import KVCacheQuantizer, KVQuantMSE, kvs_from_cache, quantize_model_cache
from kvquant.compact_cache import CompactKVCache
from nexusquant import E8QuantizedCache, NexusQuantEvictTruncate, compress_kv_cache, nexusquant_evict
from randkv import RandKVConfig
from randkv.transformers import RandKVCache
from tiny_turboquant import TinyKVCache
from torch import Tensor
from transformers import DynamicCache

__all__ = ["AdaptiveKVCache", "E8QuantizedCache", "TinyKVCache"]


def read(model: Any, cache: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
    """Read left-padded prompts into a cache, as `generate` does."""
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    model(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, past_key_values=cache)
    return cache


def randkv(model: Any, input_ids: Tensor, attention_mask: Tensor, spare: int = 1, recent: int = 2) -> RandKVCache:
    """All of the prompt and the last tokens stay, and of the other generated ones `spare`, at random."""
    tokens = input_ids.shape[1]
    config = RandKVConfig(budget=tokens + spare, buffer_size=recent)
    cache = RandKVCache(model_config=model.config, prompt_length=tokens, randkv_config=config)
    return read(model, cache, input_ids, attention_mask)


def lattice(model: Any, input_ids: Tensor, attention_mask: Tensor, keys: int = 3, values: int = 2) -> Any:
    """NexusQuant's cache, which rounds what it is given to a lattice of so many bits."""
    cache = E8QuantizedCache.from_model(model, key_bits=keys, value_bits=values)
    return read(model, cache, input_ids, attention_mask)


def compressed(model: Any, input_ids: Tensor, attention_mask: Tensor) -> DynamicCache:
    """NexusQuant after the prompt was read."""
    cache = read(model, DynamicCache(), input_ids, attention_mask)
    return compress_kv_cache(cache, mode="quant_only", rope_base=model.config.rope_parameters["rope_theta"])


def zeroed(model: Any, input_ids: Tensor, attention_mask: Tensor) -> DynamicCache:
    """NexusQuant's eviction as in its README, for models in half precision."""
    with nexusquant_evict(model, quality="balanced", verbose=False):
        return read(model, DynamicCache(), input_ids, attention_mask)


def truncated(model: Any, input_ids: Tensor, attention_mask: Tensor) -> DynamicCache:
    """NexusQuant's eviction after the prompt was read, which closes the gaps; for float16."""
    if len(input_ids) > 1:
        raise NotImplementedError("one prompt at a time")
    cache = read(model, DynamicCache(), input_ids, attention_mask)
    return NexusQuantEvictTruncate(head_dim=model.config.head_dim, bits=4).compress(cache)[0]


def rotated(model: Any, input_ids: Tensor, attention_mask: Tensor, inner: bool = False) -> DynamicCache:
    """KVQuant++ as its `generate` does, and with its default for keys, the estimator of inner products."""
    config, quantizers = model.config, []
    cache = read(model, DynamicCache(), input_ids, attention_mask)
    for keys, values in kvs_from_cache(cache):
        quantizer = KVCacheQuantizer(
            head_dim=config.head_dim, n_outlier=config.head_dim // 4, k_quantizer_cls=None if inner else KVQuantMSE,
            gqa_factor=config.num_attention_heads // config.num_key_value_heads,
        )  # fmt: skip
        quantizer.calibrate(keys, values)
        quantizers.append(quantizer)
    return quantize_model_cache(cache, quantizers)


def compact(model: Any, input_ids: Tensor, attention_mask: Tensor) -> CompactKVCache:
    """KVQuant++'s cache of codes, which has an attention of its own and hands none to the model's."""
    cache = CompactKVCache(n_layers=model.config.num_hidden_layers, gqa_factor=2).attach_to(model)
    return read(model, cache, input_ids, attention_mask)
