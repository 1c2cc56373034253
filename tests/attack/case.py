"""A case: a bad input, the command that gets it, and what must come out; each runs in a process of its own."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the server starts, whose children read it
LIMIT_S, MEMORY = 10.0, 8 * 2**30
"""Seconds that a command may compute, and bytes that it may have: one that hangs or grows ends alone."""
PATIENCE = 6
"""How many times `LIMIT_S` a command is waited for that does not compute: others may have the machine."""
MAIN = "perturbkv.cli.main"
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([MAIN, "transformers", "perturbkv.pipeline.sample.measure", __name__])
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
Flaw = str | None


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code (negative: the signal that ended it), both streams, and files.

    `left` names new files, `changed` those that were there before and have another content now.
    """

    code: int
    out: str
    err: str
    hung: bool = False
    left: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def last(self) -> str:
        """The last line on stderr."""
        return (self.err.strip().splitlines() or [""])[-1]


@dataclass(frozen=True)
class Case:
    """One row of the table: `spoil` puts the bad input into a folder, `argv` runs there, `expected` names a flaw.

    Attributes:
        kind: cases of one kind try the same thing with other values.
        module: has the `main` that gets `argv`.
        before: what the process does first, such as giving up rights.
    """

    name: str
    argv: tuple[str, ...]
    expected: Callable[[Outcome, Path], Flaw]
    spoil: Callable[[Path], object] = lambda folder: None
    kind: str = ""
    module: str = MAIN
    before: Callable[[], None] | None = None


def attack(case: Case, folder: Path) -> Flaw:
    """Run the case in a new folder, which is removed again, and return what is wrong with its outcome."""
    folder.mkdir()
    case.spoil(folder)
    before = _contents(folder)
    outcome = run(case.argv, folder, module=case.module, before=case.before)
    after = _contents(folder)
    changed = tuple(sorted(name for name in before if before[name] != after.get(name)))
    flaw = case.expected(replace(outcome, changed=changed), folder)
    for path in (folder, _cache(folder)):
        shutil.rmtree(path, ignore_errors=True)
    return flaw


def sample(cases: Iterable[Case], count: int, seed: int) -> list[Case]:
    """Draw `count` cases, one of each kind in turn."""
    draw, kinds = random.Random(seed), dict[str, list[Case]]()
    for case in cases:
        kinds.setdefault(case.kind, []).append(case)
    rows = [draw.sample(kind, len(kind)) for kind in draw.sample(list(kinds.values()), len(kinds))]
    return [case for turn in itertools.zip_longest(*rows) for case in turn if case is not None][:count]


def crashed(outcome: Outcome) -> Flaw:
    """Return what is wrong with any command's end: it hangs, shows a traceback or what a terminal would obey."""
    text = outcome.out + outcome.err
    if outcome.hung:
        return f"still running: {outcome.last}"
    if "Traceback" in text or "Exception ignored" in text:
        return f"traceback: {outcome.last}"
    found = _CONTROL.search(text)
    return f"{found[0]!r} in {text[max(0, found.start() - 30) : found.end() + 10]!r}" if found else None


def refused(*words: str, alone: bool = False) -> Callable[[Outcome, Path], Flaw]:
    """Expect one line with one of the words, exit code 2 and every file as it was; `alone`: no other line before it."""

    def flaw(outcome: Outcome, folder: Path) -> Flaw:
        line = outcome.last
        if flaw := crashed(outcome):
            return flaw
        if outcome.code != 2 or not line.startswith("error: ") or len(line) > 3000:
            return f"exit code {outcome.code}, not one line: {line[:300]!r}"
        if outcome.left or outcome.changed:
            return f"left behind {outcome.left}, changed {outcome.changed}"
        if alone and outcome.err.strip().count("\n"):
            return f"more than one line: {outcome.err[:300]!r}"
        return None if not words or any(word in line for word in words) else f"names none of {words}: {line[:300]!r}"

    return flaw


VERDICTS = ("smallest budget under each limit", "did nothing: ", "not compared: ", "and it answers none of ")
"""Words of answers whose exit code, 1 or 2, is part of the answer."""


def _is_answer(outcome: Outcome) -> bool:
    """Return whether a command has answered."""
    return outcome.code == 0 or (
        outcome.code in (1, 2) and any(words in outcome.out + outcome.err for words in VERDICTS)
    )


def answers(outcome: Outcome, folder: Path) -> Flaw:
    """Expect an answer, of text that no terminal obeys."""
    return crashed(outcome) or (None if _is_answer(outcome) else f"exit code {outcome.code}: {outcome.err[-300:]!r}")


def answers_or_refused(outcome: Outcome, folder: Path) -> Flaw:
    """Expect an answer or one line."""
    return answers(outcome, folder) if _is_answer(outcome) else refused()(outcome, folder)


def run(
    argv: tuple[str, ...],
    folder: Path,
    limit: float = LIMIT_S,
    module: str = MAIN,
    before: Callable[[], None] | None = None,
) -> Outcome:
    """Return the outcome, killed after `limit` seconds of computing or `PATIENCE` times as many of waiting."""
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
        self.folder, self._files = folder, _files(folder)
        name = f"{folder.name}-{next(self._numbers)}"
        self._streams = folder.parent / f"{name}.out", folder.parent / f"{name}.err"
        self._process = _SERVER.Process(
            target=_command, args=(module, argv, folder, _cache(folder), self._streams, before, limit)
        )
        self._process.start()
        self.pid = self._process.pid or 0

    def lives(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """Send a signal to the process where it runs."""
        if self.lives():
            os.kill(self.pid, number)

    def outcome(self, limit: float) -> Outcome:
        """Return how it ended, killed after `limit` seconds."""
        self._process.join(limit)
        hung = self.lives() or self._process.exitcode == -signal.SIGXCPU
        if self.lives():
            self._process.kill()
            self._process.join()
        out, err = (stream.read_text(errors="replace") if stream.exists() else "" for stream in self._streams)
        for stream in self._streams:
            stream.unlink(missing_ok=True)
        partial_files = [
            f"cache: {name}" for name in _files(_cache(self.folder)) if Path(name).name.startswith(".tmp-")
        ]
        left = tuple(sorted([*(_files(self.folder) - self._files), *partial_files]))
        return Outcome(self._process.exitcode or 0, out, err, hung, left)


def _command(
    module: str,
    argv: tuple[str, ...],
    folder: Path,
    cache: Path,
    streams: tuple[Path, Path],
    before: Callable[[], None] | None,
    limit: float | None,
) -> None:
    """Run the command line as its users start it, in this process, which was made for it."""
    sys.stdout, sys.stderr = (stream.open("w") for stream in streams)
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


def _cache(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.cache"


def _files(folder: Path) -> frozenset[str]:
    """Return the names of everything under a folder."""
    found = (os.path.join(at, name) for at, folders, files in os.walk(folder) for name in folders + files)
    return frozenset(os.path.relpath(path, folder) for path in found)


def _contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of files up to 1 MiB, by name."""
    files = (folder / name for name in _files(folder))
    files = (path for path in files if path.is_file() and not path.is_symlink() and path.stat().st_size < 2**20)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
