"""Caches of three packages, measured beside SnapKV:

    perturbkv heads --dataset needle --compare snapkv:attention,cache:examples/measure_packages.py:turboquant

Each reads the prompt as the package's users do and returns its cache. Where the cache is the package's own class, it is
called token by token; entries that were rounded in a plain `DynamicCache` are measured as they are.
"""

import torch
from nexusquant import compress_kv_cache
from randkv import RandKVConfig
from randkv.transformers import RandKVCache
from tiny_turboquant import TinyKVCache
from transformers import DynamicCache


def randkv(model, input_ids, attention_mask, spare=1, recent=2):
    """Keep the prompt, the `recent` last tokens, and of the other generated ones `spare`, drawn at random."""
    tokens = input_ids.shape[1]
    config = RandKVConfig(budget=tokens + spare, buffer_size=recent)
    cache = RandKVCache(model_config=model.config, prompt_length=tokens, randkv_config=config)
    return _read(model, cache, input_ids)


def turboquant(model, input_ids, attention_mask, preset="safe"):
    """Store all but the last 128 entries in few bits: keys per channel, values per token."""
    cache = _read(model, TinyKVCache(compression=preset), input_ids)
    tensors = [one for layer in cache.layers for one in vars(layer).values() if isinstance(one, torch.Tensor)]
    cache.nbytes = sum(one.numel() * min(one.element_size(), 2) for one in tensors)  # codes, and numbers of 16 bits
    return cache


def nexusquant(model, input_ids, attention_mask):
    """Round the keys and values of a finished prompt to a lattice."""
    cache = _read(model, DynamicCache(), input_ids)
    return compress_kv_cache(cache, mode="quant_only", rope_base=model.config.rope_parameters["rope_theta"])


def _read(model, cache, input_ids):
    model(input_ids=input_ids, past_key_values=cache)
    return cache
