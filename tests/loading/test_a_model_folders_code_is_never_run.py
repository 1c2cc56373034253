"""A model folder's own Python is never run, whatever stands on standard input."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import perturbkv as pk
from tests.support.folders import model_folder


def test_a_folder_with_code_of_its_own_is_refused_and_its_code_stays_unrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "surprise"
    config["auto_map"] = {
        "AutoConfig": "modeling_surprise.SurpriseConfig",
        "AutoModelForCausalLM": "modeling_surprise.SurpriseModel",
    }
    (folder / "config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (folder / "modeling_surprise.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass SurpriseConfig: ...\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
    with pytest.raises(pk.PerturbkvError):
        pk.load_model(str(folder))
    assert not ran.exists()
