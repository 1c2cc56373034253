"""Entries of a full cache chosen by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perturbkv.cache.compact import CompactCache, CompactLayer, full_cache, join_layers, prompt_states
from perturbkv.cache.entries import KeptEntries, borrow
from perturbkv.models.adapter import Adapter
from tests.support.models import token_ids

Positions = list[Tensor]
TOKENS = 40
"""Length of the text of which entries are kept by hand."""


def gather(key: Tensor, value: Tensor, positions: Sequence[Tensor]) -> KeptEntries:
    """One (kept,) of positions per kept set, out of (kv_head, key, d_head)."""
    sharing = len(positions) // len(key)
    keys = [key[head // sharing, kept] for head, kept in enumerate(positions)]
    return KeptEntries.of(keys, [value[head // sharing, kept] for head, kept in enumerate(positions)])


def kept_positions(counts: Sequence[int], seed: int) -> Positions:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(TOKENS, generator=generator)[:count].sort().values for count in counts]


def compact(adapter: Adapter, positions: Sequence[Sequence[Positions | None]]) -> CompactCache:
    """positions[measured layer][row][kept set]; None keeps everything."""
    cache, layers = full_cache(adapter), []
    with torch.inference_mode():
        adapter.model(input_ids=torch.tensor([token_ids(TOKENS)]), past_key_values=cache)
    for place, rows in enumerate(positions):
        keys, values = adapter.cache_layer(cache, place).keys[0], adapter.cache_layer(cache, place).values[0]
        entries = [borrow(keys, values) if row is None else gather(keys, values, row) for row in rows]
        layers.append(CompactLayer(entries, adapter.heads, TOKENS))
    return CompactCache(join_layers(adapter, layers, prompt_states(adapter, cache)))
