"""What no model can be is refused in a line that names the value or the file, before anything of its size is made."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from perturbkv.errors import ModelError, UnknownNameError
from perturbkv.models.loading import load_model, open_model, pick_device
from perturbkv.models.sanity import check_config
from perturbkv.models.sources import explain_errors, resolve
from tests.support.folders import model_folder
from tests.support.gguf_files import gguf_file

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERTURBKV_CACHE", str(tmp_path / "cache"))


def say(folder: Path, name: str = "config.json", **values: object) -> None:
    held = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**held, **values}))


def refused(name: object, *words: str) -> None:
    with pytest.raises(ModelError) as raised:
        load_model(str(name), device="cpu")
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    "name",
    ["owner/name:", "owner/name:Q4_K_M", "owner/name:file.ggufx", "own er/name", "owner/näme", "own er/name:f.gguf?"],
)
def test_what_no_repository_can_be_called_is_no_name_that_the_hub_is_asked_for(name: str) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown model .*owner/name:file\.gguf., a folder or"):
        resolve(name)


@pytest.mark.parametrize("value", [0, -1, 10**20, float("nan"), float("inf"), "many", [32], {}, 1.5, True, None])
@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_size",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_a_size_that_is_none_is_refused_by_its_name(folder: Path, key: str, value: object) -> None:
    say(folder, **{key: value})
    if (key, value) == ("num_key_value_heads", None):  # transformers means as many as heads
        refused(folder, "is not whole")
    elif (key, value) in (("num_attention_heads", 0), ("num_attention_heads", 10**20), ("hidden_size", -1)):
        refused(folder, "config.json")  # transformers stumbles first, in words of its own
    else:
        refused(folder, key)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": 10**6}, ["a whole number from 1 to 1000, got 1000000"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "a divisor of 4 heads, got 3"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "a finite number of at least 0, got nan"]),
        ({"rms_norm_eps": -1e-5}, ["rms_norm_eps", "got -1e-05"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, ["rope_theta", "got inf"]),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, ["factor", "got 0"]),
        ({"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}}, ["model", "nonsense"]),
        ({"sliding_window": {"a": 1}}, ["sliding_window"]),
        ({"quantization_config": [None]}, ["config.json"]),
        ({"hidden_act": "nonsense"}, ["model", "nonsense"]),
        ({"head_dim": 7}, ["model"]),
    ],
    ids=json.dumps,
)
def test_values_that_no_model_has_are_refused(folder: Path, values: dict[str, Any], words: list[str]) -> None:
    say(folder, **values)
    refused(folder, *words)


@pytest.mark.parametrize(
    ("family", "key", "value", "words"),
    [
        ("gemma3_text", "query_pre_attn_scalar", -4, "a finite number above 0, got -4"),
        ("granite", "attention_multiplier", float("nan"), "a finite number above 0, got nan"),
        ("granite", "logits_scaling", 0.0, "a finite number above 0, got 0.0"),
        ("mixtral", "num_experts_per_tok", 5, "at most its 4 experts, got 5"),
        ("qwen3_moe", "num_experts_per_tok", 5, "at most its 4 experts, got 5"),
        ("gpt_oss", "num_experts_per_tok", 0, "a whole number from 1 to 65536, got 0"),
    ],
)
def test_values_that_no_model_of_a_family_has_are_refused(
    tmp_path: Path, family: str, key: str, value: float, words: str
) -> None:
    folder = model_folder(tmp_path / family, family)
    say(folder, **{key: value})
    refused(folder, f"expected {key} of model", words)


@pytest.mark.parametrize(("last", "words"), [(64, ""), (65, "at most its 64 experts"), (0, "from 1 to 65536")])
def test_a_number_for_each_layer_is_looked_at_in_each(last: int, words: str) -> None:
    config = CONFIG_MAPPING["hunyuan_v1_moe"](num_experts=64, moe_topk=[8] * 31 + [last], num_key_value_heads=8)
    with pytest.raises(ModelError, match=f"num_experts_per_tok .* {words}") if words else nullcontext():
        check_config(config, "m")


def test_what_a_model_may_leave_open_is_taken(folder: Path) -> None:
    say(folder, head_dim=None, sliding_window=None, rms_norm_eps=0.0)
    load_model(str(folder), device="cpu")


@pytest.mark.parametrize("index", ["5", "[]", "null", '{"weight_map": {"x": null}}', "[" * 50_000])
def test_an_index_that_is_none_is_refused(folder: Path, index: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, str(folder))


@pytest.mark.parametrize("content", ["", "{}", "[]", "5", "[" * 100_000], ids=lambda text: text[:5])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_json_of_another_kind_is_refused(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    refused(folder, str(folder))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64], ids=str)
def test_weights_of_no_floating_point_type_are_not_cast_in_silence(folder: Path, dtype: torch.dtype) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[UP] = tensors[UP].to(dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(folder, f"'{UP}' in model.safetensors is of", "no floating-point type")


def test_what_is_no_file_in_a_folder_is_refused_at_once(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    refused(folder, "got a named pipe: tokenizer.json")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/dev/zero")
    refused(folder, "got a device: tokenizer.json")


def test_what_nobody_reads_of_a_folder_does_not_matter(folder: Path) -> None:
    os.mkfifo(folder / "control")
    save_file({"inputs": torch.zeros(3, dtype=torch.int64)}, folder / "recorded.safetensors")
    assert load_model(str(folder), device="cpu").layers


def test_a_name_that_cannot_be_looked_for_is_refused(tmp_path: Path) -> None:
    for name in ("x" * 5000, "~nobody-of-this-name/model", f"{tmp_path / 'loop'}"):
        (tmp_path / "loop").is_symlink() or (tmp_path / "loop").symlink_to(tmp_path / "loop")
        refused(name, "cannot be looked for")
    assert resolve("owner/name").hub_id == "owner/name"


@pytest.mark.parametrize("name", ["meta", "xla", "hpu", "cuda:x", "cuda:-1", "cpu:5", "cuda:99", "", "nonsense"])
def test_a_device_that_computes_nothing_is_refused(name: str) -> None:
    from perturbkv.errors import ConfigError

    with pytest.raises(ConfigError, match="device"):
        pick_device(name)
    assert pick_device("cpu:0").type == "cpu"


def at(place: int, content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        held = bytearray(path.read_bytes())
        held[place : place + len(content)] = content
        path.write_bytes(held)

    return change


def in_matrix(place: int, content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        name = b"blk.1.ffn_up.weight"
        at(path.read_bytes().index(name) + len(name) + place, content)(path)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (at(4, struct.pack("<I", 99)), "of version 2 or 3, got"),
        (at(4, struct.pack(">I", 3)), "of version 50331648"),
        (at(8, struct.pack("<Q", 2**63)), "its header does not end within"),
        (at(16, struct.pack("<Q", 2**64 - 1)), "its header does not end within"),
        (at(24, struct.pack("<Q", 2**63)), "its header does not end within"),
        (in_matrix(20, struct.pack("<I", 99)), "'blk.1.ffn_up.weight' is of type 99, which is not known"),
        (in_matrix(4, struct.pack("<Q", 2**63)), "is cut: tensor 'blk.1.ffn_up.weight' ends at byte"),
        (in_matrix(24, struct.pack("<Q", 2**63)), "is cut: tensor 'blk.1.ffn_up.weight' ends at byte"),
    ],
    ids=["version", "byte order", "tensors", "pairs", "a key", "type", "width", "place"],
)
def test_a_gguf_header_that_says_what_cannot_be_is_refused(
    tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    path = gguf_file(tmp_path / "model.gguf")
    change(path)
    refused(path, str(path), words)


def test_a_gguf_file_of_no_alignment_is_refused(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "model.gguf")
    key = b"general.alignment"
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 0)
    content = path.read_bytes()
    (pairs,) = struct.unpack_from("<Q", content, 16)
    path.write_bytes(content[:16] + struct.pack("<Q", pairs + 1) + pair + content[24:])
    refused(path, "is cut or damaged")


def test_an_error_of_ours_and_an_interrupt_pass_what_explains_other_libraries(folder: Path) -> None:
    for error in (ModelError("ours"), KeyboardInterrupt()):
        with pytest.raises(type(error)), explain_errors(resolve(str(folder)), "the weights"):
            raise error


def test_a_whole_gguf_file_is_taken(tmp_path: Path) -> None:
    assert open_model(str(gguf_file(tmp_path / "model.gguf"))).parameters() > 0
