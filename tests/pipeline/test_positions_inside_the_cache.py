"""Positions in the cache: kept keys at 0 … b − 1 and the next token at b, against a decoder that places them so."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from perturbkv.cache import entries, ragged
from perturbkv.cache.entries import KeptEntries, pool_entries
from perturbkv.configs.choice import parse
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.capture import decode_from
from perturbkv.schema import VARIABLES
from perturbkv.selection.grid import configuration
from tests.oracle import theory
from tests.oracle.decoder import Decoder, Step
from tests.pipeline.test_capture_leaves_no_trace import hook_count
from tests.support.configs import flat
from tests.support.models import HEADS, exact_adapter, tiny_adapter, tiny_model, token_ids
from tests.support.resolved import answer, prefill_and_evict, trace_sample
from tests.support.varlen import varlen

LENGTH, QUESTION, STEPS, SINKS = 40, 7, 6, 3
PROMPT = Prompt("s", token_ids(LENGTH, seed=4), 0, question_tokens=QUESTION)
TOKENS = token_ids(STEPS, seed=8)
PART = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
KEPT = configuration(12, policy=f"streaming-llm(sinks={SINKS})", selection="position", window=5)
INSIDE = configuration(12, policy=f"streaming-llm(sinks={SINKS}, positions=in-cache)", selection="position", window=5)
SNAPKV = configuration(12, window=5)
ONE_SINK = parse("streaming-llm(sinks=1)"), parse("streaming-llm(sinks=1, positions=in-cache)")
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    "partial": PART["rope_parameters"],
}  # fmt: skip


def decoded(adapter: Adapter, configs: Sequence[EvictionConfig], scenario: str) -> torch.Tensor:
    """Logits (row, step, vocab) of the question and of `TOKENS`, one by one."""
    context, question = PROMPT.parts(scenario)
    cache = prefill_and_evict(adapter, context, configs, "s").cache
    found = []
    with torch.inference_mode(), decode_from(adapter, cache):
        for piece in ([list(question)] if question else []) + [[token] for token in TOKENS]:
            found.append(adapter.model(torch.tensor([piece] * len(configs)), past_key_values=cache).logits)
    return torch.cat(found, dim=1)


@functools.cache
def has_read(adapter: Adapter, context: tuple[int, ...]) -> Decoder:
    decoder = Decoder(adapter.model)
    for token in context:
        decoder.step(token)
    return decoder


@functools.cache
def adapter_of(family: str, heads: tuple[int, int]) -> Adapter:
    return exact_adapter(family, *heads, **(PART if family == "phi3" else {}))


@functools.cache
def placed(adapter: Adapter, config: EvictionConfig, scenario: str) -> np.ndarray:
    """The same logits by the naive decoder: the first entries and the last ones, counted from 0 in the cache."""
    context, question = PROMPT.parts(scenario)
    n, budget, decoder = len(context), config.budget.tokens(len(context)), has_read(adapter, context).copy()
    stays = [place < flat(config).sinks or place >= n - budget + flat(config).sinks for place in range(n)]
    logits = []
    for token in (*question, *TOKENS):
        seen = np.array(stays + [True] * (decoder.position - n))
        masks = [np.tile(seen, (decoder.heads, 1))] * decoder.layers
        logits.append(decoder.step(token, masks, in_cache=flat(config).positions == "in-cache").logits)
    return np.stack(logits)


@pytest.mark.parametrize("path", ["padded", "packed"])
@pytest.mark.parametrize("scenario", ["regular", "context-only"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
def test_logits_are_those_of_a_cache_whose_keys_stand_at_0_to_b(
    family: str, heads: tuple[int, int], scenario: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "packed":
        monkeypatch.setattr(ragged, "kernel_for", lambda keys, values: varlen)
    adapter = adapter_of(family, heads)
    rows = (INSIDE, KEPT, replace(INSIDE, budget=Budget(21), granularity=parse("kv")))
    for config, found in zip(rows, decoded(adapter, rows, scenario), strict=True):
        expected = placed(adapter, config, scenario)
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-9 * np.abs(expected).max())
    moved, own = decoded(adapter, rows, scenario)[:2]
    assert float((moved - own).abs().max()) > 1e-3 * float(own.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rope", ROPES)
def test_a_moved_key_is_the_one_that_the_model_would_have_cached_there(rope: str, dtype: torch.dtype) -> None:
    """By transformers' own rotations at both positions; YaRN's factor is in both once."""
    family = "phi3" if rope == "partial" else "llama"
    rotary = tiny_model(family, d_head=16, rope_parameters=ROPES[rope]).model.rotary_emb
    assert (rotary.attention_scaling != 1) == (rope == "yarn")
    prompt, stands = torch.tensor([0, 1, 2, 95, 301, 511]), torch.arange(6)
    key = torch.randn(1, 1, 6, 16, generator=torch.Generator().manual_seed(1)).to(dtype)

    def cached(place: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(key, key, *rotary(key, place[None]))[1][0, 0]

    angle = entries._angles(stands, rotary.inv_freq) - entries._angles(prompt, rotary.inv_freq)
    found, eps = entries.rotate_keys(cached(prompt), angle), torch.finfo(dtype).eps
    assert found.dtype == dtype
    torch.testing.assert_close(found, cached(stands), rtol=0, atol=4 * eps * float(key.abs().max()))
    assert torch.equal(found[:3], cached(prompt)[:3])
    assert not torch.allclose(found[3:], cached(prompt)[3:], atol=0.1)


def same(one: Any, other: Any, place: int) -> None:
    """Every number of one configuration and of the full-cache run, bit for bit."""
    apart = {"perturbation_eviction", "perturbation_change"}
    assert set(one) - apart == set(other) - apart
    for name, array in one.items():
        if name not in {"kept_code", *apart}:
            part = place if "config" in VARIABLES[name].dims else ...
            np.testing.assert_array_equal(array[part], other[name][part], err_msg=name)


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_where_nothing_is_evicted_both_positions_are_one(scenario: str) -> None:
    for budget in (1.0, LENGTH + 5):
        runs = [
            RunConfig("m", "d", (replace(config, budget=Budget(budget)),), scenario=scenario, steps=2, generate=4)
            for config in (KEPT, INSIDE)
        ]
        same(*(trace_sample(tiny_adapter(), PROMPT, run).arrays for run in runs), 0)


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_rows_at_the_prompts_positions_do_not_notice_the_others(scenario: str) -> None:
    """Bit for bit, the noise floor with them, in a batch of the same size."""
    rows = [(SNAPKV, KEPT, replace(KEPT, policy=ONE_SINK[0])), (SNAPKV, KEPT, replace(KEPT, policy=ONE_SINK[1]))]
    runs = [RunConfig("m", "d", configs, scenario=scenario, steps=3, generate=4) for configs in rows]
    one, other = (trace_sample(tiny_adapter(), PROMPT, run).arrays for run in runs)
    for place in (0, 1):
        same(one, other, place)
    assert np.array_equal(one["perturbation_isolated"], other["perturbation_eviction"])
    assert np.array_equal(one["theta"], other["theta"])
    assert not other["perturbation_change"][:2].any()
    assert not np.array_equal(one["perturbation_propagated"][2], other["perturbation_propagated"][2])


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_answers_are_those_of_the_placed_cache(scenario: str) -> None:
    """Of `generate`, and of a trace, which decodes twice from the same cache."""
    adapter, (context, question) = exact_adapter("llama", 4, 2), PROMPT.parts(scenario)
    configs = (INSIDE, KEPT)
    made = answer(adapter, PROMPT, configs, 8, scenario=scenario).evicted
    run = RunConfig("m", "d", configs, scenario=scenario, generate=8, steps=2)
    traced = trace_sample(adapter, PROMPT, run).arrays["generated"]
    for config, tokens, stored in zip(configs, made, traced, strict=True):
        decoder, n = Decoder(adapter.model), len(context)
        for token in context:
            logits = decoder.step(token).logits
        stays = [place < SINKS or place >= n - 12 + SINKS for place in range(n)]
        expected: list[int] = []
        for later in range(len(question) + len(tokens) - 1):
            masks = [np.tile(stays + [True] * later, (decoder.heads, 1))] * decoder.layers
            if later >= len(question):
                expected.append(int(np.argmax(logits)))
            token = question[later] if later < len(question) else expected[-1]
            logits = decoder.step(token, masks, in_cache=flat(config).positions == "in-cache").logits
        assert tokens == [*expected, int(np.argmax(logits))]
        assert [token for token in stored.tolist() if token >= 0] == tokens
    assert made[0] != made[1]


def test_the_models_positions_are_its_own_again_afterwards() -> None:
    adapter = tiny_adapter()
    hooks, ids = hook_count(adapter.model), torch.tensor([token_ids(9)])
    with torch.inference_mode():
        plain = adapter.model(ids).logits
        decoded(adapter, (INSIDE,), "regular")
        cache = prefill_and_evict(adapter, PROMPT.token_ids, (INSIDE,), "s").cache
        with pytest.raises(RuntimeError, match="size"), decode_from(adapter, cache):
            torch.zeros(2) @ torch.zeros(3)
        assert hook_count(adapter.model) == hooks
        assert torch.equal(adapter.model(ids).logits, plain)


def test_entries_that_rows_share_are_pooled_once() -> None:
    shared, own = torch.arange(20.0).view(10, 2), torch.arange(100.0, 106.0).view(3, 2)
    rows = [
        KeptEntries(shared, -shared, torch.tensor([7, 1]), [2]),
        KeptEntries(own, -own, torch.tensor([2, 0]), [2]),
        KeptEntries(shared, -shared, torch.tensor([9]), [1]),
    ]
    made = pool_entries(rows)
    assert len(made.keys) == 13
    keys, values = made.take(torch.arange(5))
    assert keys.tolist() == [[14, 15], [2, 3], [104, 105], [100, 101], [18, 19]]
    assert torch.equal(values, -keys)
    assert pool_entries(rows[::2]).keys is shared


@pytest.mark.parametrize("prompt", [14, LENGTH])
@pytest.mark.parametrize("granularity", ["query", "kv"])
def test_a_cache_that_is_compressed_again_counts_from_0_again(granularity: str, prompt: int) -> None:
    """A short prompt is compressed as its text grows, a long one while it is read; beside rows that keep positions."""
    adapter, most, limit = exact_adapter("llama", 4, 2, seed=1), 40, 20
    chosen = replace(INSIDE, granularity=parse(granularity))
    given = Prompt("s", token_ids(prompt, seed=4), 0)
    found = answer(adapter, given, (KEPT, chosen, SNAPKV), most, compress_over=limit)
    decoder, held, expected, moved = Decoder(adapter.model), list(range(prompt)), [], []
    for token in given.token_ids:
        last = decoder.step(token)
    if prompt > limit:
        held = held[:SINKS] + held[SINKS - 12 :]
    while len(expected) < most:
        expected.append(int(np.argmax(last.logits)))
        if len(held) > limit:
            stays = held[:SINKS] + held[SINKS - 12 :]
            moved.append((len(expected), naive_perturbations(decoder, last, held, stays)))
            held = stays
        masks = [np.tile([place in held for place in range(decoder.position)], (decoder.heads, 1))] * decoder.layers
        held.append(decoder.position)
        last = decoder.step(expected[-1], masks, in_cache=True)
    assert len(found.evicted[1]) > 30
    assert found.evicted[1] == expected[: len(found.evicted[1])]
    compressions = [one for one in found.compressions if one.config == 1]
    assert len(compressions) >= 2
    for one, (generated, perturbations) in zip(compressions, moved, strict=False):
        assert (one.generated, one.before, one.after) == (generated, limit + 1, 12)
        np.testing.assert_allclose(one.perturbation.numpy(), perturbations, rtol=1e-5)
    alone = answer(adapter, given, (KEPT,), most, compress_over=limit)
    assert found.evicted[0] == alone.evicted[0] != found.evicted[1]


def naive_perturbations(decoder: Decoder, last: Step, held: list[int], stays: list[int]) -> list[list[float]]:
    """(layer, head) isolated perturbation on the last query, keys where they stand before anything moves."""
    layers: list[list[float]] = []
    for layer in range(decoder.layers):
        w_o = decoder.w_o(layer)
        layers.append([])
        for head in range(decoder.heads):
            kv_head = head * decoder.kv_heads // decoder.heads
            keys = [
                decoder._rotate(decoder.unrotated[layer][kv_head][place][None], stands, layer)[0]
                for stands, place in enumerate(held)
            ]
            weights = theory.softmax([float(last.query[layer][head] @ key) * decoder.scale for key in keys])
            values = [decoder.values[layer][kv_head][place] for place in held]
            columns = theory.head_slice(w_o, head, decoder.d_head)
            layers[-1].append(theory.perturbation(weights, [place in stays for place in held], values, columns))
    return layers
