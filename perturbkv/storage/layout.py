"""How a run's samples lie in the arrays of its trace, in a file as in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perturbkv.configs.run import RunConfig
from perturbkv.errors import TraceError
from perturbkv.schema import KEY_AXIS, ROWS, VARIABLES, Variable, axis_lengths
from perturbkv.storage.merge import Shapes
from perturbkv.trace import SampleTrace

FORMAT, FORMAT_VERSION = "perturbkv-trace", 4
AXES = {
    "sample": "sample id",
    "config": "eviction configuration",
    "step": "decode step",
    "layer": "decoder layer",
    "head": "query head",
    "answer_token": "place in a generated answer",
    "d_head": "component of a head's output",
    "d_model": "component of a hidden state",
    "key": "position of a cache entry",
    "kept_byte": "place in kept_code",
    "prompt_entry": "place in prompt_token",
    "lost_entry": "place among the evicted entries that add most",
}
"""Axis of a file -> what its coordinate is."""
FLAGS = {
    "failure": Variable((), "1", "why the sample failed; empty where it is complete", "str"),
    "complete": Variable((), "1", "1 where every number of the sample is there", "uint8"),
}
"""Variables that a file has beside those of a trace: the state of each sample."""
STORED = {**VARIABLES, **FLAGS}


class Arrays(Protocol):
    """Arrays by name: a dictionary of NumPy's, or an HDF5 file."""

    def __contains__(self, name: str, /) -> bool:
        """Whether there is one of this name."""

    def __getitem__(self, name: str, /) -> Any:
        """The array, which takes assignments."""


def whole_sizes(
    run: RunConfig, sample_ids: Sequence[str], shapes: Iterable[tuple[str, Shapes | None]]
) -> tuple[dict[str, int], set[str]]:
    """Axis lengths of a run's trace, and the variables that it holds; each sample's shapes, None of failed ones.

    Raises TraceError where the samples' axes do not fit together.
    """
    sizes, names = joint_sizes(shapes)
    least = {"config": len(run.configs), "step": run.steps, "layer": 1, "head": 1}
    return least | sizes | {"sample": len(sample_ids)}, names


def joint_sizes(shapes: Iterable[tuple[str, Shapes | None]]) -> tuple[dict[str, int], set[str]]:
    """Axis lengths of a whole trace, and the variables that its samples hold; None stands for a failed sample.

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
    return sizes, names


def least_bytes(sizes: Mapping[str, int], names: set[str]) -> int:
    """Bytes that a trace's file takes at least: those of the prompts' tokens, which are stored uncompressed."""
    rows = [
        variable for name, variable in VARIABLES.items() if name in names and variable.in_rows and name != "kept_code"
    ]
    return sum(math.prod(sizes[axis] for axis in one.axes) * np.dtype(one.dtype).itemsize for one in rows)


def fill_of(dtype: str) -> float | str:
    """What stands where nothing was measured: NaN in floats, 0 in integers, no text."""
    if dtype == "str":
        return ""
    return np.nan if np.issubdtype(np.dtype(dtype), np.floating) else 0


def place(arrays: Arrays, where: int, sample: SampleTrace, filled: dict[str, int]) -> None:
    """Put one sample at its place along `sample`, and behind what is `filled` of the axes that all samples share."""
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


def nothing_filled() -> dict[str, int]:
    """The axes that all samples share, before the first sample."""
    return dict.fromkeys(ROWS, 0)
