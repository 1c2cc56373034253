"""The measurements of one sample and of a whole run, as NumPy arrays of the variables that `schema` declares."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from perturbkv import kept_codec
from perturbkv.configs import layer_types
from perturbkv.configs.choice import Choice, as_tuple
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import CHOICES, EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.escaping import escape_line
from perturbkv.schema import (
    ANSWER_TEXT,
    DIGEST,
    KEPT,
    KEY_AXIS,
    MEASURED_LAYERS,
    ROWS,
    SUMS,
    TEXT,
    VARIABLES,
    axis_lengths,
)


@dataclass(frozen=True)
class SampleTrace:
    """The measurements of one sample.

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
                raise TraceError(f"sample '{self.sample_id}': expected a variable of the trace format, got '{name}'")
        kept = set(KEPT) if not self.arrays.keys().isdisjoint(KEPT) else set()
        needed = {name for name, spec in VARIABLES.items() if not spec.optional} | kept
        missing = [name for name in VARIABLES if name in needed and name not in self.arrays]
        if missing:
            raise TraceError(f"sample '{self.sample_id}' lacks {', '.join(missing)}")
        self.sizes()

    def sizes(self) -> dict[str, int]:
        """Return axis name -> length. Raises TraceError where two variables disagree."""
        return axis_lengths(self.sample_id, self.shapes())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return variable name -> shape."""
        return {name: array.shape for name, array in self.arrays.items()}


@dataclass(frozen=True)
class FailedSample:
    """A sample that failed: its id and the reason in one line."""

    sample_id: str
    reason: str


@dataclass(frozen=True, repr=False)
class Trace:
    """A finished trace, in memory.

    Attributes:
        run: the configuration of the run.
        sample_ids: the `sample` coordinate, failed samples included.
        failures: id of each failed sample -> reason.
        arrays: variable name -> array with `sample` as its first axis (except `kept_code`, `prompt_token` and
            `prompt_start`: one long axis of all samples, into which `kept_offset` or `prompt_offset` points). Failed
            samples hold NaN, integers 0; so do steps past the end of a complete sample's text, whose token is -1:
            see `measured`.
        attrs: provenance as stored: format version, versions of libraries, device name, and the measured layers
            where these are not all layers.
        source: the file that it was read from, for messages and figures; `digest` is its SHA-256, shortened.
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
        """(sample, step) True for measured steps: those of complete samples, before the end of the text.

        In a trace without `steps_measured`, all steps of complete samples were measured.
        """
        steps = self.arrays["token_id"].shape[1]
        counts = self.arrays.get("steps_measured", np.full(len(self.sample_ids), steps))
        return np.asarray((np.arange(steps) < np.asarray(counts)[:, np.newaxis]) & self.ok[:, np.newaxis])

    @property
    def layers(self) -> tuple[int, ...]:
        """The measured decoder layers' numbers, along the axis `layer`."""
        return self._layers[0]

    @property
    def decoder_layers(self) -> int:
        """Number of decoder layers, measured or not: the length of that axis."""
        return self._layers[1]

    @property
    def _layers(self) -> tuple[tuple[int, ...], int]:
        """The measured layers' numbers, and how many layers the model has."""
        text, measured = self.attrs.get(MEASURED_LAYERS), self.arrays["kept_count"].shape[2]
        return layer_types.parse_measured(text) if text else (tuple(range(measured)), measured)

    def get(self, name: str, analysis: str) -> NDArray[np.generic]:
        """Return a variable of the complete samples only: (sample, …). Raises TraceError where the trace lacks it.

        `analysis` names the caller in the error message.
        """
        if name not in self.arrays:
            save = f" --save {VARIABLES[name].save}" if name in VARIABLES and VARIABLES[name].save else ""
            raise TraceError(
                f"{analysis} needs the variable '{name}', which {self.source or 'this trace'} lacks; "
                f"record it{save and ' with'}{save}: perturbkv trace --model {self.run.model} "
                f"--dataset {self.run.dataset}{save} -o trace.h5"
            )
        array = self.arrays[name]
        return array[self.ok] if VARIABLES[name].axes[0] == "sample" else array

    def kept(self, sample: int, config: int, layer: int, head: int) -> NDArray[np.int32]:
        """Return the ascending positions (kept_entry,) that a head keeps. Raises TraceError if the trace lacks them."""
        codes, offset, length = self._codes_at((sample, config, layer, head))
        start = int(offset)
        return kept_codec.decode_positions(
            codes[start : start + int(length)], int(self.arrays["prompt_tokens"][sample])
        )

    def kept_masks(self, sample: int, config: int) -> NDArray[np.bool_]:
        """Return masks (layer, head, key), True for kept entries. Raises TraceError without kept positions."""
        codes, offsets, lengths = self._codes_at((sample, config))
        tokens = int(self.arrays["prompt_tokens"][sample])
        return kept_codec.decode_masks(codes, offsets.reshape(-1), lengths.reshape(-1), tokens).reshape(
            *offsets.shape, tokens
        )

    def same_kept(self, first: int, second: int) -> NDArray[np.bool_]:
        """Return (sample, layer, head) over complete samples: True if both configurations keep the same entries.

        Equal sets of one prompt have equal codes; each distinct pair of codes is compared once. In a trace without
        positions the digests are compared. Raises TraceError where the trace has neither.
        """
        if DIGEST in self.arrays:
            digests = self.kept_digests()
            return np.asarray(digests[:, first] == digests[:, second])
        codes, offsets, lengths = self._codes_at((self.ok,))
        starts, other_starts, sizes = offsets[:, first], offsets[:, second], lengths[:, first]
        same = np.asarray(sizes == lengths[:, second])
        pairs, of_head = np.unique(np.stack([starts, other_starts, sizes], axis=-1)[same], axis=0, return_inverse=True)
        equal = [
            start == other or np.array_equal(codes[start : start + size], codes[other : other + size])
            for start, other, size in pairs.tolist()
        ]
        same[same] = np.array(equal, dtype=bool)[of_head.reshape(-1)]
        return same

    def kept_digests(self) -> NDArray[np.int64]:
        """Return digests (sample, config, layer, head) of the kept sets of complete samples.

        Digests are read where they are stored and computed where the positions are. Raises TraceError where the trace
        has neither.
        """
        counts = self._complete_values("kept_count")
        digests = self._complete_values(DIGEST) if DIGEST in self.arrays else np.zeros_like(counts)
        if "kept_code" in self.arrays:
            offsets, lengths = self._complete_values("kept_offset"), self._complete_values("kept_length")
            computed = kept_codec.digests(np.asarray(self.arrays["kept_code"]), offsets, lengths, counts)
            digests = np.where(lengths > 0, computed, digests)
        if ((digests == 0) & (counts > 0)).any():
            raise TraceError(self._no_positions_message())
        return np.asarray(np.where(counts > 0, digests, 0), dtype=np.int64)

    def missing_positions_message(self) -> str:
        """Return the message that says how to record kept positions if a complete sample lacks them, else ''."""
        try:
            self._codes_at((self.ok,))
        except TraceError as error:
            return str(error)
        return ""

    def config_index(self, label: str) -> int:
        """Return a configuration's index along `config`, given its label. Raises TraceError with the known labels."""
        labels = self.run.labels()
        if label not in labels:
            raise TraceError(f"expected one of the trace's configurations ({'; '.join(labels)}), got '{label}'")
        return labels.index(label)

    def sample(self, name: str) -> SampleTrace | FailedSample:
        """Return one sample as measured, kept positions included. Raises TraceError for an unknown id."""
        if name not in self.sample_ids:
            raise TraceError(f"expected one of the trace's samples ({', '.join(self.sample_ids)}), got '{name}'")
        if name in self.failures:
            return FailedSample(name, self.failures[name])
        place = self.sample_ids.index(name)
        return SampleTrace(
            name, sample_arrays(lambda variable, where: self.arrays[variable][where], self.arrays, place)
        )

    def sel(
        self,
        *,
        sample: str | Sequence[str] | None = None,
        where: Callable[[EvictionConfig], bool] = lambda config: True,
        **choices: Any,
    ) -> Trace:
        """Return the trace of some samples and configurations, in memory; every analysis accepts it.

        Args:
            sample: one sample id, or several.
            where: predicate on configurations.
            choices: values that the configurations must have: `policy="snapkv"`, `budget=128`, `selection_alpha=0.5`,
                or a list of accepted values of each.

        Raises TraceError where nothing is left, or a sample or a field is unknown.
        """
        ids = self.sample_ids if sample is None else (sample,) if isinstance(sample, str) else tuple(sample)
        if len(set(ids)) < len(ids):
            raise TraceError(f"expected every sample once, got {', '.join(ids)}")
        known = dict.fromkeys(name for config in self.run.configs for name in config.flat())
        if strange := choices.keys() - known:
            raise TraceError(f"expected choices of a configuration ({', '.join(known)}), got '{strange.pop()}'")
        samples = [self.sample(name) for name in ids]
        indices = [
            index for index, config in enumerate(self.run.configs) if where(config) and _matches(config, choices)
        ]
        if not indices or not ids:
            raise TraceError(f"expected a configuration of {choices} and a sample of {list(ids)}, got a trace without")
        run = replace(self.run, samples=len(ids), configs=tuple(self.run.configs[index] for index in indices))
        return Trace.from_samples(run, [_select_configs(sample, indices) for sample in samples], self.attrs)

    @staticmethod
    def from_samples(run: RunConfig, samples: Sequence[SampleTrace | FailedSample], attrs: Mapping[str, str]) -> Trace:
        """Return the trace of a run's samples, in their order. Raises TraceError where their axes differ."""
        failures = {sample.sample_id: sample.reason for sample in samples if isinstance(sample, FailedSample)}
        ids = tuple(sample.sample_id for sample in samples)
        shapes = (
            (sample.sample_id, sample.shapes() if isinstance(sample, SampleTrace) else None) for sample in samples
        )
        sizes, names = trace_sizes(run, ids, shapes)
        arrays = {name: _empty_array(name, sizes) for name in VARIABLES if name in names}
        filled = dict.fromkeys(ROWS, 0)
        for index, sample in enumerate(samples):
            if isinstance(sample, SampleTrace):
                write_sample(arrays, index, sample, filled)
        return Trace(run, ids, arrays, failures, dict(attrs))

    def save(self, path: str | Path) -> Path:
        """Write the trace file atomically; an existing file is replaced."""
        return cast("Path", _storage_module("trace.trace_writing").save(self, Path(path)))

    def to_xarray(self) -> Any:
        """Return an `xarray.Dataset` with the names, axes and units of a trace file."""
        return _storage_module("trace.export").to_dataset(self)

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with a row per sample × configuration × step × layer × head, as `export` does."""
        return _storage_module("trace.export").to_table(self)

    def _codes_at(self, index: tuple[Any, ...]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the codes of all kept sets, and the code offsets and lengths at an index. Raises TraceError."""
        if not self.arrays.keys() >= {*KEPT, "kept_count"}:
            raise TraceError(self._no_positions_message())
        offsets, lengths, counts = (
            np.asarray(self.arrays[name][index]) for name in ("kept_offset", "kept_length", "kept_count")
        )
        if ((lengths == 0) & (counts != 0)).any():
            raise TraceError(self._no_positions_message())
        return np.asarray(self.arrays["kept_code"]), offsets, lengths

    def _complete_values(self, name: str) -> NDArray[np.int64]:
        """Return a variable of the complete samples, as int64."""
        return np.asarray(self.arrays[name][self.ok], dtype=np.int64)

    def _no_positions_message(self) -> str:
        """Return the error message for a trace without kept positions."""
        return (
            f"expected kept positions in {self.source or 'this trace'}, got one that was measured without them "
            "(--no-kept, kept=False); measure them into another file: perturbkv trace "
            f"--model {self.run.model} --dataset {self.run.dataset} -o trace.h5"
        )

    def _title(self) -> str:
        """Return a one-line title: model, data set, complete samples, and a note if the weights are random."""
        run, complete = self.run, int(self.ok.sum())
        weights = " · random weights" if run.random_weights else ""
        return escape_line(
            f"{run.model} · {run.dataset} · {complete} of {len(self.sample_ids)} samples complete{weights}"
        )

    def __repr__(self) -> str:
        return "\n".join([self._title(), *(f"  {label}" for label in self.run.labels())])

    def _repr_html_(self) -> str:
        """Return the trace's title and a table of its variables as HTML for a notebook."""
        small = [name for name in self.arrays if not VARIABLES[name].is_concatenated and not VARIABLES[name].raw]
        rows = [
            (name, " ".join(VARIABLES[name].dims), "×".join(map(str, self.arrays[name].shape)), VARIABLES[name].units)
            for name in small
        ]
        return Table(self._title(), ("variable", "axes behind sample", "#shape", "unit"), rows).as_html()


def _storage_module(name: str) -> ModuleType:
    """Return a module of `perturbkv.storage`, imported late to avoid a circular import."""
    return importlib.import_module(f"perturbkv.storage.{name}")


def sample_arrays(read: Callable[[str, Any], Any], names: Iterable[str], index: int) -> dict[str, NDArray[Any]]:
    """Return variable name -> values of one complete sample; `read(name, index)` gives the values at an index.

    From concatenated variables only the sample's own entries are taken, and their offsets are counted from the first.
    """
    chosen, arrays = list(names), {}
    if "prompt_count" in chosen and not read("prompt_count", index):
        chosen = [name for name in chosen if name not in (*TEXT, "token_text")]
    if "expected_answers" in chosen and not str(read("expected_answers", index)):
        chosen = [name for name in chosen if name not in ANSWER_TEXT]
    rows = {name: VARIABLES[name].dims[0] for name in chosen if VARIABLES[name].is_concatenated}
    begin_and_end = {axis: _sample_rows(read, *ROWS[axis], index) for axis in set(rows.values())}
    for name in chosen:
        arrays[name] = np.asarray(read(name, begin_and_end[rows[name]] if name in rows else index))
    for axis, rows_of_sample in begin_and_end.items():
        offset, _ = ROWS[axis]
        if offset in arrays:
            arrays[offset] = np.maximum(arrays[offset] - rows_of_sample.start, 0)  # of count 0, any offset is valid
    return arrays


def _sample_rows(read: Callable[[str, Any], Any], offset: str, count: str, index: int) -> slice:
    """Return the slice of one sample along a concatenated axis; empty where it has no entries there.

    `offset` and `count` name the variables that say where its entries are.
    """
    offsets, counts = (np.asarray(read(name, index)) for name in (offset, count))
    used = counts > 0
    return slice(int(offsets[used].min()), int((offsets + counts)[used].max())) if used.any() else slice(0, 0)


def _matches(config: EvictionConfig, choices: Mapping[str, Any]) -> bool:
    """Return whether a configuration has each of the chosen values, or one of a list of values.

    A choice is a field's or option's value by `EvictionConfig.flat`; a field it lacks matches nothing.
    """
    values = config.flat()
    texts = {name: str(getattr(config, name)) for name in CHOICES}  # with their options: `adakv(floor=0.1)`
    for name, wanted in choices.items():
        own = (values[name], texts.get(name, values[name])) if name in values else ()
        if not any(_plain_value(value) in own for value in as_tuple(wanted)):
            return False
    return True


def _plain_value(value: Any) -> Any:
    """Return a value in the form of `EvictionConfig.flat`: a budget as a number, a choice as text."""
    return value.value if isinstance(value, Budget) else str(value) if isinstance(value, Choice) else value


def _select_configs(sample: SampleTrace | FailedSample, indices: Sequence[int]) -> SampleTrace | FailedSample:
    """Return the sample with the configurations at these indices alone."""
    if isinstance(sample, FailedSample):
        return sample
    whole = len(indices) == sample.sizes()["config"]
    arrays = {
        name: np.take(array, indices, axis=VARIABLES[name].dims.index("config"))
        if "config" in VARIABLES[name].dims
        else array
        for name, array in sample.arrays.items()
        if whole or name not in SUMS
    }
    return SampleTrace(sample.sample_id, arrays)


class Arrays(Protocol):
    """Writable arrays by name: a dictionary of NumPy arrays, or an HDF5 file."""

    def __contains__(self, name: str, /) -> bool:
        """Return whether there is an array of this name."""

    def __getitem__(self, name: str, /) -> Any:
        """Return the array, which supports assignment to slices."""


def trace_sizes(
    run: RunConfig, sample_ids: Sequence[str], shapes: Iterable[tuple[str, Mapping[str, tuple[int, ...]] | None]]
) -> tuple[dict[str, int], set[str]]:
    """Return the axis lengths of a run's trace, and the names of its variables.

    `shapes` are each sample's shapes by variable, None for a failed one. Raises TraceError where the samples' axes
    differ.
    """
    sizes: dict[str, int] = {}
    names: set[str] = {name for name, variable in VARIABLES.items() if not variable.optional}
    for sample_id, sample_shapes in shapes:
        names |= set(sample_shapes or ())
        for axis, length in axis_lengths(sample_id, sample_shapes or {}).items():
            if axis in ROWS:
                sizes[axis] = sizes.get(axis, 0) + length
            elif axis == KEY_AXIS:
                sizes[axis] = max(length, sizes.get(axis, 0))
            elif sizes.setdefault(axis, length) != length:
                raise TraceError(f"expected the axis '{axis}' alike in all samples, got {sizes[axis]} and {length}")
    least = {"config": len(run.configs), "step": run.steps, "layer": 1, "decoder_layer": 1, "head": 1}
    return least | sizes | {"sample": len(sample_ids)}, names


def fill_value(dtype: str) -> float | str:
    """Return the fill value for elements that were not measured: NaN for floats, 0 for integers, '' for text."""
    if dtype == "str":
        return ""
    return np.nan if np.issubdtype(np.dtype(dtype), np.floating) else 0


def _empty_array(name: str, sizes: Mapping[str, int]) -> NDArray[Any]:
    """Return a variable's array for all samples, filled with `fill_value`."""
    variable = VARIABLES[name]
    dtype = object if variable.dtype == "str" else variable.dtype
    return np.full([sizes[axis] for axis in variable.axes], fill_value(variable.dtype), dtype=dtype)


def write_sample(arrays: Arrays, index: int, sample: SampleTrace, filled: dict[str, int]) -> None:
    """Write a sample's arrays at `index`, and after `filled` entries along each concatenated axis.

    `filled` maps these axes to the entries that are written, and is updated.
    """
    if "steps_measured" in arrays:
        arrays["steps_measured"][index] = sample.sizes()["step"]  # unless the sample has the variable itself
    sizes = sample.sizes()
    offsets = {ROWS[axis][0]: axis for axis in ROWS if axis in sizes}
    for name, array in sample.arrays.items():
        if VARIABLES[name].is_concatenated:
            begin = filled[VARIABLES[name].dims[0]]
            arrays[name][begin : begin + len(array)] = array
        elif name in offsets:
            arrays[name][index] = np.asarray(array) + filled[offsets[name]]
        elif VARIABLES[name].dims[-1:] == (KEY_AXIS,):
            missing = arrays[name].shape[-1] - array.shape[-1]  # NaN at the end of the last axis
            padding = [(0, 0)] * (array.ndim - 1) + [(0, missing)]
            arrays[name][index] = np.pad(array, padding, constant_values=np.nan)
        else:
            arrays[name][index] = array.item() if VARIABLES[name].dtype == "str" and not array.ndim else array
    for axis in offsets.values():
        filled[axis] += sizes[axis]
