"""Writing a run's samples, or a trace in memory, to the trace file that FORMAT.md in the parent folder specifies.

After a failed write, as on a full disk, HDF5 cannot close its file: the process ends in a segmentation fault. So
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
from perturbkv.schema import AXES, FLAGS, FORMAT, FORMAT_VERSION, MEASURED_LAYERS, ROWS, STORED, Variable, least_bytes
from perturbkv.storage.atomic_files import atomic_path
from perturbkv.storage.run.sample_parts import Shapes
from perturbkv.storage.trace.texts import storable_text
from perturbkv.trace import FailedSample, SampleTrace, Trace, fill_value, trace_sizes, write_sample


class Stream(io.RawIOBase):
    """A file for HDF5, written and read at any offset, whose writes never raise.

    Args:
        path: the file's path; the file is emptied.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._at, self._end = 0, 0
        self._failure: OSError | None = None
        self._unwritten: list[tuple[int, bytes]] = []

    def check(self) -> None:
        """Raise the first OSError of a failed write, if any."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Close the underlying file."""
        if not self.closed:
            os.close(self._file)
        super().close()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the offset, and return it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._end}[whence]
        return self._at

    def tell(self) -> int:
        """Return the current offset."""
        return self._at

    def write(self, data: Any) -> int:
        """Write at the offset, and return the number of bytes; after a failure, data stays in memory."""
        view = memoryview(data).cast("B")
        self._try(lambda: self._write_all(view))
        if self._failure is not None:
            self._unwritten.append((self._at, bytes(view)))
        self._at += len(view)
        self._end = max(self._end, self._at)
        return len(view)

    def readinto(self, buffer: Any) -> int:
        """Read into the buffer at the offset, from file and memory, and return its length; unwritten bytes are zero."""
        view = memoryview(buffer).cast("B")
        view[:] = os.pread(self._file, len(view), self._at).ljust(len(view), b"\0")
        for begin, data in self._unwritten:
            first, last = max(begin, self._at), min(begin + len(data), self._at + len(view))
            if first < last:
                view[first - self._at : last - self._at] = data[first - begin : last - begin]
        self._at += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the file's size, and return it."""
        end = self._at if size is None else size
        self._try(lambda: os.ftruncate(self._file, end))
        self._end = end
        return end

    def _write_all(self, data: memoryview) -> None:
        """Write all of the data at the offset. Raises OSError."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], self._at + done)

    def _try(self, work: Callable[[], object]) -> None:
        """Call `work` unless an earlier call failed; store its OSError."""
        if self._failure is None:
            try:
                work()
            except OSError as error:
                self._failure = error


def run_uninterrupted(work: Callable[[threading.Event], None]) -> None:
    """Run `work` in another thread, so that Ctrl-C does not interrupt (and break) an HDF5 call.

    `work` gets an event that is set when it should stop; Ctrl-C takes effect when it has stopped.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work, stop)
        try:
            done.result()
        finally:
            stop.set()


_CHUNK_LENGTH = 2**16
"""Numbers in a chunk of a one-dimensional variable: few enough for HDF5's cache while samples come one by one."""
_CHUNK_BYTES = 2**15
"""Bytes of small samples that share a chunk and a call, as a call of HDF5 takes as long for a single one."""
_COMPRESSION = {"compression": "gzip", "compression_opts": 1, "shuffle": True}
_WITHOUT_VARIABLE = "This is a netCDF dimension but not a netCDF variable."
"""netCDF's mark of a dimension without a coordinate: one for kept_code would take eight times the code's size."""
_HDF5_VERSIONS = ("v110", "v110")
"""The file format of HDF5 1.10, whose headers, links and indices have checksums, and which netCDF reads."""
_SCALARS_PER_WRITE = 512
"""Number of samples whose scalars are written in one call."""
_CACHE_BYTES = 2**18
"""Bytes of HDF5's chunk cache per variable, for those that are written in parts."""


def write_trace(
    path: Path,
    run: RunConfig,
    sample_ids: Sequence[str],
    attrs: Mapping[str, str],
    shapes: Callable[[str], Shapes | None],
    sample: Callable[[str], SampleTrace | FailedSample],
) -> None:
    """Write a trace file, one sample in memory at a time.

    Args:
        path: the file.
        run: its configuration.
        sample_ids: all samples, in the order of the file.
        attrs: provenance, stored as root attributes.
        shapes: returns the shapes of a sample's variables by its id; None where it failed.
        sample: returns the sample itself.

    Raises TraceError where the samples' axes differ, OSError where the file cannot be written.
    """
    sizes, names = trace_sizes(run, sample_ids, ((name, shapes(name)) for name in sample_ids))
    texts = {name: storable_text(str(value)) for name, value in attrs.items()}  # file names may have arbitrary bytes
    texts |= {"format": FORMAT, "run": run.to_json()}
    _check_free_space(path.parent, least_bytes(sizes, names))

    def write(stop: Event) -> None:
        with Stream(path) as stream:
            with h5py.File(stream, "w", libver=_HDF5_VERSIONS, track_order=True, rdcc_nbytes=_CACHE_BYTES) as file:
                variables = _create_variables(file, texts, sizes, names, sample_ids, run.labels())
                filled = dict.fromkeys(ROWS, 0)
                for index, name in enumerate(sample_ids):
                    stream.check()
                    if stop.is_set():
                        return
                    _write_sample_or_failure(variables, index, sample(name), filled)
                for variable in variables.values():
                    variable.finish()
            stream.check()

    run_uninterrupted(write)


def _check_free_space(folder: Path, needed: int) -> None:
    """Raise OSError if fewer than `needed` bytes are free in a folder's file system."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes needed, {free:,} free")


def _create_variables(
    file: h5py.File,
    attrs: Mapping[str, str],
    sizes: Mapping[str, int],
    names: set[str],
    sample_ids: Sequence[str],
    labels: list[str],
) -> dict[str, _BufferedVariable]:
    """Write the file's attributes and coordinates, and return name -> new, empty variable."""
    file.attrs["format_version"] = FORMAT_VERSION
    for name, text in attrs.items():
        file.attrs[name] = text
    measured = attrs.get(MEASURED_LAYERS)
    _write_coordinates(file, sizes, sample_ids, labels, layer_types.parse_measured(measured)[0] if measured else None)
    return {
        name: _BufferedVariable(_create_variable(file, name, variable, sizes), variable)
        for name, variable in STORED.items()
        if name in names | FLAGS.keys()
    }


def _storable_texts(value: Any) -> NDArray[Any]:
    """Return texts as an array that HDF5 can store; a single text becomes a zero-dimensional array."""
    texts = [storable_text(str(text)) for text in np.asarray(value, dtype=object).flat]
    return np.array(texts, dtype=object).reshape(np.shape(value))


def _write_coordinates(
    file: h5py.File,
    sizes: Mapping[str, int],
    sample_ids: Sequence[str],
    labels: list[str],
    layers: Sequence[int] | None,
) -> None:
    """Write the coordinates of all axes; `layers` are the indices of the measured layers, None for all."""
    texts = {"sample": list(sample_ids), "config": labels}
    numbers = {} if layers is None else {"layer": np.array(layers)}
    for axis in (name for name in AXES if name in sizes):  # in one order, whichever axis a sample has first
        length = sizes[axis]
        if axis in ROWS:
            scale = file.create_dataset(axis, shape=(length,), dtype=">f4")  # as netCDF makes one without values
        else:
            is_text = axis in texts
            values = texts[axis] if is_text else numbers.get(axis, np.arange(length))
            block = np.array(values, dtype=object if is_text else "<i8")
            scale = file.create_dataset(axis, data=block, **_storage("str" if is_text else "int64", block.shape))
        scale.make_scale(f"{_WITHOUT_VARIABLE}{length:10d}" if axis in ROWS else axis)
        scale.attrs["units"], scale.attrs["long_name"] = "1", AXES[axis]


def _storage(dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return h5py's storage options: chunks with checksums, compressed for matrices and byte codes.

    Texts take no filter (HDF5 2.0): a chunk holds only their addresses.
    """
    if dtype == "str":
        return {"dtype": h5py.string_dtype()}
    options: dict[str, Any] = {"dtype": np.dtype(dtype).newbyteorder("<"), "fillvalue": fill_value(dtype)}
    if 0 in shape:
        return options
    if len(shape) == 1:
        deflated = _COMPRESSION if dtype == "uint8" else {}
        return {**options, "chunks": (min(shape[0], _CHUNK_LENGTH),), "fletcher32": True, **deflated}
    sample_bytes = math.prod(shape[1:]) * np.dtype(dtype).itemsize
    samples_per_chunk = max(1, min(shape[0], _CHUNK_BYTES // sample_bytes))
    return {**options, "chunks": (samples_per_chunk, *shape[1:]), "fletcher32": True, **_COMPRESSION}


def _create_variable(file: h5py.File, name: str, variable: Variable, sizes: Mapping[str, int]) -> h5py.Dataset:
    """Create a variable filled with NaN (floats) or 0 (integers), and return its dataset."""
    shape = tuple(sizes[axis] for axis in variable.axes)
    dataset = file.create_dataset(name, shape=shape, **_storage(variable.dtype, shape))
    dataset.attrs["units"], dataset.attrs["long_name"] = variable.units, variable.long_name
    for dimension, axis in zip(dataset.dims, variable.axes, strict=True):
        dimension.attach_scale(file[axis])
    return dataset


class _BufferedVariable:
    """A variable that is written by whole samples or consecutive rows, small ones several at a time."""

    def __init__(self, dataset: h5py.Dataset, variable: Variable) -> None:
        self._dataset = dataset
        self._shape = () if variable.is_concatenated else dataset.shape[1:]
        self._dtype = np.dtype(object) if variable.dtype == "str" else dataset.dtype
        self._begin, self._end, self._bytes = 0, 0, 0
        self._rows_per_write = dataset.chunks[0] if dataset.ndim > 1 and dataset.chunks else _SCALARS_PER_WRITE
        self._waiting: list[NDArray[Any]] = []

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole variable."""
        return tuple(self._dataset.shape)

    def __setitem__(self, where: int | slice, value: Any) -> None:
        """Write a sample at an index, broadcast to its shape, or consecutive rows at a slice."""
        block = np.asarray(_storable_texts(value) if self._dtype.kind == "O" else value, dtype=self._dtype)
        if isinstance(where, slice):
            self._buffer(where.start, block)
        else:
            whole = block if block.shape == self._shape else np.broadcast_to(block, self._shape)
            self._buffer(where, whole[np.newaxis])

    def finish(self) -> None:
        """Write the remaining buffered blocks."""
        self._write()

    def _buffer(self, begin: int, block: NDArray[Any]) -> None:
        """Buffer a block of rows that starts at row `begin`, and write the buffer once it fills a chunk."""
        if begin != self._end:
            self._write()
            self._begin = begin
        size = sum(map(len, block.flat)) if self._dtype.kind == "O" else block.nbytes
        self._waiting.append(block.copy() if size < _CHUNK_BYTES else block)  # a view would keep its whole sample
        self._end = begin + len(block)
        self._bytes += size
        if self._end - self._begin >= self._rows_per_write or self._bytes >= _CHUNK_BYTES:
            self._write()

    def _write(self) -> None:
        """Write the buffered blocks to the file."""
        if self._end > self._begin:
            block = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
            self._dataset[self._begin : self._end] = block
        self._begin, self._waiting, self._bytes = self._end, [], 0


def _write_sample_or_failure(
    variables: Mapping[str, _BufferedVariable],
    index: int,
    sample: SampleTrace | FailedSample,
    filled: dict[str, int],
) -> None:
    """Write the sample at `index` of the `sample` axis, its flag `complete` last.

    `filled`: axis of `ROWS` -> the rows that earlier samples fill; it grows by the sample's own.
    """
    if isinstance(sample, FailedSample):
        variables["failure"][index] = sample.reason
    else:
        write_sample(variables, index, sample, filled)
        variables["complete"][index] = 1


def save(trace: Trace, path: Path) -> Path:
    """Write a trace to a file atomically, and return the path.

    Raises TraceError where a required variable is missing.
    """

    def shapes(name: str) -> Shapes | None:
        sample = trace.sample(name)
        return sample.shapes() if isinstance(sample, SampleTrace) else None

    attrs = {name: value for name, value in trace.attrs.items() if name not in ("format", "format_version")}
    with atomic_path(path) as temporary:
        write_trace(temporary, trace.run, trace.sample_ids, attrs, shapes, trace.sample)
    return path
