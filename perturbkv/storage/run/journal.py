"""A run's journal: its finished samples on disk, each in a complete file, before the trace file exists.

A process killed while HDF5 writes can leave a file that no longer opens; so HDF5 is written once, at the end, from the
journal. Each of its files holds some of a sample's configurations and names them, or the reason why the sample failed;
a sample that was measured for more configurations later has several files.

A file is a NumPy archive of two byte arrays: `head`, JSON that describes the file, and `data`, the numbers of all
variables in the order of `arrays` in the head. Texts along an axis are in a third one, `texts`, as JSON.
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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from perturbkv.configs.run import RunConfig
from perturbkv.errors import OutputError, PerturbkvError, TraceError
from perturbkv.schema import VARIABLES
from perturbkv.storage.atomic_files import write_atomically
from perturbkv.storage.output import real_path, translate_os_errors
from perturbkv.storage.run.sample_parts import Shapes, code_bytes
from perturbkv.trace import FailedSample, SampleTrace

Layout = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Variable -> its type and shape, in the order in which they are stored."""
_HEAD, _DATA, _TEXTS = "head.npy", "data.npy", "texts.npy"
_DAMAGE_ERRORS = (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, PerturbkvError)
_REQUIRED = frozenset(name for name, variable in VARIABLES.items() if not variable.optional)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a journal, described without its numbers.

    Attributes:
        folder: the journal's folder.
        file: the file's name in it.
        sample_id: the sample.
        labels: labels of the configurations along its `config` axis; none for a failed sample.
        reason: why the sample failed; None for a measured one.
    """

    folder: Path
    file: str
    sample_id: str
    labels: tuple[str, ...]
    reason: str | None = None

    @property
    def path(self) -> Path:
        """The file's path."""
        return self.folder / self.file

    def arrays(self, names: Iterable[str] = tuple(VARIABLES)) -> dict[str, NDArray[Any]]:
        """Return name -> array of the named variables that the file holds, as in a `SampleTrace`.

        Raises TraceError for a damaged file, which is removed, so that the sample is measured again.
        """
        with self._open() as archive:
            return _read_arrays(archive, set(names))

    def shapes(self) -> Shapes:
        """Return variable name -> shape, with unused bytes of kept_code not counted. Raises as `arrays`."""
        with self._open() as archive:
            head = _read_head(archive)
        layout = _parse_layout(head)
        code_shape = {"kept_code": (int(head["code_bytes"]),)} if "kept_code" in layout else {}
        return {name: shape for name, (_, shape) in layout.items()} | code_shape

    @contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        """Open the file as a zip archive. Raises TraceError for a damaged or missing file, and removes it."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                yield archive
        except (FileNotFoundError, *_DAMAGE_ERRORS):
            self.path.unlink(missing_ok=True)
            raise TraceError(
                f"expected a whole file of the sample '{self.sample_id}' in {self.folder}, got a damaged one, "
                "now removed; run the same command again to measure it anew"
            ) from None


def write_entry(entry: Entry, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an entry's file with the given variables atomically."""
    contiguous = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in arrays.items()}
    layout = [[name, array.dtype.str, array.shape] for name, array in contiguous.items()]
    head: dict[str, Any] = {"id": entry.sample_id, "reason": entry.reason, "configs": entry.labels, "arrays": layout}
    head |= {"code_bytes": code_bytes(arrays)}
    texts = {name: array.reshape(-1).tolist() for name, array in contiguous.items() if array.dtype.kind == "O"}
    numbers = [array.reshape(-1).view(np.uint8) for name, array in contiguous.items() if name not in texts]

    def write(stream: IO[bytes]) -> None:
        with zipfile.ZipFile(stream, "w") as archive:
            _write_bytes(archive, _HEAD, [json.dumps(head).encode()])
            _write_bytes(archive, _DATA, numbers)
            if texts:
                _write_bytes(archive, _TEXTS, [json.dumps(texts).encode()])

    write_atomically(entry.path, write, folders=False)


def read_entry(path: Path) -> Entry | None:
    """Return the entry of a file without reading its numbers.

    None for a damaged file, and for one whose description lacks a required variable or does not fit its labels.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            head = _read_head(archive)
            if head["reason"] is not None:
                return Entry(path.parent, path.name, head["id"], (), head["reason"])
            entry, layout = Entry(path.parent, path.name, head["id"], tuple(head["configs"])), _parse_layout(head)
            each_once = len(set(entry.labels)) == len(entry.labels) == layout["kept_count"][1][0]
            return entry if each_once and layout.keys() >= _REQUIRED else None
    except (OSError, *_DAMAGE_ERRORS):
        return None


def _write_bytes(archive: zipfile.ZipFile, name: str, parts: Sequence[Any]) -> None:
    """Write the parts, joined into one NumPy array of bytes, as the member `name` of an archive."""
    length = sum(memoryview(part).nbytes for part in parts)
    with archive.open(name, "w", force_zip64=True) as member:
        header = {"descr": "|u1", "fortran_order": False, "shape": (length,)}
        npy.write_array_header_1_0(member, header)
        for part in parts:
            member.write(part)


def _read_bytes(archive: zipfile.ZipFile, name: str) -> NDArray[np.uint8]:
    """Return the bytes of the member `name` of an archive as an array, after checking the CRC-32."""
    content = archive.read(name)
    begin = 10 + int.from_bytes(content[8:10], "little")  # after NumPy's header
    return np.frombuffer(content, dtype=np.uint8, offset=begin)


def _read_head(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Return the JSON description in an entry's file."""
    return dict(json.loads(_read_bytes(archive, _HEAD).tobytes()))


def _parse_layout(head: Mapping[str, Any]) -> Layout:
    """Return the dtypes and shapes of an entry's variables from the file's description."""
    return {name: (np.dtype(dtype), tuple(shape)) for name, dtype, shape in head["arrays"]}


def _read_arrays(archive: zipfile.ZipFile, names: set[str]) -> dict[str, NDArray[Any]]:
    """Return name -> array of the named variables that an entry's file holds."""
    data, begin, arrays = _read_bytes(archive, _DATA), 0, {}
    texts = json.loads(_read_bytes(archive, _TEXTS).tobytes()) if _TEXTS in archive.namelist() else {}
    for name, (dtype, shape) in _parse_layout(_read_head(archive)).items():
        if dtype.kind == "O":
            if name in names:
                arrays[name] = np.array(texts[name], dtype=object).reshape(shape)
            continue
        length = math.prod(shape) * dtype.itemsize
        if name in names:
            arrays[name] = data[begin : begin + length].view(dtype).reshape(shape)
        begin += length
    return arrays


SUFFIX = ".journal"
SHARD, DONE = "shard.json", "done"
"""File names: a shard's record of the run, and the mark that the shard is complete (`storage.run.shards`)."""
_RUN = "run.json"


def journal_path(trace: Path) -> Path:
    """Return the path of the journal's folder, beside the trace file."""
    target = real_path(trace)
    return target.with_name(target.name + SUFFIX)


class Journal:
    """A folder of a run's finished samples.

    Args:
        folder: the folder; `begin` makes it, with the run's configuration inside.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check_ownership(self) -> None:
        """Raise OutputError if the path is a file, or a folder with files foreign to a journal."""
        if not self.folder.exists():
            return
        other: Path | None = self.folder
        if self.folder.is_dir():
            other = next((file for file in self.folder.iterdir() if not _is_journal_file(file)), None)
        if other is not None:
            raise OutputError(
                f"expected a run's journal at {self.folder}, got {other}; move it away, or choose another place"
            )

    def run(self) -> RunConfig | None:
        """Return the run that the journal belongs to; None if missing or unreadable."""
        try:
            return RunConfig.from_json((self.folder / _RUN).read_text())
        except (OSError, PerturbkvError):
            return None

    def begin(self, run: RunConfig) -> None:
        """Create the folder in an existing one, remove unfinished files of a killed process, and store the run.

        Raises OutputError where the parent folder vanished.
        """
        with translate_os_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
        for leftover in self.folder.glob("*.tmp*"):
            leftover.unlink()
        write_atomically(self.folder / _RUN, lambda stream: stream.write(run.to_json().encode()), folders=False)

    def append(self, sample: SampleTrace | FailedSample, labels: Sequence[str]) -> Entry:
        """Store a measured sample, with its configurations' labels, or a failed sample; return the new entry."""
        file, sample_id = self._free_path(sample.sample_id).name, sample.sample_id
        if isinstance(sample, FailedSample):
            entry, arrays = Entry(self.folder, file, sample_id, (), sample.reason), {}
        else:
            entry, arrays = Entry(self.folder, file, sample_id, tuple(labels)), dict(sample.arrays)
        write_entry(entry, arrays)
        return entry

    def entries(self) -> list[Entry]:
        """Return all entries, in order of writing within a sample; damaged files are left out."""
        return [entry for entry in map(read_entry, self._paths()) if entry is not None]

    def sample_ids(self) -> list[str]:
        """Return the ids of the samples with an entry."""
        return list(dict.fromkeys(entry.sample_id for entry in self.entries()))

    def discard(self) -> None:
        """Remove the folder, the file of the run last, so that the journal is identifiable after a kill in between."""
        with suppress(OSError):
            for path in self._paths():
                path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def discard_empty(self) -> None:
        """Remove the folder if it holds no sample."""
        if self.folder.is_dir() and not self._paths():
            self.discard()

    def exists_on_disk(self) -> bool:
        """Return whether the journal's folder exists with its run: begun and not removed since."""
        return (self.folder / _RUN).exists()

    def _paths(self) -> list[Path]:
        """Return the paths of all entries, in order of writing within a sample."""
        return sorted(self.folder.glob("*.npz"), key=lambda path: (len(path.name), path.name))

    def _free_path(self, sample_id: str) -> Path:
        """Return an unused file path for a sample id, numbered from the sample's second file on."""
        name = hashlib.sha256(sample_id.encode()).hexdigest()[:24]
        paths = (self.folder / f"{name}{f'-{number}' if number else ''}.npz" for number in itertools.count())
        return next(path for path in paths if not path.exists())


def _is_journal_file(file: Path) -> bool:
    """Return whether a file belongs to a journal, temporary ones included, or is an artefact of the file system."""
    system_file = file.name.startswith(".nfs") or file.name in (".DS_Store", "Thumbs.db", "desktop.ini")
    return file.name in (_RUN, SHARD, DONE) or file.suffix == ".npz" or ".tmp" in file.name or system_file
