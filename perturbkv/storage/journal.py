"""Finished samples on disk before the trace file exists: files that are there whole or not at all.

A process killed while HDF5 writes can leave a file that no longer opens; so HDF5 is written once, at the end, from
these. Each file holds some of a sample's configurations and says which; a sample that was measured for more of them
later has several files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from perturbkv.configs import former as configs_before
from perturbkv.configs.run import RunConfig
from perturbkv.errors import OutputError, PerturbkvError, TraceError
from perturbkv.schema import KEPT, VARIABLES
from perturbkv.storage import former_kept
from perturbkv.storage.files import write_whole
from perturbkv.storage.merge import Shapes, code_bytes
from perturbkv.storage.places import real
from perturbkv.trace import FailedSample, SampleTrace

SUFFIX = ".journal"
_RUN, _HEAD = "run.json", "head"
_DAMAGE = (ValueError, KeyError, EOFError, zipfile.BadZipFile, PerturbkvError)


def journal_path(trace: Path) -> Path:
    """The journal's folder, beside the trace file."""
    where = real(trace)
    return where.with_name(where.name + SUFFIX)


@dataclass(frozen=True)
class Entry:
    """One file of a journal, its numbers unread: some configurations of a sample, or the reason why it failed."""

    path: Path
    sample_id: str
    labels: tuple[str, ...]
    reason: str | None = None
    named: bool = True
    """False where the file does not say which configurations it holds, as those of former versions."""

    def arrays(self, names: Iterable[str] = tuple(VARIABLES)) -> dict[str, NDArray[Any]]:
        """Those of the named variables that it holds, as in a `SampleTrace`.

        Raises TraceError for a damaged file, which is removed, so that the sample is measured again.
        """
        wanted = list(names)
        with self._opened() as stream, np.load(stream, allow_pickle=False) as held:
            former = former_kept.POSITIONS in held.files
            read = former_kept.asked(wanted) if former else wanted
            found = {name: held[name] for name in read if name in held.files}
            return former_kept.with_codes(found, wanted) if former else found

    def shapes(self) -> Shapes:
        """Variable name -> shape, that of kept_code without what is no head's. Raises as `arrays`."""
        with self._opened() as stream, zipfile.ZipFile(stream) as held:
            members = set(held.namelist())
            shapes = {name: _shape(held, name) for name in VARIABLES if f"{name}.npy" in members}
            former = f"{former_kept.POSITIONS}.npy" in members
        kept = self.arrays(KEPT if former else KEPT[:2])
        shapes |= {name: array.shape for name, array in kept.items()}
        return shapes | ({KEPT[2]: (code_bytes(kept),)} if kept else {})

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        try:
            with self.path.open("rb") as stream:
                yield stream
        except (FileNotFoundError, *_DAMAGE):
            self.path.unlink(missing_ok=True)
            msg = (
                f"expected a whole file of the sample '{self.sample_id}' in {self.path.parent}, got a damaged one, "
                "now removed; run the same command again to measure it anew"
            )
            raise TraceError(msg) from None


class Journal:
    """The folder of a run's finished samples.

    Args:
        folder: made, with the run's configuration inside, by `begin`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

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
        """Make the folder, clear what a killed process left half written, and note the run.

        What the run before left unnamed is named first: killed at any point, no entry is read by another run's labels.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob("*.tmp*"):
            leftover.unlink()
        former, older = self.run(), self._older_labels()
        if former is not None and (older or former.configs != run.configs):
            self._name_configurations(former.labels(), older)
        write_whole(self.folder / _RUN, lambda stream: stream.write(run.to_json().encode()))

    def append(self, sample: SampleTrace | FailedSample, labels: Sequence[str]) -> Entry:
        """Keep the configurations `labels` of one sample beside those that are there, or that it failed."""
        path, name = self._free_path(sample.sample_id), sample.sample_id
        if isinstance(sample, FailedSample):
            entry, arrays = Entry(path, name, (), sample.reason), {}
        else:
            entry, arrays = Entry(path, name, tuple(labels)), dict(sample.arrays)
        _write_entry(entry, arrays)
        return entry

    def entries(self) -> list[Entry]:
        """What is there, older parts of a sample before newer ones; damaged files are left out."""
        run = self.run()
        older, labels = self._older_labels(), run.labels() if run else []
        found = (_read_entry(path, labels) for path in self._paths())
        return [_relabelled(entry, older) for entry in found if entry is not None]

    def sample_ids(self) -> list[str]:
        """Samples of which something is there."""
        return list(dict.fromkeys(entry.sample_id for entry in self.entries()))

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def discard_empty(self) -> None:
        """Remove the folder where no sample came into it."""
        if self.folder.is_dir() and not self._paths():
            self.discard()

    def _older_labels(self) -> dict[str, str]:
        """How format 2 named the run's configurations -> their labels; empty where this version began the journal."""
        try:
            entries = json.loads((self.folder / _RUN).read_text())["configs"]
        except (OSError, ValueError, KeyError):
            return {}
        run = self.run()
        if run is None or any("policy_options" in entry for entry in entries):
            return {}
        return dict(zip(map(configs_before.label, entries), run.labels(), strict=True))

    def _name_configurations(self, labels: Sequence[str], older: Mapping[str, str]) -> None:
        """Write into the files of former versions what they hold: `labels` where they say nothing, none of `older`."""
        for path in self._paths():
            entry = _read_entry(path, labels)
            if entry is None:
                path.unlink()
            elif not entry.named or set(entry.labels) & older.keys():
                with suppress(TraceError):  # damaged: removed by then
                    _write_entry(_relabelled(entry, older), entry.arrays())

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
    return file.name == _RUN or file.suffix == ".npz" or ".tmp" in file.name or left


def _relabelled(entry: Entry, older: Mapping[str, str]) -> Entry:
    return replace(entry, labels=tuple(older.get(label, label) for label in entry.labels))


def _write_entry(entry: Entry, arrays: Mapping[str, NDArray[Any]]) -> None:
    """The head is JSON in bytes, which NumPy stores without pickling."""
    text = json.dumps({"id": entry.sample_id, "reason": entry.reason, "configs": entry.labels})
    members = {_HEAD: np.frombuffer(text.encode(), dtype=np.uint8), **arrays}
    write_whole(entry.path, lambda stream: np.savez(stream, **members))  # type: ignore[arg-type]


def _read_entry(path: Path, labels: Sequence[str]) -> Entry | None:
    """An entry without its numbers, of `labels` where it does not say; None where it is damaged."""
    try:
        with zipfile.ZipFile(path) as held, held.open(f"{_HEAD}.npy") as member:
            head = json.loads(npy.read_array(member).tobytes())
            if head["reason"] is not None:
                return Entry(path, head["id"], (), head["reason"])
            entry = Entry(path, head["id"], tuple(head.get("configs", labels)), named="configs" in head)
            whole = {f"{name}.npy" for name in VARIABLES if not VARIABLES[name].optional} <= set(held.namelist())
            each_once = len(set(entry.labels)) == len(entry.labels) == _shape(held, "kept_count")[0]
            return entry if whole and each_once else None
    except (OSError, *_DAMAGE):
        return None


def _shape(held: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    """An array's shape, its numbers unread."""
    with held.open(f"{name}.npy") as member:
        version = npy.read_magic(member)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        return tuple(read(member)[0])
