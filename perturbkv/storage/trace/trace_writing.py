"""A run's samples → the trace file. FORMAT.md beside this file specifies what is written here."""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from perturbkv.configs import layer_types
from perturbkv.configs.run import RunConfig
from perturbkv.schema import MEASURED, ROWS, Variable
from perturbkv.storage.run.merge import Shapes
from perturbkv.storage.trace import checksums
from perturbkv.storage.trace.layout import AXES, FLAGS, FORMAT, FORMAT_VERSION, STORED, least_bytes
from perturbkv.storage.trace.stream import Stream, undisturbed
from perturbkv.storage.trace.texts import storable
from perturbkv.trace import FailedSample, SampleTrace, fill_of, place, whole_sizes

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
                file.attrs[checksums.NAME] = checksums.document(told, {name: _said(file[name]) for name in file})
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
    return checksums.words(held.attrs["units"], held.attrs["long_name"])


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
            scale.attrs[checksums.NAME] = np.array([checksums.of(held)], dtype=np.uint32)
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
        summed = 0 if variable.in_rows else checksums.of(self._empty())
        self._sums = np.full(1 if variable.in_rows else held.shape[0], summed, dtype=np.uint32)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._held.shape)

    def _empty(self) -> NDArray[Any]:
        return np.full(self._shape, fill_of(self._variable.dtype), dtype=self._dtype)

    def __setitem__(self, where: int | slice, value: Any) -> None:
        block = np.asarray(_texts(value) if self._dtype.kind == "O" else value, dtype=self._dtype)
        if isinstance(where, slice):
            self._sums[0] = checksums.of(block, int(self._sums[0]))
            self._wait(where.start, block)
        else:
            whole = block if block.shape == self._shape else np.broadcast_to(block, self._shape)
            self._sums[where] = checksums.of(whole)
            self._wait(where, whole[np.newaxis])

    def finish(self) -> None:
        """Write what waits, and the sums."""
        self._write()
        self._held.attrs[checksums.NAME] = self._sums

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
