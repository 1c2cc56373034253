from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

from perturbkv.cache import CompactCache, gather
from perturbkv.capture import decode_from
from perturbkv.errors import ConfigError
from perturbkv.models import Adapter
from tests.support.models import HEADS, tiny_adapter, token_ids

N, STEPS = 40, 20


def full_cache(adapter: Adapter) -> DynamicCache:
    cache = DynamicCache()
    with torch.inference_mode():
        adapter.model(input_ids=torch.tensor([token_ids(N)]), past_key_values=cache)
    return cache


def kept_positions(kept_heads: int, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(N, generator=generator)[:count].sort().values for _ in range(kept_heads)])


def compact(cache: DynamicCache, positions: list[list[torch.Tensor]]) -> CompactCache:
    """positions[layer][row]"""
    entries = [
        [gather(layer.keys[0], layer.values[0], row) for row in rows]
        for layer, rows in zip(cache.layers, positions, strict=True)
    ]
    return CompactCache(entries, N)


def masked_logits(adapter: Adapter, tokens: list[int], positions: list[torch.Tensor]) -> torch.Tensor:
    """Decode one by one from the full cache, evicted entries masked in each layer and head by hand."""
    from perturbkv.capture import intercept_attention

    cache, logits = full_cache(adapter), []

    def attend(stock, module, args, kwargs):  # type: ignore[no-untyped-def]
        query, key, value = args[:3]
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        kept = positions[module.layer_idx]
        kept = kept.repeat_interleave(query.shape[1] // len(kept), dim=0)
        mask = torch.ones(query.shape[1], key.shape[2], dtype=torch.bool)
        mask[:, :N] = False
        mask.scatter_(1, kept, True)
        scores = (query @ key.transpose(2, 3) * kwargs["scaling"]).masked_fill(~mask[None, :, None], -torch.inf)
        return (scores.softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None

    with torch.inference_mode(), intercept_attention(adapter, attend):
        for token in tokens:
            logits.append(adapter.model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("granularity", ["query", "kv"])
def test_decoding_equals_the_masked_full_cache(heads: tuple[int, int], granularity: str) -> None:
    adapter = tiny_adapter("llama", *heads)
    kept_heads = adapter.heads if granularity == "query" else adapter.kv_heads
    counts = (9, 25, 9)
    positions = [
        [kept_positions(kept_heads, count, seed=10 * layer + row) for row, count in enumerate(counts)]
        for layer in range(len(adapter.layers))
    ]
    tokens = list(token_ids(STEPS, seed=5))
    cache = compact(full_cache(adapter), positions)
    found = []
    with torch.inference_mode(), decode_from(adapter, cache):
        for token in tokens:
            ids = torch.full((len(counts), 1), token)
            found.append(adapter.model(input_ids=ids, past_key_values=cache).logits[:, -1])
    for row in range(len(counts)):
        expected = masked_logits(adapter, tokens, [rows[row] for rows in positions])
        relative = (torch.stack(found)[:, row] - expected).abs().max() / expected.abs().max()
        assert relative < 1e-5


def test_several_tokens_at_once_equal_one_by_one() -> None:
    adapter = tiny_adapter()
    positions = [[kept_positions(adapter.heads, 12, seed=layer)] for layer in range(len(adapter.layers))]
    tokens = torch.tensor([token_ids(6, seed=2)])
    logits = []
    for pieces in (tokens.split(6, dim=1), tokens.split(1, dim=1)):
        cache = compact(full_cache(adapter), positions)
        with torch.inference_mode(), decode_from(adapter, cache):
            made = [adapter.model(input_ids=piece, past_key_values=cache).logits for piece in pieces]
        logits.append(torch.cat(made, dim=1))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_bytes_are_what_the_budgets_say() -> None:
    adapter = tiny_adapter()
    rows = [(adapter.heads, 9), (adapter.kv_heads, 25), (adapter.heads, 9)]
    positions = [[kept_positions(*row, seed=1) for row in rows] for _ in adapter.layers]
    entries = sum(heads * count for heads, count in rows) * len(adapter.layers)
    assert compact(full_cache(adapter), positions).nbytes == entries * 2 * adapter.d_head * 4


def test_the_full_cache_is_released() -> None:
    adapter = tiny_adapter()
    full = full_cache(adapter)
    watched = [weakref.ref(tensor) for layer in full.layers for tensor in (layer.keys, layer.values)]
    storages = {layer.keys.untyped_storage().data_ptr() for layer in full.layers}
    cache = compact(full, [[kept_positions(adapter.heads, 9, seed=1)] for _ in adapter.layers])
    held = {block.keys.untyped_storage().data_ptr() for layer in cache.layers for block in layer.blocks}
    assert not storages & held
    assert all(reference() is not None for reference in watched)
    del full
    gc.collect()
    assert all(reference() is None for reference in watched)


def test_a_compact_cache_cannot_be_used_by_mistake() -> None:
    adapter = tiny_adapter()
    cache = compact(full_cache(adapter), [[kept_positions(adapter.heads, 9, seed=1)] for _ in adapter.layers])
    with torch.inference_mode(), pytest.raises(ConfigError, match="decode_from"):
        adapter.model(input_ids=torch.tensor([[1]]), past_key_values=cache)


def test_appending_is_amortised() -> None:
    """The tail's memory moves only when it doubles, and what was kept never moves."""
    adapter = tiny_adapter()
    cache = compact(full_cache(adapter), [[kept_positions(adapter.heads, 9, seed=1)] for _ in adapter.layers])
    tails, blocks = set(), set()
    with torch.inference_mode(), decode_from(adapter, cache):
        for token in token_ids(60):
            adapter.model(input_ids=torch.tensor([[token]]), past_key_values=cache)
            tails.add(cache.layers[0].keys.data_ptr())
            blocks.add(cache.layers[0].blocks[0].keys.data_ptr())
    assert len(blocks) == 1
    assert len(tails) <= 4
