"""A tiny run in one process or in many, and what has to hold of it whatever happens to them.

What is finished is never measured again, nothing is measured more often than there were commands, the command that goes
on leaves the file of an undisturbed run, and no process, lock or half-written file stays behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from perturbkv.storage.output import Lock
from perturbkv.storage.run.journal import SUFFIX, Journal
from perturbkv.storage.trace.trace_file import read_trace
from tests.attack.case import Outcome, Running
from tests.attack.ray_cluster import RayCluster, enter_cluster, in_network_of, leave_network, listed, living
from tests.support.folders import model_folder
from tests.support.growing import told
from tests.support.patience import patience

LENGTHS = (90, 120, 150, 180, 210, 240)
"""Tokens of the prompts, which tell them apart."""
IDS = tuple(f"p{length}" for length in LENGTHS)
LONGEST_S, END_S = 120.0, 5.0
"""Seconds that a run may take, and within which everything of it ends once it does, on an idle machine."""
_SCORE = '''
import os, time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
import perturbkv as pk

NOTES, LAYERS = Path({notes!r}), Counter()

@dataclass(frozen=True)
class Counted(pk.Score):
    """The largest attention of the window's queries; each sample is noted, takes 0.1 s, hangs or dies on request."""

    needs = ("attention",)

    def score(self, layer):
        tokens = layer.attention.shape[-1]
        if LAYERS[tokens] % 2 == 0:
            with open(NOTES / str(tokens), "ab", buffering=0) as file:
                file.write(b".")
            time.sleep(0.1)
            for request in NOTES.glob(f"*-{{tokens}}"):
                request.unlink()
                if (what := request.name.rpartition("-")[0]) == "hang":
                    time.sleep(600)
                from tests.support.dying import die_at

                die_at(what)
        LAYERS[tokens] += 1
        return layer.attention[..., : layer.prefix].amax(dim=1)
'''
RUN = ("trace", "--model", "model", "--dataset", "prompts.jsonl", "--policy", "counted.py:Counted", "--selection",
       "attention", "--budget", "24", "--window", "8", "--output", "shared/t.h5")  # fmt: skip


@dataclass(frozen=True)
class Way:
    """The commands that measure a run at once."""

    name: str
    commands: tuple[tuple[str, ...], ...]


HERE = Way("one process", (RUN,))
SHARDS = Way("shards", tuple((*RUN, "--shard", f"{number}/3") for number in (1, 2, 3)))
MERGE = Way("a merge", (("merge", "shared/t.h5"),))
"""All shards are measured before."""
WORKERS = Way("workers", ((*RUN, "--engine", "workers", "--workers", "2"),))
RAY = Way("Ray", ((*RUN, "--engine", "ray", "--workers", "2"),))
OWN_RAY = Way("a Ray of its own", RAY.commands)


@dataclass
class DisturbedRun:
    """A folder with a model, prompts and a score; `shared` in it is the output's, `notes` lie beside it."""

    folder: Path
    cluster: RayCluster | None = None
    _undisturbed: dict[str, tuple[float, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model_folder(self.folder / "model", positions=512)
        text = "The quick brown fox jumps over the lazy dog. " * 6
        rows = [{"id": name, "prompt": f"{name} {text}"[: n - 1] + "."} for name, n in zip(IDS, LENGTHS, strict=True)]
        (self.folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (self.folder / "counted.py").write_text(_SCORE.format(notes=str(self.notes)))
        self.undisturbed(HERE)
        self.trace.replace(self.expected)

    @property
    def shared(self) -> Path:
        """The folder of the output."""
        return self.folder / "shared"

    @property
    def trace(self) -> Path:
        """The trace file."""
        return self.shared / "t.h5"

    @property
    def expected(self) -> Path:
        """The file of the undisturbed run."""
        return self.folder.with_suffix(".h5")

    @property
    def notes(self) -> Path:
        """A folder with a file per sample, a byte for each time that it was begun."""
        return self.folder.with_suffix(".notes")

    def clear(self) -> None:
        """Make everything as before the first run."""
        for folder in (self.shared, self.folder / "away", self.notes):
            shutil.rmtree(folder, ignore_errors=True)
        self.shared.mkdir()
        self.notes.mkdir()

    def undisturbed(self, way: Way) -> tuple[float, int]:
        """Return how long a way takes and how often its last process changes the disk; the folder is cleared before."""
        self.clear()
        if way.name not in self._undisturbed:
            count = self.folder / "changes"
            self.prepare(way)
            begin = time.monotonic()
            if flaw := self.flaw_of_end(self.begin(way, before=partial(count_changes, self.shared, count)), (0,)):
                raise RuntimeError(flaw)
            self._undisturbed[way.name] = time.monotonic() - begin, int(count.read_text())
            if way is not HERE or self.expected.exists():
                self.clear()
        return self._undisturbed[way.name]

    def prepare(self, way: Way) -> None:
        """Have all shards measured for a merge: none joins them while somebody else holds the trace."""
        if way is not MERGE or self.trace.exists() or any(self.shared.glob(f"*{SUFFIX}")):
            return
        shards = self.folder / "shards"
        if not shards.exists():
            runs = self.begin(SHARDS)
            self.until(lambda: self.begun() == len(IDS), runs)
            with Lock(self.trace):
                for run in runs:
                    run.outcome(patience(LONGEST_S))
            shutil.copytree(self.shared, shards)
        shutil.copytree(shards, self.shared, dirs_exist_ok=True)
        self.measured()

    def begin(self, way: Way, *more: str, before: Callable[[], None] | None = None) -> list[Running]:
        """Start the commands of a way; `before` is what each process does first."""
        self.prepare(way)
        network: Callable[[], None] | None = leave_network if way is OWN_RAY else None
        if way is RAY:
            assert self.cluster is not None
            network = partial(enter_cluster, *self.cluster.entrance())
        first = partial(_each, one_thread, network, before)
        return [Running((*words, *more), self.folder, before=first) for words in way.commands]

    def until(self, met: Callable[[], object], runs: Sequence[Running]) -> None:
        """Wait for something, as long as a run lives."""
        while not met() and any(run.lives() for run in runs):
            time.sleep(0.002)

    def begun(self) -> int:
        """Return how many samples were begun so far."""
        return sum(file.name.isdigit() for file in self.notes.iterdir())

    def measured(self) -> Counter[str]:
        """Return how often each sample was begun since this was called last."""
        sizes = Counter({f"p{file.name}": file.stat().st_size for file in self.notes.iterdir() if file.name.isdigit()})
        shutil.rmtree(self.notes)
        self.notes.mkdir()
        return sizes

    def kept(self) -> set[str]:
        """Return the samples that are finished and safe."""
        found = set(IDS) - set(read_trace(self.trace).failures) if self.trace.exists() else set()
        for folder in self.shared.glob(f"*{SUFFIX}"):
            found |= {entry.sample_id for entry in Journal(folder).entries() if entry.reason is None}
        return found

    def workers(self) -> list[psutil.Process]:
        """Return the workers of this machine and of the cluster."""
        cache = str(self.folder.with_name(f"{self.folder.name}.cache"))
        return [one for one in living() if _environment(one).get("PERTURBKV_CACHE") == cache] + (
            in_network_of(self.cluster.pid, "ray::Actor") if self.cluster else []
        )

    def check(
        self, runs: Sequence[Running], codes: Sequence[int], rest: Way, safe: set[str], attempts: int, tidy: bool = True
    ) -> str | None:
        """Return what is wrong with how runs end, and with what the same command does then."""
        return self.flaw_of_end(runs, codes, tidy) or self.flaw_of_rest(rest, safe, attempts)

    def flaw_of_end(self, runs: Sequence[Running], codes: Sequence[int], tidy: bool = True) -> str | None:
        """Return what is wrong with commands that end: exit codes, tracebacks, processes, half-written files.

        A killed one (code −9) may leave its lock and what it was writing, and nothing else; without `tidy` so may all.
        """
        outcomes = [run.outcome(patience(LONGEST_S)) for run in runs]
        for outcome in outcomes:
            if flaw := flaw_of_outcome(outcome, codes):
                return flaw
        if flaw := flaw_of_processes(self.workers):
            return flaw
        if not tidy or any(outcome.code == -signal.SIGKILL for outcome in outcomes):
            return None
        names = [path.name for path in self.shared.rglob("*") if ".tmp" in path.name or path.name.endswith(".lock")]
        return f"left behind: {names}" if names else None

    def flaw_of_rest(self, way: Way, safe: set[str], attempts: int) -> str | None:
        """Return what is wrong once the same command is given again: it measures what is missing, and no more.

        Args:
            way: how the rest is measured.
            safe: samples that were finished before the disturbance.
            attempts: how often each may have been begun until now.
        """
        begun, kept = self.measured(), self.kept()
        if lost := safe - kept:
            return f"lost: {sorted(lost)}"
        if often := {name: count for name, count in begun.items() if count > attempts}:
            return f"measured more than {attempts} times: {often}"
        runs = self.begin(way)
        if flaw := self.flaw_of_end(runs, (0,)):
            return f"the second run, {way.name}: {flaw}"
        again = self.measured()
        if again != dict.fromkeys(set(IDS) - kept, 1):
            return f"kept were {sorted(kept)}, and {way.name} measured {dict(again)}"
        left = sorted(path.name for path in self.shared.iterdir())
        if left != ["t.h5"]:
            return f"the second run, {way.name}, leaves {left}"
        return None if _same(self.trace, self.expected) else f"{way.name}: the file differs from the undisturbed run's"


def flaw_of_outcome(outcome: Outcome, codes: Sequence[int]) -> str | None:
    """Return what is wrong with an end: anything but one of these exit codes, and a line where one is due."""
    if outcome.hung:
        return f"still running: {outcome.last}"
    if outcome.code not in codes or "Traceback" in outcome.err:
        return f"exit code {outcome.code}: {outcome.err.strip()[-400:]}"
    silent = outcome.code not in (0, 1, -signal.SIGKILL) and not outcome.last.startswith("error: ")
    return f"no line: {outcome.last}" if silent else None


def flaw_of_processes(find: Callable[[], list[psutil.Process]], seconds: float = END_S) -> str | None:
    """Return which processes are there still after the time within which they have to end, and kill them."""
    end = time.monotonic() + patience(seconds)
    while (found := find()) and time.monotonic() < end:
        time.sleep(0.05)
    names = listed(found)
    for one in found:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    return f"processes are left: {names}" if found else None


def one_thread() -> None:
    """Compute with one thread, as a worker does: sums of another number of threads are rounded otherwise."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def kill_at_change(folder: Path, number: int) -> None:
    """Kill this process just before it makes its change number `number` under the folder."""
    _on_change(folder, lambda made: os.kill(os.getpid(), signal.SIGKILL) if made == number else None)


def count_changes(folder: Path, file: Path) -> None:
    """Note in a file how many changes this process makes under the folder."""
    _on_change(folder, lambda made: file.write_text(str(made + 1)))


def _on_change(folder: Path, act: Callable[[int], object]) -> None:
    """Act on everything that is made, renamed or removed; `rmtree` names entries of an open folder."""
    changes = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")
    numbers = iter(range(sys.maxsize))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" and event not in changes:
            return
        inside = str(arguments[0]).startswith(str(folder))
        if event == "open":
            inside &= bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        elif event in ("os.remove", "os.rmdir"):
            inside |= arguments[1] >= 0
        if inside:
            act(next(numbers))

    sys.addaudithook(hook)


def _each(*steps: Callable[[], None] | None) -> None:
    for step in steps:
        if step is not None:
            step()


def _environment(process: psutil.Process) -> dict[str, str]:
    with suppress(psutil.Error, OSError):
        return process.environ()
    return {}


def _same(found: Path, expected: Path) -> bool:
    """Compare everything but when a file was made."""
    (mine, *variables), (others, *expected_variables) = told(found), told(expected)
    own = {"created": ""}
    return mine | own == others | own and variables == expected_variables
