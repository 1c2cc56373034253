"""A tiny run in a folder, and whether its second run leaves what an undisturbed one does."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perturbkv.storage.output import lock_path
from perturbkv.storage.run.journal import Journal, journal_path
from tests.attack.materials import Materials
from tests.attack.running import Outcome, Running
from tests.support.growing import told

SAMPLES = 6
_ASKED = ("--dataset", "prompts.jsonl", "--samples", str(SAMPLES), "--budget", "24", "--window", "8", "--steps", "2")
RUN = ("trace", "--model", "model", *_ASKED, "--output", "t.h5")
_THERE = re.compile(r"(\d+) of \d+ samples are there already")
LONG_S = 120.0


@dataclass(frozen=True)
class Arena:
    """A folder of the run, and what the run leaves where nothing disturbs it, after so many seconds."""

    folder: Path
    expected: Path
    seconds: float

    @property
    def trace(self) -> Path:
        return self.folder / "t.h5"

    def clear(self) -> None:
        """As before the first run."""
        for path in [self.trace, lock_path(self.trace), *self.folder.glob("t.h5.tmp*")]:
            path.unlink(missing_ok=True)
        shutil.rmtree(journal_path(self.trace), ignore_errors=True)

    def finished(self) -> int:
        """How many samples are safe now."""
        return SAMPLES if self.trace.exists() else len(Journal(journal_path(self.trace)).sample_ids())

    @staticmethod
    def told(outcome: Outcome) -> int:
        """How many samples a run found finished."""
        said = _THERE.search(outcome.err)
        return int(said[1]) if said else 0

    def flaw_of_rerun(self) -> str | None:
        """What is wrong with the same command's second run; None where it leaves what it should."""
        finished = self.finished()
        again = Running(RUN, self.folder).outcome(LONG_S)
        if again.code:
            return f"the second run ends with {again.code}: {again.err.strip()[-300:]}"
        if self.told(again) != finished:
            return f"{finished} samples were finished, the second run says: {again.err.strip()[-300:]!r}"
        left = sorted(path.name for path in self.folder.iterdir() if path.name.lstrip(".").startswith("t.h5"))
        if left != ["t.h5"]:
            return f"the second run leaves {left}"
        return None if same(self.trace, self.expected) else "the file differs from the undisturbed run's"


def same(found: Path, expected: Path) -> bool:
    """Everything but the second in which a file was made, and the sum of the attributes that name it."""
    (mine, *variables), (others, *expected_variables) = told(found), told(expected)
    of_its_own = {"created": "", "crc32": ""}
    return mine | of_its_own == others | of_its_own and variables == expected_variables


@contextmanager
def arena(folder: Path) -> Iterator[Arena]:
    """A tiny model and its prompts in an empty folder; the run's file as nothing disturbs it."""
    Materials(folder / "materials", SAMPLES)
    shutil.copytree(folder / "materials", folder / "arena")
    quiet = Arena(folder / "arena", folder / "expected.h5", 0.0)
    start = time.monotonic()
    outcome = Running(RUN, quiet.folder).outcome(LONG_S)
    if outcome.code:
        raise RuntimeError(outcome.err)
    seconds = time.monotonic() - start
    quiet.trace.rename(quiet.expected)
    yield Arena(quiet.folder, quiet.expected, seconds)


@contextmanager
def small_disk(place: Arena, size: int) -> Iterator[Arena]:
    """The arena on a disk of its own."""
    folder = place.folder.parent / "small"
    folder.mkdir()
    with disk(folder, size):
        for name in ("model", "prompts.jsonl"):
            (folder / name).symlink_to(place.folder / name)
        yield Arena(folder, place.expected, place.seconds)
    folder.rmdir()


@contextmanager
def disk(folder: Path, size: int) -> Iterator[None]:
    """A disk of so many bytes at an empty folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def can_mount() -> bool:
    """Whether this process may make disks of its own."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
        return done.returncode == 0 and subprocess.run(["umount", folder], check=False).returncode == 0
