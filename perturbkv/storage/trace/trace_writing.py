"""Writing a run's samples, or a trace in memory, to the trace file that FORMAT.md in the parent folder specifies.

Where a write fails, as on a full disk, HDF5 cannot close its file: the process ends in a segmentation fault. So
`Stream` remembers the failure, later writes stay in memory, and the writer checks for the failure between its calls.
"""

from __future__ import annotations

import errno
import io
import math
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from perturbkv.configs import layer_types
from perturbkv.configs.run import RunConfig
from perturbkv.schema import MEASURED, ROWS, Variable
from perturbkv.storage.atomic_files import written_whole
from perturbkv.storage.run.merge import Shapes
from perturbkv.storage.trace import layout
from perturbkv.storage.trace.layout import AXES, FLAGS, FORMAT, FORMAT_VERSION, STORED, least_bytes
from perturbkv.storage.trace.texts import storable
from perturbkv.trace import FailedSample, SampleTrace, Trace, fill_value, whole_sizes, write_sample


class Stream(io.RawIOBase):
    """A file's bytes, written and read at any offset.

    Args:
        path: the file's path; the file is emptied.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._at, self._end = 0, 0
        self._failure: OSError | None = None
        self._unwritten: list[tuple[int, bytes]] = []

    def check(self) -> None:
        """Raise the first OSError, where a write failed."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            os.close(self._file)
        super().close()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the offset and return it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._end}[whence]
        return self._at

    def tell(self) -> int:
        """Return the offset."""
        return self._at

    def write(self, data: Any) -> int:
        """Write at the offset; after a failure data stays in memory."""
        held = memoryview(data).cast("B")
        self._try(lambda: self._write_all(held))
        if self._failure is not None:
            self._unwritten.append((self._at, bytes(held)))
        self._at += len(held)
        self._end = max(self._end, self._at)
        return len(held)

    def readinto(self, buffer: Any) -> int:
        """Read at the offset, from the file and from memory; unwritten bytes are zero."""
        held = memoryview(buffer).cast("B")
        held[:] = os.pread(self._file, len(held), self._at).ljust(len(held), b"\0")
        for begin, data in self._unwritten:
            first, last = max(begin, self._at), min(begin + len(data), self._at + len(held))
            if first < last:
                held[first - self._at : last - self._at] = data[first - begin : last - begin]
        self._at += len(held)
        return len(held)

    def truncate(self, size: int | None = None) -> int:
        """Set the file's size."""
        end = self._at if size is None else size
        self._try(lambda: os.ftruncate(self._file, end))
        self._end = end
        return end

    def _write_all(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], self._at + done)

    def _try(self, work: Callable[[], object]) -> None:
        """Call `work` unless an earlier call failed; remember a failure."""
        if self._failure is None:
            try:
                work()
            except OSError as error:
                self._failure = error


def undisturbed(work: Callable[[threading.Event], None]) -> None:
    """Run `work` in a thread of its own, so that Ctrl-C cannot interrupt a call of HDF5, which would fail.

    `work` gets an event that is set when it should stop; Ctrl-C takes effect when it has.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work, stop)
        try:
            done.result()
        finally:
            stop.set()


_CHUNK = 2**16
"""Numbers in a chunk of a one-dimensional variable: few enough for HDF5's cache while samples come one by one."""
_CHUNK_BYTES = 2**15
"""Bytes of small samples that share a chunk and a call: HDF5 takes as long for a single one."""
_DEFLATED = {"compression": "gzip", "compression_opts": 1, "shuffle": True}
_WITHOUT_VARIABLE = "This is a netCDF dimension but not a netCDF variable."
"""netCDF's name of a dimension without a coordinate: counting kept_code's bytes would take eight times their size."""
_VERSIONS = ("v110", "v110")
"""From HDF5 1.10 on, headers, links and indices have checksums of their own; netCDF reads them as well."""


_SCALARS = 512
"""Number of samples whose scalars are written in one call."""
_CACHED = 2**18
"""Bytes of HDF5's chunk cache per variable, for those that are written in parts."""


def write_trace(
    path: Path,
    run: RunConfig,
    sample_ids: Sequence[str],
    attrs: Mapping[str, str],
    shapes: Callable[[str], Shapes | None],
    sample: Callable[[str], SampleTrace | FailedSample],
) -> None:
    """Write a whole trace file, one sample in memory at a time.

    `shapes` returns the shapes of a sample's variables, None where it failed, before `sample` returns the sample
    itself. Raises TraceError where the samples' axes do not fit together, OSError where the disk does not take the
    file.
    """
    sizes, names = whole_sizes(run, sample_ids, ((name, shapes(name)) for name in sample_ids))
    told = {name: _text(value) for name, value in attrs.items()} | {"format": FORMAT, "run": run.to_json()}
    _check_room(path.parent, least_bytes(sizes, names))

    def write(stop: Event) -> None:
        with Stream(path) as stream:
            with h5py.File(stream, "w", libver=_VERSIONS, track_order=True, rdcc_nbytes=_CACHED) as file:
                variables = _create_variables(file, told, sizes, names, sample_ids, run.labels())
                filled = dict.fromkeys(ROWS, 0)
                for where, name in enumerate(sample_ids):
                    stream.check()
                    if stop.is_set():
                        return
                    _write_sample(variables, where, sample(name), filled)
                variables.finish()
                file.attrs[layout.CHECKSUM] = layout.checksum_document(
                    told, {name: _checksum_text(file[name]) for name in file}
                )
            stream.check()

    undisturbed(write)


def _check_room(folder: Path, needed: int) -> None:
    """Raise OSError where a file of at least `needed` bytes cannot fit; a larger one fails while it is written."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes needed, {free:,} free")


def _create_variables(
    file: h5py.File,
    told: Mapping[str, str],
    sizes: Mapping[str, int],
    names: set[str],
    sample_ids: Sequence[str],
    labels: list[str],
) -> _Variables:
    """Write the file's attributes and coordinates, and return its variables, still empty."""
    file.attrs["format_version"] = FORMAT_VERSION
    for name, text in told.items():
        file.attrs[name] = text
    held = told.get(MEASURED)
    _write_coordinates(file, sizes, sample_ids, labels, layer_types.parse_measured(held)[0] if held else None)
    return _Variables(file, {name: one for name, one in STORED.items() if name in names | FLAGS.keys()}, sizes)


def _text(value: object) -> str:
    """Return a value as text that UTF-8 can encode: file names may have arbitrary bytes."""
    return storable(str(value))


def _texts(value: Any) -> NDArray[Any]:
    """Return a text, or an array of texts, as UTF-8 can encode them."""
    return np.array([_text(one) for one in np.asarray(value, dtype=object).flat], dtype=object).reshape(np.shape(value))


def _checksum_text(held: h5py.Dataset) -> str:
    """Return a variable's unit and meaning, as they are summed."""
    return layout.checksum_text(held.attrs["units"], held.attrs["long_name"])


def _write_coordinates(
    file: h5py.File,
    sizes: Mapping[str, int],
    sample_ids: Sequence[str],
    labels: list[str],
    layers: Sequence[int] | None,
) -> None:
    """Write the coordinates; `layers` are the indices of the measured layers, None: all."""
    named = {"sample": list(sample_ids), "config": labels}
    counted = {} if layers is None else {"layer": np.array(layers)}
    for axis in (one for one in AXES if one in sizes):  # in one order, whatever a sample brought first
        length = sizes[axis]
        if axis in ROWS:
            scale = file.create_dataset(axis, shape=(length,), dtype=">f4")
        else:
            places = counted.get(axis, np.arange(length))
            held = np.array(named.get(axis, places), dtype=object if axis in named else "<i8")
            scale = file.create_dataset(axis, data=held, **_storage("str" if axis in named else "int64", held.shape))
            scale.attrs[layout.CHECKSUM] = np.array([layout.checksum_of(held)], dtype=np.uint32)
        scale.make_scale(f"{_WITHOUT_VARIABLE}{length:10d}" if axis in ROWS else axis)
        scale.attrs["units"], scale.attrs["long_name"] = "1", AXES[axis]


def _storage(dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return how numbers are stored: in chunks with checksums; matrices and codes in bytes are compressed.

    Texts take no filter (HDF5 2.0): a chunk holds their addresses alone.
    """
    if dtype == "str":
        return {"dtype": h5py.string_dtype()}
    kind: dict[str, Any] = {"dtype": np.dtype(dtype).newbyteorder("<"), "fillvalue": fill_value(dtype)}
    if 0 in shape:
        return kind
    if len(shape) == 1:
        deflated = _DEFLATED if dtype == "uint8" else {}
        return {**kind, "chunks": (min(shape[0], _CHUNK),), "fletcher32": True, **deflated}
    together = _samples_per_chunk(shape, np.dtype(dtype).itemsize)
    return {**kind, "chunks": (together, *shape[1:]), "fletcher32": True, **_DEFLATED}


def _samples_per_chunk(shape: tuple[int, ...], itemsize: int) -> int:
    """Return how many samples of a variable share a chunk: one where samples are large."""
    each = math.prod(shape[1:]) * itemsize
    return max(1, min(shape[0], _CHUNK_BYTES // each))


class _Variables:
    """The variables of a file that is being written, with their checksums."""

    def __init__(self, file: h5py.File, chosen: Mapping[str, Variable], sizes: Mapping[str, int]) -> None:
        self._held = {
            name: _SummedVariable(_create_variable(file, name, one, sizes), one) for name, one in chosen.items()
        }

    def __contains__(self, name: str, /) -> bool:
        return name in self._held

    def __getitem__(self, name: str, /) -> _SummedVariable:
        return self._held[name]

    def finish(self) -> None:
        """Write buffered blocks and the checksums."""
        for variable in self._held.values():
            variable.finish()


def _create_variable(file: h5py.File, name: str, variable: Variable, sizes: Mapping[str, int]) -> h5py.Dataset:
    """Return a new variable filled with NaN (floats) or 0 (integers)."""
    shape = tuple(sizes[axis] for axis in variable.axes)
    made = file.create_dataset(name, shape=shape, **_storage(variable.dtype, shape))
    made.attrs["units"], made.attrs["long_name"] = variable.units, variable.long_name
    for dimension, axis in zip(made.dims, variable.axes, strict=True):
        dimension.attach_scale(file[axis])
    return made


class _SummedVariable:
    """A variable that takes whole samples or consecutive rows, and sums them."""

    def __init__(self, held: h5py.Dataset, variable: Variable) -> None:
        self._held, self._variable = held, variable
        self._shape = () if variable.in_rows else held.shape[1:]
        self._dtype = np.dtype(object) if variable.dtype == "str" else held.dtype
        self._begin, self._end, self._bytes = 0, 0, 0
        self._together = held.chunks[0] if held.ndim > 1 and held.chunks else _SCALARS
        self._waiting: list[NDArray[Any]] = []
        summed = 0 if variable.in_rows else layout.checksum_of(self._empty())
        self._sums = np.full(1 if variable.in_rows else held.shape[0], summed, dtype=np.uint32)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._held.shape)

    def _empty(self) -> NDArray[Any]:
        return np.full(self._shape, fill_value(self._variable.dtype), dtype=self._dtype)

    def __setitem__(self, where: int | slice, value: Any) -> None:
        block = np.asarray(_texts(value) if self._dtype.kind == "O" else value, dtype=self._dtype)
        if isinstance(where, slice):
            self._sums[0] = layout.checksum_of(block, int(self._sums[0]))
            self._buffer(where.start, block)
        else:
            whole = block if block.shape == self._shape else np.broadcast_to(block, self._shape)
            self._sums[where] = layout.checksum_of(whole)
            self._buffer(where, whole[np.newaxis])

    def finish(self) -> None:
        """Write buffered blocks and the checksums."""
        self._write()
        self._held.attrs[layout.CHECKSUM] = self._sums

    def _buffer(self, begin: int, block: NDArray[Any]) -> None:
        """Buffer a block, and write the buffer once it fills a chunk."""
        if begin != self._end:
            self._write()
            self._begin = begin
        size = sum(map(len, block.flat)) if self._dtype.kind == "O" else block.nbytes
        small = size < _CHUNK_BYTES
        self._waiting.append(block.copy() if small else block)  # a view would hold the whole of its sample
        self._end = begin + len(block)
        self._bytes += size
        if self._end - self._begin >= self._together or self._bytes >= _CHUNK_BYTES:
            self._write()

    def _write(self) -> None:
        if self._end > self._begin:
            together = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
            self._held[self._begin : self._end] = together
        self._begin, self._waiting, self._bytes = self._end, [], 0


def _write_sample(
    variables: _Variables, where: int, sample: SampleTrace | FailedSample, filled: dict[str, int]
) -> None:
    """Write one sample after the rows that are `filled`, its `complete` flag last."""
    if isinstance(sample, FailedSample):
        variables["failure"][where] = sample.reason
    else:
        write_sample(variables, where, sample, filled)
        variables["complete"][where] = 1


def save(trace: Trace, path: Path) -> Path:
    """Write a trace's file, whole or not at all, and return its path.

    Raises TraceError where a required variable is missing.
    """
    shapes = {
        name: sample.shapes() if isinstance(sample, SampleTrace) else None
        for name in trace.sample_ids
        for sample in [trace.sample(name)]
    }
    own = ("format", "format_version")
    attrs = {name: value for name, value in trace.attrs.items() if name not in own}
    with written_whole(path) as beside:
        write_trace(beside, trace.run, trace.sample_ids, attrs, shapes.__getitem__, trace.sample)
    return path
