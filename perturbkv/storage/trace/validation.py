"""Checks of a trace file: its structure, its axes, and whether its numbers are possible.

The structure is compared with FORMAT.md (types, axes, units, checksums), the axes with the run and the variables,
counts and offsets with the axes that they refer to. Checksums show that numbers are those that were written; files
without any are checked against what no run can have measured, such as NaN in place of a number. Each file is checked
once, when it is opened.
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
_FLAGS = ("evicted", "top1_agreement")
_MOST_TOKENS = 2**31
"""Positions are 32-bit numbers."""
_MEASURED = tuple(name for name, variable in VARIABLES.items() if not variable.optional and variable.dtype == "float64")
"""Variables that hold a number for every measured step."""


def check_states(path: Path, complete: NDArray[Any], reasons: NDArray[Any]) -> None:
    """Raise TraceError unless every sample is complete without a reason, or failed with one."""
    for place, (whole, reason) in enumerate(zip(complete.tolist(), reasons.tolist(), strict=True)):
        if whole not in (0, 1) or bool(whole) == bool(reason):
            _refuse(path, f"sample {place} complete, or failed for a reason,", f"complete {whole} and '{reason}'")


def check_numbers(path: Path, arrays: Arrays, measured: NDArray[np.bool_]) -> None:
    """Raise TraceError unless counts, flags and measured numbers are possible.

    `measured`: (sample, step) True where a step has numbers. Absent variables are skipped.
    """
    ok = np.asarray(measured.any(axis=1))
    for name in _FLAGS:
        if name in arrays and (arrays[name] > 1).any():
            _refuse(path, f"{name} of 0 or 1", str(arrays[name].max()))
    for name in _MEASURED:
        if name in arrays:
            _check_finite(path, name, arrays[name], measured)
    if {"prompt_tokens", "kept_count", "stage1_count"} <= arrays.keys():
        _check_counts(path, arrays, ok)
    if {"prompt_tokens", "lost_position"} <= arrays.keys():
        tokens, lost = arrays["prompt_tokens"], arrays["lost_position"]
        _check_within(path, "lost_position", lost[ok], -1, _broadcast(tokens, lost)[ok])


def check_codes(path: Path, arrays: Arrays, ok: NDArray[np.bool_], codes: NDArray[Any]) -> None:
    """Raise TraceError unless every head's code is absent or has `kept_count` positions within the prompt.

    `arrays` holds kept_offset, kept_length, kept_count and prompt_tokens; the codes lie within `codes`.
    """
    told = np.stack(
        [arrays[name].reshape(len(ok), -1) for name in ("kept_offset", "kept_length", "kept_count")], axis=-1
    )
    for place in np.flatnonzero(ok):
        offsets, lengths, counts = np.unique(told[place], axis=0).T
        there = (lengths > 0) | (counts == 0)
        if not kept_codec.are_sound(
            codes, offsets[there], lengths[there], counts[there], int(arrays["prompt_tokens"][place])
        ):
            _refuse(path, "kept_code of as many positions within the prompt as kept_count says", "others")


def check_text(path: Path, arrays: Arrays, starts: NDArray[Any]) -> None:
    """Raise TraceError unless every prompt's tokens begin within its text, in ascending order.

    `arrays` holds prompt_offset and prompt_count, whose rows lie within `starts`, and prompt_text.
    """
    told = zip(*(arrays[name].tolist() for name in ("prompt_offset", "prompt_count", "prompt_text")), strict=True)
    for begin, count, text in told:
        own = starts[begin : begin + count]
        if count and (own[0] != 0 or (own[1:] < own[:-1]).any() or own[-1] > len(text)):
            _refuse(path, "prompt_start ascending from 0 within each prompt's text", "others")


def check_expected(path: Path, expected: NDArray[Any]) -> None:
    """Raise TraceError unless accepted answers are a JSON list of texts in every sample that has any."""
    for text in filter(None, expected.tolist()):
        try:
            told = json.loads(text)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, list) or not all(isinstance(one, str) for one in told):
            _refuse(path, "expected_answers as a JSON list of texts", repr(text[:80]))


def _check_counts(path: Path, arrays: Arrays, ok: NDArray[np.bool_]) -> None:
    tokens, kept, stage1 = (arrays[name][ok] for name in ("prompt_tokens", "kept_count", "stage1_count"))
    _check_within(path, "prompt_tokens", tokens, 1, np.full_like(tokens, _MOST_TOKENS))
    _check_within(path, "kept_count", kept, 0, _broadcast(tokens, kept) + 1)
    _check_within(path, "stage1_count", stage1, 0, kept + 1)
    if {"prompt_count", "question_tokens"} <= arrays.keys():
        held, question = arrays["prompt_count"][ok], arrays["question_tokens"][ok]
        if ((held != 0) & (held != tokens + question)).any():
            _refuse(path, "prompt_count of the prompt's tokens and its question's", str(held.tolist()))


def _check_finite(path: Path, name: str, numbers: NDArray[Any], measured: NDArray[np.bool_]) -> None:
    steps = np.moveaxis(numbers, VARIABLES[name].axes.index("step"), 1)
    if np.isnan(steps[measured]).any():
        _refuse(path, f"a number everywhere in {name} where a step was measured", "NaN")


def _check_within(path: Path, name: str, held: NDArray[Any], least: int, above: NDArray[Any]) -> None:
    """Raise TraceError for numbers below `least` or not below `above`."""
    wrong = (held < least) | (held >= above)
    if wrong.any():
        where = tuple(np.argwhere(wrong)[0].tolist())
        most = np.broadcast_to(above, held.shape)[where] - 1
        _refuse(path, f"{name} from {least} to {most}", f"{held[where]}")


def _broadcast(of_samples: NDArray[Any], held: NDArray[Any]) -> NDArray[Any]:
    """Return (sample,) numbers broadcast to the shape of `held`."""
    spread = of_samples.reshape(-1, *[1] * (held.ndim - 1))
    return np.broadcast_to(spread, held.shape)


def _refuse(path: Path, expected: str, got: str) -> NoReturn:
    msg = f"expected {expected} in {path}, got {got}; the file was changed since it was made; make it again"
    raise TraceError(msg)


_NEEDED = ("sample", "config", "step", *FLAGS)
"""Items that every trace has, whatever its variables."""
_TEXTS = ("sample", "config")


def check_structure(file: StoredFile) -> None:
    """Raise TraceError unless every known axis and variable is as the format specifies it."""
    names = file.names()
    for name in _NEEDED:
        if name not in names:
            file.refuse(f"'{name}'", "none")
    axes = axes_of(names)
    for axis in axes:
        _check_type(file, axis, "str" if axis in _TEXTS else "" if axis in ROWS else "int64")
        if len(file.shape(axis)) != 1:
            file.refuse(f"one axis of {axis}", f"the shape {file.shape(axis)}")
    for name in variables_of(names):
        _check_variable(file, name, axes)
    _check_sums(file, [*axes, *variables_of(names)])


def axes_of(names: list[str]) -> list[str]:
    """Return the known axes among these names."""
    return [axis for axis in AXES if axis in names]


def variables_of(names: list[str]) -> list[str]:
    """Return the known variables among these names."""
    return [name for name in STORED if name in names]


def check_version(file: StoredFile) -> None:
    """Raise TraceError for another format, or another version of it."""
    attrs = file.attributes()
    if attrs.get("format") != FORMAT:
        file.refuse("a perturbkv trace", "another HDF5 file")
    version = attrs.get("format_version")
    if not isinstance(version, int) or version < 1:
        file.refuse(f"the format_version {FORMAT_VERSION}", str(version))
    if version != FORMAT_VERSION:
        file.refuse_version(version, FORMAT_VERSION)


def run_of(file: StoredFile) -> RunConfig:
    """Return the file's run. Raises TraceError where it is invalid."""
    text = file.attributes().get("run")
    if not isinstance(text, str):
        file.refuse("the run as JSON", "none")
    try:
        return RunConfig.from_json(text)
    except PerturbkvError as error:
        file.refuse("the run as JSON", f"one that says: {error}")


def _check_type(file: StoredFile, name: str, dtype: str) -> None:
    if dtype and not file.has_dtype(name, dtype):
        file.refuse(f"{name} of the type {dtype}", "another")


def _check_variable(file: StoredFile, name: str, axes: list[str]) -> None:
    variable = STORED[name]
    _check_type(file, name, variable.dtype)
    if (found := file.axes(name, axes)) != variable.axes:
        file.refuse(f"{name} along {' '.join(variable.axes)}", " ".join(found) or "no axis")
    if (units := file.text(name, "units")) != variable.units:
        file.refuse(f"{name} in the unit {variable.units}", units)


def _check_sums(file: StoredFile, names: list[str]) -> None:
    """Raise TraceError for a changed text or a missing checksum; do nothing for a file without any checksums."""
    attrs = file.attributes()
    if layout.CHECKSUM not in attrs:
        return
    said = {name: layout.checksum_text(file.text(name, "units"), file.text(name, "long_name")) for name in names}
    texts = {name: value for name, value in attrs.items() if isinstance(value, str)}
    try:
        differing = layout.differing_checksums(str(attrs[layout.CHECKSUM]), texts, said)
    except (ValueError, RecursionError):
        differing = layout.CHECKSUM
    if differing is not None:
        file.refuse(f"'{differing}' as it was written", "another or none")
    for name in names:
        if name not in ROWS and file.sums(name) is None:
            file.refuse(f"the sums of {name}", "none")


_AGAIN = "the file was changed since it was made; make it again"
Shape = tuple[int, ...]
Counts = NDArray[np.int64]


def check_configs(path: Path, labels: Sequence[str], held: Sequence[str]) -> None:
    """Raise TraceError unless the coordinate `config` holds the labels of the run's configurations in their order."""
    if len(held) != len(labels):
        msg = (
            f"expected the {len(labels)} configurations of the run along 'config' in {path}, got {len(held)}; {_AGAIN}"
        )
        raise TraceError(msg)
    for place, (expected, got) in enumerate(zip(labels, held, strict=True)):
        if expected != got:
            where = f"at place {place} along 'config' in {path}"
            msg = f"expected '{expected}', as the run says, {where}, got '{got}'; {_AGAIN}"
            raise TraceError(msg)


def check_run(path: Path, lengths: Mapping[str, int], run: RunConfig) -> None:
    """Raise TraceError unless there are as many samples and steps as the run has."""
    for axis, expected in (("sample", run.samples), ("step", run.steps)):
        if lengths[axis] != expected:
            msg = f"expected the {expected} places of the run along '{axis}' in {path}, got {lengths[axis]}; {_AGAIN}"
            raise TraceError(msg)


def check_samples(path: Path, held: Sequence[str]) -> None:
    """Raise TraceError unless sample ids are unique."""
    if len(set(held)) < len(held):
        twice = next(name for name in held if list(held).count(name) > 1)
        msg = f"expected every sample id once along 'sample' in {path}, got '{twice}' twice; {_AGAIN}"
        raise TraceError(msg)


def check_coordinate(path: Path, axis: str, held: NDArray[np.generic], measured: Sequence[int] | None = None) -> None:
    """Raise TraceError unless a coordinate is 0, 1, 2, …, or the indices of the measured layers."""
    if not np.array_equal(held, np.arange(len(held)) if measured is None else np.array(measured)):
        expected = f"0 … {len(held) - 1}" if measured is None else " ".join(map(str, measured))
        msg = f"expected the places {expected} along '{axis}' in {path}, got {held[:8].tolist()} …; {_AGAIN}"
        raise TraceError(msg)


def check_shapes(path: Path, lengths: Mapping[str, int], shapes: Mapping[str, Shape]) -> None:
    """Raise TraceError unless every variable is as long along each axis as the axis' coordinate."""
    for name, shape in shapes.items():
        axes = VARIABLES[name].axes if name in VARIABLES else ("sample",)
        expected = tuple(lengths[axis] for axis in axes)
        if shape != expected:
            msg = f"expected {name} of the shape {expected} along {' '.join(axes)} in {path}, got {shape}; {_AGAIN}"
            raise TraceError(msg)


def check_step_counts(path: Path, measured: Counts, ok: NDArray[np.bool_], steps: int) -> None:
    """Raise TraceError unless `steps_measured` is 1 … `steps` in every complete sample and 0 in every failed one."""
    wrong = np.where(ok, (measured < 1) | (measured > steps), measured != 0)
    if wrong.any():
        place = int(wrong.argmax())
        expected = f"1 … {steps}" if ok[place] else "0, as the sample failed,"
        msg = f"expected steps_measured of {expected} for sample {place} in {path}, got {measured[place]}; {_AGAIN}"
        raise TraceError(msg)


def check_ranges(path: Path, axis: str, names: tuple[str, str], offset: Counts, count: Counts, held: int) -> None:
    """Raise TraceError unless the ranges given by two variables, offset and count, lie within `held` rows of `axis`."""
    wrong = (offset < 0) | (count < 0) | (count > held - offset)
    if wrong.any():
        where = tuple(np.argwhere(wrong)[0].tolist())
        msg = (
            f"expected {' and '.join(names)} within the {held} places along '{axis}' in {path}, "
            f"got {offset[where]} and {count[where]} at {where}; {_AGAIN}"
        )
        raise TraceError(msg)
