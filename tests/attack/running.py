"""One attack: the command line in a process of its own, which may crash, hang or eat its machine alone."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the server starts, whose children read it
LIMIT_S = 10.0
"""No attack may compute longer."""
PATIENCE = 6
"""How many times that is waited for one that does not compute: other processes may have the machine."""
MEMORY = 8 * 2**30
"""Bytes that an attack may ask for: what goes on asking ends, and the machine does not."""
MAIN = "perturbkv.cli.main"
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([MAIN, "transformers", "perturbkv.pipeline.sample.measure", __name__])


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
    as it should be; by default one line and exit code 2, nothing left behind. `module` has the `main` that is called,
    `before` is what the process does first, such as giving up rights. `start` runs it: None is `run`.
    """

    name: str
    folder: Path
    argv: tuple[str, ...]
    fine: Callable[[Outcome], str | None]
    module: str = MAIN
    before: Callable[[], None] | None = None
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
    if case.start is not None:
        return case.fine(case.start(case.argv, case.folder))
    return case.fine(run(case.argv, case.folder, module=case.module, before=case.before))


def run(
    argv: tuple[str, ...],
    folder: Path,
    limit: float = LIMIT_S,
    module: str = MAIN,
    before: Callable[[], None] | None = None,
) -> Outcome:
    """The command's outcome, killed after `limit` seconds of computing, or `PATIENCE` times as many of waiting."""
    return Running(argv, folder, module, before, limit).outcome(PATIENCE * limit)


class Running:
    """A command that has begun, in a process of its own; it ends after `limit` seconds of computing."""

    _numbers = itertools.count()

    def __init__(
        self,
        argv: tuple[str, ...],
        folder: Path,
        module: str = MAIN,
        before: Callable[[], None] | None = None,
        limit: float | None = None,
    ) -> None:
        self.folder, self._there = folder, _files(folder)
        name = f"{folder.name}-{next(self._numbers)}"
        self._streams = folder.parent / f"{name}.out", folder.parent / f"{name}.err"
        self._cache = folder.parent / f"{folder.name}.cache"
        told = (module, argv, folder, self._cache, *self._streams, before, limit)
        self._process = _SERVER.Process(target=_command, args=told)
        self._start = time.monotonic()
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def lives(self) -> bool:
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """A signal, where the process is there to get it."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def outcome(self, limit: float = LIMIT_S) -> Outcome:
        """How it ended, killed after `limit` seconds."""
        self._process.join(limit)
        hung = self._process.is_alive() or self._process.exitcode == -signal.SIGXCPU
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        seconds = time.monotonic() - self._start
        out, err = (stream.read_text(errors="replace") if stream.exists() else "" for stream in self._streams)
        for stream in self._streams:
            stream.unlink(missing_ok=True)
        halves = [f"cache: {name}" for name in _files(self._cache) if Path(name).name.startswith(".tmp-")]
        left = tuple(sorted([*(_files(self.folder) - self._there), *halves]))
        return Outcome(self._process.exitcode or 0, out, err, seconds, hung, left)


def _files(folder: Path) -> frozenset[str]:
    """What lies under a folder."""
    found = (os.path.join(at, name) for at, folders, files in os.walk(folder) for name in folders + files)
    return frozenset(os.path.relpath(path, folder) for path in found)


def _command(
    module: str,
    argv: tuple[str, ...],
    folder: Path,
    cache: Path,
    out: Path,
    err: Path,
    before: Callable[[], None] | None,
    limit: float | None,
) -> None:
    """The command line as its users start it, in this process, which was made for it."""
    sys.stdout, sys.stderr = out.open("w"), err.open("w")
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (round(limit), round(limit) + 1))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and pass that on
    os.chdir(folder)
    os.environ |= {"COLUMNS": "80", "PERTURBKV_CACHE": str(cache)}
    sys.argv = ["perturbkv", *argv]
    if before is not None:
        before()
    importlib.import_module(module).main()
