"""examples/save_slot.py saves a slot of the embedded model, and the command that it prints finds it exact."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.screens import run

ROOT = Path(__file__).resolve().parents[2]


def test_the_saved_slot_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, str(ROOT / "examples/save_slot.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    ran = run(*shlex.split(printed)[1:], "-o", "audit")
    assert ran.code == 0 and ran.out.startswith("exact: "), ran.out + ran.err
