"""A trace as one tidy table, in CSV or Parquet: a row per sample × configuration × step × layer × head.

Columns: the row's coordinates, every field of its configuration, then every variable that has no other axes, repeated
along the axes that it lacks. Parquet carries each column's unit and meaning in its field's metadata, and the trace's
provenance in the file's. Failed samples, and steps past the end of a sample's text, have no rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError
from perturbkv.schema import VARIABLES, Variable
from perturbkv.storage.files import written_whole
from perturbkv.trace import Trace

AXES = ("config", "step", "layer", "head")
SUFFIXES = (".csv", ".parquet")


def columns(trace: Trace) -> dict[str, Variable]:
    """The variables that become columns: those of the trace whose axes are the table's; `kept_offset` means nothing."""
    return {
        name: variable
        for name, variable in VARIABLES.items()
        if name in trace.arrays and name != "kept_offset" and set(variable.dims) <= set(AXES)
    }


def schema(trace: Trace) -> pa.Schema:
    """Types, units and provenance of the table."""
    fields = [pa.field("sample", pa.string()), pa.field("config", pa.string())]
    for field in dataclasses.fields(EvictionConfig):
        fields.append(pa.field(field.name, _config_type(field.name)))
    fields += [pa.field(axis, pa.int32()) for axis in AXES[1:]]
    for name, variable in columns(trace).items():
        about = {"units": variable.units, "long_name": variable.long_name}
        fields.append(pa.field(name, pa.from_numpy_dtype(np.dtype(variable.dtype)), metadata=about))
    about = {"run": trace.run.to_json(), "trace": trace.source, "trace_digest": trace.digest, **trace.attrs}
    return pa.schema(fields, metadata=about)


def rows(trace: Trace, place: int) -> pa.RecordBatch:
    """All rows of one sample, `place` counting along the trace's `sample` axis."""
    shape = tuple(trace.arrays["perturbation_isolated"].shape[1:])
    every = np.indices(shape).reshape(len(shape), -1)
    held = trace.measured[place][every[AXES.index("step")]]
    index = every[:, held]
    configs = trace.run.configs
    found: dict[str, Any] = {
        "sample": np.repeat(trace.sample_ids[place], index.shape[1]),
        "config": np.array(trace.run.labels())[index[0]],
    }
    for field in dataclasses.fields(EvictionConfig):
        values = [_config_value(config, field.name) for config in configs]
        found[field.name] = np.array(values)[index[0]]
    found |= {axis: index[number].astype(np.int32) for number, axis in enumerate(AXES) if axis != "config"}
    for name, variable in columns(trace).items():
        found[name] = _spread(trace.arrays[name][place], variable.dims, shape)[held]
    return pa.RecordBatch.from_pydict(found, schema=schema(trace))


def write(trace: Trace, path: Path, finished: Callable[[], None] = lambda: None) -> int:
    """Write the table, its format chosen by the path's suffix, one sample in memory at a time; returns the rows.

    A file appears whole or not at all; `finished` is called after each sample. Raises ConfigError for another suffix.
    """
    check_suffix(path)
    opened = pa.csv.CSVWriter if path.suffix == ".csv" else pa.parquet.ParquetWriter
    written = 0
    with written_whole(path) as beside, opened(beside, schema(trace)) as writer:
        for place in np.flatnonzero(trace.ok):
            batch = rows(trace, int(place))
            writer.write_batch(batch)
            written += batch.num_rows
            finished()
    return written


def check_suffix(path: Path) -> None:
    """Raise ConfigError unless the path ends in .csv or .parquet."""
    if path.suffix not in SUFFIXES:
        msg = f"expected a file ending in {' or '.join(SUFFIXES)}, got '{path}'"
        raise ConfigError(msg)


def _config_value(config: EvictionConfig, name: str) -> Any:
    value = getattr(config, name)
    return str(value) if _config_type(name) == pa.string() else value


def _config_type(name: str) -> pa.DataType:
    """A budget is text, and so is what is protected of it: 128 are entries, 0.05 a fraction."""
    text = dict.fromkeys(("str", "Budget", "int | float"), pa.string())
    kinds = {**text, "int": pa.int64(), "float": pa.float64()}
    annotation = next(field.type for field in dataclasses.fields(EvictionConfig) if field.name == name)
    return kinds[str(annotation)]


def _spread(array: np.ndarray[Any, Any], dims: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A variable's values for every row, repeated along the axes that it lacks."""
    aligned = np.asarray(array).reshape([shape[AXES.index(axis)] if axis in dims else 1 for axis in AXES])
    return np.broadcast_to(aligned, shape).reshape(-1)
