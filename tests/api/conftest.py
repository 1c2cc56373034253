"""A tiny model and a few prompts for it, as a notebook would hold them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import perturbkv as pk
from perturbkv.models.adapter import Adapter
from tests.support.folders import model_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("api") / "tiny", positions=512)


@pytest.fixture(scope="session")
def model(folder: Path) -> Adapter:
    return pk.load_model(str(folder))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"{i} " + "The quick brown fox jumps over the lazy dog. " * 3} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path
