"""A trace as one tidy table, in CSV or Parquet: a row per sample × configuration × step × layer × head.

Columns: the row's coordinates, every choice of its configuration (null where it has no such option), then every
variable that has no other axes, repeated along the axes that it lacks; drift is that after the row's layer. Parquet
stores each column's unit and meaning in its field's metadata, and the trace's provenance in the file's. In CSV an
apostrophe precedes a text that a spreadsheet would evaluate. Failed samples, and steps past the end of a sample's text,
have no rows. The prompts' own tokens and texts are a table of their own: a row per sample × token.

The same table is available as a pandas table, and the trace as an xarray dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError
from perturbkv.schema import KEPT, ROWS, TEXTS, VARIABLES, Variable
from perturbkv.storage.atomic_files import atomic_path
from perturbkv.storage.output import real_path
from perturbkv.storage.trace.texts import token_texts
from perturbkv.trace import FailedSample, SampleTrace, Trace

AXES = ("config", "step", "layer", "head")
_EVERY_LAYER = "decoder_layer"
"""Axis of variables of all layers; a row has the number of its own layer, a measured one."""
SUFFIXES = (".csv", ".parquet")
_FORMULA, _NUMBER = r"(?s)^[=+\-@\t\r].", r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_COUNTS = ("budget", "protect_first", "protect_recent")
_TOKENS = pa.schema([("sample", pa.string()), ("position", pa.int32()), ("token", pa.int32()), ("text", pa.string())])
_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


def columns(trace: Trace) -> dict[str, Variable]:
    """Return name -> variable for the columns of the table, without codes, texts and variables along other axes."""
    return {
        name: variable
        for name, variable in VARIABLES.items()
        if name in trace.arrays and name not in (*KEPT, *TEXTS) and set(variable.dims) <= {*AXES, _EVERY_LAYER}
    }


def schema(trace: Trace) -> pa.Schema:
    """Return the table's Arrow schema: types, units and provenance."""
    fields = [pa.field("sample", pa.string()), pa.field("config", pa.string())]
    fields += [pa.field(name, kind) for name, (kind, _) in _config_columns(trace.run.configs).items()]
    fields += [pa.field(axis, pa.int32()) for axis in AXES[1:]]
    for name, variable in columns(trace).items():
        meaning = {"units": variable.units, "long_name": variable.long_name}
        fields.append(pa.field(name, pa.from_numpy_dtype(np.dtype(variable.dtype)), metadata=meaning))
    provenance = {"run": trace.run.to_json(), "trace": trace.source, "trace_digest": trace.digest, **trace.attrs}
    return pa.schema(fields, metadata=provenance)


def sample_rows(trace: Trace, sample: int) -> pa.RecordBatch:
    """Return all table rows of the sample at index `sample`."""
    shape = tuple(trace.arrays["perturbation_isolated"].shape[1:])
    cells = np.indices(shape).reshape(len(shape), -1)  # (axis, row): the row's index along each of `AXES`
    measured = trace.measured[sample][cells[AXES.index("step")]]
    index = cells[:, measured]
    config = index[AXES.index("config")]
    values_of: dict[str, Any] = {
        "sample": np.repeat(trace.sample_ids[sample], index.shape[1]),
        "config": np.array(trace.run.labels())[config],
    }
    for name, (kind, values) in _config_columns(trace.run.configs).items():
        values_of[name] = pa.array(values, kind).take(pa.array(config))
    values_of |= {axis: index[number].astype(np.int32) for number, axis in enumerate(AXES) if axis != "config"}
    values_of["layer"] = np.array(trace.layers, dtype=np.int32)[index[AXES.index("layer")]]
    for name, variable in columns(trace).items():
        array = np.asarray(trace.arrays[name][sample])
        if _EVERY_LAYER in variable.dims:
            array = array.take(trace.layers, axis=variable.dims.index(_EVERY_LAYER))
        values_of[name] = _broadcast(array, variable.dims, shape)[measured]
    return pa.RecordBatch.from_pydict(values_of, schema=schema(trace))


def write(trace: Trace, path: Path, finished: Callable[[], None] = lambda: None) -> int:
    """Write the table of a trace to `path`, one sample in memory at a time, and return the number of rows.

    The path's suffix determines the format. The file is written atomically; `finished` is called after each sample.
    Raises ConfigError for another suffix.
    """
    batches = (sample_rows(trace, int(sample)) for sample in np.flatnonzero(trace.ok))
    return _write_batches(path, schema(trace), batches, finished)


def _write_batches(
    path: Path, table_schema: pa.Schema, batches: Iterable[pa.RecordBatch], finished: Callable[[], None] = lambda: None
) -> int:
    """Write a table batch by batch, and return the number of rows; file and errors as in `write`."""
    check_suffix(path)
    is_csv, written = path.suffix == ".csv", 0
    writer_class = pa.csv.CSVWriter if is_csv else pa.parquet.ParquetWriter
    with atomic_path(path) as temporary, writer_class(temporary, table_schema) as writer:
        for batch in batches:
            writer.write_batch(escape_formulas(batch) if is_csv else batch)
            written += batch.num_rows
            finished()
    return written


def escape_formulas(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with an apostrophe before every text that a spreadsheet would evaluate as a formula.

    A spreadsheet evaluates a text that begins with = + - @, a tab or a carriage return, has more characters, and is no
    number.
    """
    columns = [_escape_texts(column) if pa.types.is_string(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _escape_texts(texts: pa.StringArray) -> pa.StringArray:
    """Return the texts, with an apostrophe before those that a spreadsheet would evaluate as a formula."""
    formulas = pc.and_not(pc.match_substring_regex(texts, _FORMULA), pc.match_substring_regex(texts, _NUMBER))
    return pc.if_else(formulas, pc.binary_join_element_wise("'", texts, ""), texts)


def tokens_path(path: Path) -> Path:
    """Return the path of the token table, beside the main table at `path`."""
    return path.with_name(f"{path.stem}.tokens{path.suffix}")


def write_tokens(trace: Trace, path: Path) -> int:
    """Write the table of the prompts' tokens, one row per token, as `write`, and return the number of rows.

    The trace must hold their text.
    """
    return _write_batches(path, _TOKENS, (_token_rows(trace.sample(name)) for name in trace.sample_ids))


def _token_rows(sample: SampleTrace | FailedSample) -> pa.RecordBatch:
    """Return the token-table rows of one sample; none for a failed sample or one stored without text."""
    if isinstance(sample, FailedSample) or not (texts := token_texts(sample.arrays, sample.sample_id)):
        return pa.RecordBatch.from_pylist([], schema=_TOKENS)
    values_of = [[sample.sample_id] * len(texts), range(len(texts)), sample.arrays["prompt_token"], texts]
    columns = [pa.array(values, kind) for values, kind in zip(values_of, _TOKENS.types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=_TOKENS)


def check_suffix(path: Path) -> None:
    """Raise ConfigError for a path that ends in neither .csv nor .parquet."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"expected a file ending in {' or '.join(SUFFIXES)}, got '{path}'")


def check_not_source(trace: Path, path: Path) -> None:
    """Raise ConfigError if the output `path` is the trace file itself, links resolved."""
    if real_path(trace) == real_path(path):
        raise ConfigError(f"expected another file than the trace itself, got {path}; name another")


def _config_columns(configs: Sequence[EvictionConfig]) -> dict[str, tuple[pa.DataType, list[Any]]]:
    """Return column name -> (type, value per configuration) for the configurations' fields and options.

    A column is of its values' type, of floats for whole numbers and floats, and of text for any other mixture and where
    all values are None. Budgets and protected lengths are text: 128 are entries, 0.05 is a fraction.
    """
    flat = [config.flat() for config in configs]
    columns = {}
    for name in dict.fromkeys(name for values in flat for name in values):
        values = [config.get(name) for config in flat]
        if name in _COUNTS:
            values = list(map(str, values))
        kinds = {type(value) for value in values if value is not None}
        kind = kinds.pop() if len(kinds) == 1 else float if kinds == {int, float} else str
        columns[name] = (_TYPES[kind], [value if value is None else kind(value) for value in values])
    return columns


def _broadcast(array: np.ndarray[Any, Any], dims: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return one sample's variable with one value per table row, repeated along the axes that it lacks.

    `dims` are the variable's axes; `shape` has the lengths of all `AXES`.
    """
    axes = [{_EVERY_LAYER: "layer"}.get(axis, axis) for axis in dims]
    aligned = array.reshape([shape[AXES.index(axis)] if axis in axes else 1 for axis in AXES])
    return np.broadcast_to(aligned, shape).reshape(-1)


def to_dataset(trace: Trace) -> Any:
    """Return the trace as an `xarray.Dataset` of all variables, with names and units as in a trace file."""
    import xarray as xr

    coordinates: dict[str, Any] = {"sample": list(trace.sample_ids), "config": trace.run.labels()}
    variables: dict[str, Any] = {
        name: (
            VARIABLES[name].axes,
            np.asarray(array),
            {"units": VARIABLES[name].units, "long_name": VARIABLES[name].long_name},
        )
        for name, array in trace.arrays.items()
    }
    variables["complete"] = (("sample",), trace.ok.astype(np.uint8), {})
    variables["failure"] = (("sample",), [trace.failures.get(name, "") for name in trace.sample_ids], {})
    dataset = xr.Dataset(variables, coordinates, {"run": trace.run.to_json(), **trace.attrs})
    indices = {axis: np.arange(length) for axis, length in dataset.sizes.items() if axis not in {*coordinates, *ROWS}}
    if "layer" in indices:
        indices["layer"] = np.array(trace.layers)
    return dataset.assign_coords(indices)


def to_table(trace: Trace) -> Any:
    """Return the trace as a `pandas.DataFrame`, one row per sample × configuration × step × layer × head."""
    batches = [sample_rows(trace, int(sample)) for sample in np.flatnonzero(trace.ok)]
    return pa.Table.from_batches(batches, schema=schema(trace)).to_pandas()
