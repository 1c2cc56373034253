from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from transformers import DynamicCache

from perturbkv.cache import ragged
from perturbkv.cache.compact import CompactCache, CompactLayer
from perturbkv.cache.entries import borrow
from perturbkv.configs.resources import SLACK
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.capture import decode_from, intercept_attention
from tests.support.caches import gather
from tests.support.models import HEADS, tiny_adapter, token_ids
from tests.support.varlen import varlen

N, STEPS = 40, 32
Positions = list[torch.Tensor]
RAGGED = {
    "query": [(9, 9, 9, 9), (25, 3, 11, 18), (9, 9, 9, 9), (40, 1, 2, 5)],
    "kv": [(9,) * 2, (25, 3), (9,) * 2, (40, 1)],
    "layer": [(9,), (25,), (1,), (40,)],
}


def full_cache(adapter: Adapter) -> DynamicCache:
    cache = DynamicCache()
    with torch.inference_mode():
        adapter.model(input_ids=torch.tensor([token_ids(N)]), past_key_values=cache)
    return cache


def kept_positions(counts: Sequence[int], seed: int) -> Positions:
    """One kept set per count."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(N, generator=generator)[:count].sort().values for count in counts]


def compact(cache: DynamicCache, positions: list[list[Positions]], layout: str = "ragged") -> CompactCache:
    """positions[layer][row][kept set]"""
    layers = [
        CompactLayer([gather(layer.keys[0], layer.values[0], row) for row in rows], 4, N, layout)
        for layer, rows in zip(cache.layers, positions, strict=True)
    ]
    return CompactCache(layers)


def decode(adapter: Adapter, cache: CompactCache, tokens: Sequence[int], rows: int) -> torch.Tensor:
    found = []
    with torch.inference_mode(), decode_from(adapter, cache):
        for token in tokens:
            ids = torch.full((rows, 1), token)
            found.append(adapter.model(input_ids=ids, past_key_values=cache).logits[:, -1])
    return torch.stack(found, dim=1)


def masked_logits(adapter: Adapter, tokens: list[int], positions: list[Positions]) -> torch.Tensor:
    """Decode one by one from the full cache, evicted entries masked in each layer and head by hand."""
    cache, logits = full_cache(adapter), []

    def attend(stock, module, args, kwargs):  # type: ignore[no-untyped-def]
        query, key, value = args[:3]
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        kept = positions[module.layer_idx]
        mask = torch.ones(query.shape[1], key.shape[2], dtype=torch.bool)
        mask[:, :N] = False
        for head in range(len(mask)):
            mask[head, kept[head * len(kept) // len(mask)]] = True
        scores = (query @ key.transpose(2, 3) * kwargs["scaling"]).masked_fill(~mask[None, :, None], -torch.inf)
        return (scores.softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None

    with torch.inference_mode(), intercept_attention(adapter, attend):
        for token in tokens:
            logits.append(adapter.model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
    return torch.stack(logits)


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def counts_of(adapter: Adapter, granularity: str) -> list[tuple[int, ...]]:
    """Kept entries per row and kept set, from even to very uneven."""
    if granularity != "kv":
        return RAGGED[granularity]
    return [(row * adapter.kv_heads)[: adapter.kv_heads] for row in RAGGED["kv"]]


@pytest.mark.parametrize("path", ["padded", "packed"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("granularity", ["query", "kv", "layer"])
def test_decoding_equals_the_masked_full_cache(
    heads: tuple[int, int], granularity: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tiny_adapter("llama", *heads)
    if path == "packed":
        monkeypatch.setattr(ragged, "kernel_for", lambda keys, values: varlen)
    rows = counts_of(adapter, granularity)
    times = adapter.kv_heads if granularity == "layer" else 1  # one set, held once for each key/value head
    positions = [
        [kept_positions(counts, seed=10 * layer + row) * times for row, counts in enumerate(rows)]
        for layer in range(len(adapter.layers))
    ]
    tokens = list(token_ids(STEPS, seed=5))
    cache = compact(full_cache(adapter), positions)
    assert {type(block).__name__ for block in cache.layers[0].blocks} == {
        {"padded": "Block", "packed": "PackedBlock"}[path]
    }
    found = decode(adapter, cache, tokens, len(rows))
    for row in range(len(rows)):
        assert far(found[row], masked_logits(adapter, tokens, [layer[row] for layer in positions])) < 1e-5


def test_torchs_own_kernel_takes_what_we_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments that we give it; the kernel itself runs on CUDA alone."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    ragged.variable_length_attention.cache_clear()
    attend = ragged.variable_length_attention()
    ragged.variable_length_attention.cache_clear()
    assert attend is not None
    starts = torch.tensor([0, 1], dtype=torch.int32)
    shape = torch.empty(1, 2, 8, device="meta"), torch.empty(1, 1, 8, device="meta")
    for lengths in (None, torch.tensor([1], dtype=torch.int32)):
        output, totals = attend(shape[0], shape[1], shape[1], starts, starts, 1, 1, 0.5, lengths)
        assert output.shape == (1, 2, 8)
        assert totals.shape == (2, 1)


def test_a_rectangular_cache_has_no_padding_and_refuses_ragged_heads() -> None:
    adapter = tiny_adapter()
    full = full_cache(adapter)
    even = [[kept_positions((9,) * 4, seed=1), kept_positions((10,) * 4, seed=2)] for _ in adapter.layers]
    assert compact(full, even, "rectangular").padding_nbytes == 0
    uneven = [[kept_positions((9, 9, 9, 8), seed=1)] for _ in adapter.layers]
    with pytest.raises(ConfigError, match="rectangular"):
        compact(full, uneven, "rectangular")


def test_several_tokens_at_once_equal_one_by_one() -> None:
    adapter = tiny_adapter()
    positions = [[kept_positions((12, 3, 7, 12), seed=layer)] for layer in range(len(adapter.layers))]
    tokens = torch.tensor([token_ids(6, seed=2)])
    logits = []
    for pieces in (tokens.split(6, dim=1), tokens.split(1, dim=1)):
        cache = compact(full_cache(adapter), positions)
        with torch.inference_mode(), decode_from(adapter, cache):
            made = [adapter.model(input_ids=piece, past_key_values=cache).logits for piece in pieces]
        logits.append(torch.cat(made, dim=1))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spread", [1, 2, 40])
def test_bytes_are_the_budgets_and_a_bounded_padding(spread: int) -> None:
    adapter = tiny_adapter()
    generator = torch.Generator().manual_seed(spread)
    rows = [torch.randint(max(1, N // spread), N + 1, (4,), generator=generator).tolist() for _ in range(6)] + [[9, 9]]
    positions = [[kept_positions(row, seed=1) for row in rows] for _ in adapter.layers]
    cache = compact(full_cache(adapter), positions)
    budgets = sum(map(sum, rows)) * len(adapter.layers) * (adapter.d_key + adapter.d_value) * 4
    assert sum(layer.kept_nbytes for layer in cache.layers) == budgets
    assert cache.nbytes == budgets + cache.padding_nbytes
    assert 0 <= cache.padding_nbytes <= budgets * SLACK
    tensors = [tensor for layer in cache.layers for block in layer.blocks for tensor in (block.keys, block.values)]
    assert cache.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_the_full_cache_is_released() -> None:
    adapter = tiny_adapter()
    full = full_cache(adapter)
    watched = [weakref.ref(tensor) for layer in full.layers for tensor in (layer.keys, layer.values)]
    storages = {layer.keys.untyped_storage().data_ptr() for layer in full.layers}
    cache = compact(full, [[kept_positions((9, 3, 9, 9), seed=1)] for _ in adapter.layers])
    held = {block.keys.untyped_storage().data_ptr() for layer in cache.layers for block in layer.blocks}
    assert not storages & held
    assert all(reference() is not None for reference in watched)
    del full
    gc.collect()
    assert all(reference() is None for reference in watched)


def test_a_run_that_keeps_everything_borrows_the_full_cache() -> None:
    layer = full_cache(tiny_adapter()).layers[0]
    held = CompactLayer([borrow(layer.keys[0], layer.values[0])], 4, N).blocks[0]
    assert held.keys.data_ptr() == layer.keys.data_ptr()


def mixed_cache(adapter: Adapter, full: DynamicCache, copied: bool = False) -> tuple[CompactCache, list[list[int]]]:
    """Rows 0 and 2 keep everything, rows 1 and 3 sets of uneven length; full caches that hold decoded tokens too."""
    counts = [(), (9, 3, 7, 25), (), (6, 12, 6, 30)[: adapter.kv_heads]]
    layers = []
    for layer in full.layers:
        keys, values = (kind[0, :, :N] for kind in (layer.keys, layer.values))
        if copied:
            values = values.transpose(0, 1).contiguous().transpose(0, 1)
        rows = [
            gather(keys, values, kept_positions(row, seed=place)) if row else borrow(keys, values)
            for place, row in enumerate(counts)
        ]
        layers.append(CompactLayer(rows, adapter.heads, N))
    return CompactCache(layers), [list(row) for row in counts]


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("heads", [HEADS["GQA"], HEADS["MHA"]], ids=["GQA", "MHA"])
def test_rows_that_keep_everything_go_through_the_kernel_of_the_evicted_ones(
    heads: tuple[int, int], copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a kernel it sees every row, and answers for the full rows what the plain model does."""
    adapter, seen = tiny_adapter("llama", *heads), []

    def kernel(query, *more):  # type: ignore[no-untyped-def]
        seen.append(len(query) * query.shape[1])
        return varlen(query, *more)

    monkeypatch.setattr(ragged, "kernel_for", lambda keys, values: kernel)
    full, tokens = full_cache(adapter), list(token_ids(5, seed=5))
    with torch.inference_mode():
        plain = [adapter.model(torch.tensor([[token]]), past_key_values=full).logits[0, -1] for token in tokens]
    cache, _ = mixed_cache(adapter, full, copied)
    assert {type(block).__name__ for layer in cache.layers for block in layer.blocks} == {"PackedBlock"}
    found = decode(adapter, cache, tokens, 4)
    assert sum(seen) == len(tokens) * len(adapter.layers) * 4 * adapter.heads
    for row in (0, 2):
        assert far(found[row], torch.stack(plain)) < 1e-5
    for row in (1, 3):
        assert far(found[row], torch.stack(plain)) > 1e-3


@pytest.mark.parametrize("path", ["padded", "packed"])
@pytest.mark.parametrize("rows", [[0, 1, 3], [3], [2, 3], [1]])
def test_rows_that_stay_go_on_as_if_the_others_were_there(
    path: str, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "packed":
        monkeypatch.setattr(ragged, "kernel_for", lambda keys, values: varlen)
    adapter, tokens = tiny_adapter(), list(token_ids(14, seed=5))
    whole, counts = mixed_cache(adapter, full_cache(adapter))
    cache, _ = mixed_cache(adapter, full_cache(adapter))
    expected = decode(adapter, whole, tokens, 4)
    decode(adapter, cache, tokens[:3], 4)
    cache.keep_rows(rows)
    found = decode(adapter, cache, tokens[3:], len(rows))
    assert far(found, expected[rows, 3:]) < 1e-5
    for layer in cache.layers:
        assert [sorted(layer.lengths(place)) for place in range(len(rows))] == [
            sorted(length + 14 for length in counts[row] or [N] * adapter.kv_heads) for row in rows
        ]
        assert layer.kept_entries == sum(sum(counts[row] or [N] * adapter.kv_heads) for row in rows)
        assert sorted(layer.borrowed_rows) == [place for place, row in enumerate(rows) if row in (0, 2)]


@pytest.mark.parametrize("path", ["padded", "packed"])
def test_what_is_borrowed_is_read_where_it_lies_and_counted_as_borrowed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "packed":
        monkeypatch.setattr(ragged, "kernel_for", lambda keys, values: varlen)
    adapter = tiny_adapter()
    full = full_cache(adapter)
    with torch.inference_mode():
        adapter.model(torch.tensor([[1, 2, 3]]), past_key_values=full)
    cache, counts = mixed_cache(adapter, full)
    entry = (adapter.d_key + adapter.d_value) * 4
    for layer, original in zip(cache.layers, full.layers, strict=True):
        blocks = [block for block in layer.blocks if block.segments[0].row in (0, 2)]
        assert [block.keys.data_ptr() for block in blocks] == [original.keys.data_ptr()] * 2
        assert [block.values.data_ptr() for block in blocks] == [original.values.data_ptr()] * 2
        assert layer.borrowed_nbytes == 2 * N * adapter.kv_heads * entry
        assert layer.kept_nbytes == layer.borrowed_nbytes + sum(map(sum, counts)) * entry
        for block in blocks:
            for place, segment in enumerate(block.segments):
                keys, values = block.entries(place)
                assert torch.equal(keys, original.keys[0, segment.head, :N])
                assert torch.equal(values, original.values[0, segment.head, :N])
    assert cache.padding_nbytes == cache.nbytes - sum(layer.kept_nbytes for layer in cache.layers)
    assert (cache.padding_nbytes == 0) == (path == "packed")


def test_a_compact_cache_cannot_be_used_by_mistake() -> None:
    adapter = tiny_adapter()
    cache = compact(full_cache(adapter), [[kept_positions((9,) * 4, seed=1)] for _ in adapter.layers])
    with torch.inference_mode(), pytest.raises(ConfigError, match="decode_from"):
        adapter.model(input_ids=torch.tensor([[1]]), past_key_values=cache)


def test_appending_is_amortised() -> None:
    """The tail's memory moves only when it doubles, and what was kept never moves."""
    adapter = tiny_adapter()
    cache = compact(full_cache(adapter), [[kept_positions((9, 4, 9, 9), seed=1)] for _ in adapter.layers])
    tails, blocks = set(), set()
    with torch.inference_mode(), decode_from(adapter, cache):
        for token in token_ids(60):
            adapter.model(input_ids=torch.tensor([[token]]), past_key_values=cache)
            tails.add(cache.layers[0].keys.data_ptr())
            blocks.add(cache.layers[0].blocks[0].keys.data_ptr())
    assert len(blocks) == 1
    assert len(tails) <= 4


def test_freezing_a_row_again_changes_nothing_but_where_its_entries_lie() -> None:
    """Row 0 is compacted to all that it holds while row 1 decodes on; then both, so that the tail is dropped."""
    adapter = tiny_adapter()
    positions = [[kept_positions((12, 3, 7, 12), seed=9), kept_positions((5,) * 4, seed=8)] for _ in adapter.layers]
    tokens = token_ids(24, seed=3)
    expected = decode(adapter, compact(full_cache(adapter), positions), tokens, 2)
    cache = compact(full_cache(adapter), positions)
    found = []
    for start, rows in ((0, [0]), (8, [0, 1]), (16, [])):
        found.append(decode(adapter, cache, tokens[start : start + 8], 2))
        for layer in cache.layers:
            layer.replace_rows({row: layer.entries(row) for row in rows})
    assert cache.layers[0].length == 8
    assert cache.get_seq_length() == N + 24
    assert far(torch.cat(found, dim=1), expected) < 1e-5


def test_entries_of_a_row_are_what_it_kept_and_what_came_after() -> None:
    adapter = tiny_adapter()
    full, kept = full_cache(adapter), kept_positions((12, 3, 7, 12), seed=9)
    cache = compact(full, [[kept] for _ in adapter.layers])
    decode(adapter, cache, token_ids(5), 1)
    held = cache.layers[0].entries(0)
    assert held.lengths == [17, 8, 12, 17]
    sets = held.sets()
    assert torch.equal(sets[1][0][:3], full.layers[0].keys[0, 0, kept[1]])
    assert torch.equal(sets[2][0][7:], cache.layers[0].keys[0, 1, :5])
    assert torch.equal(sets[3][1][:12], full.layers[0].values[0, 1, kept[3]])
