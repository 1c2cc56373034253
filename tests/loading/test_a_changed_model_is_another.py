"""A model's revision changes with every file that its numbers depend on, and with no other."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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
