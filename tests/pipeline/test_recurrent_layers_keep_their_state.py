"""Models with recurrent layers: attention is evicted, and every row carries the prompt's state on by itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from perturbkv.analyses.budget.safe_budget import CacheSize, cache_size
from perturbkv.analyses.measurements import Measurements
from perturbkv.api.measuring import measure
from perturbkv.cache.compact import CompactCache
from perturbkv.configs import cache_contents, layer_types
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError, ModelError
from perturbkv.models import recurrent_states as recurrent
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.capture import decode_from, intercept_attention
from perturbkv.pipeline.sample.decoding import decode_full
from perturbkv.pipeline.variants import given_sets
from perturbkv.selection.grid import configuration
from perturbkv.selection.resolved_config import resolve
from perturbkv.trace import Trace
from tests.support.caches import Positions, compact, kept_positions
from tests.support.hybrids import HYBRIDS, MEASURED, STATES, hybrid_adapter
from tests.support.models import MIXED, tiny_adapter, token_ids
from tests.support.resolved import answer, prefill, trace_sample

pytestmark = pytest.mark.skipif(recurrent.LAYER is None, reason="no states in caches")
N, KV, HEADS = 40, 2, 4


def read(adapter: Adapter) -> DynamicCache:
    cache = DynamicCache(config=adapter.config)
    with torch.inference_mode():
        adapter.model(input_ids=torch.tensor([token_ids(N)]), past_key_values=cache)
    return cache


def decode(adapter: Adapter, cache: CompactCache, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits (row, token, vocab) of tokens (row, token), part by part."""
    with torch.inference_mode(), decode_from(adapter, cache):
        return torch.cat([adapter.model(input_ids=part, past_key_values=cache).logits for part in parts], dim=1)


def masked(adapter: Adapter, parts: Sequence[torch.Tensor], positions: list[Positions | None]) -> torch.Tensor:
    """From the model's own cache, one text alone, entries masked by hand in each measured layer and head."""
    cache = read(adapter)

    def attend(stock, module, args, kwargs):  # type: ignore[no-untyped-def]
        query, key, value = args[:3]
        kept, queries, entries = positions[adapter.layer_of(module)], query.shape[2], key.shape[2]
        output = torch.zeros(1, queries, HEADS, value.shape[-1])
        for head in range(HEADS):
            seen = torch.ones(queries, entries, dtype=torch.bool).tril(entries - queries)
            if kept is not None:
                seen[:, :N] = False
                seen[:, kept[head * len(kept) // HEADS]] = True
            logits = query[0, head] @ key[0, head // 2].T * kwargs["scaling"]
            output[0, :, head] = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value[0, head // 2]
        return output, None

    with torch.inference_mode(), intercept_attention(adapter, attend):
        return torch.cat([adapter.model(input_ids=part, past_key_values=cache).logits[0] for part in parts])


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def texts(rows: int, parts: Sequence[int]) -> list[torch.Tensor]:
    """Tokens (row, token) of each part, of another text in each row."""
    every = torch.tensor([token_ids(sum(parts), seed=5 + row) for row in range(rows)])
    return list(every.split(list(parts), dim=1))


@pytest.mark.parametrize("family", HYBRIDS)
def test_attention_is_measured_and_states_are_found(family: str) -> None:
    adapter = hybrid_adapter(family)
    assert adapter.layer_indices == MEASURED[family]
    assert adapter.is_recurrent and adapter.is_mixed == (family != "falcon_h1")


@pytest.mark.parametrize("family", HYBRIDS)
def test_with_nothing_evicted_decoding_is_the_plain_models(family: str) -> None:
    adapter, parts = hybrid_adapter(family), texts(1, [1] * 8)
    cache = read(adapter)
    with torch.inference_mode():
        plain = torch.cat([adapter.model(input_ids=part, past_key_values=cache).logits for part in parts], dim=1)
    assert far(decode(adapter, compact(adapter, [[None], [None]]), parts), plain) < 1e-5


@pytest.mark.parametrize("parts", [[1, 1, 1], [5, 1, 2]], ids=["one by one", "blocks"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_each_row_decodes_as_the_masked_model_on_its_own_text(family: str, parts: list[int]) -> None:
    """With other kept sets and other tokens in each row: states of rows do not mix."""
    adapter, tokens = hybrid_adapter(family), texts(4, parts)
    rows = [None, kept_positions((9, 9), 1), kept_positions((25, 3), 2), kept_positions((9, 4, 9, 2), 3)]
    positions = [rows, [*rows[:3], kept_positions((7, 1, 30, 12), 4)]]
    found = decode(adapter, compact(adapter, positions), tokens)
    for row in range(4):
        own = [part[row : row + 1] for part in tokens]
        assert far(found[row], masked(adapter, own, [layer[row] for layer in positions])) < 1e-5
    assert far(found[1], found[0]) > 1e-2


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_cache_that_is_forked_marked_forgotten_and_cut_goes_on_as_a_new_one(family: str) -> None:
    adapter, tokens = hybrid_adapter(family), texts(3, [5, 1, 1, 1])
    rows = [None, kept_positions((9, 9), 1), kept_positions((25, 3), 2)]
    whole = compact(adapter, [rows, rows])
    other = whole.fork()
    expected = decode(adapter, whole, tokens)
    assert torch.equal(decode(adapter, other, tokens), expected)
    whole.forget()
    assert torch.equal(decode(adapter, whole, tokens), expected)
    whole.forget()
    decode(adapter, whole, tokens[:1])
    whole.mark()
    decode(adapter, whole, tokens[1:])
    whole.forget(after=5)
    whole.keep_rows([2, 0])
    cut = [part[[2, 0]] for part in tokens[1:]]
    assert far(decode(adapter, whole, cut), expected[[2, 0], 5:]) < 1e-5
    whole.forget(after=5)
    assert far(decode(adapter, whole, cut), expected[[2, 0], 5:]) < 1e-5


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_reference_leaves_the_prompts_states_as_they_were(family: str) -> None:
    adapter = hybrid_adapter(family)
    read = prefill(adapter, token_ids(N), [configuration(12, window=4)], Resources(), "s")
    before = copy.deepcopy(read.cache)
    decode_full(adapter, read, (), 4, 3)
    for layer, own in zip(read.cache.layers, before.layers, strict=True):
        for name in ("conv_states", "recurrent_states"):
            for place, state in getattr(own, name, {}).items():
                assert state is None or torch.equal(getattr(layer, name)[place], state)
    assert np.all([layer.get_seq_length() == N + 4 for layer in map(read.cache.layers.__getitem__, MEASURED[family])])


def states(cache: Any) -> list[torch.Tensor]:
    kinds = [getattr(layer, name, {}) for layer in cache.layers for name in ("conv_states", "recurrent_states")]
    return [state for kind in kinds for state in kind.values() if state is not None]


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_replay_leaves_the_cache_as_it_was(family: str) -> None:
    adapter = hybrid_adapter(family)
    found = prefill(adapter, token_ids(N), [configuration(12, policy="kvzip", window=4)], Resources(), "s").cache
    assert all(torch.equal(one, other) for one, other in zip(states(found), states(read(adapter)), strict=True))
    assert {found.layers[index].keys.shape[2] for index in MEASURED[family]} == {N}


def traced(adapter: Adapter, scenario: str = "regular", **more: Any) -> Any:
    configs = (configuration(12, window=4), configuration(12, policy="snapkv", window=4, granularity="kv"))
    run = RunConfig(adapter.name, "d", configs, scenario=scenario, **more)
    return trace_sample(adapter, Prompt("s", token_ids(N + 6), 0, question_tokens=6), run).arrays


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_sample_is_measured_alike_again_and_its_bytes_are_all(family: str) -> None:
    adapter = hybrid_adapter(family)
    found, again = traced(adapter, steps=3), traced(adapter, steps=3)
    assert all(np.array_equal(found[name], again[name], equal_nan=True) for name in found)
    n, entry, state = N + 6, 2 * 8 * 2, 2 * STATES[family]  # bytes in 16 bits: keys and values of 8 numbers
    assert found["unmeasured_bytes"] == state
    assert found["full_bytes"] == 2 * KV * n * entry + state
    assert found["held_bytes"][1] == 2 * KV * 12 * entry + state
    assert found["held_share"][1] == pytest.approx(found["held_bytes"][1] / found["full_bytes"])
    drift, first = found["hidden_drift_l1"], MEASURED[family][0]
    assert drift.shape[-1] == len(adapter.every_layer)
    assert (drift[..., :first] <= 2 * found["hidden_noise_floor"][:, :first]).all()
    assert found["hidden_noise_floor"].max() < 1e-3 < drift[..., first:].min()
    keys = [read(adapter).layers[index].keys.nbytes for index in MEASURED[family]]
    assert adapter.shape.full_cache_bytes(N) == 2 * sum(keys) + 4 * STATES[family]


@pytest.mark.parametrize("family", HYBRIDS)
def test_what_the_full_row_answers_is_what_the_model_generates(family: str) -> None:
    """After a question over the compressed context: rows go back to its end, states too."""
    adapter = hybrid_adapter(family)
    found = traced(adapter, "context-only", generate=8, steps=3)
    with torch.inference_mode():
        made = adapter.model.generate(torch.tensor([token_ids(N + 6)]), max_new_tokens=8, do_sample=False)
    assert found["generated_full"].tolist() == made[0, N + 6 :].tolist()


@pytest.mark.parametrize("family", HYBRIDS)
def test_answers_are_compressed_again_and_diverge_from_the_models_own(family: str) -> None:
    adapter, prompt = hybrid_adapter(family), Prompt("s", token_ids(N), 0)
    chosen = [configuration(10, policy="snapkv", window=4, granularity="query")]
    found = answer(adapter, prompt, chosen, 24, compress_over=20, divergence=True)
    with torch.inference_mode():
        made = adapter.model.generate(torch.tensor([token_ids(N)]), max_new_tokens=24, do_sample=False)
    assert found.full == made[0, N:].tolist()
    assert len(found.compressions) >= 1
    assert float(found.divergence.noise_floor.max()) < 1e-5 < float(found.divergence.kl.max())


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1"])
def test_what_reads_a_prompt_its_own_way_is_refused(family: str) -> None:
    adapter = hybrid_adapter(family)
    with pytest.raises(ConfigError, match="'vertical-slash' .* expects no model .m., some of whose layers slide"):
        cache_contents.check_sparse_prefill([Choice("vertical-slash")], 1, 0, (), adapter.config, "m")
    press = EvictionConfig(12, Choice("kvpress:KnormPress"), "given", 0, "kv")
    with pytest.raises(ModelError, match="'KnormPress' expects .* model 'm'"):
        given_sets.check_sources([resolve(press)], adapter.config, "m")
    with pytest.raises(ModelError, match="an audit of a dump expects .*; model 'tiny-.*' has recurrent states"):
        adapter.check_plain_layers("an audit of a dump")


@pytest.mark.parametrize(
    ("policy", "selection"),
    [("expected-attention", "attention"), ("streaming-llm(positions=in-cache)", "position")],
)
def test_rotations_of_a_model_without_any_are_refused(policy: str, selection: str) -> None:
    config = configuration(12, policy=policy, selection=selection, window=4)
    with pytest.raises(ModelError, match="rotates keys .* model 'tiny-nemotron_h' has no rotations by halves"):
        measure(hybrid_adapter("nemotron_h"), [Prompt("s", token_ids(N), 0)], [config], progress=False)


def test_a_single_measured_layer_is_told_as_one() -> None:
    assert layer_types.describe_measured("5 of 6") == "layer 5 alone measured, of 6"
    assert layer_types.describe_measured("5 11 of 18") == "layers 5 11 of 18 measured"
    assert layer_types.describe_measured("") == ""


def test_caches_of_another_length_have_the_same_windows_and_states() -> None:
    """By hand: one full layer of 500 entries and five of 64, of 1,024 bytes each; at 1,000 the five stay."""
    config, share = configuration(64, window=4, granularity="kv"), (64 + 5 * 64) / (500 + 5 * 64)
    for length, full, evicted in ((500, 820, 384), (1000, 1320, 384)):
        size = CacheSize(length, 2, 1024.0, 500.0, "float32", 5 * 64 * 1024.0)
        assert (size.full_bytes, size.evicted_bytes(config, share)) == (
            2 * 1024 * full,
            pytest.approx(2 * 1024 * evicted),
        )
    size = CacheSize(1000, 1, 1024.0, 500.0, "float32", 5 * 64 * 1024.0)
    config, share = configuration(0.1, window=4), (50 + 5 * 64) / (500 + 5 * 64)
    assert size.evicted_bytes(config, share) == pytest.approx(1024 * (100 + 5 * 64))


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2"])
def test_the_bytes_of_an_entry_are_those_of_measured_layers(family: str) -> None:
    adapter = tiny_adapter(family) if family in MIXED else hybrid_adapter(family)
    configs = (configuration(12, window=4), configuration(20, window=4, granularity="kv"))
    run = RunConfig(adapter.name, "d", configs, dtype="float32", steps=1)
    samples = [trace_sample(adapter, Prompt("a", token_ids(40), 0), run)]
    measured = Measurements(Trace.from_samples(run, samples, {}), "budget")
    size = cache_size(measured, 40, 1)
    assert size.token_bytes == pytest.approx(2 * KV * 2 * 8 * 4)  # two layers, keys and values of 8 numbers in 4 bytes
    assert size.full_bytes == pytest.approx(adapter.shape.full_cache_bytes(40))
