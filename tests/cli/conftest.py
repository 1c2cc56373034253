from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from perturbkv.cli import console
from perturbkv.cli.main import main
from tests.support.folders import model_folder


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


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
def perturbkv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ran]:
    """Run the command in this process, in an empty folder, as 80 columns would show it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> Ran:
        out, err = io.StringIO(), io.StringIO()
        screens = mock.patch.multiple(console, out=console.Console(file=out), err=console.Console(file=err))
        argv = mock.patch.object(sys, "argv", ["perturbkv", *map(str, arguments)])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), screens, argv:
            code = _exit_code()
        return Ran(code, out.getvalue(), err.getvalue())

    return run


def _exit_code() -> int:
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


@pytest.fixture
def tiny(model: Path, data: Path) -> list[object]:
    """Options of a run that takes a moment: prompts of 182 tokens, budget 24, window 8."""
    return ["--model", model, "--dataset", data, "--samples", 2, "--budget", 24, "--window", 8]
