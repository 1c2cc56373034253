from __future__ import annotations

import numpy as np
import pytest
import torch

from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ActivationError, BudgetError
from perturbkv.models.adapter import Adapter
from perturbkv.trace import FailedSample, SampleTrace
from tests.support.models import FAMILIES, tiny_adapter, token_ids
from tests.support.resolved import answer, trace, trace_sample


def run(*configs: EvictionConfig, steps: int = 2) -> RunConfig:
    return RunConfig(model="m", dataset="d", configs=configs, steps=steps)


def prompt(count: int = 50, name: str = "s") -> Prompt:
    return Prompt(name, token_ids(count), 0)


def config(budget: int | float = 16, **fields: object) -> EvictionConfig:
    return EvictionConfig(budget=Budget(budget), **{"window": 6, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_everything_changes_nothing_beyond_the_noise_floor(family: str) -> None:
    arrays = trace_sample(tiny_adapter(family), prompt(), run(config(1.0), config(80, selection="attention"))).arrays
    np.testing.assert_allclose(arrays["retained_mass"], 1, rtol=1e-12)
    assert arrays["perturbation_isolated"].max() < 1e-10
    assert arrays["theta"].max() < 1e-10
    assert arrays["perturbation_propagated"].max() < 1e-4 * arrays["output_norm"].max()
    assert (arrays["top1_agreement"] == 1).all()
    assert arrays["logit_kl"].max() < 1e-9
    assert 1 - 1e-5 < arrays["draft_acceptance"].min() <= arrays["draft_acceptance"].max() <= 1
    assert not arrays["evicted"].any()


def test_kept_counts_equal_the_budgets() -> None:
    configs = [config(16), config(0.5), config(16, granularity="kv"), config(24, selection="random")]
    arrays = trace_sample(tiny_adapter(), prompt(), run(*configs)).arrays
    for index, tokens in enumerate((16, 25, 16, 24)):
        assert (arrays["kept_count"][index] == tokens).all()
    assert arrays["evicted"].tolist() == [1] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_measured_against_its_own_noise(dtype: torch.dtype) -> None:
    arrays = trace_sample(tiny_adapter(dtype=dtype), prompt(), run(config(16), config(1.0))).arrays
    assert all(np.isfinite(array).all() for name, array in arrays.items() if name != "lost_output")  # fewer went
    floor = arrays["noise_floor"].max()
    assert arrays["perturbation_propagated"][0].mean() > 3 * floor
    assert arrays["perturbation_propagated"][1].max() <= 3 * floor


@pytest.mark.parametrize(
    ("dtype", "epsilon"), [(torch.float32, 2**-23), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)], ids=str
)
def test_every_floor_is_at_least_one_rounding_of_what_it_is_the_floor_of(dtype: torch.dtype, epsilon: float) -> None:
    """The head whose output is nothing at all has no length to round, and a floor above 0 all the same."""
    adapter = tiny_adapter(dtype=dtype)
    with torch.no_grad():
        adapter.output_projection(0)[:, : adapter.d_value] = 0
    arrays = trace_sample(adapter, prompt(), run(config(16))).arrays
    assert (arrays["output_norm"][:, 0, 0] == 0).all()
    scales = {"": "_norm", "_l2": "_norm_l2"}
    for kind, norm in scales.items():
        assert (arrays[f"noise_floor{kind}"] >= 0.999 * epsilon * arrays[f"output{norm}"]).all()
        assert (arrays[f"noise_floor_isolated{kind}"] >= 0.9 * 2.0**-52 * arrays[f"output{norm}"]).all()
        assert (arrays[f"hidden_noise_floor{kind}"] >= 0.999 * epsilon * arrays[f"hidden{norm}"]).all()
    assert (arrays["final_noise_floor"] >= 0.999 * epsilon * arrays["final_norm"]).all()
    assert min(arrays[name].min() for name in ("noise_floor_cosine", "hidden_noise_floor_cosine")) >= epsilon**2 / 2
    assert arrays["final_noise_floor_cosine"].min() >= epsilon**2 / 2
    assert arrays["noise_floor_isolated_cosine"].min() >= 2.0**-105
    assert arrays["logit_kl_noise_floor"].min() >= epsilon
    assert all(array.min() > 0 for name, array in arrays.items() if "noise_floor" in name)


def test_results_do_not_depend_on_what_else_is_measured() -> None:
    alone = trace_sample(tiny_adapter(), prompt(), run(config(16))).arrays
    among = trace_sample(tiny_adapter(), prompt(), run(config(20, granularity="kv"), config(16), config(30))).arrays
    for name in ("perturbation_isolated", "perturbation_propagated", "theta_hat", "hidden_drift_l1"):
        np.testing.assert_allclose(alone[name][0], among[name][1], rtol=1e-4, atol=1e-5)


def test_a_rerun_gives_the_same_numbers() -> None:
    first, second = (trace_sample(tiny_adapter(), prompt(), run(config(16))).arrays for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def poison(adapter: Adapter, layer: int) -> None:
    """Make prompts that hold token 255 give NaN from `layer` on."""
    prompts: list[torch.Tensor] = []

    def remember(module, args, kwargs):  # type: ignore[no-untyped-def]
        prompts.append(kwargs["input_ids"])

    def spoil(module, args):  # type: ignore[no-untyped-def]
        return (args[0] * torch.nan, *args[1:]) if 255 in prompts[-1] else None

    adapter.model.model.register_forward_pre_hook(remember, with_kwargs=True)
    adapter.model.model.layers[layer].register_forward_pre_hook(spoil)


def test_nan_fails_the_sample_and_names_the_layer() -> None:
    adapter = tiny_adapter(layers=3)
    poison(adapter, layer=1)
    bad = Prompt("bad", (*token_ids(30), 255, 3), 0)
    with pytest.raises(ActivationError, match="layer 1 hold NaN or Inf in sample 'bad'"):
        trace_sample(adapter, bad, run(config(16)))


@pytest.mark.parametrize(
    ("module", "place"), [("model.norm", "the outputs of the final norm"), ("lm_head", "the logits")]
)
def test_nan_after_the_last_layer_fails_the_sample_and_says_where(module: str, place: str) -> None:
    adapter = tiny_adapter()
    spoiled = adapter.model.get_submodule(module)
    spoiled.register_forward_hook(lambda module, args, output: output * torch.nan)
    with pytest.raises(ActivationError, match=f"^{place} hold NaN or Inf in sample 'bad'$"):
        trace_sample(adapter, Prompt("bad", token_ids(40), 0), run(config(16)))


@pytest.mark.parametrize("module", ["model.norm", "lm_head"])
def test_nan_that_only_decoding_makes_fails_the_sample(module: str) -> None:
    adapter = tiny_adapter()

    def spoil(module, args, output):  # type: ignore[no-untyped-def]
        return output if output.shape[0] == 1 else output * torch.inf

    adapter.model.get_submodule(module).register_forward_hook(spoil)
    with pytest.raises(ActivationError, match="hold NaN or Inf in sample 'bad'"):
        trace_sample(adapter, Prompt("bad", token_ids(40), 0), run(config(16)))


def test_a_generated_answer_is_not_made_of_nan() -> None:
    adapter = tiny_adapter()

    def spoil(module, args, output):  # type: ignore[no-untyped-def]
        return output if output.shape[0] == 1 else output * torch.nan

    adapter.model.lm_head.register_forward_hook(spoil)
    with pytest.raises(ActivationError, match="the logits hold NaN"):
        answer(adapter, Prompt("bad", token_ids(40), 0), (config(16),), 4)


def test_the_run_goes_on_after_a_failed_sample() -> None:
    adapter = tiny_adapter()
    poison(adapter, layer=0)
    good, bad = Prompt("good", tuple(i % 200 for i in token_ids(40)), 0), Prompt("bad", (255,) * 40, 0)
    finished: list[SampleTrace | FailedSample] = []
    failed = trace(adapter, [bad, good], run(config(16)), finished=finished.append)
    assert [sample.sample_id for sample in failed] == ["bad"]
    assert [type(sample) for sample in finished] == [FailedSample, SampleTrace]


def test_a_fraction_that_leaves_only_the_window_is_refused() -> None:
    with pytest.raises(BudgetError, match="no more than the window of 6"):
        trace_sample(tiny_adapter(), prompt(), run(config(0.1)))


def test_working_memory_does_not_change_the_numbers() -> None:
    wide = trace_sample(tiny_adapter(), prompt(), run(config(16))).arrays
    narrow = trace_sample(tiny_adapter(), prompt(), run(config(16)), Resources(chunk_bytes=1)).arrays
    np.testing.assert_allclose(wide["theta"], narrow["theta"], rtol=1e-5)
