from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.support.folders import model_folder
from tests.support.screens import Ran, run
from tests.support.undrawn import undrawn


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny", positions=512)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"{i} " + "The quick brown fox jumps over the lazy dog. " * 4} for i in range(6)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def perturbkv(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Ran]]:
    """Run the command in this process, in an empty folder; no screen of it is wider than the terminal.

    Nothing is drawn in the files of its figures, but in tests marked `drawn`.
    """
    monkeypatch.chdir(tmp_path)

    def narrow(*words: object) -> Ran:
        ran = run(*words)
        coloured = "\x1b" in ran.out
        assert coloured or "--json" in words or all(cell_len(line) <= 80 for line in ran.out.splitlines()), ran.out
        return ran

    with nullcontext() if request.node.get_closest_marker("drawn") else undrawn():
        yield narrow


@pytest.fixture
def tiny(model: Path, data: Path) -> list[object]:
    """Options of a run that takes a moment: prompts of 182 tokens, budget 24, window 8."""
    return ["--model", model, "--dataset", data, "--samples", 2, "--budget", 24, "--window", 8]
