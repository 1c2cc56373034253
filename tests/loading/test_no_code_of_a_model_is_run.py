"""A model is data: neither Python beside its weights, nor pickles, nor a kernel that its configuration names, runs."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.integrations import hub_kernels
from transformers.models.auto import configuration_auto

from perturbkv.errors import ModelError
from perturbkv.models.loading import load_model, open_model
from tests.support.folders import model_folder

CODE = "from pathlib import Path\n\nPath('was-run').touch()\nclass Own: ...\n"
CUSTOM_MODEL = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}


def update(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def test_code_of_its_own_is_refused_in_one_line(folder: Path, plant: Callable[[Path], None]) -> None:
    plant(folder)
    with pytest.raises(ModelError, match=r"needs Python code of its own, which is never run") as refused:
        open_model(str(folder))
    assert "\n" not in str(refused.value)
    assert "trust_remote_code" not in str(refused.value)
    assert not Path("was-run").exists()


def test_a_known_family_is_read_by_the_library_whatever_code_lies_beside_it(folder: Path) -> None:
    update(folder / "config.json", auto_map=CUSTOM_MODEL)
    assert load_model(str(folder), "float32", "cpu").layers
    assert open_model(str(folder)).parameters() > 0
    assert not Path("was-run").exists()


def test_pickled_weights_are_not_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch was-run'\ntR.")
    with pytest.raises(ModelError):
        load_model(str(folder), "float32", "cpu")
    assert not Path("was-run").exists()


def test_no_kernel_that_a_configuration_names_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[object] = []
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *names, **more: fetched.append(names))
    update(folder / "config.json", attn_implementation="kernels-community/flash-attn2")
    assert open_model(str(folder)).parameters() > 0
    assert load_model(str(folder), "float32", "cpu").model.config._attn_implementation == "sdpa"
    assert fetched == []


def test_transformers_by_itself_would_run_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[str] = []
    monkeypatch.setattr(
        configuration_auto, "get_class_from_dynamic_module", lambda name, *more, **most: run.append(name)
    )
    own_family(folder)
    with pytest.raises(AttributeError):  # of the class that it was not given
        configuration_auto.AutoConfig.from_pretrained(folder)
    assert run == ["own.Own"]
