"""Scripts of docs/ and studies/ and commands, run in this process: what they write to stdout."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from perturbkv.cli import console
from perturbkv.cli.main import main
from tests.support.undrawn import undrawn

ROOT = Path(__file__).resolve().parents[2]
DOCS, STUDIES = ROOT / "docs", ROOT / "studies"
SCRIPTS = DOCS / "scripts"


def quietly(work: Callable[[], object], *arguments: object, code: int = 0) -> str:
    """What `work` writes to stdout with these arguments on its command line, or to stderr where it has to fail."""
    out, err, ended = io.StringIO(), io.StringIO(), 0
    screens = mock.patch.multiple(console, out=console.Console(file=out), err=console.Console(file=err))
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with streams[0], streams[1], screens, mock.patch.object(sys, "argv", [*map(str, arguments)]):
        try:
            work()
        except SystemExit as left:
            ended = left.code or 0
    assert ended == code, out.getvalue() + err.getvalue()
    return (err if code else out).getvalue()


def perturbkv(*arguments: object) -> None:
    """Run a command for what it leaves to scripts, which read no figure."""
    with undrawn():
        quietly(main, "perturbkv", *arguments)


def script(name: str, *arguments: object) -> str:
    """What a script says, run as `python docs/name.py` runs it: scripts beside it can be imported."""
    path = str(SCRIPTS / f"{name}.py")
    return quietly(lambda: _run(path, "__main__"), path, *arguments)


def study(name: str, *arguments: object, code: int = 0) -> str:
    """What a study says, `studies/NAME.py`; with code 2 the line of a refusal."""
    path = str(STUDIES / f"{name}.py")
    return quietly(lambda: _run(path, "__main__"), path, *arguments, code=code)


def tables(said: str) -> dict[str, list[list[str]]]:
    """Title of each Markdown table that a study prints -> its rows of cells, heads first."""
    found: dict[str, list[list[str]]] = {}
    for title, rows in re.findall(r"^(.+)\n\n((?:\|.*\n)+)", said, re.MULTILINE):
        found[title] = [[cell.strip() for cell in row.strip().split("|")[1:-1]] for row in rows.splitlines()]
        assert set(found[title].pop(1)) == {"---"}
        assert {len(row) for row in found[title]} == {len(found[title][0])}, title
    return found


def functions(name: str, folder: Path = SCRIPTS) -> dict[str, Any]:
    """What a script defines."""
    return _run(str(folder / f"{name}.py"), name)


def _run(path: str, name: str) -> dict[str, Any]:
    """The script's names; scripts that it imports are forgotten afterwards: theirs are other modules' names too."""
    folder = Path(path).parent
    try:
        with mock.patch.object(sys, "path", [str(folder), *sys.path]):
            return runpy.run_path(path, run_name=name)
    finally:
        for module in [*sys.modules.values()]:
            if str(getattr(module, "__file__", None)).startswith(f"{folder}/"):
                del sys.modules[module.__name__]
