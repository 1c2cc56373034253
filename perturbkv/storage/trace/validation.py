"""Checks of a trace file: its structure, its axes, and whether its numbers are possible.

The structure is compared with FORMAT.md (types, axes, units, checksums), the axes with the run and the variables,
counts and offsets with the axes that they refer to. Checksums show that numbers are those that were written; files
without checksums are checked for impossible numbers, such as NaN in place of a number. Each file is checked once, when
it is opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from perturbkv import kept_codec
from perturbkv.configs.run import RunConfig
from perturbkv.errors import PerturbkvError, TraceError
from perturbkv.schema import ROWS, VARIABLES
from perturbkv.storage.trace import layout
from perturbkv.storage.trace.hdf5 import StoredFile
from perturbkv.storage.trace.layout import AXES, FLAGS, FORMAT, FORMAT_VERSION, STORED

Arrays = Mapping[str, NDArray[Any]]
_MOST_TOKENS = 2**31
"""Positions are 32-bit numbers."""
_MEASURED = tuple(name for name, variable in VARIABLES.items() if not variable.optional and variable.dtype == "float64")
"""Variables that hold a number for every measured step."""


def check_states(path: Path, complete: NDArray[Any], reasons: NDArray[Any]) -> None:
    """Raise TraceError for a sample that is neither complete, nor failed with a reason."""
    for index, (flag, reason) in enumerate(zip(complete.tolist(), reasons.tolist(), strict=True)):
        if flag not in (0, 1) or bool(flag) == bool(reason):
            _refuse(path, f"sample {index} complete, or failed for a reason,", f"complete {flag} and '{reason}'")


def check_numbers(path: Path, arrays: Arrays, measured: NDArray[np.bool_]) -> None:
    """Raise TraceError for impossible counts, flags or measured numbers.

    `measured` (sample, step): True where a step has numbers. Variables that `arrays` lacks are not checked.
    """
    ok = np.asarray(measured.any(axis=1))
    for name in ("evicted", "top1_agreement"):
        if name in arrays and (arrays[name] > 1).any():
            _refuse(path, f"{name} of 0 or 1", arrays[name].max())
    for name in _MEASURED:
        if name in arrays:
            _check_finite(path, name, arrays[name], measured)
    if {"prompt_tokens", "kept_count", "stage1_count"} <= arrays.keys():
        _check_counts(path, arrays, ok)
    if {"prompt_tokens", "lost_position"} <= arrays.keys():
        tokens, lost = arrays["prompt_tokens"], arrays["lost_position"]
        _check_within(path, "lost_position", lost[ok], -1, _broadcast(tokens, lost)[ok])


def check_codes(path: Path, arrays: Arrays, ok: NDArray[np.bool_], codes: NDArray[Any]) -> None:
    """Raise TraceError for a stored code that does not give `kept_count` positions within the prompt.

    `arrays` holds kept_offset, kept_length, kept_count and prompt_tokens; offsets point into `codes`.
    """
    columns = np.stack(
        [arrays[name].reshape(len(ok), -1) for name in ("kept_offset", "kept_length", "kept_count")], axis=-1
    )
    for index in np.flatnonzero(ok):
        offsets, lengths, counts = np.unique(columns[index], axis=0).T
        stored = (lengths > 0) | (counts == 0)
        if not kept_codec.are_valid(
            codes, offsets[stored], lengths[stored], counts[stored], int(arrays["prompt_tokens"][index])
        ):
            _refuse(path, "kept_code of as many positions within the prompt as kept_count says", "others")


def check_text(path: Path, arrays: Arrays, starts: NDArray[Any]) -> None:
    """Raise TraceError for prompts whose tokens do not begin within the text, in ascending order.

    `arrays` holds prompt_text, and prompt_offset and prompt_count, which point into `starts`.
    """
    prompts = zip(*(arrays[name].tolist() for name in ("prompt_offset", "prompt_count", "prompt_text")), strict=True)
    for begin, count, text in prompts:
        tokens = starts[begin : begin + count]
        if count and (tokens[0] != 0 or (tokens[1:] < tokens[:-1]).any() or tokens[-1] > len(text)):
            _refuse(path, "prompt_start ascending from 0 within each prompt's text", "others")


def check_expected_answers(path: Path, expected: NDArray[Any]) -> None:
    """Raise TraceError for accepted answers that are not a JSON list of texts."""
    for text in filter(None, expected.tolist()):
        try:
            answers = json.loads(text)
        except (ValueError, RecursionError):
            answers = None
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            _refuse(path, "expected_answers as a JSON list of texts", repr(text[:80]))


def _check_counts(path: Path, arrays: Arrays, ok: NDArray[np.bool_]) -> None:
    """Raise TraceError for impossible counts of tokens or entries in the complete samples (mask `ok`)."""
    tokens, kept, stage1 = (arrays[name][ok] for name in ("prompt_tokens", "kept_count", "stage1_count"))
    _check_within(path, "prompt_tokens", tokens, 1, np.full_like(tokens, _MOST_TOKENS))
    _check_within(path, "kept_count", kept, 0, _broadcast(tokens, kept) + 1)
    _check_within(path, "stage1_count", stage1, 0, kept + 1)
    if {"prompt_count", "question_tokens"} <= arrays.keys():
        stored, question = arrays["prompt_count"][ok], arrays["question_tokens"][ok]
        if ((stored != 0) & (stored != tokens + question)).any():
            _refuse(path, "prompt_count of the prompt's tokens and its question's", stored.tolist())


def _check_finite(path: Path, name: str, numbers: NDArray[Any], measured: NDArray[np.bool_]) -> None:
    """Raise TraceError for NaN in a variable at a measured (sample, step)."""
    steps = np.moveaxis(numbers, VARIABLES[name].axes.index("step"), 1)
    if np.isnan(steps[measured]).any():
        _refuse(path, f"a number everywhere in {name} where a step was measured", "NaN")


def _check_within(path: Path, name: str, numbers: NDArray[Any], low: int, high: NDArray[Any]) -> None:
    """Raise TraceError for numbers outside the range from `low` to below `high`."""
    wrong = (numbers < low) | (numbers >= high)
    if wrong.any():
        index = tuple(np.argwhere(wrong)[0].tolist())
        _refuse(path, f"{name} from {low} to {high[index] - 1}", numbers[index])


def _broadcast(per_sample: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """Return per-sample numbers (sample,) broadcast to the shape of `like`."""
    return np.broadcast_to(per_sample.reshape(-1, *[1] * (like.ndim - 1)), like.shape)


def _refuse(path: Path, expected: str, got: object) -> NoReturn:
    """Raise TraceError for a changed file, with a message of the expected and the actual content."""
    raise TraceError(f"expected {expected} in {path}, got {got}; the file was changed since it was made; make it again")


_REQUIRED = ("sample", "config", "step", *FLAGS)
"""Items that every trace has, whatever its variables."""


def check_structure(file: StoredFile) -> None:
    """Raise TraceError for a known axis or variable that violates the format's specification."""
    names = file.names()
    for name in _REQUIRED:
        if name not in names:
            file.refuse(f"'{name}'", "none")
    axes = known_axes(names)
    for axis in axes:
        _check_type(file, axis, "str" if axis in ("sample", "config") else "" if axis in ROWS else "int64")
        if len(file.shape(axis)) != 1:
            file.refuse(f"one axis of {axis}", f"the shape {file.shape(axis)}")
    for name in known_variables(names):
        _check_variable(file, name, axes)
    _check_checksums(file, [*axes, *known_variables(names)])


def known_axes(names: list[str]) -> list[str]:
    """Return the format's axes that occur in `names`, the items of a file."""
    return [axis for axis in AXES if axis in names]


def known_variables(names: list[str]) -> list[str]:
    """Return the format's variables that occur in `names`, the items of a file."""
    return [name for name in STORED if name in names]


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
    text = file.attributes.get("run")
    if not isinstance(text, str):
        file.refuse("the run as JSON", "none")
    try:
        return RunConfig.from_json(text)
    except PerturbkvError as error:
        file.refuse("the run as JSON", f"one that says: {error}")


def _check_type(file: StoredFile, name: str, dtype: str) -> None:
    """Raise TraceError for a variable or axis of another dtype; an empty `dtype` accepts any."""
    if dtype and not file.has_dtype(name, dtype):
        file.refuse(f"{name} of the type {dtype}", "another")


def _check_variable(file: StoredFile, name: str, axes: list[str]) -> None:
    """Raise TraceError for a variable whose type, axes or unit differ from the format."""
    variable = STORED[name]
    _check_type(file, name, variable.dtype)
    if (stored := file.axes(name, axes)) != variable.axes:
        file.refuse(f"{name} along {' '.join(variable.axes)}", " ".join(stored) or "no axis")
    if (units := file.text(name, "units")) != variable.units:
        file.refuse(f"{name} in the unit {variable.units}", units)


def _check_checksums(file: StoredFile, names: list[str]) -> None:
    """Raise TraceError for a changed text or a missing checksum; accept a file without any checksums."""
    attrs = file.attributes
    if layout.CHECKSUM not in attrs:
        return
    meanings = {name: layout.checksum_text(file.text(name, "units"), file.text(name, "long_name")) for name in names}
    texts = {name: value for name, value in attrs.items() if isinstance(value, str)}
    try:
        differing = layout.first_difference(str(attrs[layout.CHECKSUM]), texts, meanings)
    except (ValueError, RecursionError):
        differing = layout.CHECKSUM
    if differing is not None:
        file.refuse(f"'{differing}' as it was written", "another or none")
    for name in names:
        if name not in ROWS and file.checksums(name) is None:
            file.refuse(f"the sums of {name}", "none")


Counts = NDArray[np.int64]


def check_configs(path: Path, labels: Sequence[str], stored: Sequence[str]) -> None:
    """Raise TraceError if the coordinate `config` differs from the labels of the run's configurations, in order."""
    if len(stored) != len(labels):
        _refuse(path, f"the {len(labels)} configurations of the run along 'config'", len(stored))
    for index, (expected, got) in enumerate(zip(labels, stored, strict=True)):
        if expected != got:
            _refuse(path, f"'{expected}', as the run says, at place {index} along 'config'", f"'{got}'")


def check_run(path: Path, lengths: Mapping[str, int], run: RunConfig) -> None:
    """Raise TraceError if the lengths of the sample and step axes differ from the run's."""
    for axis, expected in (("sample", run.samples), ("step", run.steps)):
        if lengths[axis] != expected:
            _refuse(path, f"the {expected} places of the run along '{axis}'", lengths[axis])


def check_samples(path: Path, ids: Sequence[str]) -> None:
    """Raise TraceError for a duplicate sample id."""
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if list(ids).count(name) > 1)
        _refuse(path, "every sample id once along 'sample'", f"'{twice}' twice")


def check_coordinate(path: Path, axis: str, stored: NDArray[np.generic], measured: Sequence[int] | None = None) -> None:
    """Raise TraceError if an axis' coordinate is not 0, 1, 2, …, or not the layer indices `measured`, if given."""
    if not np.array_equal(stored, np.arange(len(stored)) if measured is None else np.array(measured)):
        expected = f"0 … {len(stored) - 1}" if measured is None else " ".join(map(str, measured))
        _refuse(path, f"the places {expected} along '{axis}'", f"{stored[:8].tolist()} …")


def check_shapes(path: Path, lengths: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise TraceError for a variable whose shape contradicts the lengths of its axes."""
    for name, shape in shapes.items():
        axes = VARIABLES[name].axes if name in VARIABLES else ("sample",)
        expected = tuple(lengths[axis] for axis in axes)
        if shape != expected:
            _refuse(path, f"{name} of the shape {expected} along {' '.join(axes)}", shape)


def check_step_counts(path: Path, measured: Counts, ok: NDArray[np.bool_], steps: int) -> None:
    """Raise TraceError if `steps_measured` is not 1 … `steps` in complete samples and 0 in failed samples."""
    wrong = np.where(ok, (measured < 1) | (measured > steps), measured != 0)
    if wrong.any():
        sample = int(wrong.argmax())
        expected = f"1 … {steps}" if ok[sample] else "0, as the sample failed,"
        _refuse(path, f"steps_measured of {expected} for sample {sample}", measured[sample])


def check_ranges(path: Path, axis: str, names: tuple[str, str], offset: Counts, count: Counts, rows: int) -> None:
    """Raise TraceError for ranges (offset, count) of two variables that exceed the `rows` of an axis."""
    wrong = (offset < 0) | (count < 0) | (count > rows - offset)
    if wrong.any():
        where = tuple(np.argwhere(wrong)[0].tolist())
        got = f"{offset[where]} and {count[where]} at {where}"
        _refuse(path, f"{' and '.join(names)} within the {rows} places along '{axis}'", got)
