"""What a head's loss and an evicted entry cost the text: named where they decide, refused where no gradient flows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perturbkv as pk
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ModelError, TraceError, UnknownNameError
from perturbkv.models.adapter import Adapter
from perturbkv.models.interface import AttentionFunction
from perturbkv.pipeline.sample.capture import intercept_attention
from perturbkv.schema import VARIABLES
from perturbkv.selection.grid import configuration
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import SampleTrace, Trace
from tests.oracle import effect, theory
from tests.oracle.sample import Reference, attention_of
from tests.support.hybrids import HYBRIDS, hybrid_adapter
from tests.support.models import GATED, exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import trace_sample

WINDOW, N, STEPS = 5, 40, 3
PROMPT = Prompt("s", token_ids(N, seed=4), 0, question_tokens=9)
CONFIGS = tuple(configuration(14, window=WINDOW, selection=selection) for selection in ("attention", "two-stage"))
ANSWER, WORD, PLACE, HEAD = 77, 7, 11, (1, 2)
"""The planted world's token that follows, the word that decides it, its place, and the layer and head that see it."""


def traced(adapter: Adapter, *configs: pk.EvictionConfig, prompt: Prompt = PROMPT, **more: Any) -> SampleTrace:
    run = RunConfig("m", "d", configs or CONFIGS, **{"steps": STEPS, "save": ("effect",), **more})
    sample: SampleTrace = trace_sample(adapter, prompt, run)
    return sample


@pytest.mark.parametrize("family", ["llama", "gpt_oss", GATED])
def test_all_isolated_effects_together_are_the_first_order_change_of_log_p(family: str) -> None:
    """Every layer's output moved at once toward what its kept sets leave, in the plain model, which reads all anew."""
    adapter = exact_adapter(family, 4, 2)
    sample = traced(adapter)
    reference = Reference(adapter.model, PROMPT.token_ids, RunConfig("m", "d", CONFIGS, steps=STEPS))
    for index, config in enumerate(CONFIGS):
        moved = {
            (reference.decoder.places[layer], N + step): sum(differences(reference, config, layer, step))[None]
            for layer, step in np.ndindex(2, STEPS)
        }
        expected = effect.derivative(adapter.model, (*PROMPT.token_ids, *reference.tokens), STEPS, moved)
        assert sample.arrays["effect_isolated"][index].sum() == pytest.approx(float(expected[0]), rel=1e-5)


def differences(reference: Reference, config: pk.EvictionConfig, layer: int, step: int) -> list[Any]:
    """ô_h − o_h (d_model) of every head, by loops."""
    held, found = reference.layer(layer, step), []
    attention, seen = attention_of(held, reference.decoder.scale), held["key"].shape[1]
    for head, (kept, _) in enumerate(reference.kept(layer, config, step)):
        sunk = attention.shape[1] - seen  # an entry that stays, without a value
        stays = [i in kept or i >= N for i in range(seen)] + [True] * sunk
        values = np.concatenate([held["value"][head // 2], np.zeros((sunk, reference.decoder.d_head))])
        projection = theory.head_slice(held["w_o"], head, reference.decoder.d_head)
        weights = list(attention[head])
        found.append(theory.evicted_output(weights, stays, values, projection)
                     - theory.head_output(weights, values, projection))  # fmt: skip
    return found


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", GATED, "lfm2", "deepseek_v3"])
def test_every_other_number_stays_as_it_is_bit_by_bit(family: str, scenario: str) -> None:
    if family in HYBRIDS:
        adapter = hybrid_adapter(family)
    else:
        adapter = tiny_adapter(family, 4, 4 if family == "deepseek_v3" else 2)
    without, sample = (traced(adapter, scenario=scenario, save=save).arrays for save in ((), ("effect",)))
    assert sample.keys() - without.keys() == {
        "effect_isolated", "effect_propagated", "effect_noise_floor", "effect_noise_floor_isolated", "entry_effect"
    }  # fmt: skip
    for name, array in without.items():
        np.testing.assert_array_equal(sample[name], array, err_msg=name)
    first = (sample[f"effect_{kind}"][:, :, 0] for kind in ("isolated", "propagated"))  # before anything was evicted
    np.testing.assert_allclose(*first, rtol=1e-3, atol=1e-5 * np.abs(sample["effect_isolated"]).max())


def planted() -> Adapter:
    """Llama in which one head of four looks for one word, and alone makes the next token.

    Component 0 of every embedding is 1; that of the word has component 1 too. The head's query and key are of the
    slowest rotation, so that places make no difference; it writes component 5, which the answer's logit reads. Other
    heads look at all entries alike and write what hardly moves the logits.
    """
    adapter = tiny_adapter("llama", 4, 4)
    model, (layer, head) = adapter.model, HEAD
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif "v_proj" not in name and "o_proj" not in name:
                parameter.zero_()
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.model.embed_tokens.weight[WORD, 1] = 1.0
        for index, block in enumerate(model.model.layers):
            attention = block.self_attn
            attention.v_proj.weight.mul_(0.01)
            attention.o_proj.weight.mul_(0.1)
            own = slice(8 * head, 8 * head + 8)
            if index == layer:
                attention.v_proj.weight[own], attention.o_proj.weight[:, own] = 0.0, 0.0
                attention.q_proj.weight[8 * head + 3, 0] = attention.k_proj.weight[8 * head + 3, 1] = 2.0
                attention.v_proj.weight[8 * head, 1] = 1.0
                attention.o_proj.weight[5, 8 * head] = 0.25
        model.lm_head.weight.normal_(0, 0.01, generator=torch.Generator().manual_seed(0))
        model.lm_head.weight[ANSWER, 5] = 1.5
    return adapter


@pytest.fixture(scope="module")
def world() -> Trace:
    ids = [100 + place for place in range(N)]
    ids[PLACE] = WORD
    recent = configuration(14, policy="streaming-llm", selection="position", window=WINDOW)
    settings = pk.Settings(steps=STEPS, save=("effect",))
    return pk.measure(planted(), [Prompt("s", tuple(ids), 0)], (recent, CONFIGS[0]), settings=settings, progress=False)


def test_the_head_and_the_entry_that_decide_are_named(world: Trace) -> None:
    arrays = world.arrays
    assert (arrays["token_id"] == ANSWER).all(), "the word decides every token"
    assert PLACE not in world.kept(0, 0, *HEAD)
    for kind in ("isolated", "propagated"):
        sizes = arrays[f"effect_{kind}"][0, 0].sum(axis=0)
        assert np.unravel_index(sizes.argmin(), sizes.shape) == HEAD
        assert sizes[HEAD] < -1 and np.abs(np.delete(sizes.ravel(), 4 * HEAD[0] + HEAD[1])).max() < 0.02
    entries = arrays["entry_effect"][0, 0]
    assert np.nanargmin(entries) == PLACE
    assert entries[PLACE] == pytest.approx(arrays["effect_isolated"][0, 0].sum(), rel=0.1)


def test_tokens_say_which_word_costs_the_text_and_heads_compare_effects(world: Trace) -> None:
    sides = "streaming-llm:position", "snapkv:attention"
    found = pk.tokens(world, baseline=sides[0], treatment=sides[1])
    costs = [token.baseline_effect for token in found.tokens]
    np.testing.assert_array_equal(costs, world.arrays["entry_effect"][0, 0, :N])
    shown = repr(found)
    assert f"at {PLACE} costs most" in " ".join(shown.split())
    gains = replace(found, effects=tuple(tuple(np.abs(each)) for each in found.effects))
    assert "Change of the text's log p" in repr(gains) and "costs most" not in repr(gains)
    pair = pk.compare_heads(world, *sides, distance="effect")[0]
    sizes = np.abs(world.arrays["effect_propagated"][0]).mean(axis=1)
    np.testing.assert_allclose(pair.propagated.baseline_mean, sizes[0])
    np.testing.assert_allclose(pair.propagated.treatment_mean, sizes[1])
    assert "|Δ log p|" in repr(pk.compare_heads(world, *sides, distance="effect"))


def test_effects_are_compared_in_a_trace_with_a_failed_sample(world: Trace) -> None:
    def with_nan(name: str, held: Any) -> Any:
        empty = np.full_like(held[:1], np.nan if held.dtype.kind == "f" else 0)
        return np.concatenate([empty, held]) if VARIABLES[name].axes[0] == "sample" else held

    failed = replace(
        world,
        run=replace(world.run, samples=2),
        sample_ids=("f", *world.sample_ids),
        arrays={name: with_nan(name, held) for name, held in world.arrays.items()},
        failures={"f": "out of memory"},
    )
    sides = "streaming-llm:position", "snapkv:attention"
    found, alone = (pk.compare_heads(one, *sides, distance="effect")[0] for one in (failed, world))
    np.testing.assert_array_equal(found.propagated.baseline_mean, alone.propagated.baseline_mean)
    assert (found.samples, found.failed_samples) == (1, 1)


def test_what_is_no_kept_set_has_no_entries() -> None:
    inside = configuration(14, policy="streaming-llm(positions=in-cache)", selection="position", window=WINDOW)
    arrays = traced(tiny_adapter(), CONFIGS[0], inside, steps=1).arrays
    assert np.isfinite(arrays["effect_isolated"]).all() and np.isfinite(arrays["effect_propagated"]).all()
    assert np.isnan(arrays["entry_effect"]).all(axis=1).tolist() == [False, True]
    assert (arrays["effect_noise_floor_isolated"] > 0).all() and (arrays["effect_noise_floor"] > 0).all()


def test_a_trace_with_effects_is_saved_and_read(world: Trace, tmp_path: Path) -> None:
    found = read_trace(world.save(tmp_path / "t.h5"))
    for name in ("effect_isolated", "effect_propagated", "entry_effect"):
        np.testing.assert_array_equal(found.arrays[name], world.arrays[name])


def test_a_model_through_which_no_gradient_flows_is_refused_in_one_line() -> None:
    with pytest.raises(ModelError, match="^--save effect needs a backward pass through 'tiny-olmo_h.*which failed"):
        traced(hybrid_adapter("olmo_hybrid"))  # its reference code changes states in place


def test_an_attention_that_lets_no_gradient_through_is_refused_in_one_line() -> None:
    def detached(stock: AttentionFunction, module: Any, args: Any, kwargs: Any) -> Any:
        output, weights = stock(module, *args, **kwargs)
        return output.detach(), weights

    adapter = tiny_adapter()
    adapter.facts  # noqa: B018  # found with the attention as it is
    with intercept_attention(adapter, detached), pytest.raises(ModelError, match="through the attention of layer 1"):
        traced(adapter)


def test_what_a_trace_lacks_or_no_distance_is_told_in_one_line() -> None:
    trace = Trace.from_samples(
        RunConfig("m", "d", CONFIGS, steps=STEPS, samples=1), [traced(tiny_adapter(), save=())], {}
    )
    with pytest.raises(TraceError, match="record it with --save effect"):
        pk.compare_heads(trace, distance="effect")
    with pytest.raises(UnknownNameError, match="^unknown distance 'effect'; known: l1, l2, cosine"):
        pk.layer_drift(trace, distance="effect")
