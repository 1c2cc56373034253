"""transformers fills what a model lacks with random weights; here such a model is an error that names the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from perturbkv.errors import ModelError
from perturbkv.models.loading import load_model
from perturbkv.models.sanity import check_finite
from tests.support.folders import model_folder
from tests.support.gguf_files import gguf_file
from tests.support.models import tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERTURBKV_CACHE", str(tmp_path / "cache"))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def spoil(name: str, value: float) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[3] = value

    return lambda folder: change_tensors(folder, change)


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-50])


def lose_shard(folder: Path) -> None:
    names = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    places = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    places["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a tensor is missing": (lambda it: change_tensors(it, lambda held: held.pop(UP)), [f"lacks '{UP}'"]),
    "the final norm is missing": (lambda it: change_tensors(it, lambda held: held.pop(NORM)), [f"lacks '{NORM}'"]),
    "a layer too many": (
        lambda it: change_config(it, num_hidden_layers=3),
        ["lacks 'model.layers.2.input_layernorm.weight' and 8 more"],
    ),
    "a layer too few": (
        lambda it: change_config(it, num_hidden_layers=1),
        ["no place for 'model.layers.1.input_layernorm.weight' and 8 more"],
    ),
    "another width": (lambda it: change_config(it, hidden_size=64), ["shape (260, 64), got (260, 32) and 20 more"]),
    "another vocabulary": (
        lambda it: change_config(it, vocab_size=300),
        ["'lm_head.weight' of shape (300, 32), got (260, 32) and 1 more"],
    ),
    "a tensor too many": (
        lambda it: change_tensors(it, lambda held: held.update(more=torch.zeros(2))),
        ["no place for 'more'"],
    ),
    "NaN": (spoil(UP, float("nan")), [f"'{UP}' holds 1 values that are NaN or Inf"]),
    "Inf": (spoil(NORM, float("inf")), [f"'{NORM}' holds 1 values"]),
    "minus Inf": (spoil(NORM, float("-inf")), [f"'{NORM}' holds 1 values"]),
    "cut weights": (cut, ["the weights of"]),
    "text for weights": (lambda it: (it / WEIGHTS).write_text("hello"), ["the weights of"]),
    "no weights": (lambda it: (it / WEIGHTS).unlink(), [WEIGHTS]),
    "a shard that is not there": (lose_shard, ["model-00002-of-00002.safetensors"]),
    "no tokenizer": (
        lambda it: [(it / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
        ["tokenizer.json", "serialization file"],  # the second line of what transformers says
    ),
    "no configuration": (lambda it: (it / "config.json").unlink(), ["config.json"]),
    "half a configuration": (lambda it: (it / "config.json").write_text("{"), ["config.json"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    spoiled, words = BROKEN[case]
    spoiled(folder)
    with pytest.raises(ModelError) as raised:
        load_model(str(folder), device="cpu")
    assert all(word in str(raised.value) for word in [str(folder), *words])
    assert "\n" not in str(raised.value)
    assert str(raised.value)[-1] not in ":,("


def test_a_tokenizer_made_up_of_special_tokens_is_none(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "qwen2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="tokenizer.json.* no token but special ones"):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize("more", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_a_whole_folder_is_not(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", family, **more)
    assert load_model(str(folder), "bfloat16", "cpu").weights == "float32 → bfloat16"


def test_what_old_checkpoints_hold_besides_is_no_error(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    change_tensors(folder, lambda held: held.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load_model(str(folder), device="cpu")


def test_values_whose_sum_overflows_are_whole() -> None:
    model = tiny_model(dtype=torch.float16)
    with torch.no_grad():
        model.lm_head.weight.fill_(6e4)
    assert torch.isinf(model.lm_head.weight.sum())
    check_finite(model, "large")


def cut_file(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-5000])
    return path


def cut_header(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:3000])
    return path


def text(path: Path) -> Path:
    path.write_text("not a GGUF file")
    return path


def empty(path: Path) -> Path:
    path.write_text("")
    return path


BROKEN_GGUF: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda it: cut_file(gguf_file(it)), "is cut: tensor 'blk.1.ffn_up.weight' ends at byte"),
    "cut in its header": (lambda it: cut_header(gguf_file(it)), "its header does not end"),
    "text": (text, "does not begin with 'GGUF'"),
    "nothing": (empty, "does not begin with 'GGUF'"),
    "a tensor is missing": (
        lambda it: gguf_file(it, without="blk.1.attn_q.weight"),
        "lacks 'model.layers.1.self_attn.q_proj.weight'",
    ),
    "a layer too many": (lambda it: gguf_file(it, layers=3), "lacks 'model.layers.2"),
    "a layer too few": (
        lambda it: gguf_file(it, layers=1),
        "of the 20 tensors in its GGUF file transformers would use 11, not 'blk.1.",
    ),
    "a tensor nobody uses": (
        lambda it: gguf_file(it, extra="rope_freqs.weight"),
        "transformers would use 20, not 'rope_freqs.weight'",
    ),
    "a bias nobody uses": (
        lambda it: gguf_file(it, extra="blk.0.attn_q.bias"),
        "of the 21 tensors in its GGUF file transformers would use 20",
    ),
    "NaN": (
        lambda it: gguf_file(it, poisoned="blk.1.ffn_norm.weight"),
        "'model.layers.1.post_attention_layernorm.weight' holds 1 values",
    ),
}


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "as it is"])
@pytest.mark.parametrize("case", BROKEN_GGUF)
def test_a_broken_gguf_file_is_refused_in_one_line(
    case: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr("perturbkv.models.gguf.LARGEST", 0)
    made, words = BROKEN_GGUF[case]
    path = tmp_path / "model.gguf"
    made(path)
    with pytest.raises(ModelError) as raised:
        load_model(str(path), device="cpu")
    assert str(path) in str(raised.value)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "cache").glob("*")) == []
