"""Scripts of docs/ and commands, run in this process: what they write to stdout."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from perturbkv.cli import console
from perturbkv.cli.main import main
from tests.support.undrawn import undrawn

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCRIPTS = DOCS / "scripts"


def quietly(work: Callable[[], object], *arguments: object) -> str:
    """What `work` writes to stdout with these arguments on its command line."""
    out, err = io.StringIO(), io.StringIO()
    screens = mock.patch.multiple(console, out=console.Console(file=out), err=console.Console(file=err))
    with contextlib.redirect_stdout(out), screens, mock.patch.object(sys, "argv", [*map(str, arguments)]):
        try:
            work()
        except SystemExit as left:
            assert not left.code, out.getvalue() + err.getvalue()
    return out.getvalue()


def perturbkv(*arguments: object) -> None:
    """Run a command for what it leaves to scripts, which read no figure."""
    with undrawn():
        quietly(main, "perturbkv", *arguments)


def study(path: str, *arguments: object) -> str:
    """Run a study of the repository, `studies/alpha.py`; return what it prints."""
    where = str(DOCS.parent / path)
    return quietly(lambda: runpy.run_path(where, run_name="__main__"), where, *arguments)


def script(name: str, *arguments: object) -> str:
    """What a script says, run as `python docs/name.py` runs it: scripts beside it can be imported."""
    path = str(SCRIPTS / f"{name}.py")
    return quietly(lambda: _run(path, "__main__"), path, *arguments)


def functions(name: str) -> dict[str, Any]:
    """What a script defines."""
    return _run(str(SCRIPTS / f"{name}.py"), name)


def _run(path: str, name: str) -> dict[str, Any]:
    """The script's names; scripts that it imports are forgotten afterwards: theirs are other modules' names too."""
    try:
        with mock.patch.object(sys, "path", [str(SCRIPTS), *sys.path]):
            return runpy.run_path(path, run_name=name)
    finally:
        for module in [*sys.modules.values()]:
            if str(getattr(module, "__file__", None)).startswith(f"{SCRIPTS}/"):
                del sys.modules[module.__name__]
