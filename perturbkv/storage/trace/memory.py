"""A trace in memory, as a file: the same as one that was measured into it."""

from __future__ import annotations

from pathlib import Path

from perturbkv.storage.atomic_files import written_whole
from perturbkv.storage.trace.trace_writing import write_trace
from perturbkv.trace import SampleTrace, Trace


def save(trace: Trace, path: Path) -> Path:
    """Write the file of a trace, whole or not at all. Raises TraceError where it lacks what a file MUST hold."""
    shapes = {
        name: sample.shapes() if isinstance(sample, SampleTrace) else None
        for name in trace.sample_ids
        for sample in [trace.sample(name)]
    }
    own = ("format", "format_version")
    attrs = {name: value for name, value in trace.attrs.items() if name not in own}
    with written_whole(path) as beside:
        write_trace(beside, trace.run, trace.sample_ids, attrs, shapes.__getitem__, trace.sample)
    return path
