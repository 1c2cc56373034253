"""Models that mix full layers with sliding ones: the full ones are evicted, the others see what they always see."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from perturbkv.auditing import loss
from perturbkv.cache import ragged
from perturbkv.cache.compact import CompactCache, full_cache
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources, Shape
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.capture import decode_from, intercept_attention
from perturbkv.pipeline.variants import given_sets
from perturbkv.selection.grid import configuration
from perturbkv.selection.resolved_config import resolve
from tests.support.caches import Positions, compact, kept_positions
from tests.support.models import MIXED, WINDOW, tiny_adapter, token_ids
from tests.support.resolved import answer, prefill
from tests.support.varlen import varlen

N, STEPS = 40, 32
EVEN = {"query": (9, 9, 9, 9), "kv": (9, 9)}
UNEVEN = {"query": (25, 3, 11, 18), "kv": (25, 3)}


def read(adapter: Adapter) -> torch.Tensor:
    cache = full_cache(adapter)
    with torch.inference_mode():
        adapter.model(input_ids=torch.tensor([token_ids(N)]), past_key_values=cache)
    return cache


def decode(adapter: Adapter, cache: CompactCache, chunks: Sequence[Sequence[int]], rows: int) -> torch.Tensor:
    found = []
    with torch.inference_mode(), decode_from(adapter, cache):
        for tokens in chunks:
            ids = torch.tensor([list(tokens)] * rows)
            found.append(adapter.model(input_ids=ids, past_key_values=cache).logits)
    return torch.cat(found, dim=1)


def masked_logits(adapter: Adapter, chunks: Sequence[Sequence[int]], positions: list[Positions | None]) -> torch.Tensor:
    """From the model's own cache, entries masked by hand in each measured layer and head; the others are untouched."""
    cache, logits = read(adapter), []

    def attend(stock, module, args, kwargs):  # type: ignore[no-untyped-def]
        query, key, value = args[:3]
        group, queries = query.shape[1] // key.shape[1], query.shape[2]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        kept = positions[adapter.layer_of(module)]
        mask = torch.ones(query.shape[1], queries, key.shape[2], dtype=torch.bool)
        mask = mask.tril(key.shape[2] - queries)
        for head in range(len(mask) if kept is not None else 0):
            own = torch.zeros(N, dtype=torch.bool)
            own[kept[head * len(kept) // len(mask)]] = True
            mask[head, :, :N] = own
        scores = (query @ key.transpose(2, 3) * kwargs["scaling"]).masked_fill(~mask, -torch.inf)
        if "s_aux" in kwargs:  # one more entry of every head, without a value
            sink = kwargs["s_aux"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores, value = torch.cat([scores, sink], -1), torch.nn.functional.pad(value, (0, 0, 0, 1))
        return (scores.softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None

    with torch.inference_mode(), intercept_attention(adapter, attend):
        for tokens in chunks:
            logits.append(adapter.model(input_ids=torch.tensor([list(tokens)]), past_key_values=cache).logits[0])
    return torch.cat(logits)


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("chunks", [[1] * STEPS, [9, *[1] * 7, 16], [30]], ids=["one by one", "blocks", "at once"])
@pytest.mark.parametrize("granularity", EVEN)
@pytest.mark.parametrize("family", MIXED)
def test_decoding_equals_the_masked_full_cache(family: str, granularity: str, chunks: list[int]) -> None:
    """Over a prompt longer than the window, and as long again as it is: no entry of the prompt is left in it."""
    adapter, counts = tiny_adapter(family), (EVEN[granularity], UNEVEN[granularity])
    positions = [[None, *(kept_positions(one, 10 * layer + row) for row, one in enumerate(counts))] for layer in (0, 1)]
    tokens = list(token_ids(sum(chunks), seed=5))
    parts = [tokens[sum(chunks[:place]) : sum(chunks[: place + 1])] for place in range(len(chunks))]
    found = decode(adapter, compact(adapter, positions), parts, 3)
    for row in range(3):
        assert far(found[row], masked_logits(adapter, parts, [layer[row] for layer in positions])) < 1e-5


def test_the_check_of_windows_can_fail() -> None:
    """One entry more or less in a window is seen."""
    adapter = tiny_adapter("gemma3_text")
    tokens = [[token] for token in token_ids(4, seed=5)]
    expected = masked_logits(adapter, tokens, [None, None])
    for more in (-1, 1):
        cache = compact(adapter, [[None], [None]])
        for layer in cache.layers:
            if layer.is_sliding:
                object.__setattr__(layer.window, "size", WINDOW + more)
        assert far(decode(adapter, cache, tokens, 1)[0], expected) > 1e-3


@pytest.mark.slow
def test_a_cache_that_is_shared_forgotten_and_cut_goes_on_as_a_new_one() -> None:
    adapter = tiny_adapter("gemma3_text")
    positions = [[None, kept_positions((9, 4, 9, 2), layer), kept_positions((7,) * 4, layer)] for layer in (0, 1)]
    whole, tokens = compact(adapter, positions), [[token] for token in token_ids(14, seed=3)]
    other = whole.fork()
    expected = decode(adapter, whole, tokens, 3)
    assert torch.equal(decode(adapter, other, tokens, 3), expected)
    whole.forget(after=5)
    assert whole.get_seq_length() == N + 5
    whole.keep_rows([2, 0])
    assert far(decode(adapter, whole, tokens[5:], 2), expected[[2, 0], 5:]) < 1e-5


@pytest.mark.parametrize("family", MIXED)
def test_the_models_own_cache_holds_windows_and_nothing_behind_them(family: str) -> None:
    adapter = tiny_adapter(family)
    before = prefill(adapter, token_ids(N), [configuration(12, window=4)], Resources(), "s")
    assert sorted(before.states) == [0, 2] and adapter.layer_indices == (1, 3)
    for index, layer in enumerate(before.cache.layers):
        length = N if index in adapter.layer_indices else WINDOW - 1
        assert layer.keys.shape[2] == length
        assert layer.keys.untyped_storage().nbytes() == layer.keys.numel() * layer.keys.itemsize
        assert layer.get_seq_length() == N
    shape = Shape.from_config(adapter.config, 4, 0)
    held = [layer.keys.nbytes + layer.values.nbytes for layer in before.cache.layers]
    assert 0 <= shape.full_cache_bytes(N) - sum(held) <= 2 * 2 * 2 * 8 * 4  # a window counts its query's own entry


def test_only_measured_layers_are_held_and_compressed_again() -> None:
    adapter, prompt = tiny_adapter("gemma3_text"), Prompt("s", token_ids(N), 0)
    chosen = [configuration(10, policy="snapkv", window=4, granularity="query")]
    found = answer(adapter, prompt, chosen, 24, compress_over=20, divergence=True)
    windows = 2 * 2 * WINDOW  # of two layers, which hold them in both caches
    assert found.held == [pytest.approx((2 * 10 * 4 + windows) / (2 * 2 * N + windows))]
    assert [one.perturbation.shape for one in found.compressions] == [(2, 4)] * len(found.compressions)
    assert len(found.compressions) >= 1
    assert found.divergence is not None
    assert float(found.divergence.noise_floor.max()) < 1e-5  # row 0 keeps everything, and its windows are the model's


def test_what_compresses_every_layer_is_refused() -> None:
    adapter, prompt = tiny_adapter("olmo3"), Prompt("s", token_ids(N), 0)
    press = EvictionConfig(12, Choice("kvpress:KnormPress"), "given", 0, "kv")
    with pytest.raises(ModelError, match="'KnormPress' expects layers that all see the whole prompt; some of model"):
        given_sets.check_sources([resolve(press)], adapter.config, adapter.name)
    config = loss.external_configuration("mine", 12)
    wrong = [{config: [torch.ones(2, N, dtype=torch.bool)] * 4}]
    with pytest.raises(Exception, match="of 2 layers for 'given:mine', got .* of 4"):
        loss.measure_kept_sets(adapter, [prompt], wrong)
    kept = [{config: [torch.arange(N).expand(2, N) % 2 == 0] * 2}]
    assert loss.measure_kept_sets(adapter, [prompt], kept).attrs["measured_layers"] == "1 3 of 4"


@pytest.mark.parametrize("granularity", EVEN)
def test_a_kernel_of_packed_entries_is_joined_with_the_sink_once(
    granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's kernel gives log-sum-exps over entries alone; here its stand-in does."""
    monkeypatch.setattr(ragged, "kernel_for", lambda keys, values: varlen)
    adapter, counts = tiny_adapter("gpt_oss"), (EVEN[granularity], UNEVEN[granularity])
    positions = [[None, *(kept_positions(one, 10 * layer + row) for row, one in enumerate(counts))] for layer in (0, 1)]
    parts = [[token] for token in token_ids(6, seed=5)]
    cache = compact(adapter, positions)
    assert {type(block).__name__ for block in cache.evicted_layers[0].blocks} == {"PackedBlock"}
    found = decode(adapter, cache, parts, 3)
    for row in range(3):
        assert far(found[row], masked_logits(adapter, parts, [layer[row] for layer in positions])) < 1e-5
