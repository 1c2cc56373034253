"""Reading an HDF5 file of unknown origin: every defect raises a TraceError, and nothing outside the file is read.

External links, storage in another file and foreign filters are refused before anything is read through them, and so is
a shape whose numbers the file cannot hold. `validation` checks that the contents are a trace.

The global heaps, in which HDF5 stores texts and lists, are checked before HDF5 reads them, as it never returns from a
damaged one, and no version of HDF5 stores a checksum for them. The layout is that of "Disk Format: Level 1E - Global
Heap" in the HDF5 file format specification: a header, then objects, each with its index and size; index 0 is free
space.
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

_HDF5_ERRORS = (OSError, LookupError, RuntimeError, ValueError, TypeError, AttributeError, ArithmeticError, MemoryError)
"""Exceptions that h5py raises on a defective file."""
_OPEN_MESSAGE = "already open for write"
"""Part of HDF5's message for a file that was not closed after writing, which need not be damaged."""
_FILTERS = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}
_LOCAL_LAYOUTS = {h5py.h5d.COMPACT, h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED}
_MAX_FILL_BYTES = 16 * 2**20
"""Bytes of a variable, or of a chunk of it, that may exceed what the file stores (fill values)."""
_MAX_COMPRESSION = 1032
"""Largest ratio of deflate compression (zlib: 258 bytes in two bits)."""


@contextmanager
def open_file(path: Path) -> Iterator[StoredFile]:
    """Open an HDF5 file for reading, and yield it. Raises TraceError for a file that HDF5 cannot open."""
    try:
        file = h5py.File(path, "r")
    except _HDF5_ERRORS as error:
        if isinstance(error, OSError) and (error.errno is not None or _OPEN_MESSAGE in str(error)):
            raise TraceUnavailableError(path, error) from error
        raise TraceError(
            f"expected a trace file (HDF5) at {path}, got one that is no HDF5, truncated or damaged; make it again"
        ) from error
    with file:
        yield StoredFile(file, path)


class StoredFile:
    """An HDF5 file that is open for reading; every method raises TraceError for a defect of the file."""

    def __init__(self, file: h5py.File, path: Path) -> None:
        self.path = path
        self._file = file
        self._datasets: dict[str, Any] = {}
        self._texts: dict[tuple[str, str], str] = {}

    def __contains__(self, name: str) -> bool:
        with self._translate_errors(name):
            return name in self._file

    def names(self) -> list[str]:
        """Return the names of all items in the file. Raises TraceError for a link to another file.

        An alias, a soft link to an item of the file, is left out where its name is not one of the format's own.
        """
        with self._translate_errors("its variables"):
            links = {name: self._file.get(name, getlink=True) for name in self._file}
        for name, link in links.items():
            is_alias = isinstance(link, h5py.SoftLink) and name not in (*AXES, *STORED)
            if not (is_alias or isinstance(link, h5py.HardLink)):
                self.refuse(f"'{name}' in the file itself", "a link that leads elsewhere")
        return [name for name, link in links.items() if isinstance(link, h5py.HardLink)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a variable or an axis."""
        return tuple(self._dataset(name).shape)

    def has_dtype(self, name: str, dtype: str) -> bool:
        """Return whether a variable has exactly this dtype, little-endian; for str, variable-length text."""
        with self._translate_errors(f"the type of {name}"):
            kind = self._dataset(name).id.get_type()
            if dtype == "str":
                return isinstance(kind, h5py.h5t.TypeStringID) and bool(kind.is_variable_str())
            return bool(kind.equal(_little_endian(dtype)))

    def unknown_variable(self, name: str) -> tuple[tuple[str, ...], tuple[int, ...], str, str, str, int] | None:
        """Return (axes, shape, type, unit, meaning, bytes) of a variable that is not part of the format.

        None for an item that is no variable.
        """
        with self._translate_errors(f"the variable {name}"):
            item = self._file[name]
            scales = _dimension_scales(self._file, item) if isinstance(item, h5py.Dataset) else []
            if not scales or None in scales or "CLASS" in item.attrs:
                return None
            axes = tuple(scale.name.lstrip("/") for scale in scales)
            units, meaning = (
                _plain_attribute(item.attrs, key) if key in item.attrs else None for key in ("units", "long_name")
            )
            if units is None or meaning is None:
                return None
            return axes, item.shape, str(item.dtype), str(units), str(meaning), int(item.nbytes)

    def axes(self, name: str, known: list[str]) -> tuple[str, ...]:
        """Return the axis name of each dimension of a variable: a name in `known`, else 'none' or 'another'."""
        with self._translate_errors(f"the axes of {name}"):
            scales = _dimension_scales(self._file, self._dataset(name))
        datasets = {axis: self._dataset(axis) for axis in known}
        return tuple(
            "none" if scale is None else next((axis for axis in known if datasets[axis] == scale), "another")
            for scale in scales
        )

    @cached_property
    def attributes(self) -> Mapping[str, str | int | float]:
        """Attributes of the file that are texts or single numbers, by name."""
        with self._translate_errors("its attributes"):
            values = {key: _plain_attribute(self._file.attrs, key) for key in self._file.attrs}
        return {key: value for key, value in values.items() if value is not None}

    def text(self, name: str, key: str) -> str:
        """Return the text attribute `key` of a variable."""
        if (name, key) in self._texts:
            return self._texts[name, key]
        with self._translate_errors(f"the text '{key}' of {name}"):
            attrs = self._dataset(name).attrs
            value = _plain_attribute(attrs, key) if key in attrs else None
        if not isinstance(value, str):
            self.refuse(f"a text as '{key}' of {name}", "none")
        self._texts[name, key] = value
        return value

    def checksums(self, name: str) -> NDArray[np.uint32] | None:
        """Return the stored checksums of a variable's numbers; None without checksums."""
        with self._translate_errors(f"the sums of {name}"):
            attrs = self._dataset(name).attrs
            return np.atleast_1d(np.asarray(attrs[layout.CHECKSUM], np.uint32)) if layout.CHECKSUM in attrs else None

    def read(self, name: str, where: Any = ()) -> NDArray[Any]:
        """Return a variable's numbers or texts at the index `where`, by default all of them.

        Raises TraceError for a wrong checksum.
        """
        dataset = self._dataset(name)
        with self._translate_errors(f"the numbers of {name}"):
            numbers = np.asarray((dataset.asstr() if dataset.dtype.kind == "O" else dataset)[where])
        if not layout.checksums_agree(self.checksums(name), numbers, where, name):
            self.refuse(f"the numbers of {name} as they were written", "others")
        return numbers

    def refuse(self, expected: str, got: str) -> NoReturn:
        """Raise TraceError for a damaged file, with a message of the expected and the actual content."""
        advice = "the file is damaged or was changed since it was made; make it again"
        raise TraceError(f"expected {expected} in {self.path}, got {got[:200]}; {advice}")

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        """Turn exceptions of HDF5 calls inside the block into a TraceError on reading `what`."""
        try:
            yield
        except _HDF5_ERRORS:
            self.refuse(what, "what HDF5 cannot read")

    def _dataset(self, name: str) -> Any:
        """Return the HDF5 dataset of a variable or an axis. Raises TraceError for numbers outside this file."""
        if name not in self._datasets:
            with self._translate_errors(f"the variable {name}"):
                item = self._file[name]
                if not isinstance(item, h5py.Dataset) or item.shape is None:
                    self.refuse(f"the variable {name}", "something else of this name")
                self._check_storage(name, item)
                if name not in ROWS:  # those axes have no data
                    self._check_size(name, item)
            self._datasets[name] = item
        return self._datasets[name]

    def _check_storage(self, name: str, item: h5py.Dataset) -> None:
        """Raise TraceError for numbers of other files, datasets or names, and for third-party filters."""
        properties = item.id.get_create_plist()
        filters = {properties.get_filter(index)[0] for index in range(properties.get_nfilters())}
        if properties.get_layout() not in _LOCAL_LAYOUTS or properties.get_external_count():
            self.refuse(f"the numbers of {name} in the file itself", "numbers that lie elsewhere")
        if h5py.h5o.get_info(item.id).rc > 1:
            self.refuse(f"one name for the numbers of {name}", "several hard links")
        if not filters <= _FILTERS:
            self.refuse(f"{name} under deflate, shuffle and Fletcher32 alone", f"the filters {sorted(filters)}")

    def _check_size(self, name: str, item: h5py.Dataset) -> None:
        """Raise TraceError for a shape too large for the file's size, before memory is allocated."""
        stored, samples = item.id.get_storage_size(), item.shape[0] if item.shape else 1
        if item.nbytes > max(_MAX_FILL_BYTES, stored * _MAX_COMPRESSION * max(samples, 1)):
            self.refuse(f"the numbers of {name}", f"the shape {item.shape} and {stored} bytes of them")
        chunk = np.prod(item.chunks or (0,), dtype=float) * item.dtype.itemsize
        if chunk > max(_MAX_FILL_BYTES, item.nbytes):
            self.refuse(f"{name} in chunks no larger than itself", f"chunks of {item.chunks}")


@cache
def _little_endian(dtype: str) -> Any:
    """Return HDF5's little-endian type for a NumPy dtype name."""
    return h5py.h5t.py_create(np.dtype(dtype).newbyteorder("<"))


def _dimension_scales(file: h5py.File, item: h5py.Dataset) -> list[Any]:
    """Return the dimension scale of each dimension of a variable; None where a dimension has no scale.

    The attribute is read as the specification of dimension scales defines it, as HDF5's own reader crashes on
    attributes of another type.
    """
    key = "DIMENSION_LIST"
    kind = h5py.check_vlen_dtype(item.attrs.get_id(key).dtype) if key in item.attrs else None
    if kind is None or h5py.check_ref_dtype(kind) is not h5py.Reference:
        return [None] * item.ndim
    return [file[row[0]] if len(row) else None for row in np.atleast_1d(item.attrs[key])]


def _plain_attribute(attrs: h5py.AttributeManager, key: str) -> str | int | float | None:
    """Return an attribute that is a text or a single number; None for any other value."""
    attribute = attrs.get_id(key)
    kind = attribute.dtype
    if attribute.shape != () or not (kind.kind in "iuf" or h5py.check_string_dtype(kind)):
        return None
    value = attrs[key]
    if kind.kind in "iuf":
        return value.item()  # type: ignore[no-any-return]
    text = value if isinstance(value, str) else value.decode()
    text.encode()  # raises for lone surrogates, h5py's form of bytes that are no UTF-8
    return str(text)


_HEADER = b"GCOL\x01\0\0\0"
_BLOCK_BYTES = 2**26
_OBJECT_HEADER = struct.Struct("<HH4xQ")
"""Index, references, size; objects begin at multiples of 8 after the header and their heap's size."""


def check_heaps(path: Path) -> None:
    """Raise TraceError if the objects of a global heap do not fill it without gaps.

    A file is read through once, and again when it has changed.
    """
    status = path.stat()
    _check_heaps_once(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=64)
def _check_heaps_once(path: Path, stamp: tuple[int, ...]) -> None:
    """Check the heaps, once per `stamp`, which identifies the file's version."""
    with path.open("rb") as stream:
        for offset in list(_heap_offsets(stream)):
            if not _is_filled(stream, offset):
                raise TraceError(
                    f"expected texts and lists that HDF5 can read in {path}, got a damaged heap at byte {offset}; the "
                    "file is damaged or was changed since it was made; make it again"
                )


def _heap_offsets(stream: BinaryIO) -> Iterator[int]:
    """Yield the file offsets of all global heaps."""
    begin, overlap = 0, b""
    while block := stream.read(_BLOCK_BYTES):
        block = overlap + block
        index = block.find(_HEADER)
        while index >= 0:
            yield begin + index
            index = block.find(_HEADER, index + 1)
        overlap = block[-len(_HEADER) + 1 :]
        begin += len(block) - len(overlap)


def _is_filled(stream: BinaryIO, offset: int) -> bool:
    """Return whether objects fill the global heap at `offset` without gaps."""
    stream.seek(offset + len(_HEADER))
    raw = stream.read(8)
    size = int.from_bytes(raw, "little") - len(_HEADER) - 8
    if len(raw) < 8 or not 0 <= size <= 2**32:
        return False
    objects = stream.read(size)
    at = 0
    while at + _OBJECT_HEADER.size <= len(objects):
        index, _, length = _OBJECT_HEADER.unpack_from(objects, at)
        at += _OBJECT_HEADER.size + -(-length // 8) * 8 if index else length
        if not index and length < _OBJECT_HEADER.size:
            return False
    return at <= len(objects) == size
