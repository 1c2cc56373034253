"""While an engine starts, progress shows its newest message and the seconds; standard output holds results alone."""

from __future__ import annotations

import importlib.util
import io
import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from perturbkv.auditing.dumps import vllm_audit
from perturbkv.auditing.dumps.vllm_audit import EngineProgress
from perturbkv.cli import console
from perturbkv.pipeline import progress
from tests.support.folders import model_folder
from tests.support.screens import Ran, run

ENGINE = """
import sys, time
print("INFO 11-30 02:44:03 [gpu/model_runner.py:97] Loading weights \\x1b[2J")
print("", flush=True)
time.sleep(0.8)
print("out of blocks", file=sys.stderr)
sys.exit(2)
"""
"""What stands for the engine's process."""


def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> tuple[Ran, str]:
    """An audit of that engine, as JSON, and what was drawn of its progress."""
    find, screen = importlib.util.find_spec, console.Console(file=io.StringIO(), force_terminal=terminal, width=80)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: SimpleNamespace() if name == "vllm" else find(name, *more)
    )
    monkeypatch.setattr(vllm_audit, "_BEGIN", ENGINE)
    monkeypatch.setattr(progress, "LINE_S", 0.05)
    monkeypatch.setattr(console, "progress", partial(progress.bar, console=screen))
    model = model_folder(tmp_path / "tiny", positions=512)
    ran = run("audit", f"vllm:{model}", "--situation", "plain", "--json")
    return ran, screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_engines_newest_message_is_shown(terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, drawn = audited(tmp_path, monkeypatch, terminal)
    assert ran.code == 2
    assert json.loads(ran.out)["error"]["message"] == "out of blocks"
    assert "vLLM, 0 s: Loading weights" in drawn
    assert "\x1b[2J" not in drawn
    if not terminal:
        assert "situations: 0 of 1 done after 0:00:00 (vLLM, 0 s: Loading weights" in drawn


def test_a_message_is_cut_to_the_terminals_width(tmp_path: Path) -> None:
    (tmp_path / "messages").write_bytes(b"(EngineCore pid=7) INFO 11-30 02:44:03 [core.py:97] \xff" + b"word " * 99)
    doing = EngineProgress()
    assert doing.text() == "weights, 0 s"
    doing.begin("vLLM", tmp_path / "messages")
    doing.began = time.monotonic() - 61
    assert doing.text() == f"vLLM, 61 s: \ufffd{'word ' * 15}…"
    screen = console.Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with progress.bar("situations", 5, console=screen, status=doing.text):
        pass
    drawn = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "0/5  left -:--:-- vLLM, 61 s: \ufffdword word word word word…" in drawn
    doing.begin("vLLM", tmp_path / "nowhere")
    assert doing.text() == "vLLM, 0 s"
