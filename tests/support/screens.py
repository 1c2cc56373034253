"""Every command's screen and help at 80 columns; `make snapshots` writes them into tests/cli/snapshots."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from perturbkv.cli import console
from perturbkv.cli.main import main
from perturbkv.storage.trace import trace_file
from tests.house.test_no_label_is_parsed import COMMANDS, asked_of
from tests.support.commands import every_command
from tests.support.measured import MEASURED
from tests.support.undrawn import undrawn

FOLDER = Path(__file__).resolve().parents[1] / "cli" / "snapshots"
LISTS = ("list models", "list datasets", "list policies", "list policies adakv", "list trace.h5", "tokens trace.h5")


def names() -> list[str]:
    """The names of all screens: a command's help, an analysis, a list; 'perturbkv' alone."""
    helps = [f"{' '.join(words)} -h" for words in every_command()]
    return ["perturbkv", "perturbkv -h", *helps, *COMMANDS, *LISTS]


def screen(name: str) -> str:
    """Return what a command prints on stdout, in a folder of its own, at 80 columns."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copy(MEASURED, "trace.h5")
        if name in COMMANDS:
            trace = asked_of(name)
            with mock.patch.object(trace_file, "read_trace", lambda path: trace), undrawn():
                return _run(*name.split(), *COMMANDS[name], "trace.h5", "-o", "out", "--format", "png")
        return _run(*name.removeprefix("perturbkv").split())


def _run(*words: str) -> str:
    out, err = io.StringIO(), io.StringIO()
    screens = mock.patch.multiple(console, out=console.Console(file=out), err=console.Console(file=err))
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "80"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        screens,
        mock.patch.object(sys, "argv", ["perturbkv", *words]),
        contextlib.suppress(SystemExit),
    ):
        main()
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def path_of(name: str) -> Path:
    """Return the file of a screen."""
    return FOLDER / f"{name.replace(' ', '_')}.txt"


def write() -> Iterator[Path]:
    """Write every screen; yields the files that changed."""
    FOLDER.mkdir(exist_ok=True)
    wanted = {path_of(name): name for name in names()}
    for path in set(FOLDER.glob("*.txt")) - set(wanted):
        path.unlink()
        yield path
    for path, name in wanted.items():
        text = screen(name)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            yield path


if __name__ == "__main__":
    for changed in write():
        sys.stdout.write(f"{changed.relative_to(FOLDER)}\n")
