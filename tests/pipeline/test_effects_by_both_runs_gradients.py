"""`effect_gradient="mean"`: effects by the mean of the full run's gradient and each evicted run's own."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import perturbkv as pk
from perturbkv.api.inputs import make_plan
from perturbkv.cache.blocks import Block, PackedBlock, Segment, query_indices
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError, ModelError, UnknownNameError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.run import footprint
from perturbkv.pipeline.sample import effect as effects
from perturbkv.selection.grid import configuration
from perturbkv.theory import Softmax
from tests.oracle import effect
from tests.oracle.sample import QUESTION, Reference
from tests.pipeline.test_effects_go_everywhere import differences
from tests.support.hybrids import hybrid_adapter
from tests.support.models import GATED, exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import trace_sample

WINDOW, N, STEPS = 5, 40, 3
PROMPT = Prompt("s", token_ids(N, seed=4), 0, question_tokens=QUESTION, text_tokens=token_ids(STEPS + 1, seed=7))
CONFIGS = tuple(configuration(14, window=WINDOW, selection=selection) for selection in ("attention", "two-stage"))
KINDS = {
    "in-cache": configuration(14, policy="streaming-llm(positions=in-cache)", selection="position", window=WINDOW),
    "few-bits": configuration(14, window=WINDOW, precision="quantise(bits=4)"),
    "stored": configuration(14, window=WINDOW, correction="corrected(mass=stored)"),
    "linear": configuration(14, window=WINDOW, correction="corrected(mass=linear)"),
    "oracle": configuration(14, window=WINDOW, correction="corrected-oracle"),
    "pages": configuration(24, policy="quest(page=4)", window=WINDOW),
}
"""What a row holds that is no kept set of the full cache."""


def traced(adapter: Adapter, *configs: pk.EvictionConfig, gradient: str = "mean", **more: Any) -> dict[str, Any]:
    resources = more.pop("resources", Resources())
    run = RunConfig("m", "d", configs, steps=STEPS, save=("effect",), effect_gradient=gradient, **more)
    return dict(trace_sample(adapter, PROMPT, run, resources).arrays)


def mean_derivative(reference: Reference, config: pk.EvictionConfig, layer: int, step: int, moved: Any) -> float:
    """½ (⟨g, moved⟩ + ⟨ĝ, moved⟩), by differences of the plain model and of the naive one over the evicted cache."""
    place = reference.decoder.places[layer], N + step
    text = (*PROMPT.token_ids, *reference.tokens)
    of_full = float(effect.derivative(reference.model, text, STEPS, {place: moved[None]})[0])
    return (of_full + reference.evicted_derivative(config, layer, step, moved)) / 2


@pytest.mark.parametrize("family", ["llama", "gpt_oss", GATED])
def test_every_heads_isolated_effect_is_that_of_both_gradients(family: str) -> None:
    adapter = exact_adapter(family, 4, 2)
    found = traced(adapter, *CONFIGS)["effect_isolated"]
    reference = Reference(adapter.model, PROMPT.token_ids, RunConfig("m", "d", CONFIGS, steps=STEPS))
    for index, config in enumerate(CONFIGS):
        for layer, step in ((0, 0), (0, 2), (1, 1)):
            for head, moved in enumerate(differences(reference, config, layer, step)):
                expected = mean_derivative(reference, config, layer, step, moved)
                assert found[index, step, layer, head] == pytest.approx(expected, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(("kind", "scenario"), [*((kind, "regular") for kind in KINDS), ("linear", "context-only")])
def test_what_a_row_holds_beside_kept_sets_has_its_own_gradient(kind: str, scenario: str) -> None:
    """Propagated effects of all heads together, whose difference from the full run the naive decoder gives."""
    adapter, config = exact_adapter("llama", 4, 2), KINDS[kind]
    arrays = traced(adapter, config, scenario=scenario)
    run = RunConfig("m", "d", (config,), steps=STEPS, scenario=scenario)
    reference = Reference(adapter.model, PROMPT.token_ids, run)
    evicted = reference.evicted(config)
    for layer, step in ((0, 0), (0, 2), (1, 1)):
        vectors = [run[step].head_output[layer] for run in (evicted, reference.full)]
        moved = np.concatenate(vectors[0] - vectors[1]) @ reference.decoder.w_o(layer).T
        expected = mean_derivative(reference, config, layer, step, moved)
        assert arrays["effect_propagated"][0, step, layer].sum() == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_own_entries_isolated_effects_are_by_the_mean_too() -> None:
    """Twice the mean less the full run's is the evicted run's own, so that both together are linear in the gradient."""
    adapter, configs = exact_adapter("llama", 4, 2), tuple(KINDS[kind] for kind in ("in-cache", "few-bits", "linear"))
    full, mean = (traced(adapter, *configs, gradient=gradient) for gradient in ("full", "mean"))
    first = [arrays["effect_isolated"][:, :, 0] for arrays in (full, mean)]  # before anything was evicted, in layer 0
    propagated = [arrays["effect_propagated"][:, :, 0] for arrays in (full, mean)]
    for isolated, other in zip(first, propagated, strict=True):
        np.testing.assert_allclose(isolated, other, rtol=1e-6, atol=1e-9)
    assert np.abs(mean["effect_isolated"] - full["effect_isolated"]).max(axis=(1, 2, 3)).min() > 1e-3
    assert np.isnan(mean["entry_effect"]).all()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "lfm2", GATED])
def test_entries_sum_to_heads_and_every_other_number_stays(family: str) -> None:
    if family == "lfm2":
        adapter = hybrid_adapter(family)
    else:
        adapter = tiny_adapter(family, 4, 4 if family == "deepseek_v3" else 2)
    full, mean = (traced(adapter, *CONFIGS, gradient=gradient) for gradient in ("full", "mean"))
    sums = mean["effect_isolated"].sum(axis=(1, 2, 3))
    np.testing.assert_allclose(np.nansum(mean["entry_effect"], axis=1), sums, rtol=1e-9)
    assert (np.abs(sums - full["effect_isolated"].sum(axis=(1, 2, 3))) > 1e-3).all()
    for name, array in full.items():
        if "effect" not in name:
            np.testing.assert_array_equal(mean[name], array, err_msg=name)


def test_a_cache_that_keeps_everything_has_the_full_runs_effects() -> None:
    everything = configuration(N, window=WINDOW)
    full, mean = (
        traced(exact_adapter("llama", 4, 2), everything, *CONFIGS, gradient=each) for each in ("full", "mean")
    )
    for name in ("effect_isolated", "effect_propagated", "entry_effect"):
        np.testing.assert_allclose(mean[name][0], full[name][0], atol=1e-12)
    np.testing.assert_allclose(mean["effect_noise_floor"], full["effect_noise_floor"], atol=1e-12)
    np.testing.assert_array_equal(mean["effect_noise_floor_isolated"], full["effect_noise_floor_isolated"])


def test_batches_with_padding_rows_and_one_batch_agree() -> None:
    adapter, configs = exact_adapter("llama", 4, 2), (*CONFIGS, configuration(20, window=WINDOW))
    one = traced(adapter, *configs)
    sizes = [adapter.shape.row_bytes(config, N, STEPS, STEPS) for config in configs]
    several = traced(adapter, *configs, resources=Resources(max_bytes=max(sizes) * 2))
    for name in ("effect_isolated", "effect_propagated", "entry_effect"):
        np.testing.assert_allclose(several[name], one[name], rtol=1e-7, atol=1e-10, err_msg=name)


def test_the_mean_foretells_a_small_change_of_log_p_to_second_order() -> None:
    """What the last layer evicts is halved: the full run's error becomes a quarter, the mean's an eighth.

    No other layer sees it, and the first has nothing to lose.
    """
    adapter = exact_adapter("llama", 4, 2)
    weights = [layer.self_attn.v_proj.weight for layer in adapter.model.model.layers]
    with torch.no_grad():
        weights[0].zero_()
        weights[1].div_(16)
    errors: dict[str, list[float]] = {"full": [], "mean": []}
    for _ in range(3):
        for gradient, found in errors.items():
            arrays = traced(adapter, CONFIGS[0], gradient=gradient, text="given")
            assert not arrays["effect_isolated"][:, :, 0].any()
            change = (arrays["text_logp"][0] - arrays["text_logp_full"]).sum()
            found.append(abs(arrays["effect_isolated"].sum() - change))
        with torch.no_grad():
            weights[1].div_(2)
    assert all(by_mean < by_full / 4 for by_full, by_mean in zip(errors["full"], errors["mean"], strict=True))
    assert all(3 < larger / smaller < 6 for larger, smaller in pairwise(errors["full"]))
    assert all(6 < larger / smaller < 12 for larger, smaller in pairwise(errors["mean"]))


def test_packed_blocks_give_their_gradient_without_the_kernel() -> None:
    """CUDA's variable-length attention has no gradient of its log-sum-exps."""

    def kernel(*arguments: Any) -> Any:
        raise AssertionError("a backward pass goes through it")

    segments, device = [Segment(0, 0, 2, 4), Segment(0, 1, 2, 4)], torch.device("cpu")
    keys, values, query = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 4, 8), (2, 4, 6), (1, 4, 3, 8)))
    indices = query_indices(segments, device)
    flat = [kind.flatten(0, 1).unsqueeze(1) for kind in (keys, values)]
    packed = PackedBlock(segments, *flat, [0, 4, 8], torch.tensor([0, 4, 8]), None, indices, kernel)
    gradients = []
    for block in (packed, Block(segments, keys, values, None, indices)):
        moved = query.clone().requires_grad_()
        output, logsumexp = block.attend(moved, Softmax(0.5))
        gradients += torch.autograd.grad(output.square().sum() + logsumexp.sum(), moved)
    torch.testing.assert_close(*gradients)


def test_head_budgets_of_which_one_keeps_everything_have_finite_effects() -> None:
    """The oracle's entry of a head of which nothing went has the logit −∞."""
    config = configuration(30, policy="adakv", window=WINDOW, correction="corrected-oracle", granularity="query")
    arrays = traced(tiny_adapter("llama", 4, 2), config)
    assert np.isfinite(arrays["effect_isolated"]).all() and np.isfinite(arrays["effect_propagated"]).all()


@pytest.mark.parametrize(("dtype", "told"), [(torch.float32, "full_cache"), (torch.bfloat16, "")])
def test_a_dry_run_tells_what_the_backward_pass_over_a_batch_holds(
    dtype: torch.dtype, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors that autograd saves; in float32 the row that keeps everything saves the full cache, told as such."""
    adapter = tiny_adapter("llama", 8, 4, d_head=32, layers=4, positions=4096, dtype=dtype)
    configs = pk.grid((0.1, 0.4), selection=["attention", "two-stage"], policy=["snapkv", "adakv"])
    weights = {weight.untyped_storage().data_ptr() for weight in adapter.model.parameters()}
    saved: list[dict[int, int]] = []
    backward = effects._backward

    def watched(*arguments: Any) -> Any:
        held: dict[int, int] = {}
        saved.append(held)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return backward(*arguments)

    monkeypatch.setattr(effects, "_backward", watched)
    prompt = Prompt("p", token_ids(1500), 0)
    settings = pk.Settings(steps=STEPS, save=("effect",), effect_gradient="mean")
    planned = make_plan(adapter, [prompt], configs, settings, Resources(), resumable=False)
    trace_sample(adapter, prompt, planned.run)
    _, found = (sum(size for at, size in held.items() if at not in weights) for held in saved)
    estimate, full = (
        footprint.estimate_memory(planned),
        replace(planned, run=replace(planned.run, effect_gradient="full")),
    )
    own = estimate.backward - estimate.decoding + (getattr(estimate, told) if told else 0)
    assert found == pytest.approx(own, rel=0.2)
    assert footprint.estimate_memory(full).backward < estimate.backward


def test_screens_say_whose_gradient_it_is() -> None:
    adapter, prompts = tiny_adapter("llama", 4, 2), [replace(PROMPT, sample_id=f"s{index}") for index in range(2)]
    for gradient, told in (("full", "the gradient of the full run"), ("mean", "the mean of both runs' gradients")):
        settings = pk.Settings(steps=STEPS, save=("effect",), effect_gradient=gradient)
        trace = pk.measure(adapter, prompts, CONFIGS, settings=settings, progress=False)
        assert trace.run.effect_gradient == gradient
        explained = " ".join(map(str, pk.compare_heads(trace, distance="effect").details()))
        for shown in (explained, repr(pk.tokens(trace))):
            assert f"By {told}:" in " ".join(shown.split())


def test_a_model_through_which_no_gradient_flows_is_refused_in_one_line() -> None:
    with pytest.raises(ModelError, match="^--save effect needs a backward pass through 'tiny-olmo_h.*which failed"):
        traced(hybrid_adapter("olmo_hybrid"), CONFIGS[0])


def test_what_no_run_has_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="^--effect-gradient mean needs --save effect"):
        RunConfig("m", "d", CONFIGS, effect_gradient="mean")
    with pytest.raises(UnknownNameError, match="^unknown effect gradient 'both'; known: full, mean"):
        pk.Settings(save=("effect",), effect_gradient="both")


def test_the_run_says_which_gradient() -> None:
    run = RunConfig("m", "d", CONFIGS, save=("effect",), effect_gradient="mean")
    assert RunConfig.from_json(run.to_json()) == run
    assert run.differences(replace(run, effect_gradient="full")) == ["effect_gradient"]
