"""An HDF5 file from outside: its failures are ours in one line, and nothing is read that does not lie in it.

A link to elsewhere, storage in another file and filters of other makers are refused before anything is read through
them, and so is a shape whose numbers the file cannot hold. What a trace has to be is said in `validation`.

The heaps in which HDF5 keeps texts and lists, walked before HDF5 does: one that leads nowhere it reads for ever.

They alone carry no sum in any version of HDF5. The layout is that of "Disk Format: Level 1E - Global Heap" in the HDF5
file format specification: a header, then objects, each with its index and size; index 0 is what is left free.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import h5py
import numpy as np
from numpy.typing import NDArray

from perturbkv.errors import TraceError, TraceUnavailableError
from perturbkv.schema import ROWS
from perturbkv.storage.trace import layout
from perturbkv.storage.trace.layout import AXES, STORED

_FAILURES = (OSError, LookupError, RuntimeError, ValueError, TypeError, AttributeError, ArithmeticError, MemoryError)
"""What h5py raises on a file that is not in order."""
_OPEN = "already open for write"
"""What HDF5 says of a file that was not closed after it had been open for writing; nothing of it need be damaged."""
_FILTERS = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}
_HERE = {h5py.h5d.COMPACT, h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED}
_UNSTORED = 16 * 2**20
"""Bytes of a variable, or of a chunk of it, that nothing in the file need stand for."""
_DEFLATED = 1032
"""Bytes that a deflated one holds at most (zlib: 258 in two bits)."""


@contextmanager
def opened_file(path: Path) -> Iterator[StoredFile]:
    """The file, open for reading. Raises TraceError where HDF5 cannot open it."""
    try:
        file = h5py.File(path, "r")
    except _FAILURES as error:
        if isinstance(error, OSError) and (error.errno is not None or _OPEN in str(error)):
            raise TraceUnavailableError(path, error) from error
        msg = f"expected a trace file (HDF5) at {path}, got one that is no HDF5, truncated or damaged; make it again"
        raise TraceError(msg) from error
    with file:
        yield StoredFile(file, path)


class StoredFile:
    """A file that is open for reading; every method raises TraceError for what is not in order."""

    def __init__(self, file: h5py.File, path: Path) -> None:
        self.path, self._file = path, file
        self._held: dict[str, Any] = {}
        self._texts: dict[tuple[str, str], str] = {}

    def __contains__(self, name: str) -> bool:
        with self._reading(name):
            return name in self._file

    def names(self) -> list[str]:
        """Everything that lies in the file, refused where anything leads elsewhere.

        A second name that somebody gave to what lies in it is passed over, where it is none of the format's own.
        """
        with self._reading("its variables"):
            links = {name: self._file.get(name, getlink=True) for name in self._file}
        for name, link in links.items():
            second = isinstance(link, h5py.SoftLink) and name not in (*AXES, *STORED)
            if not (second or isinstance(link, h5py.HardLink)):
                self.refuse(f"'{name}' in the file itself", "a link that leads elsewhere")
        return [name for name, link in links.items() if isinstance(link, h5py.HardLink)]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a variable or an axis."""
        return tuple(self._dataset(name).shape)

    def is_of(self, name: str, dtype: str) -> bool:
        """Whether a variable holds numbers of just this type, little-endian, or texts of any length where it is str."""
        with self._reading(f"the type of {name}"):
            kind = self._dataset(name).id.get_type()
            if dtype == "str":
                return isinstance(kind, h5py.h5t.TypeStringID) and bool(kind.is_variable_str())
            return bool(kind.equal(_little_endian(dtype)))

    def stranger(self, name: str) -> tuple[tuple[str, ...], tuple[int, ...], str, str, str, int] | None:
        """Axes, shape, type, unit, meaning and bytes of a variable that this reader does not know; None for no such."""
        with self._reading(f"the variable {name}"):
            item = self._file[name]
            scales = _scales(self._file, item) if isinstance(item, h5py.Dataset) else []
            if not scales or None in scales or "CLASS" in item.attrs:
                return None
            axes = tuple(scale.name.lstrip("/") for scale in scales)
            said = [_plain(item.attrs, key) if key in item.attrs else None for key in ("units", "long_name")]
            if None in said:
                return None
            return axes, item.shape, str(item.dtype), str(said[0]), str(said[1]), int(item.nbytes)

    def axes(self, name: str, known: list[str]) -> tuple[str, ...]:
        """Which of the `known` axes are attached to a variable, in order; 'none' and 'another' for what is not."""
        with self._reading(f"the axes of {name}"):
            scales = _scales(self._file, self._dataset(name))
        held = {axis: self._dataset(axis) for axis in known}
        return tuple(
            "none" if scale is None else next((axis for axis in known if held[axis] == scale), "another")
            for scale in scales
        )

    def attributes(self) -> Mapping[str, str | int | float]:
        """Texts and single numbers that stand under the file itself; what is neither is passed over."""
        return self._attributes

    @cached_property
    def _attributes(self) -> dict[str, str | int | float]:
        with self._reading("its attributes"):
            found = {key: _plain(self._file.attrs, key) for key in self._file.attrs}
        return {key: value for key, value in found.items() if value is not None}

    def text(self, name: str, key: str) -> str:
        """An attribute of a variable that is a text."""
        if (name, key) in self._texts:
            return self._texts[name, key]
        with self._reading(f"the text '{key}' of {name}"):
            attrs = self._dataset(name).attrs
            value = _plain(attrs, key) if key in attrs else None
        if not isinstance(value, str):
            self.refuse(f"a text as '{key}' of {name}", "none")
        self._texts[name, key] = value
        return value

    def sums(self, name: str) -> NDArray[np.uint32] | None:
        """The sums of a variable's numbers; None where there are none."""
        with self._reading(f"the sums of {name}"):
            attrs = self._dataset(name).attrs
            return np.atleast_1d(np.asarray(attrs[layout.CHECKSUM], np.uint32)) if layout.CHECKSUM in attrs else None

    def read(self, name: str, where: Any = ()) -> NDArray[Any]:
        """A variable's numbers, or texts, at a place, by default all of them: those that were written."""
        held = self._dataset(name)
        with self._reading(f"the numbers of {name}"):
            numbers = np.asarray((held.asstr() if held.dtype.kind == "O" else held)[where])
        if not layout.checksums_agree(self.sums(name), numbers, where, name):
            self.refuse(f"the numbers of {name} as they were written", "others")
        return numbers

    def refuse(self, expected: str, got: str) -> NoReturn:
        """Raise TraceError."""
        again = "the file is damaged or was changed since it was made; make it again"
        msg = f"expected {expected} in {self.path}, got {got[:200]}; {again}"
        raise TraceError(msg)

    def refuse_version(self, version: int, known: int) -> NoReturn:
        """Raise TraceError for a format that is newer than this reader, or one that is no longer read."""
        again = "measure it again: the perturbkv trace that made it, with --overwrite"
        todo = "update perturbkv" if version > known else again
        msg = f"expected a trace of format {known} at {self.path}, got format {version}; {todo}"
        raise TraceError(msg)

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """TraceError for whatever HDF5 says inside the block, where nothing but HDF5 is asked."""
        try:
            yield
        except _FAILURES:
            self.refuse(what, "what HDF5 cannot read")

    def _dataset(self, name: str) -> Any:
        """A variable or an axis whose numbers lie in this file."""
        if name not in self._held:
            with self._reading(f"the variable {name}"):
                item = self._file[name]
                if not isinstance(item, h5py.Dataset) or item.shape is None:
                    self.refuse(f"the variable {name}", "something else of this name")
                self._check_place(name, item)
                if name not in ROWS:  # those axes only count, and hold nothing
                    self._check_size(name, item)
            self._held[name] = item
        return self._held[name]

    def _check_place(self, name: str, item: h5py.Dataset) -> None:
        """Refuse numbers in other files, of other datasets, or that code of others has to unpack."""
        plan = item.id.get_create_plist()
        filters = {plan.get_filter(place)[0] for place in range(plan.get_nfilters())}
        if plan.get_layout() not in _HERE or plan.get_external_count():
            self.refuse(f"the numbers of {name} in the file itself", "numbers that lie elsewhere")
        if not filters <= _FILTERS:
            self.refuse(f"{name} under deflate, shuffle and Fletcher32 alone", f"the filters {sorted(filters)}")

    def _check_size(self, name: str, item: h5py.Dataset) -> None:
        """Refuse a shape whose numbers the file cannot hold, before memory is asked for them."""
        stored, samples = item.id.get_storage_size(), item.shape[0] if item.shape else 1
        if item.nbytes > max(_UNSTORED, stored * _DEFLATED * max(samples, 1)):
            self.refuse(f"the numbers of {name}", f"the shape {item.shape} and {stored} bytes of them")
        chunk = np.prod(item.chunks or (0,), dtype=float) * item.dtype.itemsize
        if chunk > max(_UNSTORED, item.nbytes):
            self.refuse(f"{name} in chunks no larger than itself", f"chunks of {item.chunks}")


@cache
def _little_endian(dtype: str) -> Any:
    """HDF5's own type of such numbers."""
    return h5py.h5t.py_create(np.dtype(dtype).newbyteorder("<"))


def _scales(file: h5py.File, item: h5py.Dataset) -> list[Any]:
    """What is attached to each dimension of a variable; None where nothing is.

    As the format of dimension scales has them: HDF5's own reader of it crashes on attributes of another type.
    """
    key = "DIMENSION_LIST"
    kind = h5py.check_vlen_dtype(item.attrs.get_id(key).dtype) if key in item.attrs else None
    if kind is None or h5py.check_ref_dtype(kind) is not h5py.Reference:
        return [None] * item.ndim
    return [file[row[0]] if len(row) else None for row in np.atleast_1d(item.attrs[key])]


def _plain(attrs: h5py.AttributeManager, key: str) -> str | int | float | None:
    """An attribute that is a text or a single number; None for any other."""
    held = attrs.get_id(key)
    kind = held.dtype
    if held.shape != () or not (kind.kind in "iuf" or h5py.check_string_dtype(kind)):
        return None
    value = attrs[key]
    if kind.kind in "iuf":
        return value.item()  # type: ignore[no-any-return]
    text = value if isinstance(value, str) else value.decode()
    text.encode()  # h5py gives bytes that are no text as half characters
    return str(text)


_HEADER = b"GCOL\x01\0\0\0"
_BLOCK = 2**26
_OBJECT = struct.Struct("<HH4xQ")
"""Index, references, size; objects begin at multiples of 8 behind the header and their heap's size."""


def check_heaps(path: Path) -> None:
    """Raise TraceError where the objects of a heap do not fill it one behind the other.

    A file is read through once, and again when it has changed.
    """
    found = path.stat()
    _check(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=64)
def _check(path: Path, stamp: tuple[int, ...]) -> None:
    """`stamp` tells the file as it is from the file as it was, and is remembered with it."""
    with path.open("rb") as stream:
        for place in list(_places(stream)):
            if not _is_filled(stream, place):
                msg = (
                    f"expected texts and lists that HDF5 can read in {path}, got a damaged heap at byte {place}; the "
                    "file is damaged or was changed since it was made; make it again"
                )
                raise TraceError(msg)


def _places(stream: BinaryIO) -> Iterator[int]:
    """Where heaps begin."""
    begin, kept = 0, b""
    while block := stream.read(_BLOCK):
        block = kept + block
        found = block.find(_HEADER)
        while found >= 0:
            yield begin + found
            found = block.find(_HEADER, found + 1)
        kept = block[-len(_HEADER) + 1 :]
        begin += len(block) - len(kept)


def _is_filled(stream: BinaryIO, place: int) -> bool:
    stream.seek(place + len(_HEADER))
    raw = stream.read(8)
    size = int.from_bytes(raw, "little") - len(_HEADER) - 8
    if len(raw) < 8 or not 0 <= size <= 2**32:
        return False
    objects = stream.read(size)
    at = 0
    while at + _OBJECT.size <= len(objects):
        index, _, length = _OBJECT.unpack_from(objects, at)
        at += _OBJECT.size + -(-length // 8) * 8 if index else length
        if not index and length < _OBJECT.size:
            return False
    return at <= len(objects) == size
