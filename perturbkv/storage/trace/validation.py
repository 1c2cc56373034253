"""Checks of a trace file, once, when it is opened: names, dims, no NaN where a step was measured, possible counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from perturbkv.configs.run import RunConfig
from perturbkv.errors import PerturbkvError, TraceError
from perturbkv.schema import VARIABLES
from perturbkv.storage.trace.hdf5 import StoredFile
from perturbkv.storage.trace.layout import AXES, FLAGS, FORMAT, FORMAT_VERSION, STORED

Arrays = Mapping[str, NDArray[Any]]
_MOST_TOKENS = 2**31
"""Positions are 32-bit numbers."""
_MEASURED = tuple(name for name, variable in VARIABLES.items() if not variable.optional and variable.dtype == "float64")
"""Variables that hold a number for every measured step."""
_REQUIRED = ("sample", "config", "step", *FLAGS)
"""Items that every trace has, whatever its variables."""


def check_version(file: StoredFile) -> None:
    """Raise TraceError for a file of another format or format version."""
    attrs = file.attributes
    if attrs.get("format") != FORMAT:
        file.refuse("a perturbkv trace", "another HDF5 file")
    version = attrs.get("format_version")
    if not isinstance(version, int) or version < 1:
        file.refuse(f"the format_version {FORMAT_VERSION}", str(version))
    if version != FORMAT_VERSION:
        measure_again = "measure it again: the perturbkv trace that made it, with --overwrite"
        advice = "update perturbkv" if version > FORMAT_VERSION else measure_again
        raise TraceError(f"expected a trace of format {FORMAT_VERSION} at {file.path}, got format {version}; {advice}")


def parse_run(file: StoredFile) -> RunConfig:
    """Return the run's configuration stored in a file. Raises TraceError for an invalid one."""
    try:
        return RunConfig.from_json(str(file.attributes.get("run", "")))
    except PerturbkvError as error:
        file.refuse("the run as JSON", f"one that says: {error}")


def known_variables(names: list[str]) -> list[str]:
    """Return the format's variables that occur in `names`, the items of a file."""
    return [name for name in STORED if name in names]


def check_dims(file: StoredFile, run: RunConfig) -> None:
    """Raise TraceError where an axis is not as the run says, or a variable not along its axes."""
    names = file.names()
    if missing := [name for name in _REQUIRED if name not in names]:
        file.refuse(f"'{missing[0]}'", "none")
    lengths = {axis: int(np.prod(file.shape(axis))) for axis in AXES if axis in names}
    for axis, expected in (("sample", run.samples), ("step", run.steps)):
        if lengths[axis] != expected:
            _refuse(file.path, f"the {expected} places of the run along '{axis}'", lengths[axis])
    stored, labels = file.read("config").tolist(), run.labels()
    if stored != labels:
        _refuse(file.path, f"the run's configurations {labels} along 'config'", stored)
    for name in known_variables(names):
        axes, text = STORED[name].axes, STORED[name].dtype == "str"
        if file.holds_text(name) != text:
            file.refuse(f"{name} as {'text' if text else 'numbers'}", "another type")
        if (found := file.axes(name)) != axes:
            file.refuse(f"{name} along {' '.join(axes)}", " ".join(found) or "no axis")
        shape = tuple(lengths[axis] for axis in axes)
        if file.shape(name) != shape:
            _refuse(file.path, f"{name} of the shape {shape} along {' '.join(axes)}", file.shape(name))


def check_numbers(path: Path, arrays: Arrays, measured: NDArray[np.bool_]) -> None:
    """Raise TraceError for impossible counts, and for NaN in place of a measured number.

    `measured` (sample, step): True where a step has numbers. Variables that `arrays` lacks are not checked.
    """
    for name in _MEASURED:
        if (
            name in arrays
            and np.isnan(np.moveaxis(arrays[name], VARIABLES[name].axes.index("step"), 1)[measured]).any()
        ):
            _refuse(path, f"a number everywhere in {name} where a step was measured", "NaN")
    if {"prompt_tokens", "kept_count", "stage1_count"} <= arrays.keys():
        ok = measured.any(axis=1)
        tokens, kept, stage1 = (arrays[name][ok] for name in ("prompt_tokens", "kept_count", "stage1_count"))
        most = np.broadcast_to(tokens.reshape(-1, *[1] * (kept.ndim - 1)), kept.shape)
        _check_within(path, "prompt_tokens", tokens, 1, np.full_like(tokens, _MOST_TOKENS))
        _check_within(path, "kept_count", kept, 0, most + 1)
        _check_within(path, "stage1_count", stage1, 0, kept + 1)


def check_step_counts(path: Path, counts: NDArray[np.int64], ok: NDArray[np.bool_], steps: int) -> None:
    """Raise TraceError if `steps_measured` is not 1 … `steps` in complete samples and 0 in failed samples."""
    wrong = np.where(ok, (counts < 1) | (counts > steps), counts != 0)
    if wrong.any():
        sample = int(wrong.argmax())
        expected = f"1 … {steps}" if ok[sample] else "0, as the sample failed,"
        _refuse(path, f"steps_measured of {expected} for sample {sample}", counts[sample])


def _check_within(path: Path, name: str, numbers: NDArray[Any], low: int, high: NDArray[Any]) -> None:
    """Raise TraceError for numbers outside the range from `low` to below `high`."""
    wrong = (numbers < low) | (numbers >= high)
    if wrong.any():
        index = tuple(np.argwhere(wrong)[0].tolist())
        _refuse(path, f"{name} from {low} to {high[index] - 1}", numbers[index])


def _refuse(path: Path, expected: str, got: object) -> NoReturn:
    """Raise TraceError for a changed file, with a message of the expected and the actual content."""
    raise TraceError(f"expected {expected} in {path}, got {got}; the file was changed since it was made; make it again")
