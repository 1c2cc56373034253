"""A changed model is another one, and no code of a model is run."""

from __future__ import annotations

import builtins
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations import hub_kernels
from transformers.models.auto import configuration_auto

from perturbkv.errors import ModelError
from perturbkv.models.loading import load_model, open_model
from tests.support.folders import model_folder
from tests.support.models import tiny_model

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def say(name: str, **values: object) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def stronger(file: Path) -> None:
    save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, file, {"format": "pt"})


@pytest.mark.parametrize(
    "change",
    [
        say("config.json", rms_norm_eps=0.5),
        say("generation_config.json", eos_token_id=7),
        say("tokenizer.json", normalizer={"type": "Lowercase"}),
        say("tokenizer_config.json", chat_template="{{ messages }}"),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
        lambda folder: stronger(folder / "model.safetensors"),
    ],
)
def test_what_numbers_depend_on_makes_another_revision(folder: Path, change: Change) -> None:
    before = open_model(str(folder)).revision
    change(folder)
    assert open_model(str(folder)).revision != before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "README.md").write_text("a model"),
        lambda folder: (folder / "eval_results.json").write_text("{}"),
        lambda folder: shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors"),
        lambda folder: (folder / "old.safetensors").symlink_to("nowhere"),
        lambda folder: (folder / "other.safetensors").mkdir(),
    ],
)
def test_what_nobody_reads_makes_none(folder: Path, change: Change) -> None:
    before = open_model(str(folder)).revision
    change(folder)
    assert load_model(str(folder), device="cpu").revision == before


def test_weights_in_a_folder_of_their_own_are_looked_at(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    tiny_model().save_pretrained(folder, max_shard_size="20kB")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    (folder / "parts").mkdir()
    for part in set(held["weight_map"].values()):
        (folder / part).rename(folder / "parts" / part)
    say(index.name, weight_map={name: f"parts/{part}" for name, part in held["weight_map"].items()})(folder)
    before = load_model(str(folder), device="cpu").revision
    stronger(next((folder / "parts").iterdir()))
    assert open_model(str(folder)).revision != before


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load_model(str(folder), device="cpu")


def test_an_index_that_names_what_is_no_file_is_refused_at_once(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    os.mkfifo(folder / "weights")
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "weights"}}))
    refused(folder, "got a named pipe, not a regular file")
    for held in ([1], {}, {"weight_map": {}}, {"weight_map": {"lm_head.weight": 1}}):
        index.write_text(json.dumps(held))
        refused(folder, "got one without a weight_map")


@pytest.mark.parametrize("about", [{}, {"quant_method": "nonsense", "bits": 3}, {"bits": 4}])
def test_a_way_to_quantise_that_nobody_knows_is_refused(folder: Path, about: object) -> None:
    say("config.json", quantization_config=about)(folder)
    refused(folder, "quantization_config")


def test_a_tied_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(3, 32)}, folder / "model.safetensors", {"format": "pt"})
    refused(folder, r"expected 'lm_head.weight' of shape \(\d+, 32\), got \(3, 32\)")


CODE = "from pathlib import Path\n\nPath('was-run').touch()\nclass Own: ...\n"
CUSTOM_MODEL = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}


def update(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def coded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder with Python of its own; whoever is asked whether it may run says yes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "input", lambda *question: "y")
    model = model_folder(tmp_path / "model")
    (model / "own.py").write_text(CODE)
    return model


def own_family(model: Path) -> None:
    update(model / "config.json", model_type="own", auto_map=CUSTOM_MODEL)


def own_tokenizer(model: Path) -> None:
    update(model / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})


@pytest.mark.parametrize("plant", [own_family, own_tokenizer])
def test_code_of_its_own_is_refused_in_one_line(coded: Path, plant: Callable[[Path], None]) -> None:
    plant(coded)
    with pytest.raises(ModelError, match=r"needs Python code of its own, which is never run") as refused:
        open_model(str(coded))
    assert "\n" not in str(refused.value)
    assert "trust_remote_code" not in str(refused.value)
    assert not Path("was-run").exists()


def test_a_known_family_is_read_by_the_library_whatever_code_lies_beside_it(coded: Path) -> None:
    update(coded / "config.json", auto_map=CUSTOM_MODEL)
    assert load_model(str(coded), "float32", "cpu").layers
    assert open_model(str(coded)).parameters() > 0
    assert not Path("was-run").exists()


def test_pickled_weights_are_not_opened(coded: Path) -> None:
    (coded / "model.safetensors").unlink()
    (coded / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch was-run'\ntR.")
    with pytest.raises(ModelError):
        load_model(str(coded), "float32", "cpu")
    assert not Path("was-run").exists()


def test_no_kernel_that_a_configuration_names_is_fetched(coded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[object] = []
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *names, **more: fetched.append(names))
    update(coded / "config.json", attn_implementation="kernels-community/flash-attn2")
    assert open_model(str(coded)).parameters() > 0
    assert load_model(str(coded), "float32", "cpu").model.config._attn_implementation == "sdpa"
    assert fetched == []


def test_transformers_by_itself_would_run_it(coded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[str] = []
    monkeypatch.setattr(
        configuration_auto, "get_class_from_dynamic_module", lambda name, *more, **most: run.append(name)
    )
    own_family(coded)
    with pytest.raises(AttributeError):  # of the class that it was not given
        configuration_auto.AutoConfig.from_pretrained(coded)
    assert run == ["own.Own"]
