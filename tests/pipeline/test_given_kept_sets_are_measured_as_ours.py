"""Kept sets from outside: the same numbers as ours where they are ours, physically evicted, and no stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from perturbkv.auditing import loss
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.schema import VARIABLES
from perturbkv.trace import Trace
from tests.oracle import theory
from tests.oracle.decoder import Decoder
from tests.support.models import exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import trace_sample

LENGTH, QUESTION, STEPS = 36, 7, 2
OURS = EvictionConfig(14, window=5, granularity="kv")
STAGED = ("theta_hat", "theta_hat_relax", "sigma_stage1", "sigma_topk", "stage1_count", "kept_offset")
GIVEN = loss.external_configuration("mine", 14)
PROMPT = Prompt("s", token_ids(LENGTH, seed=1), 0, question_tokens=QUESTION)


def masks_of(trace: Trace, label: str, adapter: Adapter, n: int) -> list[torch.Tensor]:
    """(kv_head, n) per layer, from the trace's kept positions."""
    config, group = trace.config_index(label), adapter.heads // adapter.kv_heads
    found = torch.zeros(len(adapter.layers), adapter.kv_heads, n, dtype=torch.bool)
    for layer in range(len(found)):
        for head in range(adapter.kv_heads):
            found[layer, head, trace.kept(0, config, layer, head * group)] = True
    return list(found)


def drawn(adapter: Adapter, n: int, shares: Sequence[float], seed: int = 3) -> list[torch.Tensor]:
    """Random kept sets of different lengths, without a window."""
    generator = torch.Generator().manual_seed(seed)
    heads = [torch.rand(adapter.kv_heads, n, generator=generator) for _ in adapter.layers]
    return [head < torch.tensor(shares).unsqueeze(-1) for head in heads]


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_our_kept_sets_given_back_give_our_numbers(scenario: str) -> None:
    adapter = exact_adapter("llama", 4, 2)
    n = LENGTH - (QUESTION if scenario == "context-only" else 0)
    run = {"steps": STEPS, "scenario": scenario, "dtype": "float32"}
    first = loss.measure_kept_sets(adapter, [PROMPT], [{}], [OURS], **run)
    masks = {GIVEN: masks_of(first, OURS.label(), adapter, n)}
    both = loss.measure_kept_sets(adapter, [PROMPT], [masks], [OURS], **run, generate=4)
    theirs, ours = (both.config_index(label) for label in (GIVEN.label(), OURS.label()))
    compared = [name for name in both.arrays if "config" in VARIABLES[name].dims and name not in STAGED]
    assert {"perturbation_propagated", "theta", "hidden_drift_l1", "logit_kl", "score", "kept_count"} < set(compared)
    for name in compared:
        array = both.arrays[name]
        np.testing.assert_allclose(array[:, theirs], array[:, ours], rtol=1e-6, atol=1e-12, err_msg=name)
    assert both.same_kept(theirs, ours).all()
    assert not np.array_equal(both.arrays["sigma_stage1"][:, theirs], both.arrays["sigma_stage1"][:, ours])


@pytest.fixture(scope="module", params=["regular", "context-only"])
def measured(request: pytest.FixtureRequest) -> tuple[Trace, Adapter, list[torch.Tensor], int]:
    adapter = exact_adapter("llama", 4, 2)
    n = LENGTH - (QUESTION if request.param == "context-only" else 0)
    masks = drawn(adapter, n, (0.2, 0.7))
    masks[1][0] = False  # a head that keeps nothing at all
    run = {"steps": STEPS, "scenario": request.param, "save": ("outputs",), "dtype": "float32"}
    return loss.measure_kept_sets(adapter, [PROMPT], [{GIVEN: masks}], **run), adapter, masks, n


def test_what_is_held_is_what_was_given(measured: tuple[Trace, Adapter, list[torch.Tensor], int]) -> None:
    trace, adapter, masks, n = measured
    for layer, wanted in enumerate(masks_of(trace, GIVEN.label(), adapter, n)):
        assert torch.equal(wanted, masks[layer])
    kept = sum(int(mask.sum()) for mask in masks)
    assert float(trace.arrays["held_share"][0, 0]) == pytest.approx(kept / (len(masks) * adapter.kv_heads * n))
    assert trace.arrays["evicted"].tolist() == [[1]]
    assert (
        int(trace.arrays["cache_bytes"][0] - trace.arrays["cache_padding_bytes"][0])
        == kept * (adapter.d_key + adapter.d_value) * 8
    )


def test_given_sets_have_no_stages(measured: tuple[Trace, Adapter, list[torch.Tensor], int]) -> None:
    arrays = measured[0].arrays
    np.testing.assert_array_equal(arrays["sigma_stage1"], arrays["retained_mass"])
    for name in ("theta_hat", "theta_hat_relax"):
        np.testing.assert_allclose(arrays[name], arrays["theta"], rtol=1e-9)
    assert (arrays["perturbation_isolated"] <= arrays["theta"] * (1 + 1e-9)).all()
    np.testing.assert_array_equal(arrays["stage1_count"], arrays["kept_count"])


def test_they_are_measured_and_decoded_as_the_oracle_does(
    measured: tuple[Trace, Adapter, list[torch.Tensor], int],
) -> None:
    trace, adapter, masks, n = measured
    reference, group = Decoder(adapter.model), adapter.heads // adapter.kv_heads
    for token in PROMPT.token_ids:
        reference.step(token)
    held = Decoder(adapter.model)
    for token in PROMPT.token_ids[:n]:
        held.step(token)
    tokens = (*PROMPT.token_ids[n:], *trace.arrays["token_id"][0].tolist())
    for later, token in enumerate(tokens):
        seen = [np.ones((adapter.heads, n + later), dtype=bool) for _ in masks]
        for mask, own in zip(seen, masks, strict=True):
            mask[:, :n] = own.repeat_interleave(group, dim=0).numpy()
        evicted = held.step(token, seen)
        step = later - (LENGTH - n)
        if step < 0:
            continue
        full = reference.step(token)
        for layer, mask in enumerate(masks):
            w_o = reference.w_o(layer)
            keys, values = (np.array(kind[layer]) for kind in (reference.keys, reference.values))
            attention = theory.decode_attention(full.query[layer], keys, adapter.d_key**-0.5)
            for head in range(adapter.heads):
                projection = theory.head_slice(w_o, head, adapter.d_value)
                kept = [*mask[head // group].tolist(), *[True] * (keys.shape[1] - n)]
                moved = theory.l1((full.head_output[layer][head] - evicted.head_output[layer][head]) @ projection)
                alone = theory.perturbation(list(attention[head]), kept, values[head // group], projection)
                at = (0, 0, step, layer, head)
                assert float(trace.arrays["perturbation_propagated"][at]) == pytest.approx(moved, rel=1e-5, abs=1e-12)
                assert float(trace.arrays["perturbation_isolated"][at]) == pytest.approx(alone, rel=1e-5, abs=1e-12)
        assert float(trace.arrays["logit_kl"][0, 0, step]) == pytest.approx(
            theory.kl(full.logits, evicted.logits), rel=1e-4
        )


def test_all_of_the_prompt_given_evicts_nothing() -> None:
    adapter = tiny_adapter()
    everything = [torch.ones(adapter.kv_heads, LENGTH, dtype=torch.bool)] * len(adapter.layers)
    trace = loss.measure_kept_sets(adapter, [PROMPT], [{GIVEN: everything}])
    assert trace.arrays["evicted"].tolist() == [[0]] and trace.arrays["held_share"].tolist() == [[1]]
    assert (trace.arrays["perturbation_propagated"] <= trace.arrays["noise_floor"][:, None]).all()


def test_what_does_not_fit_is_refused() -> None:
    adapter = tiny_adapter()
    fitting_configs = drawn(adapter, LENGTH, (0.5, 0.5))
    for masks, got in (
        (fitting_configs[:1], r"\(2, 36\) of 1$"),
        ([fitting_configs[0], fitting_configs[1][:1]], r"\(1, 36\) of 2$"),
        ([mask[:, 1:] for mask in fitting_configs], r"\(2, 35\) of 2$"),
    ):
        with pytest.raises(
            ConfigError, match=rf"expected kept sets \(kv_head, key\) \(2, 36\) of 2 layers .*, got {got}"
        ):
            loss.measure_kept_sets(adapter, [PROMPT], [{GIVEN: masks}])
    with pytest.raises(ConfigError, match="the kept sets of policy 'given:mine' are handed over"):
        trace_sample(adapter, PROMPT, RunConfig("m", "d", (GIVEN,)))
