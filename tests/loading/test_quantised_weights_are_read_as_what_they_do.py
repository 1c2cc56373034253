"""W_O is the matrix that a layer's output projection multiplies by, however it is stored; all else is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

import perturbkv as pk
from perturbkv.errors import ModelError
from perturbkv.models import projection, quantisers, stored_weights
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import open_model
from perturbkv.models.sanity import check_finite
from perturbkv.models.sources import Source
from perturbkv.models.user_model import fingerprint
from perturbkv.trace import Trace
from tests.support import quantised
from tests.support.folders import model_folder
from tests.support.models import FAMILIES, MIXED, tiny_model
from tests.support.notebook import CONFIGS, prompt
from tests.support.quantised import Adapted, Int8Linear, Int8Tensor, assert_within_noise, dequantised, in_int8, rounded


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(model_folder(tmp_path_factory.mktemp("quantised") / "model"))


def linear(bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 48, bias=bias)


def weighted(made: nn.Linear) -> nn.Linear:
    made.weight = nn.Parameter(Int8Tensor(*rounded(made.weight.detach())), requires_grad=False)
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rounding", [None, quantised.to_bfloat16])
def test_a_quantised_projection_is_the_matrix_that_it_multiplies_by(
    bias: bool, rounding: quantised.Rounding | None
) -> None:
    module = Int8Linear(linear(bias), rounding)
    projection.check(module, 64, torch.float32)
    torch.testing.assert_close(projection.read(module, 64, torch.float32), module.matrix, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.5, 50.0])
def test_a_bias_far_larger_than_the_matrix_costs_it_no_digits(size: float, dtype: torch.dtype) -> None:
    """Rounded together with it, what the matrix makes of a unit vector would keep the bias' digits alone."""
    module = Int8Linear(linear(bias=True)).to(dtype)
    bias = module.bias.detach().normal_(std=size).clone()
    projection.check(module, 64, dtype)
    assert torch.equal(projection.read(module, 64, dtype), module.matrix)
    assert torch.equal(module.bias, bias)


def test_the_bias_is_back_after_an_error() -> None:
    def fail(rows: Tensor) -> Tensor:
        raise RuntimeError

    module = Int8Linear(linear(bias=True), fail)
    bias = module.bias.detach().clone()
    with pytest.raises(projection.NoMatrixError):
        projection.check(module, 64, torch.float32)
    assert torch.equal(module.bias, bias)


def test_a_weight_that_knows_its_values_is_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module = weighted(linear())
    monkeypatch.setattr(
        projection, "_matrix_from_unit_vectors", lambda *given: pytest.fail("multiplied by unit vectors")
    )
    projection.check(module, 64, torch.float32)
    values, scale = rounded(linear().weight.detach())
    assert torch.equal(projection.read(module, 64, torch.float32), values * scale)


def test_a_plain_matrix_is_read_where_it_is() -> None:
    module = linear()
    assert projection.read(module, 64, torch.float32).data_ptr() == module.weight.data_ptr()


def test_an_adapter_beside_the_matrix_is_read_with_it() -> None:
    module = Adapted(linear()).eval()
    projection.check(module, 64, torch.float32)
    torch.testing.assert_close(projection.read(module, 64, torch.float32), module.matrix.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rounding", [quantised.to_int8, quantised.to_float8, quantised.to_fixed_int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rounds_its_input_is_no_matrix(rounding: quantised.Rounding, dtype: torch.dtype) -> None:
    module = Int8Linear(linear().to(dtype), rounding)
    with pytest.raises(projection.NoMatrixError, match="no fixed matrix"):
        projection.check(module, 64, dtype)


def test_what_is_computed_in_bfloat16_is_one() -> None:
    projection.check(Int8Linear(linear().bfloat16()), 64, torch.bfloat16)


class Broken(nn.Module):
    """A projection that cannot be called as one."""

    def __init__(self) -> None:
        super().__init__()
        self.held = nn.Parameter(torch.ones(1))

    def forward(self, rows: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda made: Int8Linear(made, quantised.to_int8),
            "layer 1 of model 'LlamaForCausalLM' gives its heads' "
            "outputs to 'o_proj', a Int8Linear of no weight, which is no fixed matrix",
        ),
        (lambda made: Broken(), "model 'LlamaForCausalLM' cannot read a short text (RuntimeError: no kernel for this)"),
    ],
)
def test_a_model_whose_w_o_cannot_be_read_is_refused_by_layer_and_kind(
    tokenizer: Any, change: Callable[[nn.Linear], nn.Module], words: str
) -> None:
    model = tiny_model()
    model.model.layers[1].self_attn.o_proj = change(model.model.layers[1].self_attn.o_proj)
    with pytest.raises(ModelError) as raised:
        pk.load_model(model, tokenizer=tokenizer)
    assert str(raised.value).startswith(words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("family", MIXED)
def test_only_measured_layers_need_a_matrix_and_are_named_by_their_index(family: str, tokenizer: Any) -> None:
    model = tiny_model(family)
    sliding, full = model.model.layers[2].self_attn, model.model.layers[3].self_attn
    sliding.o_proj = Int8Linear(sliding.o_proj, quantised.to_int8)
    assert pk.load_model(model, tokenizer=tokenizer).layer_indices == (1, 3)
    full.o_proj = Int8Linear(full.o_proj, quantised.to_int8)
    with pytest.raises(ModelError, match="^layer 3 of model .* which is no fixed matrix"):
        pk.load_model(model, tokenizer=tokenizer)


def measured(model: Any, tokenizer: Any) -> tuple[Adapter, Trace]:
    given = pk.load_model(model, tokenizer=tokenizer)
    return given, pk.measure(given, prompt(given), CONFIGS, settings=pk.Settings(steps=2), progress=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_weights_give_the_perturbations_of_the_dequantised_model(family: str, tokenizer: Any) -> None:
    model = in_int8(tiny_model(family, seed=1))  # none of these ends its text before the second step
    (ours, found), (_, expected) = measured(model, tokenizer), measured(dequantised(model), tokenizer)
    for layer, index in enumerate(ours.layer_indices):
        matrix = model.model.layers[index].self_attn.o_proj.matrix
        torch.testing.assert_close(ours.output_projection(layer), matrix, rtol=0, atol=1e-6)
    assert_within_noise(found, expected)


def test_memory_is_planned_by_the_bytes_that_a_given_model_holds(tokenizer: Any) -> None:
    model = in_int8(tiny_model())
    floats = pk.load_model(model, tokenizer=tokenizer).shape.weights_bytes
    model.config.quantization_config = {"quant_method": "quanto", "weights": "int8"}
    given = pk.load_model(model, tokenizer=tokenizer)
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert given.shape.weights_bytes == held != floats


@pytest.mark.parametrize(("method", "packed"), [("quanto", True), ("mxfp4", False)])
def test_memory_is_planned_by_the_files_of_weights_that_stay_packed(method: str, packed: bool, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    about = AutoConfig.for_model("llama", quantization_config={"quant_method": method, "weights": "int8"})
    stored = stored_weights.safetensors_storage(Source("tiny", str(folder)), about)
    assert stored.nbytes == ((folder / "model.safetensors").stat().st_size if packed else 0)


def test_heads_are_captured_while_the_projection_is_read(tokenizer: Any) -> None:
    """Reading W_O must not pass through the hooks that record what heads put out."""
    model = tiny_model()
    module = model.model.layers[0].self_attn.o_proj = Int8Linear(model.model.layers[0].self_attn.o_proj)
    given = pk.load_model(model, tokenizer=tokenizer)
    seen: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    given.output_projection(0)
    assert seen == []


def test_other_numbers_inside_a_weight_are_another_model(tokenizer: Any) -> None:
    def made(scale: float) -> str:
        model = tiny_model()
        attention = model.model.layers[0].self_attn
        attention.o_proj = weighted(attention.o_proj)
        attention.o_proj.weight.scale.mul_(scale)
        return fingerprint(pk.load_model(model, tokenizer=tokenizer))

    assert made(1.0) == made(1.0) != made(1.5)


def test_a_scale_that_is_no_number_is_named() -> None:
    model = tiny_model()
    projected = weighted(model.model.layers[1].self_attn.o_proj)
    projected.weight.scale[3] = float("nan")
    with pytest.raises(ModelError, match="o_proj.weight.scale' holds 1 values that are NaN"):
        check_finite(model, "tiny")


@pytest.mark.parametrize(
    ("about", "package"),
    [
        ({"quant_method": "vptq"}, "vptq"),
        ({"quant_method": "gptq", "bits": 4}, "gptqmodel"),
        ({"quant_method": "awq", "bits": 4}, "gptqmodel"),
        ({"quant_method": "quanto", "weights": "int8"}, "optimum-quanto"),
        ({"load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_a_quantiser_that_is_not_installed_is_named(
    about: dict[str, Any], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
    monkeypatch.setattr(quantisers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=f"which needs a package that is not here: pip install {package}$"):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("about", "kind"),
    [
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
         "torchao Int8WeightOnly"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao int8_weight_only"),
        ({"quant_method": "quanto", "weights": "int4"}, "quanto int4"),
        ({"load_in_8bit": True}, "bitsandbytes int8"),
    ],
)  # fmt: skip
def test_a_quantised_model_says_how(about: dict[str, Any], kind: str) -> None:
    assert quantisers.describe(AutoConfig.for_model("llama", quantization_config=about).quantization_config) == kind
