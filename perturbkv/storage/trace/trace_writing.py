"""A run's samples → the trace file. FORMAT.md beside this file specifies what is written here.

A file that HDF5 writes through, which fails only when HDF5 has let go of it.

Where a write fails, as on a full disk, HDF5 cannot close its file: the process ends in a segmentation fault. So a
failure is kept here, what is written from then on stays in memory, and whoever writes asks for the failure in between.

A trace in memory, as a file: the same as one that was measured into it.
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
from perturbkv.trace import FailedSample, SampleTrace, Trace, fill_of, place, whole_sizes


class Stream(io.RawIOBase):
    """The bytes of a file that is written and read at any place.

    Args:
        path: of the file, which is emptied.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._at, self._end = 0, 0
        self._failure: OSError | None = None
        self._unwritten: list[tuple[int, bytes]] = []

    def check(self) -> None:
        """Raise what went wrong so far, an OSError."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Let go of the file."""
        if not self.closed:
            os.close(self._file)
        super().close()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place; returns it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._end}[whence]
        return self._at

    def tell(self) -> int:
        """The place."""
        return self._at

    def write(self, data: Any) -> int:
        """Write at the place; what the file does not take stays in memory."""
        held = memoryview(data).cast("B")
        self._try(lambda: self._write_all(held))
        if self._failure is not None:
            self._unwritten.append((self._at, bytes(held)))
        self._at += len(held)
        self._end = max(self._end, self._at)
        return len(held)

    def readinto(self, buffer: Any) -> int:
        """Read at the place, from the file and from memory; zeros where nothing was written."""
        held = memoryview(buffer).cast("B")
        held[:] = os.pread(self._file, len(held), self._at).ljust(len(held), b"\0")
        for begin, data in self._unwritten:
            first, last = max(begin, self._at), min(begin + len(data), self._at + len(held))
            if first < last:
                held[first - self._at : last - self._at] = data[first - begin : last - begin]
        self._at += len(held)
        return len(held)

    def truncate(self, size: int | None = None) -> int:
        """End the file at a size."""
        end = self._at if size is None else size
        self._try(lambda: os.ftruncate(self._file, end))
        self._end = end
        return end

    def _write_all(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], self._at + done)

    def _try(self, work: Callable[[], object]) -> None:
        """Do it unless something failed before; a failure is kept."""
        if self._failure is None:
            try:
                work()
            except OSError as error:
                self._failure = error


def undisturbed(work: Callable[[threading.Event], None]) -> None:
    """Do `work` in a thread of its own: a Ctrl-C would reach it in the middle of a call of HDF5, as an error there.

    It gets an event that is set when it should stop; Ctrl-C goes on when it has.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work, stop)
        try:
            done.result()
        finally:
            stop.set()


_CHUNK = 2**16
"""Numbers in a chunk of what has one axis: few enough to stay in HDF5's cache while samples come one by one."""
_TOGETHER = 2**15
"""Bytes of small samples that share a chunk, and are written in one call: HDF5 takes as long for one of them."""
_DEFLATED = {"compression": "gzip", "compression_opts": 1, "shuffle": True}
_WITHOUT_VARIABLE = "This is a netCDF dimension but not a netCDF variable."
"""How netCDF names a dimension that has no coordinate: counting kept_code's bytes would take eight times as many."""
_VERSIONS = ("v110", "v110")
"""From HDF5 1.10 on, headers, links and indices carry sums of their own; netCDF reads them as well."""


_SCALARS = 512
"""Numbers, one for each sample, that are written together."""
_CACHED = 2**18
"""Bytes of chunks that HDF5 holds of each variable, for those that are written in parts."""


def write_trace(
    path: Path,
    run: RunConfig,
    sample_ids: Sequence[str],
    attrs: Mapping[str, str],
    shapes: Callable[[str], Shapes | None],
    sample: Callable[[str], SampleTrace | FailedSample],
) -> None:
    """Write a whole trace file, one sample in memory at a time.

    `shapes` gives those of a sample's variables, None where it failed, before `sample` gives the sample itself.
    Raises TraceError where the samples' axes do not fit together, OSError where the disk does not take the file.
    """
    sizes, names = whole_sizes(run, sample_ids, ((name, shapes(name)) for name in sample_ids))
    told = {name: _text(value) for name, value in attrs.items()} | {"format": FORMAT, "run": run.to_json()}
    _check_room(path.parent, least_bytes(sizes, names))

    def write(stop: Event) -> None:
        with Stream(path) as stream:
            with h5py.File(stream, "w", libver=_VERSIONS, track_order=True, rdcc_nbytes=_CACHED) as file:
                variables = _begun(file, told, sizes, names, sample_ids, run.labels())
                filled = dict.fromkeys(ROWS, 0)
                for where, name in enumerate(sample_ids):
                    stream.check()
                    if stop.is_set():
                        return
                    _write_sample(variables, where, sample(name), filled)
                variables.finish()
                file.attrs[layout.CHECKSUM] = layout.checksum_document(told, {name: _said(file[name]) for name in file})
            stream.check()

    undisturbed(write)


def _check_room(folder: Path, needed: int) -> None:
    """Raise OSError where a file of at least so many bytes cannot fit; one that is larger fails as it is written."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes needed, {free:,} free")


def _begun(
    file: h5py.File,
    told: Mapping[str, str],
    sizes: Mapping[str, int],
    names: set[str],
    sample_ids: Sequence[str],
    labels: list[str],
) -> _Variables:
    """The file's attributes and coordinates, and its variables, which are empty."""
    file.attrs["format_version"] = FORMAT_VERSION
    for name, text in told.items():
        file.attrs[name] = text
    held = told.get(MEASURED)
    _write_coordinates(file, sizes, sample_ids, labels, layer_types.parsed(held)[0] if held else None)
    return _Variables(file, {name: one for name, one in STORED.items() if name in names | FLAGS.keys()}, sizes)


def _text(value: object) -> str:
    """A text as UTF-8 can hold it: of the name of a file, any bytes."""
    return storable(str(value))


def _texts(value: Any) -> NDArray[Any]:
    """A text, or each of several."""
    return np.array([_text(one) for one in np.asarray(value, dtype=object).flat], dtype=object).reshape(np.shape(value))


def _said(held: h5py.Dataset) -> str:
    """What a variable says of itself, as it is summed."""
    return layout.checksum_words(held.attrs["units"], held.attrs["long_name"])


def _write_coordinates(
    file: h5py.File,
    sizes: Mapping[str, int],
    sample_ids: Sequence[str],
    labels: list[str],
    layers: Sequence[int] | None,
) -> None:
    """The coordinates; `layers` are the indices of those that were measured, None: all."""
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
    """How numbers lie in the file: in chunks with sums; of several axes, and codes in bytes, compressed.

    Texts take no filter (HDF5 2.0): a chunk holds their addresses alone.
    """
    if dtype == "str":
        return {"dtype": h5py.string_dtype()}
    kind: dict[str, Any] = {"dtype": np.dtype(dtype).newbyteorder("<"), "fillvalue": fill_of(dtype)}
    if 0 in shape:
        return kind
    if len(shape) == 1:
        deflated = _DEFLATED if dtype == "uint8" else {}
        return {**kind, "chunks": (min(shape[0], _CHUNK),), "fletcher32": True, **deflated}
    together = _samples_together(shape, np.dtype(dtype).itemsize)
    return {**kind, "chunks": (together, *shape[1:]), "fletcher32": True, **_DEFLATED}


def _samples_together(shape: tuple[int, ...], itemsize: int) -> int:
    """How many samples of a variable share a chunk: one, where it is large."""
    each = math.prod(shape[1:]) * itemsize
    return max(1, min(shape[0], _TOGETHER // each))


class _Variables:
    """The variables of a file that is being written; what is put into them is summed."""

    def __init__(self, file: h5py.File, chosen: Mapping[str, Variable], sizes: Mapping[str, int]) -> None:
        self._held = {name: _SummedVariable(_created(file, name, one, sizes), one) for name, one in chosen.items()}

    def __contains__(self, name: str, /) -> bool:
        return name in self._held

    def __getitem__(self, name: str, /) -> _SummedVariable:
        return self._held[name]

    def finish(self) -> None:
        """Write what waits for more, and the sums."""
        for variable in self._held.values():
            variable.finish()


def _created(file: h5py.File, name: str, variable: Variable, sizes: Mapping[str, int]) -> h5py.Dataset:
    """An empty variable: floats NaN, integers 0."""
    shape = tuple(sizes[axis] for axis in variable.axes)
    made = file.create_dataset(name, shape=shape, **_storage(variable.dtype, shape))
    made.attrs["units"], made.attrs["long_name"] = variable.units, variable.long_name
    for dimension, axis in zip(made.dims, variable.axes, strict=True):
        dimension.attach_scale(file[axis])
    return made


class _SummedVariable:
    """One of them: takes whole samples, or rows one behind the other."""

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
        return np.full(self._shape, fill_of(self._variable.dtype), dtype=self._dtype)

    def __setitem__(self, where: int | slice, value: Any) -> None:
        block = np.asarray(_texts(value) if self._dtype.kind == "O" else value, dtype=self._dtype)
        if isinstance(where, slice):
            self._sums[0] = layout.checksum_of(block, int(self._sums[0]))
            self._wait(where.start, block)
        else:
            whole = block if block.shape == self._shape else np.broadcast_to(block, self._shape)
            self._sums[where] = layout.checksum_of(whole)
            self._wait(where, whole[np.newaxis])

    def finish(self) -> None:
        """Write what waits, and the sums."""
        self._write()
        self._held.attrs[layout.CHECKSUM] = self._sums

    def _wait(self, begin: int, block: NDArray[Any]) -> None:
        """Put a block behind those that wait, and write them together once they fill a chunk."""
        if begin != self._end:
            self._write()
            self._begin = begin
        size = sum(map(len, block.flat)) if self._dtype.kind == "O" else block.nbytes
        small = size < _TOGETHER
        self._waiting.append(block.copy() if small else block)  # a view would hold the whole of its sample
        self._end = begin + len(block)
        self._bytes += size
        if self._end - self._begin >= self._together or self._bytes >= _TOGETHER:
            self._write()

    def _write(self) -> None:
        if self._end > self._begin:
            together = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
            self._held[self._begin : self._end] = together
        self._begin, self._waiting, self._bytes = self._end, [], 0


def _write_sample(
    variables: _Variables, where: int, sample: SampleTrace | FailedSample, filled: dict[str, int]
) -> None:
    """Write one sample behind what is `filled`, its `complete` flag last."""
    if isinstance(sample, FailedSample):
        variables["failure"][where] = sample.reason
    else:
        place(variables, where, sample, filled)
        variables["complete"][where] = 1


def save(trace: Trace, path: Path) -> Path:
    """Write the file of a trace, whole or not at all. Raises TraceError where it lacks what a file MUST hold."""
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
