"""A tiny model at a stand-in of the hub, and how it is asked for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import close_session, constants

import perturbkv as pk
from perturbkv.errors import ModelError
from tests.support.folders import model_folder
from tests.support.hub import Hub, serving
from tests.support.models import tiny_model

ID, WEIGHTS = "owner/tiny", "model.safetensors"
TOKEN = "hf_not-to-be-shown"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as found:
        point(monkeypatch, found.address, tmp_path)
        yield found
    close_session()


def point(monkeypatch: pytest.MonkeyPatch, address: str, home: Path) -> None:
    """The hub's client asks there, into an empty cache, without a login."""
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(home / "cache"), "HF_TOKEN_PATH": str(home / "token"), "HF_HUB_ETAG_TIMEOUT": 1,
        "HF_HUB_DOWNLOAD_TIMEOUT": 1,
    }.items():  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("PERTURBKV_CACHE", str(home / "converted"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def sharded(folder: Path, beside: Path) -> Path:
    """The model in shards, the index among them."""
    shutil.copytree(folder, beside)
    (beside / WEIGHTS).unlink()
    tiny_model().save_pretrained(beside, max_shard_size="20kB")
    assert len(list(beside.glob("*.safetensors"))) > 2
    return beside


def same(found: Any, expected: Any) -> bool:
    ids = torch.arange(40).unsqueeze(0)
    with torch.inference_mode():
        return torch.equal(found.model(ids).logits, expected.model(ids).logits)


def refused(name: str = ID, **more: Any) -> str:
    with pytest.raises(ModelError) as raised:
        pk.load_model(name, device="cpu", **more)
    said = str(raised.value)
    assert "\n" not in said and TOKEN not in said and ";" in said
    assert said.startswith(f"model '{name}' needs {name.partition(':')[0]} and the hub did not give it: ")
    return said.partition("did not give it: ")[2]
