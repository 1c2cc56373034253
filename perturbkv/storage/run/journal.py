"""A journal: finished samples on disk before the trace file exists, a file for each sample or part of one.

One file of a journal: some configurations of a sample, or the reason why it failed.

A NumPy archive of two rows of bytes: `head`, JSON that says what the file holds, and `data`, all numbers one behind the
other, each variable where `arrays` of the head says. Texts that lie along an axis are in a third one, `texts`, as JSON:
one behind the other by variable.

Finished samples on disk before the trace file exists: files that are there whole or not at all.

A process killed while HDF5 writes can leave a file that no longer opens; so HDF5 is written once, at the end, from
these. Each file holds some of a sample's configurations and says which; a sample that was measured for more of them
later has several files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
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

from perturbkv.configs.run import RunConfig
from perturbkv.errors import OutputError, PerturbkvError, TraceError
from perturbkv.schema import KEPT, VARIABLES
from perturbkv.storage.atomic_files import write_whole
from perturbkv.storage.output import real, refusals
from perturbkv.storage.run.merge import Shapes, code_bytes
from perturbkv.trace import FailedSample, SampleTrace

Layout = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Variable -> its type and shape, in the order in which they lie."""
_HEAD, _DATA, _TEXTS = "head.npy", "data.npy", "texts.npy"
_DAMAGE = (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, PerturbkvError)
_NEEDED = frozenset(name for name, variable in VARIABLES.items() if not variable.optional)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a journal, its numbers unread."""

    folder: Path
    file: str
    sample_id: str
    labels: tuple[str, ...]
    reason: str | None = None

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.folder / self.file

    def arrays(self, names: Iterable[str] = tuple(VARIABLES)) -> dict[str, NDArray[Any]]:
        """Those of the named variables that it holds, as in a `SampleTrace`.

        Raises TraceError for a damaged file, which is removed, so that the sample is measured again.
        """
        with self._opened() as held:
            return _arrays(held, set(names))

    def shapes(self) -> Shapes:
        """Variable name -> shape, that of kept_code without what is no head's. Raises as `arrays`."""
        with self._opened() as held:
            told = _head(held)
        layout = _layout(told)
        length = {KEPT[2]: (int(told["code_bytes"]),)} if KEPT[2] in layout else {}
        return {name: shape for name, (_, shape) in layout.items()} | length

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self.path) as held:
                yield held
        except (FileNotFoundError, *_DAMAGE):
            self.path.unlink(missing_ok=True)
            msg = (
                f"expected a whole file of the sample '{self.sample_id}' in {self.folder}, got a damaged one, "
                "now removed; run the same command again to measure it anew"
            )
            raise TraceError(msg) from None


def write_entry(entry: Entry, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the file, whole or not at all."""
    held = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in arrays.items()}
    layout = [[name, array.dtype.str, array.shape] for name, array in held.items()]
    told: dict[str, Any] = {"id": entry.sample_id, "reason": entry.reason, "configs": entry.labels, "arrays": layout}
    told |= {"code_bytes": code_bytes(arrays)}
    texts = {name: array.reshape(-1).tolist() for name, array in held.items() if array.dtype.kind == "O"}
    numbers = [array.reshape(-1).view(np.uint8) for name, array in held.items() if name not in texts]

    def write(stream: IO[bytes]) -> None:
        with zipfile.ZipFile(stream, "w") as archive:
            _write_bytes(archive, _HEAD, [json.dumps(told).encode()])
            _write_bytes(archive, _DATA, numbers)
            if texts:
                _write_bytes(archive, _TEXTS, [json.dumps(texts).encode()])

    write_whole(entry.path, write, folders=False)


def read_entry(path: Path) -> Entry | None:
    """An entry without its numbers; None where it is damaged."""
    try:
        with zipfile.ZipFile(path) as held:
            head = _head(held)
            if head["reason"] is not None:
                return Entry(path.parent, path.name, head["id"], (), head["reason"])
            entry, layout = Entry(path.parent, path.name, head["id"], tuple(head["configs"])), _layout(head)
            each_once = len(set(entry.labels)) == len(entry.labels) == layout["kept_count"][1][0]
            return entry if each_once and layout.keys() >= _NEEDED else None
    except (OSError, *_DAMAGE):
        return None


def _write_bytes(archive: zipfile.ZipFile, name: str, parts: Sequence[Any]) -> None:
    """One row of bytes, which NumPy reads too."""
    length = sum(memoryview(part).nbytes for part in parts)
    with archive.open(name, "w", force_zip64=True) as member:
        header = {"descr": "|u1", "fortran_order": False, "shape": (length,)}
        npy.write_array_header_1_0(member, header)
        for part in parts:
            member.write(part)


def _bytes(held: zipfile.ZipFile, name: str) -> NDArray[np.uint8]:
    """A row of bytes, held against its sum."""
    content = held.read(name)
    begin = 10 + int.from_bytes(content[8:10], "little")  # of NumPy's header
    return np.frombuffer(content, dtype=np.uint8, offset=begin)


def _head(held: zipfile.ZipFile) -> dict[str, Any]:
    return dict(json.loads(_bytes(held, _HEAD).tobytes()))


def _layout(head: Mapping[str, Any]) -> Layout:
    return {name: (np.dtype(dtype), tuple(shape)) for name, dtype, shape in head["arrays"]}


def _arrays(held: zipfile.ZipFile, names: set[str]) -> dict[str, NDArray[Any]]:
    """Those of the named variables that are there."""
    data, begin, found = _bytes(held, _DATA), 0, {}
    texts = json.loads(_bytes(held, _TEXTS).tobytes()) if _TEXTS in held.namelist() else {}
    for name, (dtype, shape) in _layout(_head(held)).items():
        if dtype.kind == "O":
            if name in names:
                found[name] = np.array(texts[name], dtype=object).reshape(shape)
            continue
        length = math.prod(shape) * dtype.itemsize
        if name in names:
            found[name] = data[begin : begin + length].view(dtype).reshape(shape)
        begin += length
    return found


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
