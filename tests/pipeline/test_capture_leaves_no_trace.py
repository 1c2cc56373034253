"""Capturing leaves no trace in the model, and caches of measured steps hold no copies."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from perturbkv import devices
from perturbkv.cache import blocks, ragged
from perturbkv.cache.compact import CompactCache, CompactLayer
from perturbkv.configs.choice import parse
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources, Shape, plan_batches
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.run.plan import copies_each_pass
from perturbkv.pipeline.sample import one_sample
from perturbkv.pipeline.sample.capture import Observer, capture, intercept_attention
from perturbkv.pipeline.sample.decoding import STEPS_AT_ONCE
from perturbkv.schema import KEPT, VARIABLES
from perturbkv.selection.grid import configuration
from perturbkv.selection.resolved_config import ResolvedRun
from tests.pipeline.test_the_compact_cache_really_evicts import (
    N,
    decode,
    far,
    full_cache,
    kept_positions,
    masked_logits,
)
from tests.support.caches import gather
from tests.support.models import FAMILIES, GATED, exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import trace_sample
from tests.support.varlen import varlen

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def watcher(seen: list[str]) -> Observer:
    return Observer(
        gate=lambda layer, gate: seen.append(f"gate {layer}"),
        attention=lambda layer, query, key, value: seen.append(f"attention {layer}"),
        head_output=lambda layer, mixed: seen.append(f"head_output {layer}"),
        hidden=lambda layer, hidden: seen.append(f"hidden {layer}"),
        final=lambda hidden: seen.append("final"),
    )


def prefill_and_decode(model: nn.Module) -> torch.Tensor:
    cache = DynamicCache()
    with torch.inference_mode():
        first = model(input_ids=torch.tensor([token_ids(20)]), past_key_values=cache).logits
        return torch.cat([first, model(input_ids=torch.tensor([[7]]), past_key_values=cache).logits], dim=1)


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def registered() -> dict[str, object]:
    return {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS}


@pytest.mark.parametrize("family", [*FAMILIES, GATED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_the_plain_models_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    adapter, seen = tiny_adapter(family, dtype=dtype), []
    plain = prefill_and_decode(adapter.model)
    with capture(adapter, watcher(seen)):
        watched = prefill_and_decode(adapter.model)
    assert torch.equal(plain, watched)
    one_pass = []
    for number in range(len(adapter.every_layer)):
        index = adapter.measured_index.get(number)
        one_pass += [] if index is None else [f"attention {index}", f"head_output {index}"]
        one_pass.append(f"hidden {number}")
    one_pass.append("final")
    gates = [f"gate {layer}" for layer in (0, 1) if adapter.has_gate(layer)]
    assert [event for event in seen if event in gates] == gates * 2
    assert [event for event in seen if event not in gates] == one_pass * 2


def test_hooks_and_attention_are_gone_afterwards() -> None:
    adapter, seen = tiny_adapter(), []
    before, hooks = registered(), hook_count(adapter.model)
    with capture(adapter, watcher(seen)):
        assert hook_count(adapter.model) > hooks
        assert registered() != before
    assert hook_count(adapter.model) == hooks
    assert registered() == before
    prefill_and_decode(adapter.model)
    assert seen == []


def test_hooks_and_attention_are_gone_after_an_exception() -> None:
    adapter, before = tiny_adapter(), registered()

    def explode(layer: int, hidden: torch.Tensor) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"), capture(adapter, Observer(hidden=explode)):
        prefill_and_decode(adapter.model)
    with pytest.raises(RuntimeError, match="planted"), capture(adapter, watcher([])):
        raise RuntimeError("planted")
    assert hook_count(adapter.model) == 0
    assert registered() == before


def test_the_hook_check_itself_can_fail() -> None:
    model = tiny_adapter().model
    handle = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: None)
    assert hook_count(model) == 1
    handle.remove()
    assert hook_count(model) == 0


def test_captures_nest_and_end_in_turn() -> None:
    adapter, outer, inner, before = tiny_adapter(), [], [], registered()
    with capture(adapter, watcher(outer)):
        with capture(adapter, watcher(inner)):
            prefill_and_decode(adapter.model)
        assert len(outer) == len(inner) > 0
        prefill_and_decode(adapter.model)
    assert len(outer) == 2 * len(inner)
    assert registered() == before


def test_other_models_keep_their_attention() -> None:
    watched, other, seen = tiny_adapter(), tiny_adapter("qwen3"), []
    with capture(watched, watcher(seen)):
        prefill_and_decode(other.model)
    assert seen == []


def test_an_unregistered_attention_is_refused() -> None:
    adapter: Adapter = tiny_adapter()
    adapter.model.config._attn_implementation = "nowhere"
    with pytest.raises(ModelError, match="'nowhere'"), intercept_attention(adapter, lambda *given: None):
        pass


PROMPT = Prompt("s", token_ids(60), 0, question_tokens=7)
CONFIGS = tuple(
    configuration(budget, policy=policy, selection=selection, granularity=granularity, window=6)
    for policy, granularity in (("snapkv", "query"), ("adakv", "kv"))
    for selection in ("attention", "two-stage")
    for budget in (12, 30)
)


def run(configs: tuple[EvictionConfig, ...] = CONFIGS, **fields: Any) -> ResolvedRun:
    return ResolvedRun.from_run(RunConfig("m", "d", configs, **fields))


@pytest.mark.parametrize("kernel", [None, varlen], ids=["padded", "packed"])
def test_decoding_from_passing_blocks_equals_the_masked_full_cache(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Working memory of 1 KiB makes many blocks."""
    monkeypatch.setattr(ragged, "kernel_for", lambda keys, values: kernel)
    monkeypatch.setattr(devices, "_CACHE_BYTES", 1024)
    adapter = tiny_adapter("llama", 4, 2)
    counts = [(9, 9, 9, 9), (25, 3, 11, 18), (40, 1, 2, 5)]
    positions = [[kept_positions(one, 10 * layer + row) for row, one in enumerate(counts)] for layer in (0, 1)]
    layers = [
        CompactLayer([gather(held.keys[0], held.values[0], row) for row in rows], 4, N, passing=True)
        for held, rows in zip(full_cache(adapter).layers, positions, strict=True)
    ]
    assert all(len(layer.blocks) > 3 for layer in layers)
    assert all(layer.kept_nbytes <= layer.nbytes for layer in layers)
    tokens = list(token_ids(3, seed=5))
    found = decode(adapter, CompactCache(layers), tokens, len(counts))
    for row in range(len(counts)):
        assert far(found[row], masked_logits(adapter, tokens, [layer[row] for layer in positions])) < 1e-5
        assert [len(keys) for keys, _ in layers[0].entries(row).sets()] == [one + 3 for one in counts[row]]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_one_step_without_copies_equals_the_first_of_two_with_copies(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = exact_adapter("llama", 4, 2)
    one = trace_sample(adapter, PROMPT, run(scenario=scenario)).arrays
    monkeypatch.setattr(one_sample, "copies_each_pass", lambda run: False)
    two = trace_sample(adapter, PROMPT, run(steps=2, scenario=scenario)).arrays
    for name, array in one.items():
        dims = VARIABLES[name].dims
        if name not in (*KEPT, "cache_padding_bytes", "cache_bytes", "steps_measured"):
            first = two[name].take([0], dims.index("step")) if "step" in dims else two[name]
            np.testing.assert_allclose(array.astype(float), first.astype(float), rtol=1e-7, atol=1e-9, err_msg=name)


def test_no_copy_outlives_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[Any] = []
    most: list[int] = []
    original = blocks.padded_block

    def watched(*given: Any) -> Any:
        made = original(*given)
        alive.append(weakref.ref(made.keys))
        most.append(sum(one() is not None for one in alive))
        return made

    monkeypatch.setattr(blocks, "padded_block", watched)
    monkeypatch.setattr(devices, "_CACHE_BYTES", 4096)
    together = Resources(max_bytes=2**30)  # one batch for any number of steps
    trace_sample(tiny_adapter(), PROMPT, run(), together)
    assert len(most) > 10
    assert max(most) == 1
    once = len(most)
    for steps, passes in ((STEPS_AT_ONCE, 1), (STEPS_AT_ONCE + 1, 2)):
        most.clear()
        trace_sample(tiny_adapter(), PROMPT, run(steps=steps), together)
        assert len(most) == passes * once
        assert max(most) == 1


def test_caches_that_are_read_again_or_hold_what_the_full_one_does_not_are_held() -> None:
    streaming = configuration(18, policy="streaming-llm", selection="position", window=6)
    inside = replace(streaming, policy=parse("streaming-llm(positions=in-cache)"))
    few = replace(CONFIGS[0], precision=parse("quantise(bits=2)"))
    for steps in (1, 20):
        assert copies_each_pass(ResolvedRun.from_run(run(steps=steps)))
    assert copies_each_pass(ResolvedRun.from_run(run((streaming,), scenario="context-only")))
    assert not any(
        copies_each_pass(ResolvedRun.from_run(each)) for each in (run(generate=3), run((*CONFIGS, inside)), run((few,)))
    )


def test_what_holds_no_copies_goes_in_fewer_batches() -> None:
    shape = Shape(3, 4, 2, 64, 64, 256, 100, itemsize=4, weights_bytes=2_000_000)
    many = CONFIGS * 8
    held, places = (plan_batches(many, shape, 400, 1, 1, None, passing=each) for each in (False, True))
    assert len(places.indices) < len(held.indices)
    assert places.largest_bytes <= places.bound_bytes == held.bound_bytes
    sizes = [shape.row_bytes(config, 400, 1, 1, passing=True) for config in many]
    assert min(sizes) >= 12 * 3 * 2 * min(config.kept_entries(400) for config in many)
