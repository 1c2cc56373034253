"""What one sample yields, and what a whole run holds: NumPy arrays of the variables that `schema` declares."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perturbkv import kept_codec
from perturbkv.configs import layer_types
from perturbkv.configs.choice import Choice
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import CHOICES, EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.escaping import line
from perturbkv.schema import ANSWER_TEXT, DIGEST, KEPT, KEY_AXIS, MEASURED, ROWS, SUMS, TEXT, VARIABLES, axis_lengths


@dataclass(frozen=True)
class SampleTrace:
    """Everything measured on one sample.

    Attributes:
        sample_id: the sample's name, unique in the run.
        arrays: variable name -> array of `VARIABLES[name].dims`, every variable that is not optional present, and
            those of the kept positions together or not at all. `kept_offset` counts from 0 within the sample.

    Raises TraceError where a variable is missing, unknown, of the wrong rank, or axes of one name differ in length.
    """

    sample_id: str
    arrays: Mapping[str, NDArray[np.generic]]

    def __post_init__(self) -> None:
        for name in self.arrays:
            if name not in VARIABLES:
                msg = f"sample '{self.sample_id}': expected a variable of the trace format, got '{name}'"
                raise TraceError(msg)
        kept = set(KEPT) if not self.arrays.keys().isdisjoint(KEPT) else set()
        needed = {name for name, spec in VARIABLES.items() if not spec.optional} | kept
        missing = [name for name in VARIABLES if name in needed and name not in self.arrays]
        if missing:
            msg = f"sample '{self.sample_id}' lacks {', '.join(missing)}"
            raise TraceError(msg)
        self.sizes()

    def sizes(self) -> dict[str, int]:
        """Axis name -> length. Raises TraceError where two variables disagree."""
        return axis_lengths(self.sample_id, self.shapes())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Variable name -> shape."""
        return {name: array.shape for name, array in self.arrays.items()}


@dataclass(frozen=True)
class FailedSample:
    """A sample that gave no numbers: its name and the one line that says why."""

    sample_id: str
    reason: str


@dataclass(frozen=True, repr=False)
class Trace:
    """A finished trace, in memory.

    Attributes:
        run: what was run.
        sample_ids: the `sample` coordinate, failed samples included.
        failures: sample id -> reason, for the failed ones.
        arrays: variable name -> array with `sample` as its first axis (except `kept_code`, `prompt_token` and
            `prompt_start`: one long axis of all samples, into which `kept_offset` or `prompt_offset` points). Failed
            samples hold NaN, integers 0; so do steps past the end of a complete sample's text, whose token is -1:
            `measured` tells.
        attrs: provenance as stored: format version, versions of libraries, device name, which layers were measured
            where it is not all of them.
        source: where it was read from, for messages and figures; `digest` its SHA-256, shortened.
    """

    run: RunConfig
    sample_ids: tuple[str, ...]
    arrays: Mapping[str, NDArray[np.generic]]
    failures: Mapping[str, str] = field(default_factory=dict)
    attrs: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    digest: str = ""

    @property
    def ok(self) -> NDArray[np.bool_]:
        """(sample,) True where the sample is complete."""
        return np.array([name not in self.failures for name in self.sample_ids], dtype=bool)

    @property
    def measured(self) -> NDArray[np.bool_]:
        """(sample, step) True where a step holds numbers: in a complete sample, before the end of its text.

        A trace that does not say how many steps were measured has all of them.
        """
        steps = self.arrays["token_id"].shape[1]
        counts = self.arrays.get("steps_measured", np.full(len(self.sample_ids), steps))
        return np.asarray((np.arange(steps) < np.asarray(counts)[:, np.newaxis]) & self.ok[:, np.newaxis])

    def layer_name(self, place: int) -> int:
        """Which decoder layer stands at a place along `layer`: of a model that is measured in some alone, the index."""
        told = self.attrs.get(MEASURED)
        return layer_types.parsed(told)[0][place] if told else place

    def get(self, name: str, analysis: str) -> NDArray[np.generic]:
        """The variable over the complete samples only: (sample, …). Raises TraceError where the trace lacks it.

        `analysis` names who asks, for the message.
        """
        if name not in self.arrays:
            record = " with --save outputs" if name in VARIABLES and VARIABLES[name].raw else ""
            msg = (
                f"{analysis} needs the variable '{name}', which {self.source or 'this trace'} lacks; "
                f"record it{record}: perturbkv trace --model {self.run.model} --dataset {self.run.dataset}"
                f"{' --save outputs' if record else ''} -o trace.h5"
            )
            raise TraceError(msg)
        array = self.arrays[name]
        return array[self.ok] if VARIABLES[name].axes[0] == "sample" else array

    def kept(self, sample: int, config: int, layer: int, head: int) -> NDArray[np.int32]:
        """(kept_entry,) positions that stayed, ascending. Raises TraceError where the trace lacks them."""
        codes, offset, length = self._kept((sample, config, layer, head))
        start = int(offset)
        return kept_codec.positions(codes[start : start + int(length)], int(self.arrays["prompt_tokens"][sample]))

    def kept_masks(self, sample: int, config: int) -> NDArray[np.bool_]:
        """(layer, head, key) True where a position stayed, of all heads at once. Raises TraceError as `kept`."""
        codes, offsets, lengths = self._kept((sample, config))
        tokens = int(self.arrays["prompt_tokens"][sample])
        return kept_codec.masks(codes, offsets.reshape(-1), lengths.reshape(-1), tokens).reshape(*offsets.shape, tokens)

    def same_kept(self, first: int, second: int) -> NDArray[np.bool_]:
        """(sample, layer, head) over the complete samples: True where two configurations keep the same positions.

        Equal sets of one prompt have equal codes, which are compared once for all heads that share both; where
        positions were left out, their digests. Raises TraceError where the trace has neither.
        """
        if DIGEST in self.arrays:
            known = self.kept_digests()
            return np.asarray(known[:, first] == known[:, second])
        codes, *places = self._kept((self.ok,))
        (here, there), (lengths, others) = ((held[:, first], held[:, second]) for held in places)
        same = np.asarray(lengths == others)
        distinct, of_head = np.unique(np.stack([here, there, lengths], axis=-1)[same], axis=0, return_inverse=True)
        equal = [
            one == other or np.array_equal(codes[one : one + length], codes[other : other + length])
            for one, other, length in distinct.tolist()
        ]
        same[same] = np.array(equal, dtype=bool)[of_head.reshape(-1)]
        return same

    def kept_digests(self) -> NDArray[np.int64]:
        """(sample, config, layer, head) of the complete samples: equal where two sets of one prompt are; 0 if empty.

        Stored ones, and those of positions that are stored. Raises TraceError where the trace has neither.
        """
        counts = self._whole("kept_count")
        found = self._whole(DIGEST) if DIGEST in self.arrays else np.zeros_like(counts)
        if KEPT[2] in self.arrays:
            offsets, lengths = (self._whole(name) for name in KEPT[:2])
            own = kept_codec.digests(np.asarray(self.arrays[KEPT[2]]), offsets, lengths, counts)
            found = np.where(lengths > 0, own, found)
        if ((found == 0) & (counts > 0)).any():
            raise TraceError(self._no_positions())
        return np.asarray(np.where(counts > 0, found, 0), dtype=np.int64)

    def why_without_kept(self) -> str:
        """What to do for kept positions, where a complete sample lacks them; empty where all have them."""
        try:
            self._kept((self.ok,))
        except TraceError as error:
            return str(error)
        return ""

    def config_index(self, label: str) -> int:
        """Place of a configuration along `config`. Raises TraceError with the known labels."""
        labels = self.run.labels()
        if label not in labels:
            msg = f"expected one of the trace's configurations ({'; '.join(labels)}), got '{label}'"
            raise TraceError(msg)
        return labels.index(label)

    def sample(self, name: str) -> SampleTrace | FailedSample:
        """One sample's part, its kept positions alone, as it was measured. Raises TraceError for an unknown one."""
        if name not in self.sample_ids:
            msg = f"expected one of the trace's samples ({', '.join(self.sample_ids)}), got '{name}'"
            raise TraceError(msg)
        if name in self.failures:
            return FailedSample(name, self.failures[name])
        place = self.sample_ids.index(name)
        return SampleTrace(name, part_of(lambda one, where: self.arrays[one][where], self.arrays, place))

    def sel(
        self,
        *,
        sample: str | Sequence[str] | None = None,
        where: Callable[[EvictionConfig], bool] = lambda config: True,
        **choices: Any,
    ) -> Trace:
        """The part of some samples and configurations, in memory, which every analysis takes as it takes the whole.

        Args:
            sample: ids.
            where: which configurations.
            choices: what the configurations have: `policy="snapkv"`, `budget=128`, `selection_alpha=0.5`, or a list of
                values.

        Raises TraceError where nothing is left, or a sample or a field is unknown.
        """
        ids = self.sample_ids if sample is None else (sample,) if isinstance(sample, str) else tuple(sample)
        if len(set(ids)) < len(ids):
            msg = f"expected every sample once, got {', '.join(ids)}"
            raise TraceError(msg)
        known = dict.fromkeys(name for config in self.run.configs for name in config.flat())
        if strange := choices.keys() - known:
            msg = f"expected choices of a configuration ({', '.join(known)}), got '{strange.pop()}'"
            raise TraceError(msg)
        taken = [self.sample(name) for name in ids]
        places = [place for place, config in enumerate(self.run.configs) if where(config) and _has(config, choices)]
        if not places or not ids:
            msg = f"expected a configuration of {choices} and a sample of {list(ids)}, got a trace without"
            raise TraceError(msg)
        run = replace(self.run, samples=len(ids), configs=tuple(self.run.configs[place] for place in places))
        return Trace.of(run, [_of_configs(one, places) for one in taken], self.attrs)

    @staticmethod
    def of(run: RunConfig, samples: Sequence[SampleTrace | FailedSample], attrs: Mapping[str, str]) -> Trace:
        """The trace of a run's samples, in their order. Raises TraceError where their axes do not fit together."""
        failures = {one.sample_id: one.reason for one in samples if isinstance(one, FailedSample)}
        ids = tuple(one.sample_id for one in samples)
        shapes = ((one.sample_id, one.shapes() if isinstance(one, SampleTrace) else None) for one in samples)
        sizes, names = whole_sizes(run, ids, shapes)
        arrays = {name: _empty(name, sizes) for name in VARIABLES if name in names}
        filled = dict.fromkeys(ROWS, 0)
        for where, one in enumerate(samples):
            if isinstance(one, SampleTrace):
                place(arrays, where, one, filled)
        return Trace(run, ids, arrays, failures, dict(attrs))

    def save(self, path: str | Path) -> Path:
        """Write the trace file, whole or not at all; a file that is there is replaced."""
        written: Path = _storage("trace.trace_writing").save(self, Path(path))
        return written

    def to_xarray(self) -> Any:
        """An `xarray.Dataset` with the names, axes and units of a trace file."""
        return _storage("trace.export").to_dataset(self)

    def to_frame(self) -> Any:
        """A `pandas.DataFrame`: a row per sample × configuration × step × layer × head, as `export` writes it."""
        return _storage("trace.export").to_table(self)

    def _kept(self, where: tuple[Any, ...]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """The codes of kept sets, and where those at a place of the axes begin and how long they are."""
        told = [self.arrays[name][where] for name in (*KEPT[:2], "kept_count") if name in self.arrays]
        if len(told) < 3 or ((told[1] == 0) & (told[2] != 0)).any():
            raise TraceError(self._no_positions())
        return np.asarray(self.arrays["kept_code"]), np.asarray(told[0]), np.asarray(told[1])

    def _whole(self, name: str) -> NDArray[np.int64]:
        """Of the complete samples."""
        return np.asarray(self.arrays[name][self.ok], dtype=np.int64)

    def _no_positions(self) -> str:
        return (
            f"expected kept positions in {self.source or 'this trace'}, got one that was measured without them "
            "(--no-kept, kept=False); measure them into another file: perturbkv trace "
            f"--model {self.run.model} --dataset {self.run.dataset} -o trace.h5"
        )

    def _title(self) -> str:
        run, complete = self.run, int(self.ok.sum())
        words = " · random weights" if run.random_weights else ""
        return line(f"{run.model} · {run.dataset} · {complete} of {len(self.sample_ids)} samples complete{words}")

    def __repr__(self) -> str:
        return "\n".join([self._title(), *(f"  {label}" for label in self.run.labels())])

    def _repr_html_(self) -> str:
        small = [name for name in self.arrays if not VARIABLES[name].in_rows and not VARIABLES[name].raw]
        rows = [
            (name, " ".join(VARIABLES[name].dims), "×".join(map(str, self.arrays[name].shape)), VARIABLES[name].units)
            for name in small
        ]
        return Table(self._title(), ("variable", "axes behind sample", "#shape", "unit"), rows).as_html()


def _storage(module: str) -> ModuleType:
    """A module of `perturbkv.storage`, reached by name: what writes and converts traces lies above and knows them."""
    return importlib.import_module(f"perturbkv.storage.{module}")


def part_of(read: Callable[[str, Any], Any], names: Iterable[str], place: int) -> dict[str, NDArray[Any]]:
    """One complete sample's part of the named variables, of which `read` gives what stands somewhere.

    Of rows that lie behind those of other samples its own alone, and offsets counted from their beginning.
    """
    wanted, found = list(names), {}
    if "prompt_count" in wanted and not read("prompt_count", place):
        wanted = [name for name in wanted if name not in TEXT]
    if "expected_answers" in wanted and not str(read("expected_answers", place)):
        wanted = [name for name in wanted if name not in ANSWER_TEXT]
    rows = {name: VARIABLES[name].dims[0] for name in wanted if VARIABLES[name].in_rows}
    begin_and_end = {axis: _rows(read, *ROWS[axis], place) for axis in set(rows.values())}
    for name in wanted:
        found[name] = np.asarray(read(name, begin_and_end[rows[name]] if name in rows else place))
    for axis, own in begin_and_end.items():
        offset, _ = ROWS[axis]
        if offset in found:
            found[offset] = np.maximum(found[offset] - own.start, 0)  # what holds nothing may begin anywhere
    return found


def _rows(read: Callable[[str, Any], Any], offset: str, count: str, place: int) -> slice:
    """Where a sample's places begin and end in the one row of all samples; some may point to nothing."""
    offsets, counts = (np.asarray(read(name, place)) for name in (offset, count))
    held = counts > 0
    return slice(int(offsets[held].min()), int((offsets + counts)[held].max())) if held.any() else slice(0, 0)


def _has(config: EvictionConfig, choices: Mapping[str, Any]) -> bool:
    """Whether a configuration has these values, or one of the values of a list."""
    held, written = config.flat(), {name: str(getattr(config, name)) for name in CHOICES}
    return all(
        name in held and any(_plain(one) in (held[name], written.get(name, held[name])) for one in _listed(wanted))
        for name, wanted in choices.items()
    )


def _listed(wanted: Any) -> Iterable[Any]:
    return wanted if isinstance(wanted, Iterable) and not isinstance(wanted, str) else (wanted,)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Budget) else str(value) if isinstance(value, Choice) else value


def _of_configs(sample: SampleTrace | FailedSample, places: Sequence[int]) -> SampleTrace | FailedSample:
    """The part of a sample that some of its configurations measured."""
    if isinstance(sample, FailedSample):
        return sample
    whole = len(places) == sample.sizes()["config"]
    arrays = {
        name: np.take(array, places, axis=VARIABLES[name].dims.index("config"))
        if "config" in VARIABLES[name].dims
        else array
        for name, array in sample.arrays.items()
        if whole or name not in SUMS
    }
    return SampleTrace(sample.sample_id, arrays)


class Arrays(Protocol):
    """Arrays by name: a dictionary of NumPy's, or an HDF5 file."""

    def __contains__(self, name: str, /) -> bool:
        """Whether there is one of this name."""

    def __getitem__(self, name: str, /) -> Any:
        """The array, which takes assignments."""


def whole_sizes(
    run: RunConfig, sample_ids: Sequence[str], shapes: Iterable[tuple[str, Mapping[str, tuple[int, ...]] | None]]
) -> tuple[dict[str, int], set[str]]:
    """Axis lengths of a run's trace, and the variables that it holds; each sample's shapes, None of failed ones.

    Raises TraceError where the samples' axes do not fit together.
    """
    sizes: dict[str, int] = {}
    names: set[str] = {name for name, variable in VARIABLES.items() if not variable.optional}
    for sample_id, held in shapes:
        names |= set(held or ())
        for axis, length in axis_lengths(sample_id, held or {}).items():
            if axis in ROWS:
                sizes[axis] = sizes.get(axis, 0) + length
            elif axis == KEY_AXIS:
                sizes[axis] = max(length, sizes.get(axis, 0))
            elif sizes.setdefault(axis, length) != length:
                msg = f"expected the axis '{axis}' alike in all samples, got {sizes[axis]} and {length}"
                raise TraceError(msg)
    least = {"config": len(run.configs), "step": run.steps, "layer": 1, "head": 1}
    return least | sizes | {"sample": len(sample_ids)}, names


def fill_of(dtype: str) -> float | str:
    """What stands where nothing was measured: NaN in floats, 0 in integers, no text."""
    if dtype == "str":
        return ""
    return np.nan if np.issubdtype(np.dtype(dtype), np.floating) else 0


def _empty(name: str, sizes: Mapping[str, int]) -> NDArray[Any]:
    """A variable of all samples with nothing in it."""
    variable = VARIABLES[name]
    dtype = object if variable.dtype == "str" else variable.dtype
    return np.full([sizes[axis] for axis in variable.axes], fill_of(variable.dtype), dtype=dtype)


def place(arrays: Arrays, where: int, sample: SampleTrace, filled: dict[str, int]) -> None:
    """Put one sample at its place along `sample`, and behind the `filled` part of the axes that all samples share."""
    if "steps_measured" in arrays:
        arrays["steps_measured"][where] = sample.sizes()["step"]  # all of them, unless it says
    sizes = sample.sizes()
    offsets = {ROWS[axis][0]: axis for axis in ROWS if axis in sizes}
    for name, array in sample.arrays.items():
        if VARIABLES[name].in_rows:
            begin = filled[VARIABLES[name].dims[0]]
            arrays[name][begin : begin + len(array)] = array
        elif name in offsets:
            arrays[name][where] = np.asarray(array) + filled[offsets[name]]
        elif VARIABLES[name].dims[-1:] == (KEY_AXIS,):
            arrays[name][where] = _padded(array, arrays[name].shape[-1])
        else:
            arrays[name][where] = array.item() if VARIABLES[name].dtype == "str" and not array.ndim else array
    for axis in offsets.values():
        filled[axis] += sizes[axis]


def _padded(array: NDArray[Any], length: int) -> NDArray[Any]:
    """The array with nothing measured behind it, up to the length of its last axis."""
    behind = [(0, 0)] * (array.ndim - 1) + [(0, length - array.shape[-1])]
    return np.pad(array, behind, constant_values=np.nan)
