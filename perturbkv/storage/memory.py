"""A trace that never was a file, or not yet: the same arrays as one that was written and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perturbkv.configs.run import RunConfig
from perturbkv.errors import TraceError
from perturbkv.schema import KEPT_AXIS, KEY_AXIS, VARIABLES
from perturbkv.storage.files import written_whole
from perturbkv.storage.merge import joint_sizes
from perturbkv.storage.trace_file import write_trace
from perturbkv.trace import FailedSample, SampleTrace, Trace


def in_memory(run: RunConfig, samples: Sequence[SampleTrace | FailedSample], attrs: Mapping[str, str]) -> Trace:
    """The trace of a run's samples, in their order. Raises TraceError where their axes do not fit together."""
    whole = [sample for sample in samples if isinstance(sample, SampleTrace)]
    failures = {sample.sample_id: sample.reason for sample in samples if isinstance(sample, FailedSample)}
    shapes = {sample.sample_id: {name: array.shape for name, array in sample.arrays.items()} for sample in whole}
    ids = tuple(sample.sample_id for sample in samples)
    sizes, names = joint_sizes({name: shapes.get(name) for name in ids})
    least = {"config": len(run.configs), "step": run.steps, "layer": 1, "head": 1}
    sizes = least | sizes | {"sample": len(ids)}
    arrays = {name: _empty(name, sizes) for name in VARIABLES if name in names}
    kept = 0
    for place, sample in enumerate(samples):
        if isinstance(sample, SampleTrace):
            kept += _place(arrays, place, sample, kept)
    return Trace(run, ids, arrays, failures, dict(attrs))


def _empty(name: str, sizes: Mapping[str, int]) -> np.ndarray[Any, Any]:
    """A variable of all samples with nothing in it: floats NaN, integers 0."""
    variable = VARIABLES[name]
    axes = (KEPT_AXIS,) if variable.dims[-1:] == (KEPT_AXIS,) else ("sample", *variable.dims)
    fill = np.nan if np.issubdtype(np.dtype(variable.dtype), np.floating) else 0
    return np.full([sizes[axis] for axis in axes], fill, dtype=variable.dtype)


def _place(arrays: Mapping[str, np.ndarray[Any, Any]], place: int, sample: SampleTrace, kept: int) -> int:
    """Put one sample where it belongs; returns how many kept entries it added behind `kept`."""
    if "steps_measured" in arrays:
        arrays["steps_measured"][place] = sample.sizes()["step"]  # of a version that measured them all
    for name, array in sample.arrays.items():
        if name == "kept_position":
            arrays[name][kept : kept + len(array)] = array
        elif name == "kept_offset":
            arrays[name][place] = np.asarray(array) + kept
        elif VARIABLES[name].dims[-1:] == (KEY_AXIS,):
            arrays[name][place, ..., : array.shape[-1]] = array
        else:
            arrays[name][place] = array
    return len(sample.arrays["kept_position"])


def save(trace: Trace, path: Path) -> Path:
    """Write the file of a trace, whole or not at all. Raises TraceError where it lacks what a file MUST hold."""
    shapes = {
        name: {one: array.shape for one, array in sample.arrays.items()} if isinstance(sample, SampleTrace) else None
        for name in trace.sample_ids
        for sample in [trace.sample(name)]
    }
    if path.is_dir():
        msg = f"expected a file's path, got the folder {path}; name the file, such as {path / 'trace.h5'}"
        raise TraceError(msg)
    own = ("format", "format_version")
    attrs = {name: value for name, value in trace.attrs.items() if name not in own}
    with written_whole(path) as beside:
        write_trace(beside, trace.run, trace.sample_ids, attrs, shapes.__getitem__, trace.sample)
    return path
