"""One attack: the command line in a process of its own, which may crash, hang or eat its machine alone."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 10.0
"""No attack may compute longer."""
PATIENCE = 6
"""How many times that is waited for one that does not compute: other processes may have the machine."""
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the server starts, whose children read it
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["perturbkv.cli.main", "transformers", "perturbkv.pipeline.measure", __name__])


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code (negative: the signal that ended it), both streams, seconds, and new files."""

    code: int
    out: str
    err: str
    seconds: float
    hung: bool
    left: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A command line that somebody tries.

    `folder` is where it runs; it holds what the case needs. `fine` says what is wrong with an outcome, None where it is
    as it should be; by default one line and exit code 2, nothing left behind. `start` runs it: None is `run`.
    """

    name: str
    folder: Path
    argv: tuple[str, ...]
    fine: Callable[[Outcome], str | None]
    start: Callable[[tuple[str, ...], Path], Outcome] | None = None


def flaw_of_refusal(outcome: Outcome) -> str | None:
    """What is wrong with an outcome that should be one line and exit code 2, with nothing left behind."""
    lines = outcome.err.strip().splitlines()
    if outcome.hung:
        return f"still running after {LIMIT_S:.0f} s"
    if "Traceback" in outcome.err + outcome.out:
        return f"traceback: {lines[-1]}"
    if outcome.code != 2:
        return f"exit code {outcome.code}, not 2: {lines[-1] if lines else 'silent'}"
    if not lines or not lines[-1].startswith("error: "):
        return f"no line that begins with 'error: ' at the end: {lines[-1:]}"
    if outcome.left:
        return f"left behind: {', '.join(outcome.left)}"
    return None


def attack(case: Case) -> str | None:
    """Run the case; what is wrong with its outcome, None where nothing is."""
    return case.fine((case.start or run)(case.argv, case.folder))


def run(argv: tuple[str, ...], folder: Path, limit: float = LIMIT_S) -> Outcome:
    """The command's outcome, killed after `limit` seconds of computing, or `PATIENCE` times as many of waiting."""
    before = _files(folder)
    streams = folder.parent / f"{folder.name}.out", folder.parent / f"{folder.name}.err"
    process = _SERVER.Process(target=_command, args=(argv, folder, *streams, limit))
    start = time.monotonic()
    process.start()
    process.join(PATIENCE * limit)
    hung = process.is_alive() or process.exitcode == -signal.SIGXCPU
    if process.is_alive():
        process.kill()
        process.join()
    seconds = time.monotonic() - start
    out, err = (stream.read_text(errors="replace") if stream.exists() else "" for stream in streams)
    for stream in streams:
        stream.unlink(missing_ok=True)
    left = tuple(sorted(_files(folder) - before))
    return Outcome(process.exitcode or 0, out, err, seconds, hung, left)


def _files(folder: Path) -> frozenset[str]:
    """What lies under a folder."""
    return frozenset(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _command(argv: tuple[str, ...], folder: Path, out: Path, err: Path, limit: float) -> None:
    """The command line as its users start it, in this process, which was made for it."""
    resource.setrlimit(resource.RLIMIT_CPU, (round(limit), round(limit) + 1))
    sys.stdout, sys.stderr = out.open("w"), err.open("w")
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    os.chdir(folder)
    os.environ["COLUMNS"] = "80"
    sys.argv = ["perturbkv", *argv]
    from perturbkv.cli.main import main

    main()
