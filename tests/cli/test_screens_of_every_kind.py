"""Output that nobody reads, without room, in an odd encoding, interrupted: no traceback, and JSON stays JSON."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from perturbkv.cli import console, main
from perturbkv.cli.main import SigtermRecord
from perturbkv.errors import InterruptedRunError, ModelError
from perturbkv.escaping import escape_control_characters
from perturbkv.storage import json_lines

Run = Callable[..., Any]
COMMAND = "from perturbkv.cli.main import main; main()"


def ran(streams: str, *argv: str, **environment: str) -> tuple[int, bytes, bytes]:
    """The exit code of the command in a shell of its own, and both of its streams."""
    script = f'"$@" {streams}\nexit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, "-c", COMMAND, *argv],
        env={**os.environ, **environment}, capture_output=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("argv", [("list", "policies"), ("list", "policies", "--json")])
def test_a_reader_who_leaves_is_no_error(argv: tuple[str, ...]) -> None:
    code, _, err = ran("| true", *argv)
    assert (code, err) == (141, b"")


def test_output_without_room_is_one_line() -> None:
    code, _, err = ran("> /dev/full", "list", "models")
    assert code == 2
    assert err.decode().count("\n") == 1 and os.strerror(errno.ENOSPC) in err.decode()


def test_a_closed_output_is_no_error() -> None:
    assert ran(">&- 2>&-", "list", "models", "--json")[0] == 0


@pytest.mark.slow
def test_an_encoding_without_our_letters_gets_escapes_and_json_that_is_json() -> None:
    code, out, err = ran("", "list", "policies", PYTHONIOENCODING="ascii")
    assert (code, err) == (0, b"")
    assert out.isascii()
    whole = json.loads(ran("", "list", "policies", "--json")[1])
    assert json.loads(ran("", "list", "policies", "--json", PYTHONIOENCODING="ascii")[1]) == whole


def test_notes_are_text_in_one_line() -> None:
    held = io.StringIO()
    with mock.patch.object(console, "err", console.Console(file=held, force_terminal=True)):
        console.note("[/INST] :smile: \x1b[2J\nerror: another")
    assert held.getvalue() == r"[/INST] :smile: \x1b[2J\nerror: another" + "\n"


def test_json_holds_texts_as_they_are() -> None:
    text = "of [  1,  2 ] and [ null ] \x1b[2J \ud800 \u2028 漢"
    document = {"text": text, "numbers": [1, 2.5, None]}
    written = console.as_json(document)
    assert json.loads(written.encode()) == {"schema": console.SCHEMA, **document}
    assert '"numbers": [1, 2.5, null]' in written
    assert json.loads(json_lines.format_line(document).encode()) == document


def test_a_long_error_shows_its_two_ends(perturbkv: Run) -> None:
    asked = perturbkv("trace", "--policy", "x" * 9_000, "--json")
    assert asked.code == 2
    assert len(asked.err) < 2_100
    assert asked.err.startswith("error: unknown policy 'xxx")
    assert len(asked.json()["error"]["message"]) < 2_100


@pytest.mark.parametrize("name", ["\x1b]0;owned\x07", "a\nerror: b", "[INST] :smile:", "\udcff"])
def test_ids_and_names_are_shown_and_stay_what_they_are(perturbkv: Run, model: Path, tmp_path: Path, name: str) -> None:
    row = {
        "id": name if name != "\udcff" else "a",
        "prompt": f"{escape_control_characters(name)} and on " * 20,
        "answers": ["[/INST]"],
    }
    path = tmp_path / f"{name}.jsonl"
    path.write_text(json.dumps(row))
    options = ["--model", model, "--budget", 24, "--window", 8, "--max-new-tokens", 2]
    shown = perturbkv("generate", "--dataset", path, *options, "-o", "out")
    assert shown.code == 0, shown.err
    assert "\x1b" not in shown.out
    assert "\nerror" not in shown.out
    again = perturbkv("generate", "--dataset", path, *options, "-o", "out", "--json")
    assert again.json()["samples"][0]["sample"] == row["id"]
    assert again.json()["run"]["dataset"] == str(path)


def test_a_line_that_is_no_answers_of_ours_is_refused(perturbkv: Run, model: Path, data: Path) -> None:
    options = ["--model", model, "--dataset", data, "--samples", 1, "--budget", 24, "--window", 8]
    options += ["--max-new-tokens", 2, "-o", "out"]
    kept = Path("out/generation.jsonl")
    assert perturbkv("generate", *options).code == 0
    whole = kept.read_text()
    kept.write_text(whole.splitlines()[0] + '\n{"sample": "p0"}\n')
    refused = perturbkv("generate", *options)
    assert (refused.code, refused.err.count("\n")) == (2, 1)


@pytest.mark.parametrize("begins", ["perturbkv.cli.main", "perturbkv.cli.command_line"])
def test_a_ctrl_c_before_anything_was_begun_is_one_line(begins: str, tmp_path: Path) -> None:
    script = (
        "import builtins, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "known = builtins.__import__\n"
        "def slow(name, *more, **most):\n"
        f"    if name == {begins!r}:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return known(name, *more, **most)\n"
        "builtins.__import__ = slow\n"
        "from perturbkv.cli.start import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "list", "models"], capture_output=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (130, b"error: interrupted; nothing was begun\n")


def ended(monkeypatch: pytest.MonkeyPatch, app: object, terminated: bool = False) -> int:
    monkeypatch.setattr(main, "app", app)
    return main._run(SigtermRecord(terminated))


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


class Finalised:
    """Something whose finaliser swallows a signal, which it sends itself."""

    def __init__(self, sent: signal.Signals) -> None:
        self.sent = sent

    def __del__(self) -> None:
        os.kill(os.getpid(), self.sent)
        time.sleep(5)  # until the handler has raised


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """Python's own handler, which a job in a shell's background is without."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_a_finaliser_swallows_interrupts_all_the_same(sent: signal.Signals) -> None:
    with main.sigterm_as_interrupt() as sigterm:
        hook = sys.unraisablehook
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (the handler runs at a later instruction)
            Finalised(sent)
            time.sleep(10)
        assert sigterm.exit_code(130) == (143 if sent == signal.SIGTERM else 130)
    assert sys.unraisablehook is not hook


def test_a_swallowed_sigterm_interrupts_a_background_job_which_ignores_ctrl_c() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with main.sigterm_as_interrupt(), pytest.raises(KeyboardInterrupt):  # noqa: PT012
            Finalised(signal.SIGTERM)
            time.sleep(2)
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_a_swallowed_interrupt_does_not_outlive_the_command() -> None:
    with main.sigterm_as_interrupt():
        Finalised(signal.SIGINT)
    time.sleep(3 * main._AGAIN_S)
