"""A cache of latents, of which attention reads keys and values of every head: measured, counted, answered from."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import perturbkv as pk
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.patching import Mixture
from perturbkv.configs.resources import Resources, Shape
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers import generation
from perturbkv.pipeline.sample.capture import intercept_attention
from perturbkv.pipeline.variants.mixtures import MixtureSample
from perturbkv.selection.grid import configuration
from perturbkv.selection.resolved_config import ResolvedRun
from tests.support.models import tiny_adapter, token_ids
from tests.support.resolved import answer, trace_sample
from tests.support.traces import kept_of

pytestmark = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="older transformers cache all heads' keys",
)

N, STEPS, WINDOW, LATENT, LAYERS, HEADS = 40, 3, 4, 10 + 4, 2, 4
PROMPT = Prompt("s", token_ids(N, seed=1), 0)
CONFIGS = tuple(
    configuration(14, policy="snapkv", window=WINDOW, selection="attention", granularity=granularity)
    for granularity in ("query", "kv", "layer", "model")
)
LAYER = CONFIGS[2]


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return tiny_adapter("deepseek_v3", HEADS, HEADS)


@pytest.fixture(scope="module")
def arrays(adapter: Adapter) -> dict[str, Any]:
    trace = pk.measure(adapter, [PROMPT], CONFIGS, settings=pk.Settings(steps=STEPS), progress=False)
    return {name: array if name == "kept_code" else array[0] for name, array in trace.arrays.items()}


def logits(adapter: Adapter, text: tuple[int, ...], kept: Any = None, seen: list[Tensor] | None = None) -> Tensor:
    """Logits (token, vocab) by a naive float64 attention; tokens after the prompt see what `kept[layer][head]` has.

    `seen` gets the attention weights (head, query, key) of each layer.
    """

    def attend(stock: Any, module: Any, args: Any, kwargs: Any) -> Any:
        query, key, value = (given[0].double() for given in args[:3])
        visible = torch.ones(HEADS, len(text), len(text), dtype=torch.bool).tril()
        for head in range(HEADS if kept is not None else 0):
            gone = sorted(set(range(N)) - set(kept[adapter.layer_of(module)][head]))
            visible[head, N:, gone] = False
        scores = (kwargs["scaling"] * query @ key.mT).masked_fill(~visible, -math.inf).softmax(dim=-1)
        if seen is not None:
            seen.append(scores)
        return (scores @ value).transpose(0, 1).unsqueeze(0).to(args[0].dtype), None

    with torch.inference_mode(), intercept_attention(adapter, attend):
        found: Tensor = adapter.model(input_ids=torch.tensor([text]), use_cache=False).logits[0].double()
    return found


def kept_sets(arrays: dict[str, Any], config: int) -> list[list[list[int]]]:
    """Kept positions of each layer and head."""
    return [[sorted(kept_of(arrays, config, layer, head)) for head in range(HEADS)] for layer in range(LAYERS)]


def test_what_is_found_at_the_door(adapter: Adapter) -> None:
    layer = adapter.layer_facts(0)
    assert (layer.latent, layer.kv_heads, layer.d_key, layer.d_value) == (LATENT, HEADS, 12, 6)
    told = Shape.from_config(adapter.config, 4, adapter.shape.weights_bytes)
    assert dataclasses.replace(told, latent=LATENT) == adapter.shape


def test_a_latent_is_counted_once_where_any_head_keeps_what_is_made_of_it(arrays: dict[str, Any]) -> None:
    assert arrays["full_bytes"] == 2 * LATENT * N * LAYERS
    for config in range(len(CONFIGS)):
        stored = sum(len(set().union(*heads)) for heads in kept_sets(arrays, config))
        assert arrays["held_share"][config] == pytest.approx(stored / (N * LAYERS))
        assert arrays["held_bytes"][config] == 2 * LATENT * stored
    assert arrays["cache_bytes"] == 2 * arrays["held_bytes"].sum()  # in float32
    assert arrays["held_share"][2] == pytest.approx(14 / N)  # as large as its budget
    assert arrays["held_share"][0] == arrays["held_share"][1] > 1.3 * 14 / N


def test_one_set_a_layer_has_the_largest_mean_over_all_heads(adapter: Adapter, arrays: dict[str, Any]) -> None:
    seen: list[Tensor] = []
    logits(adapter, PROMPT.token_ids, seen=seen)
    for layer, heads in enumerate(kept_sets(arrays, 2)):
        mean = seen[layer][:, -WINDOW:, : N - WINDOW].mean(dim=(0, 1)).tolist()
        pooled = [max(mean[max(0, place - 3) : place + 4]) for place in range(len(mean))]
        order = sorted(range(len(pooled)), key=lambda place: (-pooled[place], place))
        assert heads == [sorted([*order[: 14 - WINDOW], *range(N - WINDOW, N)])] * HEADS


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_evicted_caches_decode_as_if_masked(adapter: Adapter, arrays: dict[str, Any], config: int) -> None:
    text = (*PROMPT.token_ids, *arrays["token_id"].tolist())
    full, evicted = logits(adapter, text), logits(adapter, text, kept_sets(arrays, config))
    assert arrays["token_id"].tolist() == full[N - 1 : -1].argmax(dim=-1).tolist()
    expected = torch.nn.functional.kl_div(
        evicted[N:].log_softmax(dim=-1), full[N:].log_softmax(dim=-1), log_target=True, reduction="none"
    ).sum(dim=-1)
    np.testing.assert_allclose(arrays["logit_kl"][config], expected.numpy(), rtol=1e-3, atol=1e-7)
    assert float(expected.min()) > 1e-5


def test_a_replay_leaves_the_cache_as_it_was(adapter: Adapter, arrays: dict[str, Any]) -> None:
    replayed = configuration(14, policy="kvzip", window=WINDOW, granularity="kv")
    trace = pk.measure(adapter, [PROMPT], (*CONFIGS, replayed), settings=pk.Settings(steps=STEPS), progress=False)
    for name in ("perturbation_isolated", "perturbation_propagated", "logit_kl"):
        np.testing.assert_allclose(trace.arrays[name][0][: len(CONFIGS)], arrays[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_answers_diverge_as_the_trace_says(adapter: Adapter, scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "end_tokens", lambda adapter: set())
    prompt, settings = dataclasses.replace(PROMPT, question_tokens=5), pk.Settings(steps=STEPS, scenario=scenario)
    trace = pk.measure(adapter, [prompt], CONFIGS, settings=settings, progress=False)
    made = answer(adapter, prompt, CONFIGS, STEPS, scenario=scenario, divergence=True)
    np.testing.assert_allclose(made.divergence.kl.numpy(), trace.arrays["logit_kl"][0], rtol=1e-3, atol=1e-6)
    assert made.held == pytest.approx(trace.arrays["held_share"][0].tolist())
    assert made.stored == pytest.approx([])  # as all is in 16 bits


def test_a_cache_is_compressed_again(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "end_tokens", lambda adapter: set())
    made = answer(adapter, PROMPT, (LAYER,), 12, compress_over=18)
    assert [(each.before, each.after) for each in made.compressions] == [(19, 14), (19, 14)]


def test_mixed_sets_hold_the_latents_of_both(adapter: Adapter, arrays: dict[str, Any]) -> None:
    run = ResolvedRun.from_run(RunConfig("m", "d", (CONFIGS[0], LAYER), steps=STEPS))
    sample = MixtureSample(adapter, PROMPT, run, Resources(), 3)
    first = Mixture.of_layers(LAYERS, sample.kept_heads, [0])  # which alone has one set for all heads
    (found,) = sample.measure([first]).rows
    sets = [kept_sets(arrays, 2)[0], kept_sets(arrays, 0)[1]]
    assert found.held == pytest.approx(sum(len(set().union(*heads)) for heads in sets) / (N * LAYERS))


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"policy": "snapkv", "precision": "quantise(bits=4)"}, "precision 'quantise.*' expects a cache of the keys"),
        ({"policy": "quest(page=4)"}, "policy 'quest' expects a cache of the keys and values that attention reads"),
        ({"policy": "vertical-slash"}, "policy 'vertical-slash' expects a cache of the keys"),
        ({"policy": "streaming-llm(positions=in-cache)", "selection": "position"}, "no rotations by halves"),
        ({"policy": "expected-attention"}, "no rotations by halves that it could use"),
    ],
)
def test_what_reads_other_entries_than_the_cache_has_is_refused(
    adapter: Adapter, choices: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        pk.measure(adapter, [PROMPT], [configuration(20, window=WINDOW, **choices)], settings=pk.Settings(steps=1),
                   progress=False)  # fmt: skip


def test_a_press_is_refused(adapter: Adapter) -> None:
    press = EvictionConfig(20, Choice("kvpress:KnormPress"), "given", 0, "kv")
    with pytest.raises(ModelError, match="policy 'kvpress:KnormPress' expects a cache of the keys and values"):
        trace_sample(adapter, PROMPT, RunConfig("m", "d", (press,), steps=1))
