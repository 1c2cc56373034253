"""README's own command, from an empty cache to a figure: a tiny model and a few rows stand where the hub's are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perturbkv.storage.trace.trace_file import describe
from tests.support.folders import model_folder
from tests.support.hub import Hub, serving

COMMAND = ["heads", "--model", "mistral-7b", "--dataset", "qasper", "--output", "run"]
MODEL, TOKEN = "mistralai/Mistral-7B-Instruct-v0.3", "hf_not-to-be-shown"
TEXT = "Attention is a sum over tokens. The cache holds a key and a value of each of them, which takes memory. " * 4


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    rows = [
        {"_id": f"q{i}", "input": "What does the cache hold?", "context": f"{i} {TEXT}", "answers": ["keys and values"],
         "all_classes": None, "length": 80, "dataset": "qasper", "language": "en"}
        for i in range(2)
    ]  # fmt: skip
    (tmp_path / "data").mkdir()
    with zipfile.ZipFile(tmp_path / "data" / "data.zip", "w") as archive:
        archive.writestr("data/qasper.jsonl", "\n".join(map(json.dumps, rows)))
    with serving() as found:
        found.add(MODEL, model_folder(tmp_path / "model", "mistral", positions=4096), login=TOKEN, gated=True)
        found.add("zai-org/LongBench", tmp_path / "data", "dataset")
        yield found


def ran(hub: Hub, home: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PERTURBKV_"))}
    settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home / "hub"), "NO_PROXY": "*", "HF_TOKEN": TOKEN}
    script = Path(sys.executable).with_name("perturbkv")
    return subprocess.run([script, *COMMAND], cwd=home, env={**clean, **settings}, capture_output=True, text=True)


@pytest.mark.slow
def test_readmes_command_ends_in_a_figure(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    done = ran(hub, home)
    assert done.returncode == 0, done.stderr
    assert "downloading model.safetensors of" in done.stderr and "%|" not in done.stderr
    assert (home / "run" / "heads.png").stat().st_size > 1000
    assert describe(home / "run" / "trace.h5").attrs["revision"] == hub.held[f"models/{MODEL}"].names["main"]
    assert hub.downloads("model.safetensors") == 1
    assert TOKEN not in done.stdout + done.stderr
