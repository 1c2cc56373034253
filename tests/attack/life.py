"""A tiny run in many processes, and what has to hold of it whatever happens to them.

What is finished is never measured again, nothing is measured more than twice by one command, the command that goes on
leaves the file of an undisturbed run, and no process, lock or half-written file stays behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import torch

from perturbkv.storage.output import Lock
from perturbkv.storage.run.journal import SUFFIX, Journal
from perturbkv.storage.trace.trace_file import read_trace
from tests.attack import processes
from tests.attack.arena import LONG_S, same
from tests.attack.counted import IDS, SCORE, Counted
from tests.attack.ray_nodes import Nodes, enter_cluster, leave_network
from tests.attack.running import Outcome, Running
from tests.support.patience import patience

_ASKED = (
    "--dataset",
    "prompts.jsonl",
    "--policy",
    SCORE,
    "--selection",
    "attention",
    "--budget",
    "24",
    "--window",
    "8",
)
RUN = ("trace", "--model", "model", *_ASKED, "--output", "shared/t.h5")
MERGE = ("merge", "shared/t.h5")


@dataclass(frozen=True)
class Way:
    """How a run is measured: more words of each of the commands that do it at once."""

    name: str
    commands: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return self.name


HERE = Way("here", ((),))
WORKERS = Way("workers", (("--engine", "workers", "--workers", "2"),))
RAY = Way("ray", (("--engine", "ray", "--workers", "2"),))
RAY_OF_ITS_OWN = Way("Ray that it starts", RAY.commands)
SHARDS = Way("shards", tuple(("--shard", f"{number}/3") for number in (1, 2, 3)))


@dataclass
class Life:
    """A folder of a run, `shared` in it its output's; `expected` is the undisturbed file.

    Attributes:
        seconds: that each way took undisturbed.
        changes: that a command made on disk, undisturbed.
        ray: the cluster, where one can be had.
    """

    folder: Path
    expected: Path
    counted: Counted
    seconds: dict[str, float] = field(default_factory=dict)
    changes: dict[str, int] = field(default_factory=dict)
    ray: Nodes | None = None

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    @property
    def trace(self) -> Path:
        return self.shared / "t.h5"

    @property
    def away(self) -> Path:
        """Where the shared folder is while it has vanished."""
        return self.folder / "away"

    def clear(self) -> None:
        """As before the first run."""
        for folder in (self.shared, self.away):
            shutil.rmtree(folder, ignore_errors=True)
        self.shared.mkdir()
        self.counted.clear()

    def begin(self, way: Way, *more: str, before: Callable[[], None] | None = None) -> list[Running]:
        """Start all commands of a way; `before` is what each process does first."""
        first = partial(_in_turn, one_thread, self._network(way), before)
        return [Running((*RUN, *words, *more), self.folder, before=first) for words in way.commands]

    def _network(self, way: Way) -> Callable[[], None] | None:
        """What brings a process to where it can have Ray."""
        if way is RAY_OF_ITS_OWN:
            return leave_network
        if way is not RAY:
            return None
        assert self.ray is not None
        self.ray.whole()
        return partial(enter_cluster, *self.ray.entrance())

    def merge(self, before: Callable[[], None] | None = None) -> Running:
        """Start joining shards."""
        return Running(MERGE, self.folder, before=before)

    def all_shards(self) -> None:
        """All shards measured and none joined: whoever would join them finds the trace held by somebody else."""
        if not self._shards.exists():
            self.clear()
            runs = self.begin(SHARDS)
            while self.counted.begun() < len(IDS) and any(run.lives() for run in runs):
                time.sleep(0.01)
            with Lock(self.trace):
                ended(runs)
            shutil.copytree(self.shared, self._shards)
        shutil.rmtree(self.shared)
        shutil.copytree(self._shards, self.shared)
        self.counted.clear()

    @property
    def _shards(self) -> Path:
        return self.folder / "shards"

    def kept(self) -> set[str]:
        """The samples that are finished and safe."""
        found = set(IDS) - set(read_trace(self.trace).failures) if self.trace.exists() else set()
        for folder in self.shared.glob(f"*{SUFFIX}"):
            found |= {entry.sample_id for entry in Journal(folder).entries() if entry.reason is None}
        return found

    def workers(self) -> list[psutil.Process]:
        """Workers that are there, of this machine or the cluster."""
        cache = self.folder.parent / f"{self.folder.name}.cache"
        return processes.with_environment("PERTURBKV_CACHE", str(cache)) + (self.ray.actors() if self.ray else [])

    def begun(self) -> bool:
        """Whether a run has locked its output, and says so itself where it is asked to end."""
        return any(self.shared.glob(".*.lock"))

    def until(self, met: Callable[[], object], runs: Sequence[Running]) -> None:
        """Look all the time, as long as a run lives."""
        while not met() and any(run.lives() for run in runs):
            time.sleep(0.002)

    def flaw_of_ended(self, outcomes: Sequence[Outcome], codes: Sequence[int], tidy: bool = True) -> str | None:
        """What is wrong with commands that ended: exit codes, traceback, a line missing, orphans, half-written files.

        A killed one (code −9) may leave its lock and what it was writing, and nothing else; without `tidy` so may all.
        """
        for outcome in outcomes:
            if flaw := flaw_of_line(outcome, codes):
                return flaw
        if there := processes.left(self.workers):
            told = processes.named(there)
            processes.end(there)
            return f"processes are left: {told}"
        killed = any(outcome.code == -signal.SIGKILL for outcome in outcomes)
        halves = [] if killed or not tidy else [path.name for path in self._all() if _is_half(path)]
        return f"left behind: {halves}" if halves else None

    def flaw_of_rest(self, way: Way, safe: set[str], attempts: int) -> str | None:
        """What is wrong once the same command was given again: None where it measures what is missing, and no more.

        Args:
            way: how the rest is measured.
            safe: samples that were finished before the disturbance.
            attempts: how often each may have been begun until now.
        """
        begun, kept = self.counted.taken(), self.kept()
        if lost := safe - kept:
            return f"lost: {sorted(lost)}"
        if often := {name: count for name, count in begun.items() if count > attempts}:
            return f"measured more than {attempts} times: {often}"
        outcomes = ended(self.begin(way))
        if flaw := self.flaw_of_ended(outcomes, (0,)):
            return f"the second run, {way}: {flaw}"
        again = self.counted.taken()
        if again != dict.fromkeys(set(IDS) - kept, 1):
            return f"kept were {sorted(kept)}, and {way} measured {dict(again)}"
        left = sorted(path.name for path in self.shared.iterdir())
        if left != ["t.h5"]:
            return f"the second run, {way}, leaves {left}"
        return None if same(self.trace, self.expected) else f"{way}: the file differs from the undisturbed run's"

    def _all(self) -> Iterator[Path]:
        return self.shared.rglob("*")


def one_thread() -> None:
    """Here as in a worker: sums of another number of threads are rounded otherwise."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _in_turn(*steps: Callable[[], None] | None) -> None:
    for step in steps:
        if step is not None:
            step()


def ended(runs: Sequence[Running]) -> list[Outcome]:
    """How all of them ended."""
    return [run.outcome(patience(LONG_S)) for run in runs]


def flaw_of_line(outcome: Outcome, codes: Sequence[int]) -> str | None:
    """What is wrong with how a command ended: anything but one of these exit codes, and a line where one is due."""
    lines = outcome.err.strip().splitlines()
    last = lines[-1] if lines else "silent"
    if outcome.hung:
        return f"still running after {outcome.seconds:.0f} s: {last}"
    if outcome.code not in codes or "Traceback" in outcome.err:
        return f"exit code {outcome.code}: {outcome.err.strip()[-400:]}"
    silent = outcome.code not in (0, 1, -signal.SIGKILL) and not last.startswith("error: ")
    return f"no line: {last}" if silent else None


def _is_half(path: Path) -> bool:
    """Whether it is a lock or a half-written file."""
    return ".tmp" in path.name or path.name.endswith(".lock")
