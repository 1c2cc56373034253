"""One file of a journal: some configurations of a sample, or the reason why it failed.

A NumPy archive of two rows of bytes: `head`, JSON that says what the file holds, and `data`, all numbers one behind the
other, each variable where `arrays` of the head says. Texts that lie along an axis are in a third one, `texts`, as JSON:
one behind the other by variable.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from perturbkv.errors import PerturbkvError, TraceError
from perturbkv.schema import KEPT, VARIABLES
from perturbkv.storage.atomic_files import write_whole
from perturbkv.storage.run.merge import Shapes, code_bytes

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
        except _DAMAGE:
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
