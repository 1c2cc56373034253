"""Finished samples on disk before the trace file exists: one file per sample, written whole or not at all.

A process killed while HDF5 writes can leave a file that no longer opens; so HDF5 is written once, at the end, from
these. Each file is made under a temporary name, flushed to the disk, and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from perturbkv.config import RunConfig
from perturbkv.errors import PerturbkvError
from perturbkv.trace import FailedSample, SampleTrace

SUFFIX = ".journal"
_RUN, _TEMPORARY = "run.json", ".tmp"


def journal_path(trace: Path) -> Path:
    """The journal's folder, beside the trace file."""
    return trace.with_name(trace.name + SUFFIX)


def write_whole(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file so that it is there complete or not at all, whenever the process is killed."""
    temporary = path.with_name(path.name + _TEMPORARY)
    with temporary.open("wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())
    replace(temporary, path)


def replace(temporary: Path, path: Path) -> None:
    """Rename onto `path`, and bring the rename to the disk where the system can."""
    temporary.replace(path)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class Journal:
    """The folder of a run's finished samples.

    Args:
        folder: made, with the run's configuration inside, by `begin`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self) -> RunConfig | None:
        """The run this journal belongs to; None where there is none or it cannot be read."""
        try:
            return RunConfig.from_json((self.folder / _RUN).read_text())
        except (OSError, PerturbkvError):
            return None

    def begin(self, run: RunConfig) -> None:
        """Make the folder, clear what a killed process left half written, and note the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"*{_TEMPORARY}"):
            leftover.unlink()
        write_whole(self.folder / _RUN, lambda stream: _write_text(stream, run.to_json()))

    def append(self, sample: SampleTrace | FailedSample) -> None:
        """Keep one sample."""
        write_whole(self._path(sample.sample_id), lambda stream: _write_sample(stream, sample))

    def read(self, sample_id: str) -> SampleTrace | FailedSample | None:
        """The sample; None where it is not there or its file is damaged, so that it is measured again."""
        try:
            return _read_sample(self._path(sample_id))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, PerturbkvError):
            return None

    def sample_ids(self) -> list[str]:
        """Samples that are there, in no particular order."""
        found = (_read_id(path) for path in self.folder.glob("*.npz"))
        return [name for name in found if name is not None]

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, sample_id: str) -> Path:
        """A file name for any sample id."""
        return self.folder / f"{hashlib.sha256(sample_id.encode()).hexdigest()[:24]}.npz"


def _write_text(stream: IO[bytes], text: str) -> None:
    stream.write(text.encode())


def _write_sample(stream: IO[bytes], sample: SampleTrace | FailedSample) -> None:
    if isinstance(sample, FailedSample):
        np.savez(stream, head=_head(sample.sample_id, sample.reason))
    else:
        np.savez(stream, head=_head(sample.sample_id, None), **dict(sample.arrays))  # type: ignore[arg-type]


def _head(sample_id: str, reason: str | None) -> NDArray[np.uint8]:
    """Id and failure as JSON in bytes, which NumPy stores without pickling."""
    return np.frombuffer(json.dumps({"id": sample_id, "reason": reason}).encode(), dtype=np.uint8)


def _read_sample(path: Path) -> SampleTrace | FailedSample:
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as held:
        head = json.loads(held["head"].tobytes())
        if head["reason"] is not None:
            return FailedSample(head["id"], head["reason"])
        return SampleTrace(head["id"], {name: held[name] for name in held.files if name != "head"})


def _read_id(path: Path) -> str | None:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as held:
            return str(json.loads(held["head"].tobytes())["id"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
