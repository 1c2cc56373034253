"""torchao's and bitsandbytes' own weights, loaded by transformers: weight-only ones are measured, others refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig
from typer.testing import CliRunner

import perturbkv as pk
from perturbkv.cli.main import app
from perturbkv.errors import ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.models.sanity import check_finite
from perturbkv.models.user_model import fingerprint
from perturbkv.storage.trace.trace_file import describe
from perturbkv.trace import Trace
from tests.support.folders import model_folder
from tests.support.notebook import CONFIGS, prompt
from tests.support.quantised import assert_within_noise

WEIGHTS: dict[str, Callable[[], Any]] = {
    "int8": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
    "int4": lambda: TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4)),
    "float8": lambda: TorchAoConfig(Float8WeightOnlyConfig()),
    "int8 dynamic": lambda: TorchAoConfig(Int8DynamicActivationInt8WeightConfig()),
    "nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "LLM.int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("plain") / "model", d_head=32, intermediate_size=256)


@pytest.fixture(scope="module")
def quantised(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the model with its weights of some kind."""

    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("quantised") / "model"
        shutil.copytree(plain, folder)
        model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=WEIGHTS[kind](), dtype=torch.float32)
        model.save_pretrained(folder)
        return folder

    return make


def floats(folder: Path, plain: Path) -> Any:
    """The model with its dequantised weights put back as floats: torchao's own word on what they are."""
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    model.load_state_dict(
        {name: held if type(held) is torch.Tensor else held.dequantize() for name, held in stored.items()}
    )
    return model


def measured(model: Adapter) -> Trace:
    return pk.measure(model, prompt(model), CONFIGS, settings=pk.Settings(steps=2), progress=False)


@pytest.mark.parametrize("kind", ["int8", "int4", "float8"])
def test_perturbations_are_those_of_the_dequantised_model(
    kind: str, quantised: Callable[[str], Path], plain: Path
) -> None:
    folder = quantised(kind)
    ours = pk.load_model(str(folder), device="cpu")
    exact = pk.load_model(floats(folder, plain), tokenizer=AutoTokenizer.from_pretrained(plain))
    for layer in range(2):
        assert torch.equal(ours.output_projection(layer), exact.output_projection(layer))
        assert not torch.equal(ours.output_projection(layer), pk.load_model(str(plain)).output_projection(layer))
    assert_within_noise(measured(ours), measured(exact))
    given = pk.load_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer=ours.tokenizer)
    assert max(ours.shape.weights_bytes, given.shape.weights_bytes) < 0.8 * exact.shape.weights_bytes


def test_the_command_measures_them_and_says_how_they_are_stored(
    quantised: Callable[[str], Path], tmp_path: Path
) -> None:
    done = CliRunner().invoke(
        app,
        ["trace", "-m", str(quantised("int8")), "--samples", "1", "--length", "200", "-b", "64", "--window", "8",
         "--no-chat-template", "--device", "cpu", "-o", str(tmp_path / "t.h5")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    attrs = describe(tmp_path / "t.h5").attrs
    assert attrs["weights"] == "torchao Int8WeightOnly → float32"
    assert attrs["weights_stored"] == "W_O read as what o_proj multiplies by, dequantised"
    assert attrs["quantised_weights"] == "true"


def test_four_bits_of_bitsandbytes_are_measured(quantised: Callable[[str], Path], plain: Path) -> None:
    """What its kernel multiplies by is rounded to bfloat16 on some CPUs; the levels are the same."""
    model = pk.load_model(str(quantised("nf4")), device="cpu")
    before = pk.load_model(str(plain), device="cpu")
    for layer in range(2):
        found, stored = model.output_projection(layer), before.output_projection(layer)
        blocks = stored.reshape(-1, 64)
        near = (found.reshape(-1, 64) - blocks).abs() / blocks.abs().amax(dim=1, keepdim=True)
        assert 0 < near.mean() < near.max() < 0.16  # half of the widest step between two levels of nf4, and rounding
        assert torch.isclose(found.unique()[:, None], found.bfloat16().float().unique(), rtol=1e-2).any(dim=1).all()
    assert measured(model).arrays["perturbation_isolated"].min() > 0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("int8 dynamic", "'o_proj', a Linear of Int8Tensor, which is no fixed matrix: .* activations are quantised"),
        ("LLM.int8", "reads a text otherwise beside others in a batch"),
    ],
)
def test_what_rounds_activations_too_is_refused(kind: str, why: str, quantised: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=why):
        pk.load_model(str(quantised(kind)), device="cpu")


def test_a_given_model_is_known_again_by_the_numbers_inside(quantised: Callable[[str], Path]) -> None:
    def given(folder: Path) -> Adapter:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return pk.load_model(model, tokenizer=AutoTokenizer.from_pretrained(folder))

    folder = quantised("int8")
    first, again = given(folder), given(folder)
    assert fingerprint(first) == fingerprint(again)
    again.model.model.layers[1].mlp.up_proj.weight.qdata[0, 0] += 1
    assert fingerprint(first) != fingerprint(again)
    again.model.model.layers[1].mlp.up_proj.weight.scale[0] = float("inf")
    with pytest.raises(ModelError, match="up_proj.weight.scale' holds 1 values that are NaN or Inf"):
        check_finite(again.model, "int8")


def test_weights_without_their_scales_are_refused(quantised: Callable[[str], Path]) -> None:
    folder = quantised("int8")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="of I8, no floating-point type"):
        pk.load_model(str(folder), device="cpu")
