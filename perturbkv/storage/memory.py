"""A trace that never was a file, or not yet: the same arrays as one that was written and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perturbkv.configs.run import RunConfig
from perturbkv.schema import VARIABLES
from perturbkv.storage.files import written_whole
from perturbkv.storage.layout import fill_of, nothing_filled, place, whole_sizes
from perturbkv.storage.trace_writing import write_trace
from perturbkv.trace import FailedSample, SampleTrace, Trace


def in_memory(run: RunConfig, samples: Sequence[SampleTrace | FailedSample], attrs: Mapping[str, str]) -> Trace:
    """The trace of a run's samples, in their order. Raises TraceError where their axes do not fit together."""
    whole = [sample for sample in samples if isinstance(sample, SampleTrace)]
    failures = {sample.sample_id: sample.reason for sample in samples if isinstance(sample, FailedSample)}
    shapes = {sample.sample_id: {name: array.shape for name, array in sample.arrays.items()} for sample in whole}
    ids = tuple(sample.sample_id for sample in samples)
    sizes, names = whole_sizes(run, ids, ((name, shapes.get(name)) for name in ids))
    arrays = {name: _empty(name, sizes) for name in VARIABLES if name in names}
    filled = nothing_filled()
    for where, sample in enumerate(samples):
        if isinstance(sample, SampleTrace):
            place(arrays, where, sample, filled)
    return Trace(run, ids, arrays, failures, dict(attrs))


def _empty(name: str, sizes: Mapping[str, int]) -> np.ndarray[Any, Any]:
    """A variable of all samples with nothing in it."""
    variable = VARIABLES[name]
    dtype = object if variable.dtype == "str" else variable.dtype
    return np.full([sizes[axis] for axis in variable.axes], fill_of(variable.dtype), dtype=dtype)


def save(trace: Trace, path: Path) -> Path:
    """Write the file of a trace, whole or not at all. Raises TraceError where it lacks what a file MUST hold."""
    shapes = {
        name: {one: array.shape for one, array in sample.arrays.items()} if isinstance(sample, SampleTrace) else None
        for name in trace.sample_ids
        for sample in [trace.sample(name)]
    }
    own = ("format", "format_version")
    attrs = {name: value for name, value in trace.attrs.items() if name not in own}
    with written_whole(path) as beside:
        write_trace(beside, trace.run, trace.sample_ids, attrs, shapes.__getitem__, trace.sample)
    return path
