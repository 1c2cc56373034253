"""Kept entries in few bits: measured, answered from, compressed again; and what cannot be stored is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from perturbkv.configs.choice import parse
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ActivationError, ConfigError
from perturbkv.pipeline.answers.compression import Compressor
from perturbkv.selection import compatibility
from perturbkv.selection.grid import configuration
from tests.support.models import HEADS, exact_adapter, token_ids
from tests.support.resolved import answer, prefill_and_evict, resolved_run, trace_sample

PROMPT = Prompt("s", token_ids(40, seed=4), 0, question_tokens=9)
WINDOW = 5


def config(precision: str = "full", budget: float = 16, policy: str = "adakv", **more: object) -> EvictionConfig:
    return configuration(budget, policy=policy, **{"window": WINDOW, "kernel": 3, "precision": precision, **more})


@pytest.fixture(scope="module")
def bits() -> dict[str, np.ndarray]:
    """Everything, and 16 entries, in 16, 8, 4 and 2 bits."""
    few = ["full", *(f"quantise(bits={count}, group=8)" for count in (8, 4, 2))]
    configs = tuple(config(precision, budget, "snapkv", granularity="kv") for budget in (1.0, 16) for precision in few)
    return dict(trace_sample(exact_adapter("llama", *HEADS["GQA"]), PROMPT, RunConfig("m", "d", configs)).arrays)


@pytest.mark.parametrize("name", ["perturbation_isolated", "perturbation_propagated"])
def test_fewer_bits_of_everything_perturb_more(bits: dict[str, np.ndarray], name: str) -> None:
    """8 bits of everything is nearly the full cache, 2 bits is not; eviction alone is neither."""
    lost = bits[name][:, 0].mean(axis=(1, 2)) / bits["output_norm"][0].mean()
    assert lost[0] < 1e-12 < lost[1] < 0.02 < 10 * lost[1] < lost[2] < lost[3] / 3
    assert lost[3] > 0.1


def test_what_is_kept_depends_on_the_budget_alone(bits: dict[str, np.ndarray]) -> None:
    assert bits["evicted"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (bits["kept_count"][4:] == bits["kept_count"][4]).all()
    assert (bits["theta"][4:] == bits["theta"][4]).all(), "the bounds are those of the kept set"
    assert len(set(bits["held_share"].tolist())) == 2
    assert len(set(bits["held_bytes"].tolist())) == 8


def test_a_row_that_keeps_all_in_few_bits_is_no_floor(bits: dict[str, np.ndarray]) -> None:
    """The row that keeps everything reads the full cache itself, whatever the others store."""
    assert float(bits["noise_floor"].max()) < 1e-10 < float(bits["perturbation_propagated"][1].mean())


def test_rows_in_16_bits_are_those_of_a_run_without_others() -> None:
    adapter, plain = exact_adapter("llama", *HEADS["GQA"]), (config(), config(policy="snapkv"))
    others = (config("quantise"), config("quantise(bits=2)", 1.0))
    alone = trace_sample(adapter, PROMPT, RunConfig("m", "d", plain)).arrays
    among = trace_sample(adapter, PROMPT, RunConfig("m", "d", (plain[0], *others, plain[1]))).arrays
    for name in ("kept_count", "held_bytes", "evicted"):
        assert np.array_equal(alone[name], among[name][[0, 3]]), name
    for name in ("perturbation_isolated", "theta", "perturbation_propagated", "logit_kl"):
        np.testing.assert_allclose(alone[name], among[name][[0, 3]], rtol=1e-9, atol=1e-13)


def traced(*precisions: str, budget: float = 16) -> dict[str, np.ndarray]:
    configs = tuple(config(precision, budget, "snapkv", granularity="kv") for precision in precisions)
    return dict(trace_sample(exact_adapter("llama", *HEADS["GQA"]), PROMPT, RunConfig("m", "d", configs)).arrays)


@pytest.mark.parametrize("precision", ["16", "4; layers 0-1: 16"])
def test_sixteen_bits_everywhere_are_full_precision(precision: str) -> None:
    """Bit for bit, but for isolated perturbations, which come from the stored entries' own outputs."""
    full, found = traced("full"), traced(precision)
    assert found.keys() - full.keys() == {"perturbation_eviction", "perturbation_change"}
    assert np.array_equal(found["perturbation_change"], np.zeros_like(found["perturbation_change"]))
    for name in full:
        if name.startswith("perturbation_isolated"):
            np.testing.assert_allclose(found[name], full[name], rtol=1e-12)
        else:
            assert np.array_equal(found[name], full[name], equal_nan=full[name].dtype.kind == "f"), name


def test_a_rule_changes_its_layers_alone() -> None:
    """What a layer loses by its own bits is that of the same bits everywhere; in 16 bits nothing is lost by them."""
    found = traced("full", "2, group=8", "2, group=8; layers 0: 16", "layers 1: keys=2", "layers 1: values=2")
    change = found["perturbation_change"]  # (config, step, layer, head)
    assert (change[1] > 0).all() and not change[2][:, 0].any() and not change[3:][:, :, 0].any()
    assert np.array_equal(change[2][:, 1], change[1][:, 1])
    assert (change[3:][:, :, 1] > 0).all() and not np.allclose(change[3], change[4])
    first = found["perturbation_propagated"][:, :, 0]
    np.testing.assert_allclose(first[2:], first[[0, 0, 0]], rtol=1e-12)
    assert found["held_bytes"][1] < found["held_bytes"][2] < min(found["held_bytes"][3:]) < found["held_bytes"][0]


@pytest.mark.parametrize("code", ["fp8", "fp8-tensor", "rotated-8", "8-token"])
def test_eight_bits_of_any_format_lose_little_of_everything(code: str) -> None:
    found = traced("full", code, "2", budget=1.0)
    lost = found["perturbation_propagated"][:, 0].mean(axis=(1, 2)) / found["output_norm"][0].mean()
    assert lost[0] < 1e-10 < lost[1] < 0.1 < lost[2]


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_answers_come_from_what_is_measured(scenario: str) -> None:
    """Evicting while reading stores what evicting afterwards stores, and so says the same."""
    adapter = exact_adapter("llama", *HEADS["GQA"])
    few = ("quantise(bits=4, group=8)", "keys=rotated-3, values=2; layers 1: fp8")
    configs = tuple(config(precision, budget) for precision in few for budget in (12, 1.0))
    traced = trace_sample(adapter, PROMPT, RunConfig("m", "d", configs, scenario=scenario, generate=12)).arrays
    made = answer(adapter, PROMPT, configs, 12, scenario=scenario)
    found = [[token for token in row if token >= 0] for row in traced["generated"].tolist()]
    assert found == made.evicted
    assert made.stored == pytest.approx((traced["held_bytes"] / traced["full_bytes"]).tolist())


def test_later_compressions_round_nothing_twice() -> None:
    """What a compression keeps of the prompt is what was stored of it; decoded entries stay whole."""
    adapter, chosen = exact_adapter("llama", *HEADS["GQA"]), config("quantise(bits=2, group=8)", 12, "snapkv")
    context = PROMPT.token_ids
    for above in (1, 100):  # evicted at once; kept whole, in few bits, until the first compression
        read = prefill_and_evict(adapter, context, [chosen], "s", compress_over=above, with_full=True)
        whole = prefill_and_evict(adapter, context, [config(budget=1.0)], "s")
        before = [layer.entries(1).sets() for layer in read.cache.evicted_layers]
        full = whole.cache.evicted_layers[0].entries(0).sets()[0][0]
        assert not all(any(torch.equal(key, other) for other in full) for key in before[0][0][0])
        compressor = Compressor(adapter, read, resolved_run([chosen], compress_over=8), "s", _resources())
        compressor.compress(1)
        for layer, sets in zip(read.cache.evicted_layers, before, strict=True):
            own = layer.entries(1).sets()
            for place, (keys, values) in enumerate(own):
                first, second = sets[place * len(sets) // len(own)]
                kept = [next(i for i, one in enumerate(first) if torch.equal(one, key)) for key in keys]
                assert kept == sorted(kept) and torch.equal(second[kept], values)


def _resources() -> object:
    from perturbkv.configs.resources import Resources

    return Resources()


def test_keys_that_turn_at_each_compression_are_refused() -> None:
    chosen = config("quantise", policy="streaming-llm(positions=in-cache)", selection="position")
    with pytest.raises(ConfigError, match="positions=in-cache turns keys at each compression, .* rounded again"):
        compatibility.check_compressible(chosen)
    compatibility.check_compressible(replace(chosen, precision=parse("full")))
    compatibility.check_compressible(replace(chosen, policy=config(policy="snapkv").policy))


def test_numbers_beyond_16_bit_floats_are_refused_by_name() -> None:
    """The model itself computes with them: what cannot be stored is the scale."""
    adapter = copy.deepcopy(exact_adapter("llama", *HEADS["GQA"]))
    with torch.no_grad():
        adapter.model.model.layers[1].self_attn.v_proj.weight.mul_(1e7)
    trace_sample(adapter, PROMPT, RunConfig("m", "d", (config(),)))
    with pytest.raises(ActivationError, match="the stored values of layer 1 hold NaN or Inf in sample 's'"):
        trace_sample(adapter, PROMPT, RunConfig("m", "d", (config("quantise(bits=2)"),)))
    with pytest.raises(ActivationError, match="the stored values of layer 1 hold NaN or Inf in sample 's'"):
        answer(adapter, PROMPT, [config("quantise(bits=2)")], 4)
