"""The trace file: the only importer of h5py. FORMAT.md beside this file specifies what is written here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from perturbkv.configs import former
from perturbkv.configs.run import RunConfig
from perturbkv.errors import TraceError
from perturbkv.reading import FileKind
from perturbkv.schema import ROWS, TEXT, VARIABLES
from perturbkv.storage.coordinates import (
    check_configs,
    check_measured,
    check_places,
    check_rows,
    check_samples,
    check_shapes,
)
from perturbkv.storage.journal import Journal, journal_path
from perturbkv.storage.layout import fill_of, nothing_filled, place, whole_sizes
from perturbkv.storage.lazy import LazyArrays
from perturbkv.storage.merge import Shapes
from perturbkv.trace import FailedSample, SampleTrace, Trace

FORMAT, FORMAT_VERSION = "perturbkv-trace", 3
_FILE = FileKind("a trace file (HDF5)", TraceError, most=2**63)
_COORDINATES = {
    "sample": "sample id",
    "config": "eviction configuration",
    "step": "decode step",
    "layer": "decoder layer",
    "head": "query head",
    "answer_token": "place in a generated answer",
    "d_head": "component of a head's output",
    "d_model": "component of a hidden state",
    "key": "position of a cache entry",
    "kept_entry": "place in kept_position",
    "prompt_entry": "place in prompt_token",
    "lost_entry": "place among the evicted entries that add most",
}
_WITHOUT_VARIABLE = "This is a netCDF dimension but not a netCDF variable."
"""How netCDF names a dimension that has no coordinate: counting kept_position's entries would take twice its bytes."""


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
    Raises TraceError where the samples' axes do not fit together.
    """
    sizes, names = whole_sizes(run, sample_ids, {name: shapes(name) for name in sample_ids})
    with h5py.File(path, "w", track_order=True) as file:
        _write_header(file, run, attrs, sample_ids, sizes, names)
        filled = nothing_filled()
        for where, name in enumerate(sample_ids):
            _write_sample(file, where, sample(name), filled)


def _write_header(
    file: h5py.File,
    run: RunConfig,
    attrs: Mapping[str, str],
    sample_ids: Sequence[str],
    sizes: Mapping[str, int],
    names: set[str],
) -> None:
    file.attrs["format"], file.attrs["format_version"] = FORMAT, FORMAT_VERSION
    file.attrs["run"] = run.to_json()
    for name, value in attrs.items():
        file.attrs[name] = str(value)
    _write_coordinates(file, sizes, sample_ids, run.labels())
    text = h5py.string_dtype()
    for name, variable in VARIABLES.items():
        if name in names:
            dtype = text if variable.dtype == "str" else variable.dtype
            _create(file, name, variable.axes, sizes, dtype, variable.units, variable.long_name)
    _create(file, "failure", ("sample",), sizes, text, "1", "why the sample failed; empty where it is complete")
    _create(file, "complete", ("sample",), sizes, "uint8", "1", "1 where every number of the sample is there")


def _write_coordinates(file: h5py.File, sizes: Mapping[str, int], sample_ids: Sequence[str], labels: list[str]) -> None:
    named = {"sample": list(sample_ids), "config": labels}
    for axis in (one for one in _COORDINATES if one in sizes):  # in one order, whatever a sample brought first
        length = sizes[axis]
        if axis in named:
            scale = file.create_dataset(axis, data=named[axis], dtype=h5py.string_dtype())
        elif axis in ROWS:
            scale = file.create_dataset(axis, shape=(length,), dtype=">f4")
        else:
            scale = file.create_dataset(axis, data=np.arange(length, dtype=np.int64))
        scale.make_scale(f"{_WITHOUT_VARIABLE}{length:10d}" if axis in ROWS else axis)
        scale.attrs["units"], scale.attrs["long_name"] = "1", _COORDINATES[axis]


def _create(
    file: h5py.File, name: str, axes: Sequence[str], sizes: Mapping[str, int], dtype: Any, units: str, long_name: str
) -> None:
    """An empty variable: floats NaN, integers 0; one sample per chunk."""
    shape = tuple(sizes[axis] for axis in axes)
    options: dict[str, Any] = {}
    if len(shape) > 1 and min(shape) > 0:
        options = {"chunks": (1, *shape[1:]), "compression": "gzip", "compression_opts": 1, "shuffle": True}
    if isinstance(dtype, str):
        options["fillvalue"] = fill_of(dtype)
    if axes[-1] in ROWS:
        options["fill_time"] = "never"  # every place is written once; filling first would write them twice
    variable = file.create_dataset(name, shape=shape, dtype=dtype, **options)
    variable.attrs["units"], variable.attrs["long_name"] = units, long_name
    for dimension, axis in zip(variable.dims, axes, strict=True):
        dimension.attach_scale(file[axis])


def _write_sample(file: h5py.File, where: int, sample: SampleTrace | FailedSample, filled: dict[str, int]) -> None:
    """Write one sample behind what is `filled`, its `complete` flag last."""
    if isinstance(sample, FailedSample):
        file["failure"][where] = sample.reason
    else:
        place(file, where, sample, filled)
        file["complete"][where] = 1


def read_trace(path: str | Path) -> Trace:
    """A finished trace. Raises TraceError for anything that is not one, and where its labels are not its run's.

    Kept positions, text and saved outputs, which may be larger than memory should hold, are read when asked for;
    everything else at once. Variables that the file lacks are absent here too: `Trace.get` tells who needs them.
    """
    path = Path(path)
    with opened(path) as file:
        run = _run_of(file, path)
        _check_axes(file, run, path)
        ids, failures = _samples_of(file)
        names = [name for name in VARIABLES if name in file]
        arrays = {name: values(file, name) for name in names if not _is_large(name)}
        attrs = _provenance_of(file)
    digest = _digest(path)
    later = [name for name in names if _is_large(name)]
    held = LazyArrays(arrays, later, _read_later(path))
    return Trace(run, ids, held, failures, attrs, str(path), digest)


def values(file: h5py.File, name: str, where: Any = ()) -> Any:
    """A variable's numbers, or texts, at a place, by default all of them."""
    held = file[name].asstr() if VARIABLES[name].dtype == "str" else file[name]
    return np.asarray(held[where])


def _is_large(name: str) -> bool:
    return VARIABLES[name].in_rows or VARIABLES[name].dtype == "str" or VARIABLES[name].raw


def _read_later(path: Path) -> Callable[[str], Any]:
    """Reads one variable of the file as it is now; TraceError once it was written again."""
    stamp = path.stat().st_mtime_ns

    def read(name: str) -> Any:
        with opened(path, stamp) as file:
            return values(file, name)

    return read


@dataclass(frozen=True)
class StoredVariable:
    """A variable as it lies in the file."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    units: str
    long_name: str
    nbytes: int


@dataclass(frozen=True)
class Description:
    """What a trace file holds; of its numbers the bytes of its evicted caches alone, all samples' together.

    `with_text` names the samples whose prompt's text is stored.
    """

    run: RunConfig
    sample_ids: tuple[str, ...]
    failures: dict[str, str]
    attrs: dict[str, str]
    variables: dict[str, StoredVariable]
    caches: dict[str, int]
    with_text: tuple[str, ...]


def describe(path: Path) -> Description:
    """A trace's run, samples, variables and provenance. Raises TraceError as `read_trace` does."""
    path = Path(path)
    with opened(path) as file:
        run = _run_of(file, path)
        _check_axes(file, run, path)
        ids, failures = _samples_of(file)
        names = [name for name in file if name not in _COORDINATES and not file[name].is_scale]
        variables = {name: _stored(file[name]) for name in names}
        caches = {name: int(file[name][()].sum()) for name in ("cache_bytes", "cache_padding_bytes") if name in file}
        return Description(run, ids, failures, _provenance_of(file), variables, caches, _with_text(file, ids))


def _with_text(file: h5py.File, ids: Sequence[str]) -> tuple[str, ...]:
    counts = values(file, "prompt_count") if set(TEXT) <= set(file) else np.zeros(len(ids))
    return tuple(name for name, count in zip(ids, counts, strict=True) if count)


def _stored(variable: h5py.Dataset) -> StoredVariable:
    axes = tuple(dim[0].name.lstrip("/") for dim in variable.dims)
    units, long_name = str(variable.attrs["units"]), str(variable.attrs["long_name"])
    texts = variable[()].tolist() if variable.dtype.kind == "O" else None  # of a text HDF5 counts its address alone
    nbytes = variable.nbytes if texts is None else sum(map(len, texts))
    return StoredVariable(axes, variable.shape, str(variable.dtype), units, long_name, int(nbytes))


def read_run(path: Path) -> RunConfig:
    """The run of a trace file, its numbers unread. Raises TraceError as `read_trace` does."""
    with opened(path) as file:
        return _run_of(file, path)


def describe_whole(path: Path) -> Description:
    """As `describe`; TraceError where a variable is missing that a trace MUST hold: it cannot be extended."""
    held = describe(path)
    missing = [name for name, variable in VARIABLES.items() if not variable.optional and name not in held.variables]
    if missing:
        names = ", ".join(missing)
        msg = f"expected a whole trace at {path}, got one without {names}; use another --output, or --overwrite"
        raise TraceError(msg)
    return held


@contextmanager
def opened(path: Path, stamp: int | None = None) -> Iterator[h5py.File]:
    """The file, open for reading; TraceError for its damages, and where it was written after `stamp` (st_mtime_ns)."""
    if not path.exists():
        raise TraceError(_missing(path))
    _FILE.check(path)
    try:
        with h5py.File(path, "r") as file:
            if stamp is not None and path.stat().st_mtime_ns != stamp:
                msg = f"expected the trace at {path} as it was, got one written since; open it again"
                raise TraceError(msg)
            yield file
    except (OSError, KeyError, RuntimeError, ValueError, IndexError) as error:
        msg = f"expected a trace file (HDF5) at {path}, got one that is no HDF5, truncated or damaged; make it again"
        raise TraceError(msg) from error


def _missing(path: Path) -> str:
    journal = Journal(journal_path(path))
    if journal.folder.exists():
        kept = len(journal.sample_ids())
        return f"the run of {path} is unfinished, {kept} samples are kept; run the same command again to go on"
    return f"expected a trace file at {path}, got nothing; make one with perturbkv trace -o {path}"


def _run_of(file: h5py.File, path: Path) -> RunConfig:
    if file.attrs.get("format") != FORMAT:
        msg = f"expected a perturbkv trace at {path}, got another HDF5 file"
        raise TraceError(msg)
    version = int(file.attrs["format_version"])
    if version > FORMAT_VERSION:
        msg = f"expected a trace of format {FORMAT_VERSION} or older at {path}, got format {version}; update perturbkv"
        raise TraceError(msg)
    return RunConfig.from_json(str(file.attrs["run"]))


def _check_axes(file: h5py.File, run: RunConfig, path: Path) -> None:
    """Raise TraceError unless the coordinates are the run's and the variables', and counts stay within their axes."""
    axes = [axis for axis in _COORDINATES if axis in file]
    version = int(file.attrs["format_version"])
    labels = run.labels() if version > 2 else list(map(former.label, json.loads(file.attrs["run"])["configs"]))
    check_configs(path, labels, _names(file, "config"), known_wording=version > 1)
    check_samples(path, _names(file, "sample"))
    for axis in axes:
        if axis not in ("sample", "config", *ROWS):
            check_places(path, axis, file[axis][()])
    variables = [name for name in (*VARIABLES, "complete", "failure") if name in file]
    check_shapes(path, {axis: len(file[axis]) for axis in axes}, {name: file[name].shape for name in variables})
    if "steps_measured" in file:
        check_measured(path, file["steps_measured"][()], file["complete"][()] != 0, len(file["step"]))
    for axis, rows in ROWS.items():
        if {f"{rows}_offset", f"{rows}_count", axis} <= set(file):
            check_rows(path, rows, file[f"{rows}_offset"][()], file[f"{rows}_count"][()], len(file[axis]))


def _names(file: h5py.File, axis: str) -> list[str]:
    return [str(name) for name in file[axis].asstr()[()]]


def _samples_of(file: h5py.File) -> tuple[tuple[str, ...], dict[str, str]]:
    ids = tuple(_names(file, "sample"))
    reasons, complete = file["failure"].asstr()[()], file["complete"][()]
    failures = {
        name: str(reason) or "incomplete"
        for name, reason, whole in zip(ids, reasons, complete, strict=True)
        if not whole
    }
    return ids, failures


def _provenance_of(file: h5py.File) -> dict[str, str]:
    """Root attributes that are not the format's own."""
    return {name: str(value) for name, value in file.attrs.items() if name not in ("run", "_NCProperties")}


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12]
