"""Reading a trace file as a `Trace`, as a description, or one sample at a time.

FORMAT.md in the parent folder specifies what is read here. Large arrays are read when they are first used.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.configs import layer_types
from perturbkv.configs.run import RunConfig
from perturbkv.errors import TraceError
from perturbkv.schema import ANSWER_TEXT, KEPT, MEASURED, ROWS, TEXT, VARIABLES
from perturbkv.storage.run.journal import Journal, journal_path
from perturbkv.storage.run.shards import beside
from perturbkv.storage.trace import layout
from perturbkv.storage.trace.hdf5 import StoredFile, check_heaps, open_file
from perturbkv.storage.trace.layout import AXES, STORED
from perturbkv.storage.trace.validation import (
    axes_of,
    check_codes,
    check_configs,
    check_coordinate,
    check_expected,
    check_numbers,
    check_ranges,
    check_run,
    check_samples,
    check_shapes,
    check_states,
    check_step_counts,
    check_structure,
    check_text,
    check_version,
    run_of,
    variables_of,
)
from perturbkv.trace import Trace, sample_arrays
from perturbkv.user_files import FileKind


def sample_of(file: StoredFile, names: Iterable[str], place: int) -> dict[str, NDArray[Any]]:
    """Return those of the named variables that a complete sample has, as in a `SampleTrace`, reading its bytes alone.

    Raises TraceError where its codes are no kept positions.
    """
    held = sample_arrays(file.read, [name for name in names if name in file], place)
    if KEPT[2] in held:
        told = {name: file.read(name, place)[np.newaxis] for name in ("kept_count", "prompt_tokens")}
        told |= {name: held[name][np.newaxis] for name in KEPT[:2] if name in held}
        check_codes(file.path, told, np.array([True]), held[KEPT[2]])
    return held


class LazyArrays(Mapping[str, NDArray[np.generic]]):
    """Arrays by name: `held` are in memory, `later` are read by `read` when first used, once each."""

    def __init__(
        self, held: Mapping[str, NDArray[Any]], later: Sequence[str], read: Callable[[str], NDArray[Any]]
    ) -> None:
        self._held, self._later, self._read = dict(held), tuple(later), read

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        if name in self._later and name not in self._held:
            self._held[name] = self._read(name)
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._held, *self._later]))

    def __len__(self) -> int:
        return len(set(self._held) | set(self._later))


_FILE = FileKind("a trace file (HDF5)", TraceError, most=2**63)
_OWN = ("run", "_NCProperties", layout.CHECKSUM)
"""Root attributes that are no provenance."""


def read_trace(path: str | Path) -> Trace:
    """Return a finished trace. Raises TraceError for any other file, and where its labels are not its run's.

    Kept positions, text and saved outputs, which may be larger than memory should hold, are read when first used;
    everything else at once. Variables that the file lacks are absent: `Trace.get` raises an error that names the
    command that measures them.
    """
    path = Path(path)
    with opened(path) as file:
        run = _checked_run(file)
        ids, failures = _samples(file)
        names = [name for name in VARIABLES if name in file]
        later = [name for name in names if _is_large(name)]
        arrays = {name: file.read(name) for name in names if name not in later}
        attrs = _provenance(file)
    digest = _digest(path)
    trace = Trace(run, ids, LazyArrays(arrays, later, _read_later(path)), failures, attrs, str(path), digest)
    check_numbers(path, arrays, trace.measured)
    return trace


def _is_large(name: str) -> bool:
    return VARIABLES[name].in_rows or VARIABLES[name].dtype == "str" or VARIABLES[name].raw


def _read_later(path: Path) -> Callable[[str], Any]:
    """Return a function that reads one variable; it raises TraceError once the file was written again."""
    stamp = path.stat().st_mtime_ns

    def read(name: str) -> Any:
        with opened(path, stamp) as file:
            return _checked_rows(file, name, file.read(name))

    return read


def _checked_rows(file: StoredFile, name: str, found: Any) -> Any:
    """Return a variable's contents.

    Raises TraceError for offsets outside a prompt or its text, and for invalid lists.
    """
    if name == "kept_code":
        told = {one: file.read(one) for one in (*KEPT[:2], "kept_count", "prompt_tokens")}
        check_codes(file.path, told, file.read("complete") != 0, found)
    elif name == "prompt_start":
        told = {one: file.read(one) for one in ("prompt_offset", "prompt_count", "prompt_text")}
        check_text(file.path, told, found)
    elif name == "expected_answers":
        check_expected(file.path, found)
    return found


@dataclass(frozen=True)
class StoredVariable:
    """A variable's description in the file."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    units: str
    long_name: str
    nbytes: int


@dataclass(frozen=True)
class Description:
    """The contents of a trace file without its numbers, but for the bytes of its evicted caches, summed over samples.

    `with_text` has the samples whose prompt's text is stored, `with_kept` those whose kept positions are,
    `with_answers` those whose answers' text is.
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
    """Return a trace's run, samples, variables and provenance. Raises TraceError as `read_trace` does."""
    path = Path(path)
    with opened(path) as file:
        run = _checked_run(file)
        ids, failures = _samples(file)
        names = dict.fromkeys([*variables_of(file.names()), *file.names()])
        found = {name: _stored(file, name) for name in names if name not in AXES}
        variables = {name: one for name, one in found.items() if one is not None}
        caches = {name: int(file.read(name).sum()) for name in ("cache_bytes", "cache_padding_bytes") if name in file}
        stored = _samples_with_text(file, ids), _samples_with_kept(file, ids), _samples_with_answers(file, ids)
        return Description(run, ids, failures, _provenance(file), variables, caches, *stored)


def _samples_with_text(file: StoredFile, ids: Sequence[str]) -> tuple[str, ...]:
    counts = file.read("prompt_count") if all(name in file for name in TEXT) else np.zeros(len(ids))
    return tuple(name for name, count in zip(ids, counts, strict=True) if count)


def _samples_with_answers(file: StoredFile, ids: Sequence[str]) -> tuple[str, ...]:
    told = file.read("expected_answers") if all(name in file for name in ANSWER_TEXT) else np.full(len(ids), "")
    return tuple(name for name, expected in zip(ids, told.tolist(), strict=True) if expected)


def _samples_with_kept(file: StoredFile, ids: Sequence[str]) -> tuple[str, ...]:
    if not all(name in file for name in KEPT):
        return ()
    counts, lengths = (file.read(name).reshape(len(ids), -1) for name in ("kept_count", "kept_length"))
    complete = (file.read("complete") != 0) & ((counts == 0) | (lengths > 0)).all(axis=1)
    return tuple(name for name, held in zip(ids, complete.tolist(), strict=True) if held)


def _stored(file: StoredFile, name: str) -> StoredVariable | None:
    """Return a variable's description, also of an unknown one; None for an item that is no variable."""
    if name not in STORED:
        held = file.unknown_variable(name)
        return held and StoredVariable(*held)
    variable, shape = STORED[name], file.shape(name)
    if variable.dtype == "str":  # of a text HDF5 counts its address alone
        dtype, nbytes = "object", sum(len(str(text).encode()) for text in file.read(name).flat)
    else:
        dtype, nbytes = variable.dtype, math.prod(shape) * np.dtype(variable.dtype).itemsize
    return StoredVariable(variable.axes, shape, dtype, variable.units, file.text(name, "long_name"), nbytes)


def read_run(path: Path) -> RunConfig:
    """Return the run of a trace file, its numbers unread. Raises TraceError as `read_trace` does."""
    with opened(path) as file:
        return _run(file)


def describe_whole(path: Path) -> Description:
    """Return the description of a whole trace, which can be extended.

    Raises TraceError as `describe` does, and where a variable is missing that a trace MUST hold.
    """
    held = describe(path)
    missing = [name for name, variable in VARIABLES.items() if not variable.optional and name not in held.variables]
    if missing:
        names = ", ".join(missing)
        msg = f"expected a whole trace at {path}, got one without {names}; use another --output, or --overwrite"
        raise TraceError(msg)
    return held


@contextmanager
def opened(path: Path, stamp: int | None = None) -> Iterator[StoredFile]:
    """Open a trace file for reading.

    Raises TraceError for a missing or damaged file, and for one that was written after `stamp` (st_mtime_ns).
    """
    if not path.exists():
        raise TraceError(_missing(path))
    _FILE.check(path)
    with open_file(path) as file:
        if stamp is None:  # with one it was looked through before
            check_heaps(path)
        elif path.stat().st_mtime_ns != stamp:
            msg = f"expected the trace at {path} as it was, got one written since; open it again"
            raise TraceError(msg)
        yield file


def _missing(path: Path) -> str:
    journal = Journal(journal_path(path))
    if journal.folder.exists():
        kept = len(journal.sample_ids())
        return f"the run of {path} is unfinished, {kept} samples are kept; run the same command again to go on"
    if shards := beside(path):
        finished, count = sum(one.is_done() for one in shards), shards[0].shard.count
        return (
            f"the run of {path} is in shards, of which {finished} of {count} are done; perturbkv merge {path} joins "
            "them, or says which is missing"
        )
    return f"expected a trace file at {path}, got nothing; make one with perturbkv trace -o {path}"


def _run(file: StoredFile) -> RunConfig:
    check_version(file)
    return run_of(file)


def _checked_run(file: StoredFile) -> RunConfig:
    """Return the run of a file that follows the format, and whose axes are the run's and its variables'.

    Raises TraceError for any other file, such as one with counts outside their axes or with a sample that is neither
    complete nor failed.
    """
    run = _run(file)
    check_structure(file)
    path, names = file.path, file.names()
    lengths = {axis: file.shape(axis)[0] for axis in axes_of(names)}
    check_configs(path, run.labels(), _names(file, "config"))
    check_run(path, lengths, run)
    check_samples(path, _names(file, "sample"))
    check_shapes(path, lengths, {name: file.shape(name) for name in variables_of(names)})
    for axis in lengths:
        if axis not in ("sample", "config", *ROWS):
            check_coordinate(path, axis, file.read(axis), _measured_layers(file) if axis == "layer" else None)
    if "steps_measured" in file:
        check_step_counts(path, file.read("steps_measured"), file.read("complete") != 0, lengths["step"])
    check_states(path, file.read("complete"), file.read("failure"))
    for axis, told in ROWS.items():
        if {*told, axis} <= set(names):
            offset, count = map(file.read, told)
            check_ranges(path, axis, told, offset, count, lengths[axis])
    return run


def _measured_layers(file: StoredFile) -> tuple[int, ...] | None:
    """Return the measured layers' indices; None where the file stores none. Raises TraceError for an invalid list."""
    told = file.attributes().get(MEASURED)
    if told is None:
        return None
    try:
        found, of = layer_types.parse_measured(str(told))
    except ValueError:
        found, of = (), 0
    if not found or list(found) != sorted(set(found)) or not 0 <= found[0] <= found[-1] < of:
        file.refuse(f"{MEASURED} such as '5 11 17 of 18'", f"'{told}'")
    return found


def _names(file: StoredFile, axis: str) -> list[str]:
    return [str(name) for name in file.read(axis)]


def _samples(file: StoredFile) -> tuple[tuple[str, ...], dict[str, str]]:
    ids, complete = tuple(_names(file, "sample")), file.read("complete")
    reasons = zip(ids, file.read("failure"), complete, strict=True)
    return ids, {name: str(reason) for name, reason, whole in reasons if not whole}


def _provenance(file: StoredFile) -> dict[str, str]:
    """Return the root attributes that are not the format's own."""
    return {name: str(value) for name, value in file.attributes().items() if name not in _OWN}


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12]
