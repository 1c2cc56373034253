"""`examples/measure_packages.py` on a tiny model: L is that of what each package itself hands to attention."""

from __future__ import annotations

import functools
import runpy
from typing import Any

import numpy as np
import pytest
import torch

import perturbkv as pk
from perturbkv.configs.run import RunConfig
from perturbkv.models.adapter import Adapter
from tests.oracle import theory
from tests.oracle.decoder import Decoder, Step
from tests.support.models import exact_adapter, token_ids
from tests.support.resolved import trace_sample
from tests.support.scripts import ROOT

EXAMPLE = ROOT / "examples" / "measure_packages.py"
IDS, STEPS, LAYERS, HEADS = token_ids(300, seed=3), 5, 3, 4
"""Longer than the 256 entries within which tiny-turboquant rounds nothing."""
SNAPKV = pk.grid(64, selection="attention", granularity="kv", window=8)


def tiny() -> Adapter:
    return exact_adapter("llama", HEADS, HEADS // 2, layers=LAYERS, d_head=32)


@functools.cache
def measured(name: str) -> dict[str, np.ndarray]:
    run = RunConfig("m", "d", (*SNAPKV, *pk.grid(64, policy=f"cache:{EXAMPLE}:{name}")), steps=STEPS)
    return dict(trace_sample(tiny(), pk.Prompt("p", IDS, 0), run).arrays)


@functools.cache
def reference() -> tuple[Decoder, list[int], list[Step]]:
    """The naive decoder after the text, the text, and its steps."""
    decoder = Decoder(tiny().model)
    for token in IDS:
        last = decoder.step(token)
    tokens, steps = list[int](), list[Step]()
    for _ in range(STEPS):
        tokens.append(int(np.argmax((steps[-1] if steps else last).logits)))
        steps.append(decoder.step(tokens[-1]))
    return decoder, tokens, steps


@torch.no_grad()
def read(name: str) -> Any:
    ids, make = torch.tensor([IDS]), runpy.run_path(str(EXAMPLE))[name]
    return make(tiny().model, ids, torch.ones_like(ids))


def projected(layer: int, head: int, mixed: np.ndarray) -> float:
    decoder = reference()[0]
    return theory.l1(decoder.w_o(layer)[:, head * decoder.d_value : (head + 1) * decoder.d_value] @ mixed)


@pytest.mark.parametrize("name", ["randkv", "nexusquant"])
def test_isolated_is_what_its_own_entries_give_to_the_full_runs_queries(name: str) -> None:
    """Every layer's cache gets the new entries of the full run, and hands out what it holds then."""
    (decoder, _, steps), cache = reference(), read(name)
    expected = np.zeros((STEPS, LAYERS, HEADS))
    for step in range(STEPS):
        for layer in range(LAYERS):
            new = [[[head[len(IDS) + step]] for head in kind[layer]] for kind in (decoder.keys, decoder.values)]
            keys, values = cache.update(*torch.tensor(np.array(new), dtype=torch.float64).unsqueeze(1), layer)
            for head in range(HEADS):
                own = [kind[0, head // 2].double().numpy() for kind in (keys, values)]
                weights = theory.softmax(own[0] @ steps[step].query[layer][head] * decoder.scale)
                expected[step, layer, head] = projected(
                    layer, head, steps[step].head_output[layer][head] - weights @ own[1]
                )
    floor = np.abs(expected).max() * 1e-6
    np.testing.assert_allclose(measured(name)["perturbation_isolated"][1], expected, rtol=1e-6, atol=floor)


@pytest.mark.parametrize("name", ["randkv", "turboquant", "nexusquant"])
def test_propagated_is_what_its_own_decoding_gives(name: str) -> None:
    _, tokens, steps = reference()
    model, cache, seen = tiny().model, read(name), list[Any]()
    hooks = [layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
             for layer in model.model.layers]  # fmt: skip
    with torch.no_grad():
        logits = [
            model(torch.tensor([[token]]), past_key_values=cache, position_ids=torch.tensor([[len(IDS) + step]])).logits
            for step, token in enumerate(tokens)
        ]
    for hook in hooks:
        hook.remove()
    own = torch.cat([one.reshape(1, HEADS, -1) for one in seen]).reshape(STEPS, LAYERS, HEADS, -1).double().numpy()
    expected = np.zeros((STEPS, LAYERS, HEADS))
    for step, layer, head in np.ndindex(expected.shape):
        expected[step, layer, head] = projected(
            layer, head, steps[step].head_output[layer][head] - own[step, layer, head]
        )
    arrays, floor = measured(name), np.abs(expected).max() * 1e-6
    np.testing.assert_allclose(arrays["perturbation_propagated"][1], expected, rtol=1e-6, atol=floor)
    divergence = [theory.kl(full.logits, one[0, -1].double().numpy()) for full, one in zip(steps, logits, strict=True)]
    np.testing.assert_allclose(arrays["logit_kl"][1], divergence, rtol=1e-5, atol=1e-10)
    assert arrays["perturbation_propagated"][0].sum() > 0  # SnapKV's row, beside it


def test_each_is_told_as_what_it_is() -> None:
    """Entries of its own that stand for the prompt's; what was read through rounded entries has no isolated L.

    Above the first layer of a random model such a reading leaves entries farther from the prompt's than these are long.
    """
    for name, kind, kept in (("randkv", 1, len(IDS)), ("turboquant", 2, 0), ("nexusquant", 1, len(IDS))):
        arrays = measured(name)
        assert arrays["own_entries"][1] == kind, name
        assert (arrays["kept_count"][1] == kept).all(), name
        assert np.isnan(arrays["perturbation_isolated"][1]).all() == (name == "turboquant"), name
        assert np.isnan(arrays["held_bytes"][1]) == (name != "turboquant"), name


def test_randkv_loses_nothing_before_a_generated_token_goes() -> None:
    """The fourth new token is the first that is one too many: three generated ones stay beside the prompt."""
    lost = measured("randkv")["perturbation_isolated"][1].sum(axis=(1, 2))
    assert (lost[:3] < 1e-4 * lost[3]).all()


def test_bytes_of_codes_are_those_of_the_package() -> None:
    """Four bits of each number of 128 of 300 entries, scale and minimum of 16 bits; the others whole."""
    arrays, d_head, sets = measured("turboquant"), 32, 2 * LAYERS
    rounded = 128 * (2 * d_head / 2 + 2 * 2) + d_head * 2 * 2  # values have scales per token, keys per channel
    assert arrays["held_bytes"][1] == sets * (rounded + (len(IDS) - 128) * 2 * d_head * 2)
