"""Reading a trace file as a `Trace`, as a description, or one sample at a time.

FORMAT.md in the parent folder specifies what is read here. Large arrays are read when they are first used. A file is
checked once, when it is opened: names, dims, no NaN where a step was measured, possible counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from perturbkv.configs.run import RunConfig
from perturbkv.errors import PerturbkvError, TraceError
from perturbkv.schema import (
    ANSWER_TEXT,
    AT_CHOSEN_STEPS,
    AXES,
    FLAGS,
    FORMAT,
    FORMAT_VERSION,
    ISOLATED,
    KEPT,
    MEASURED_LAYERS,
    OF_KEPT_SETS,
    STORED,
    TEXT,
    VARIABLES,
    isolated_steps,
)
from perturbkv.storage.run.journal import Journal, journal_path
from perturbkv.storage.run.shards import find_shards
from perturbkv.storage.trace.hdf5 import StoredFile, StoredVariable, open_file
from perturbkv.trace import Trace, sample_arrays
from perturbkv.user_files import FileKind, is_path, sha256

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


def known_variables(names: Collection[str]) -> list[str]:
    """Return the format's variables that occur in `names`, the items of a file."""
    return [name for name in STORED if name in names]


def check_axes(file: StoredFile, run: RunConfig) -> None:
    """Raise TraceError where an item is missing that every trace has, or an axis is not as the run says."""
    names = file.names()
    if missing := [name for name in _REQUIRED if name not in names]:
        file.refuse(f"'{missing[0]}'", "none")
    lengths = _axis_lengths(file, names)
    for axis, expected in (("sample", run.samples), ("step", run.steps)):
        if lengths[axis] != expected:
            _refuse(file.path, f"the {expected} places of the run along '{axis}'", lengths[axis])
    stored, labels = file.read("config").tolist(), run.labels()
    if stored != labels:
        _refuse(file.path, f"the run's configurations {labels} along 'config'", stored)
    if {"layer", "decoder_layer"} <= lengths.keys():
        layers, total = file.read("layer").tolist(), lengths["decoder_layer"]
        held = "" if layers == list(range(total)) else f"{' '.join(map(str, layers))} of {total}"
        if (told := str(file.attributes.get(MEASURED_LAYERS, ""))) != held:
            _refuse(file.path, f"the attribute {MEASURED_LAYERS} '{held}', as along 'layer'", f"'{told}'")


def check_variables(file: StoredFile) -> None:
    """Raise TraceError where a variable of the format is of another type, or not along its axes."""
    names = file.names()
    lengths = _axis_lengths(file, names)
    for name in known_variables(names):
        axes, is_text = STORED[name].axes, STORED[name].dtype == "str"
        if file.holds_text(name) != is_text:
            file.refuse(f"{name} as {'text' if is_text else 'numbers'}", "another type")
        if (found := file.axes(name)) != axes:
            file.refuse(f"{name} along {' '.join(axes)}", " ".join(found) or "no axis")
        shape = tuple(lengths[axis] for axis in axes)
        if file.shape(name) != shape:
            _refuse(file.path, f"{name} of the shape {shape} along {' '.join(axes)}", file.shape(name))


def _axis_lengths(file: StoredFile, names: Collection[str]) -> dict[str, int]:
    """Return axis -> length of the format's axes among `names`, the items of a file."""
    return {axis: int(np.prod(file.shape(axis))) for axis in AXES if axis in names}


def check_numbers(path: Path, arrays: Arrays, measured: NDArray[np.bool_], isolated_every: int) -> None:
    """Raise TraceError for impossible counts, and for NaN in place of a measured number.

    `measured` (sample, step): True where a step has numbers; isolated ones as the run's `isolated_every` says.
    Variables that `arrays` lacks are not checked. Somebody's caches may lack numbers of kept sets, and isolated ones.
    """
    chosen = isolated_steps(measured, isolated_every)
    for name in _MEASURED:
        if name not in arrays:
            continue
        unknown = np.isnan(arrays[name])
        if name in (*OF_KEPT_SETS, *ISOLATED) and "own_entries" in arrays:
            unknown[arrays["own_entries"] > 0] = False  # (sample, config, …)
        by_step = np.moveaxis(unknown, VARIABLES[name].axes.index("step"), 1)  # (sample, step, …)
        if by_step[chosen if name in AT_CHOSEN_STEPS else measured].any():
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


def read_sample(file: StoredFile, names: Iterable[str], index: int) -> dict[str, NDArray[Any]]:
    """Return name -> array of the named variables that a complete sample has, as in a `SampleTrace`."""
    return sample_arrays(file.read, [name for name in names if name in file], index)


class LazyArrays(Mapping[str, NDArray[np.generic]]):
    """Arrays by name: `arrays` are in memory; those named in `later` are read, by `read(name)`, when first used."""

    def __init__(
        self, arrays: Mapping[str, NDArray[Any]], later: Sequence[str], read: Callable[[str], NDArray[Any]]
    ) -> None:
        self._arrays, self._later, self._read = dict(arrays), tuple(later), read

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        if name in self._later and name not in self._arrays:
            self._arrays[name] = self._read(name)
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._arrays, *self._later]))

    def __len__(self) -> int:
        return len(set(self._arrays) | set(self._later))


_FILE = FileKind("a trace file (HDF5)", TraceError, max_bytes=2**63)
_FORMAT_ATTRIBUTES = ("run", "_NCProperties", "crc32")
"""Root attributes that are no provenance; `crc32` are sums that earlier files carry."""


def read_trace(path: str | Path) -> Trace:
    """Return a finished trace. Raises TraceError for any other file, and for labels that differ from the run's.

    Kept positions, text and saved outputs, which may be larger than memory should hold, are read when first used;
    everything else at once. Variables that the file lacks are absent: `Trace.get` raises an error that names the
    command that measures them.
    """
    path = Path(path)
    with open_trace(path) as file:
        run = _check_and_read_run(file)
        ids, failures = _read_ids_and_failures(file)
        names = [name for name in VARIABLES if name in file]
        later = [name for name in names if VARIABLES[name].is_large]
        arrays = {name: file.read(name) for name in names if name not in later}
        attrs = _provenance(file)
    digest = sha256(path).hex()[:12]
    trace = Trace(run, ids, LazyArrays(arrays, later, _variable_reader(path)), failures, attrs, str(path), digest)
    check_numbers(path, arrays, trace.measured, trace.run.isolated_every)
    return trace


def _variable_reader(path: Path) -> Callable[[str], Any]:
    """Return a function from a variable's name to its contents, which raises TraceError once the file has changed."""
    stamp = path.stat().st_mtime_ns

    def read(name: str) -> Any:
        with open_trace(path, stamp) as file:
            return file.read(name)

    return read


@dataclass(frozen=True)
class Description:
    """The description of a trace file without its numbers.

    Attributes:
        run: the run's configuration.
        sample_ids: all samples, in the order of the file.
        failures: id of each failed sample -> reason.
        attrs: provenance.
        variables: name -> description of each variable, those unknown to the format included.
        caches: variable -> bytes of evicted caches, summed over samples.
        with_text, with_kept, with_answers: ids of the samples stored with their prompt's text, with kept positions,
            and with the text of answers.
    """

    run: RunConfig
    sample_ids: tuple[str, ...]
    failures: dict[str, str]
    attrs: dict[str, str]
    variables: dict[str, StoredVariable]
    caches: dict[str, int]
    with_text: tuple[str, ...]
    with_kept: tuple[str, ...]
    with_answers: tuple[str, ...]


def describe(path: Path) -> Description:
    """Return a trace file's run, samples, variables and provenance. Raises TraceError as `read_trace`."""
    with open_trace(path) as file:
        run = _check_and_read_run(file)
        ids, failures = _read_ids_and_failures(file)
        names = dict.fromkeys([*known_variables(file.names()), *file.names()])
        described = {name: _describe_variable(file, name) for name in names if name not in AXES}
        variables = {name: variable for name, variable in described.items() if variable is not None}
        caches = {name: int(file.read(name).sum()) for name in ("cache_bytes", "cache_padding_bytes") if name in file}
        with_text = _samples_with(file, ids, TEXT, "prompt_count")
        with_answers = _samples_with(file, ids, ANSWER_TEXT, "expected_answers")
        kept = _samples_with_kept(file, ids)
        return Description(run, ids, failures, _provenance(file), variables, caches, with_text, kept, with_answers)


def _samples_with(file: StoredFile, ids: Sequence[str], names: Iterable[str], name: str) -> tuple[str, ...]:
    """Return the ids of the samples for which the variable `name`, one of `names` that are stored together, is set."""
    if not all(each in file for each in names):
        return ()
    return tuple(sample for sample, value in zip(ids, file.read(name).tolist(), strict=True) if value)


def _samples_with_kept(file: StoredFile, ids: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of the complete samples stored with kept positions."""
    if not all(name in file for name in KEPT):
        return ()
    counts, lengths = (file.read(name).reshape(len(ids), -1) for name in ("kept_count", "kept_length"))
    complete = (file.read("complete") != 0) & ((counts == 0) | (lengths > 0)).all(axis=1)
    return tuple(name for name, has_all in zip(ids, complete.tolist(), strict=True) if has_all)


def _describe_variable(file: StoredFile, name: str) -> StoredVariable | None:
    """Return the description of a known or unknown variable; None for an item that is no variable."""
    if name not in STORED:
        return file.describe_unknown(name)
    variable, shape = STORED[name], file.shape(name)
    if variable.dtype == "str":  # HDF5 counts only the addresses of texts
        dtype, nbytes = "object", sum(len(str(text).encode()) for text in file.read(name).flat)
    else:
        dtype, nbytes = variable.dtype, math.prod(shape) * np.dtype(variable.dtype).itemsize
    return StoredVariable(variable.axes, shape, dtype, variable.units, file.text_attribute(name, "long_name"), nbytes)


def read_run(path: Path) -> RunConfig:
    """Return the run of a trace file, without reading or checking the rest. Raises TraceError for another file."""
    with open_trace(path) as file:
        check_version(file)
        return parse_run(file)


def describe_whole(path: Path) -> Description:
    """Return the description of a trace with all required variables, which can therefore be extended.

    Raises TraceError as `describe` does, and where a variable is missing that a trace MUST hold.
    """
    description = describe(path)
    stored = description.variables
    missing = [name for name, variable in VARIABLES.items() if not variable.optional and name not in stored]
    if missing:
        names = ", ".join(missing)
        raise TraceError(
            f"expected a whole trace at {path}, got one without {names}; use another --output, or --overwrite"
        )
    return description


@contextmanager
def open_trace(path: Path, stamp: int | None = None) -> Iterator[StoredFile]:
    """Open a trace file for reading, and yield it.

    Raises TraceError for a missing or damaged file, and for one that was written after `stamp` (st_mtime_ns).
    """
    if is_path(path) and not path.exists():
        raise TraceError(_missing_message(path))
    _FILE.check(path)
    with open_file(path) as file:
        if stamp is not None and path.stat().st_mtime_ns != stamp:
            raise TraceError(f"expected the trace at {path} as it was, got one written since; open it again")
        yield file


def _missing_message(path: Path) -> str:
    """Return the error message for a missing trace, which may be unfinished or divided into shards."""
    journal = Journal(journal_path(path))
    if journal.folder.exists():
        count = len(journal.sample_ids())
        return f"the run of {path} is unfinished, {count} samples are kept; run the same command again to go on"
    if shards := find_shards(path):
        finished, count = sum(shard.is_done() for shard in shards), shards[0].shard.count
        return (
            f"the run of {path} is in shards, of which {finished} of {count} are done; perturbkv merge {path} joins "
            "them, or says which is missing"
        )
    return f"expected a trace file at {path}, got nothing; make one with perturbkv trace -o {path}"


def _check_and_read_run(file: StoredFile) -> RunConfig:
    """Return the run of a file after checking its version, axes, variables and steps. Raises TraceError."""
    check_version(file)
    run = parse_run(file)
    check_axes(file, run)
    check_variables(file)
    if "steps_measured" in file:
        check_step_counts(file.path, file.read("steps_measured"), file.read("complete") != 0, run.steps)
    return run


def _read_ids_and_failures(file: StoredFile) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return all sample ids, and failed sample id -> reason."""
    ids, complete = tuple(map(str, file.read("sample"))), file.read("complete")
    states = zip(ids, file.read("failure"), complete, strict=True)
    return ids, {name: str(reason) for name, reason, is_complete in states if not is_complete}


def _provenance(file: StoredFile) -> dict[str, str]:
    """Return the root attributes that are not part of the format itself."""
    return {name: str(value) for name, value in file.attributes.items() if name not in _FORMAT_ATTRIBUTES}
