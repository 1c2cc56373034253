"""Models some of whose layers read another layer's cache: its kept sets are theirs, and its bytes count once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from perturbkv.auditing import loss
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources, Shape
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError, ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import ByteTokenizer
from perturbkv.models.proof import twin
from perturbkv.pipeline.sample.capture import Observer, capture, intercept_attention
from perturbkv.pipeline.variants.mixtures import MixtureSample
from perturbkv.selection.grid import configuration
from tests.support.models import token_ids
from tests.support.resolved import answer, prefill, resolved_run, trace_sample
from tests.support.traces import kept_of

FAMILIES = ("gemma4_text", "gemma3n_text")
"""Gemma 4 skips the prompt's queries in such layers; Gemma 3n does not, and has four residual streams."""
N, QUESTION, STEPS = 40, 3, 2
PROMPT = Prompt("s", token_ids(N + QUESTION, seed=4, vocab=200), 0, question_tokens=QUESTION)
SCORES = ((3.0, 3.0, 1.0, 1.0), (1.0, 1.0, 3.0, 3.0), (5.0,) * 4, (9.0,) * 4)
SETTINGS = {"scenario": "context-only", "steps": STEPS, "head_scores": SCORES}
pytestmark = pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="older transformers have fewer families")


@functools.cache
def sharing_adapter(family: str) -> Adapter:
    """Eight layers: two sliding and two full ones with caches, then as many that read the last of each kind."""
    of_3n = {"num_kv_shared_layers": 10, "activation_sparsity_pattern": [0.0] * 35}
    config = CONFIG_MAPPING[family](**of_3n if family == "gemma3n_text" else {"num_kv_shared_layers": 12})
    small = twin._small_config(config, of_kind=2)
    model = twin._attempt(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], small, seed=0, kernel="sdpa")
    return Adapter(model, ByteTokenizer(), family, "test", True)


def config(policy: str = "snapkv", budget: int = 14, **more: Any) -> EvictionConfig:
    return configuration(budget, policy=policy, **{"window": 4, "kernel": 3, **more})


CONFIGS = (
    config(granularity="kv", selection="attention"), config(), config("pyramidkv"), config("adakv"),
    config("random"), config(selection="hindsight"), config("kvzip"), config("headkv", granularity="kv"),
)  # fmt: skip


@functools.cache
def measured(family: str) -> dict[str, np.ndarray]:
    run = RunConfig("m", "d", CONFIGS, **SETTINGS)
    return dict(trace_sample(sharing_adapter(family), PROMPT, run).arrays)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_owner_of_a_cache_is_found(family: str) -> None:
    adapter = sharing_adapter(family)
    kinds = ["sliding"] * 2 + ["full"] * 2
    assert [layer.kind for layer in adapter.facts.layers] == [*kinds, *kinds]
    assert [layer.owner for layer in adapter.facts.layers] == [None] * 4 + [1, 1, 3, 3]
    assert adapter.layer_indices == (2, 3, 6, 7)
    assert adapter.owners == (0, 1, 1, 1)
    told = Shape.from_config(adapter.config, 4, 0)
    for shape in (adapter.shape, told):
        assert (shape.layers, shape.readers, shape.measured, shape.sliding) == (2, 2, 4, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_records_count_all_parallel_streams_of_hidden_states(family: str) -> None:
    adapter, widths = sharing_adapter(family), set[int]()
    with torch.inference_mode(), capture(adapter, Observer(hidden=lambda layer, hidden: widths.add(hidden.shape[-1]))):
        adapter.model(torch.tensor([[1, 2, 3]]))
    assert widths == {adapter.shape.streams * adapter.d_model}
    plain, layers = replace(adapter.shape, streams=1), adapter.shape.measured
    more = adapter.shape.row_bytes(config(), N, 1, STEPS) - plain.row_bytes(config(), N, 1, STEPS)
    assert more >= STEPS * layers * (max(widths) - adapter.d_model) * adapter.dtype.itemsize


@pytest.mark.parametrize("family", FAMILIES)
def test_the_owners_kept_sets_are_the_readers(family: str) -> None:
    found = measured(family)
    for index in range(len(CONFIGS)):
        sets = [[kept_of(found, index, layer, head) for head in range(4)] for layer in range(4)]
        assert sets[1] == sets[2] == sets[3]
        assert sets[0] != sets[1]
        counts = [[len(positions) for positions in layer] for layer in sets]
        assert found["kept_count"][index].tolist() == counts
        assert np.mean(counts[:2]) == pytest.approx(14, abs=0.5), "the budget is that of layers with a cache"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_owners_scores_choose_the_set(family: str) -> None:
    """The mean weights of its last 4 queries, and their mean over the group, max-pooled over 3 entries: 10 of 36."""
    adapter, found = sharing_adapter(family), measured(family)
    seen: dict[int, Any] = {}

    def attend(stock: Any, module: Any, args: Any, kwargs: Any) -> Any:
        seen[adapter.layer_of(module)] = args[0][0].double(), args[1][0].double()
        return stock(module, *args, **kwargs)

    with torch.inference_mode(), intercept_attention(adapter, attend):
        adapter.model(input_ids=torch.tensor([PROMPT.token_ids[:N]]), use_cache=False)
    query, key = seen[1]
    for own in range(len(key)):
        scores = torch.zeros(N - 4, dtype=torch.float64)
        for head in range(2 * own, 2 * own + 2):
            logits = adapter.scale(1) * query[head, -4:] @ key[own].T
            weights = logits.masked_fill(torch.ones(4, N).triu(N - 3) > 0, -torch.inf).softmax(dim=-1)[:, : N - 4]
            scores += weights.mean(dim=0)
        pooled = torch.nn.functional.max_pool1d(scores[None], 3, 1, 1)[0]
        expected = pooled.sort(descending=True, stable=True).indices[:10].sort().values.tolist()
        for layer in (1, 2, 3):
            assert kept_of(found, 0, layer, 2 * own)[:10] == expected


def masked_run(adapter: Adapter, text: Sequence[int], kept: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Of the plain model reading a text at once: what measured projections receive, what layers put out, the logits.

    `kept` has, for each measured layer and head, which of the context's entries the later queries see; None: all.
    """

    def attend(stock: Any, module: Any, args: Any, kwargs: Any) -> Any:
        (query, key, value), outputs = (given[0].double() for given in args[:3]), []
        sets = kept[adapter.layer_of(module)]
        for head in range(len(query)):
            own = head * len(key) // len(query)
            seen = torch.ones(len(text), len(text), dtype=torch.bool).tril()
            if sets is not None:
                seen[N:, [position for position in range(N) if position not in sets[head]]] = False
            logits = kwargs.get("scaling", query.shape[-1] ** -0.5) * query[head] @ key[own].T
            outputs.append(logits.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ value[own])
        return torch.stack(outputs, dim=1).unsqueeze(0).float(), None

    received: list[Tensor] = []
    streams: list[Tensor] = []
    hooks = []
    for projection in adapter.projections:
        hooks.append(projection.register_forward_pre_hook(lambda _, args: received.append(args[0][0])))
    for layer in adapter.every_layer:
        hooks.append(layer.register_forward_hook(lambda _, args, output: streams.append(output)))
    with torch.inference_mode(), intercept_attention(adapter, attend):
        logits = adapter.model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return received, streams, logits.double()


@pytest.mark.parametrize("family", FAMILIES)
def test_propagated_perturbation_drift_and_divergence_equal_the_masked_models(family: str) -> None:
    adapter, found = sharing_adapter(family), measured(family)
    text = [*PROMPT.token_ids, *found["token_id"].tolist()]
    outputs, streams, logits = masked_run(adapter, text, [None] * 4)
    for index in range(len(CONFIGS)):
        kept = [[kept_of(found, index, layer, head) for head in range(4)] for layer in range(4)]
        evicted_outputs, evicted_streams, evicted_logits = masked_run(adapter, text, kept)
        for step in range(STEPS):
            place = N + QUESTION + step
            for layer in range(4):
                slices = adapter.projections[layer].weight.detach().double().T.view(4, -1, adapter.d_model)
                gone = (outputs[layer] - evicted_outputs[layer])[place].double().view(4, 1, -1)
                expected = (gone @ slices).abs().sum(dim=(1, 2))
                assert found["perturbation_propagated"][index, step, layer] == pytest.approx(expected.numpy(), rel=2e-3)
            for layer in range(len(adapter.every_layer)):
                moved = (streams[layer] - evicted_streams[layer])[..., place, :].double().abs().sum()
                assert found["hidden_drift_l1"][index, step, layer] == pytest.approx(float(moved), rel=2e-3, abs=1e-3)
            full, evicted = (kind[place].log_softmax(dim=-1) for kind in (logits, evicted_logits))
            assert found["logit_kl"][index, step] == pytest.approx(
                float((full.exp() * (full - evicted)).sum()), rel=5e-3
            )
        assert int(logits[N + QUESTION - 1].argmax()) == text[N + QUESTION]


@pytest.mark.parametrize("family", FAMILIES)
def test_entries_and_bytes_count_once(family: str) -> None:
    adapter, found = sharing_adapter(family), measured(family)
    width, window = adapter.d_key + adapter.d_value, adapter.facts.layers[0].window
    sliding = [adapter.facts.layers[layer] for layer in (0, 1)]
    windows = sum(layer.kv_heads * (layer.d_key + layer.d_value) * window for layer in sliding)
    full = 2 * adapter.kv_heads * N * width + windows
    assert float(found["full_bytes"]) == 2 * full
    for index, one in enumerate(CONFIGS):
        sets = adapter.heads if one.granularity.name == "query" else adapter.kv_heads
        held = found["kept_count"][index, :2, :: adapter.heads // sets].sum() * width + windows
        assert float(found["held_share"][index]) == pytest.approx(held / full)
        assert float(found["held_bytes"][index]) == 2 * held


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_their_divergence_are_those_of_the_masked_model(family: str) -> None:
    adapter, found = sharing_adapter(family), measured(family)
    answers = answer(adapter, PROMPT, CONFIGS[:2], 5, scenario="context-only", divergence=True)
    full = masked_run(adapter, [*PROMPT.token_ids, *answers.full], [None] * 4)[2].log_softmax(dim=-1)
    for index, tokens in enumerate([answers.full, *answers.evicted], start=-1):
        kept: list[Any] = [None] * 4
        if index >= 0:
            kept = [[kept_of(found, index, layer, head) for head in range(4)] for layer in range(4)]
            evicted = masked_run(adapter, [*PROMPT.token_ids, *answers.full], kept)[2].log_softmax(dim=-1)
            expected = (full.exp() * (full - evicted)).sum(dim=-1)[N + QUESTION :]
            assert answers.divergence.kl[index].tolist() == pytest.approx(expected.tolist(), rel=5e-3)
            assert (expected > 1e-3).all()
        logits = masked_run(adapter, [*PROMPT.token_ids, *tokens], kept)[2]
        assert logits[N + QUESTION - 1 : -1].argmax(dim=-1).tolist() == tokens
    assert answers.held == pytest.approx(found["held_share"][:2].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_readers_are_measured_with_the_entries_that_the_owner_stores(family: str) -> None:
    """In few bits, and with a correction for what is gone."""
    adapter = sharing_adapter(family)
    few = config(precision="quantise(bits=4, group=8)")
    prompt = Prompt("s", PROMPT.token_ids[:N], 0)
    run = RunConfig("m", "d", (few,), generate=2)
    found = trace_sample(adapter, prompt, run).arrays
    plain = trace_sample(adapter, prompt, RunConfig("m", "d", (config(),))).arrays
    assert (found["kept_count"] == plain["kept_count"]).all()
    assert (found["perturbation_change"] > 0).all()
    assert (found["perturbation_eviction"] == plain["perturbation_isolated"]).all()
    corrected = trace_sample(adapter, prompt, RunConfig("m", "d", (config(correction="corrected"),))).arrays
    assert np.isfinite(corrected["perturbation_isolated"]).all()
    assert (corrected["perturbation_isolated"] != plain["perturbation_isolated"]).all()


def test_what_takes_a_cache_in_every_layer_says_which_has_none() -> None:
    adapter, words = sharing_adapter("gemma4_text"), "layer 6 reads the entries of layer 3"
    mask = [torch.ones(adapter.kv_heads, N, dtype=torch.bool)] * 4
    with pytest.raises(ModelError, match=f"policy 'quest' expects .* {words}"):
        prefill(adapter, token_ids(N), [config("quest", budget=36)], Resources(), "s")
    with pytest.raises(ModelError, match=f"compressing caches again .* {words}"):
        answer(adapter, PROMPT, [config()], 4, compress_over=20)
    with pytest.raises(ModelError, match=f"a policy whose kept sets come from elsewhere expects .* {words}"):
        loss.measure_kept_sets(adapter, [PROMPT], [{loss.external_configuration("own", 20): mask}])
    with pytest.raises(ModelError, match=f"a mixture of kept sets expects .* {words}"):
        MixtureSample(adapter, PROMPT, resolved_run(CONFIGS[:2]), Resources(), 2)


def test_head_scores_of_readers_alone_are_refused_as_they_choose_nothing() -> None:
    scores = ((0.0,) * 4, (0.0,) * 4, (1.0, 2.0, 3.0, 4.0), (9.0,) * 4)
    run = RunConfig("m", "d", (config("headkv", granularity="kv"),), **{**SETTINGS, "head_scores": scores})
    with pytest.raises(ConfigError, match="head score above 0 in a layer of model 'gemma4_text' that fills a cache"):
        trace_sample(sharing_adapter("gemma4_text"), PROMPT, run)
