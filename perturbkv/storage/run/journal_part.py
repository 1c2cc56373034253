"""Finished samples on disk before the trace file exists: files that are there whole or not at all.

A process killed while HDF5 writes can leave a file that no longer opens; so HDF5 is written once, at the end, from
these. Each file holds some of a sample's configurations and says which; a sample that was measured for more of them
later has several files.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from perturbkv.configs.run import RunConfig
from perturbkv.errors import OutputError, PerturbkvError
from perturbkv.storage.atomic_files import write_whole
from perturbkv.storage.output import real, refusals
from perturbkv.storage.run.journal import Entry, read_entry, write_entry
from perturbkv.trace import FailedSample, SampleTrace

SUFFIX = ".journal"
SHARD, DONE = "shard.json", "done"
"""What a shard's journal knows of the whole run, and that nothing of its share is missing (`storage.shards`)."""
_RUN = "run.json"


def journal_path(trace: Path) -> Path:
    """The journal's folder, beside the trace file."""
    where = real(trace)
    return where.with_name(where.name + SUFFIX)


class Journal:
    """The folder of a run's finished samples.

    Args:
        folder: made, with the run's configuration inside, by `begin`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._labels: dict[tuple[str, ...], tuple[str, ...]] = {}

    def check_ours(self) -> None:
        """Raise OutputError where the folder is somebody else's: a file, or with files that no journal has."""
        if not self.folder.exists():
            return
        others = (
            [self.folder] if not self.folder.is_dir() else [file for file in self.folder.iterdir() if not _own(file)]
        )
        if others:
            msg = f"expected a run's journal at {self.folder}, got {others[0]}; move it away, or choose another place"
            raise OutputError(msg)

    def run(self) -> RunConfig | None:
        """The run this journal belongs to; None where there is none or it cannot be read."""
        try:
            return RunConfig.from_json((self.folder / _RUN).read_text())
        except (OSError, PerturbkvError):
            return None

    def begin(self, run: RunConfig) -> None:
        """Make the folder, in one that is there; clear what a killed process left half written, and note the run.

        Raises OutputError where the folder that it is made in vanished.
        """
        with refusals(self.folder):
            self.folder.mkdir(exist_ok=True)
        for leftover in self.folder.glob("*.tmp*"):
            leftover.unlink()
        write_whole(self.folder / _RUN, lambda stream: stream.write(run.to_json().encode()), folders=False)

    def append(self, sample: SampleTrace | FailedSample, labels: Sequence[str]) -> Entry:
        """Keep the configurations `labels` of one sample beside those that are there, or that it failed."""
        file, name = self._free_path(sample.sample_id).name, sample.sample_id
        if isinstance(sample, FailedSample):
            entry, arrays = Entry(self.folder, file, name, (), sample.reason), {}
        else:
            entry, arrays = self._slim(Entry(self.folder, file, name, tuple(labels))), dict(sample.arrays)
        write_entry(entry, arrays)
        return entry

    def entries(self) -> list[Entry]:
        """What is there, older parts of a sample before newer ones; damaged files are left out."""
        found = map(read_entry, self._paths())
        return [self._slim(entry) for entry in found if entry is not None]

    def sample_ids(self) -> list[str]:
        """Samples of which something is there."""
        return list(dict.fromkeys(entry.sample_id for entry in self.entries()))

    def discard(self) -> None:
        """Remove the folder, what says whose it is last: killed in between, nothing is left that nobody knows."""
        with suppress(OSError):
            for path in self._paths():
                path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def discard_empty(self) -> None:
        """Remove the folder where no sample came into it."""
        if self.folder.is_dir() and not self._paths():
            self.discard()

    def is_there(self) -> bool:
        """Whether a run has begun it, and nobody removed it since."""
        return (self.folder / _RUN).exists()

    def _slim(self, entry: Entry) -> Entry:
        """The entry, its folder and labels those of all others: thousands of them take little memory."""
        return replace(entry, folder=self.folder, labels=self._labels.setdefault(entry.labels, entry.labels))

    def _paths(self) -> list[Path]:
        """All entries, those of one sample in the order in which they were written."""
        return sorted(self.folder.glob("*.npz"), key=lambda path: (len(path.name), path.name))

    def _free_path(self, sample_id: str) -> Path:
        """A file name for any sample id, numbered from the second of a sample on."""
        name = hashlib.sha256(sample_id.encode()).hexdigest()[:24]
        paths = (self.folder / f"{name}{f'-{number}' if number else ''}.npz" for number in itertools.count())
        return next(path for path in paths if not path.exists())


def _own(file: Path) -> bool:
    """Whether a journal has files of such a name, half written ones among them, or a file system leaves such."""
    left = file.name.startswith(".nfs") or file.name in (".DS_Store", "Thumbs.db", "desktop.ini")
    return file.name in (_RUN, SHARD, DONE) or file.suffix == ".npz" or ".tmp" in file.name or left
