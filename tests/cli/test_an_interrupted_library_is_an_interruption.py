"""A Ctrl-C inside of a library may come out as another error: it ends the command as a Ctrl-C does."""

from __future__ import annotations

import pytest

from perturbkv.cli import main
from perturbkv.cli.command_line import JsonRequest
from perturbkv.cli.main import SigtermRecord
from perturbkv.errors import InterruptedRunError, ModelError


def ended(monkeypatch: pytest.MonkeyPatch, app: object, terminated: bool = False) -> int:
    monkeypatch.setattr(main, "app", app)
    return main._run(JsonRequest(), SigtermRecord(terminated))


def loading(interrupted: bool) -> None:
    """As torch unwinds while it loads weights, and as loading tells of it."""
    try:
        try:
            if interrupted:
                raise KeyboardInterrupt
        finally:
            empty = "trying to pop from empty mode stack"
            raise RuntimeError(empty)
    except RuntimeError as error:
        raise ModelError(f"the model cannot be loaded: {error}") from None


@pytest.mark.parametrize(("terminated", "code"), [(False, 130), (True, 143)])
def test_an_error_behind_which_a_ctrl_c_lies_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminated: bool, code: int
) -> None:
    assert ended(monkeypatch, lambda **asked: loading(True), terminated) == code
    assert capsys.readouterr().err.startswith("error: interrupted")


def test_any_other_error_stays_what_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(monkeypatch, lambda **asked: loading(False)) == 2
    assert capsys.readouterr().err.startswith("error: the model")


def test_a_run_says_itself_what_it_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(**asked: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise InterruptedRunError(2, 3, "t.h5") from None

    assert ended(monkeypatch, run) == 130
    assert "2 of 3" in capsys.readouterr().err
