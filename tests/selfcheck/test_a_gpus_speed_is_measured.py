"""The rows of a GPU's speed, on the CPU: what their processes measure, and what a row makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from perturbkv.cache.compact import CompactCache, join_layers, prompt_states
from perturbkv.errors import ModelError
from perturbkv.models import recurrent_states
from perturbkv.pipeline.sample.capture import decode_from
from perturbkv.selfcheck import gpu_rows
from perturbkv.selfcheck.rows import NO_GPU, Result, run_groups
from tests.oracle import theory as naive
from tests.support.hybrids import hybrid_adapter
from tests.support.models import tiny_adapter

CPU = {"dtype": "float32", "device": "cpu"}


@pytest.mark.slow
def test_times_are_taken_in_turns_and_tell_their_phases() -> None:
    found = gpu_rows.time_runs(
        tiny_adapter(), gpu_rows.random_tokens(150), 2, {"2": gpu_rows.SWEEP[:2], "24": gpu_rows.SWEEP}
    )
    assert {name: len(spent) for name, spent in found["seconds"].items()} == {
        "prefill": 2, "prefill and 2 decodes": 2, "2": 2, "24": 2
    }  # fmt: skip
    assert set(found["phases"]) == {"2", "24"}
    for count in ("2", "24"):
        spent = found["phases"][count]
        parts = sum(
            spent[name] for name in ("prefill", "reference", "layers", "evict", "decode", "measure", "assembly")
        )
        assert 0 < parts <= found["seconds"][count][-1]
        assert spent["scores"] + spent["norms"] <= spent["prefill"]


@pytest.mark.slow
def test_decoding_steps_from_both_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rows, "load_model", lambda model, dtype, device: tiny_adapter())
    found = gpu_rows.time_decoding("tiny", tokens=60, budget=20, batch=3, steps=2, repeats=2, **CPU)
    assert {name: len(spent) for name, spent in found.items()} == {"full": 2, "evicted": 2}


@pytest.mark.parametrize("family", ["llama", "gpt_oss", *(["lfm2"] if recurrent_states.LAYER else [])])
def test_the_evicted_cache_of_the_decoding_row_equals_a_full_one_where_all_is_kept(family: str) -> None:
    """Both rows decode the same tokens: with everything kept they give the same logits; windows are the first row's."""
    adapter, made = hybrid_adapter(family) if family == "lfm2" else tiny_adapter(family), []
    rows = 1 if family == "gpt_oss" else 2
    ids = torch.tensor([[3], [4]])
    with torch.inference_mode():
        cache = gpu_rows._random_cache(adapter, 2, 30)
        kept = [gpu_rows._keep_last(adapter, cache.layers[index], 30) for index in adapter.layer_indices]
        compact = CompactCache(join_layers(adapter, kept, prompt_states(adapter, cache)))
        with decode_from(adapter, compact):
            made.append(adapter.model(input_ids=ids, past_key_values=compact).logits)
        made.append(adapter.model(input_ids=ids, past_key_values=cache).logits)
    torch.testing.assert_close(*(logits[:rows] for logits in made), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23), reason="older ones cache all heads' keys"
)
def test_a_cache_of_latents_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rows, "load_model", lambda model, dtype, device: tiny_adapter("deepseek_v3", 4, 4))
    with pytest.raises(ModelError, match="the benchmark of decoding expects a cache of the keys and values"):
        gpu_rows.time_decoding("tiny", tokens=60, budget=20, batch=3, steps=2, repeats=2, **CPU)


def test_the_loop_that_value_norms_are_held_against_computes_them_too() -> None:
    value, w_o = gpu_rows.random_layer(entries=9, d_model=24, heads=4, kv_heads=2, **CPU)
    expected = naive.projected_value_norms(value.double().numpy(), w_o.double().numpy(), 4)
    for compute in gpu_rows.NORMS.values():
        np.testing.assert_allclose(compute(value, w_o), expected, rtol=1e-5)


@pytest.mark.slow
def test_norms_are_timed_beside_a_matrix_product() -> None:
    found = gpu_rows.time_norms(repeats=2, entries=64, d_model=64, heads=4, kv_heads=2, **CPU)
    assert {name: len(spent) for name, spent in found["seconds"].items()} == {"ours": 2, "loop": 2}
    operations = 2 * 64 * 64 * 64
    assert found["rate"] == [pytest.approx(operations / spent) for spent in found["seconds"]["ours"]]
    assert found["matmul_rate"] > 0


ANSWERS: dict[str, Result] = {
    "time_norms": {"seconds": {"ours": [1.0, 3.0], "loop": [4.0, 6.0]}, "rate": [5.0, 7.0], "matmul_rate": 12.0},
    "time_sweep": {"seconds": {"24": [3.0], "prefill": [2.0]}, "phases": {"24": {"prefill": 2.0}}},
    "time_decoding": {"full": [4.0], "evicted": [1.0]},
}


def test_every_row_is_a_ratio_of_what_its_process_found(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = {}

    def answer(module: str, work: str, arguments: Mapping[str, Any]) -> Result:
        repeats[work] = arguments["repeats"]
        return ANSWERS[work]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_rows, "run_process", answer)
    rows = run_groups(gpu_rows.TARGETS, gpu_rows.groups(3))
    assert {row.target.name: row.value for row in rows} == {
        "triton-time": 0.375, "triton-rate": 0.5, "cuda-24": 1.5, "cuda-decode": 0.25
    }  # fmt: skip
    assert repeats == {"time_norms": 20, "time_sweep": 5, "time_decoding": 3}


def test_without_a_gpu_that_is_the_reason_and_nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = gpu_rows.measure(torch.device("cpu"), ("triton-rate", "cuda-24"))
    assert [(row.target.name, row.value, row.reason) for row in report.rows] == [
        ("triton-rate", None, NO_GPU), ("cuda-24", None, NO_GPU)
    ]  # fmt: skip
    assert report.unmeasured_rows() == []
