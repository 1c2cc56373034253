"""Checks of several traces that are analysed as one: one model, equal configurations, distinct prompts.

The same prompt can be in two traces under different names of its file, its data set or its metric.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from perturbkv.configs.run import METRICS
from perturbkv.errors import TraceError
from perturbkv.trace import Trace


def check_no_duplicate_prompts(traces: Sequence[Trace], trace_name: Callable[[Trace], str]) -> None:
    """Raise TraceError for a prompt that is in two of the traces."""
    locations: dict[str, str] = {}
    for trace in traces:
        own: dict[str, str] = {}
        for index in np.flatnonzero(trace.ok):
            location = f"sample '{trace.sample_ids[index]}' of {trace.run.dataset} in {trace_name(trace)}"
            keys = _prompt_keys(trace, int(index))
            if other := next((locations[key] for key in keys if key in locations), None):
                raise TraceError(
                    f"expected every prompt once, got {other} and {location}, the same; leave one of the traces out"
                )
            own |= dict.fromkeys(keys, location)
        locations |= own


def _prompt_keys(trace: Trace, index: int) -> list[str]:
    """Return the keys that identify the prompt at an index: source and sample id, and its tokens' digest if stored.

    Its source is the file's digest, or data set, options and seed.
    """
    options = trace.run.dataset_options
    chosen = {name: value for name, value in options.items() if name != METRICS}
    source = options.get("file_sha256") or [trace.run.dataset, chosen, trace.run.seed]
    keys = [json.dumps([source, trace.sample_ids[index]])]
    if "prompt_token" in trace.arrays and (count := int(trace.arrays["prompt_count"][index])):
        start = int(trace.arrays["prompt_offset"][index])
        tokens = np.asarray(trace.arrays["prompt_token"][start : start + count], dtype=np.int32)
        keys.append(hashlib.sha256(tokens.tobytes()).hexdigest())
    return keys


_SHARED = ("model", "revision", "scenario", "dtype", "cache")
"""Settings that traces must share to be analysed as one; those of one data set also share the chat template."""


def as_traces(traces: Any) -> tuple[Trace, ...]:
    """Return a trace, or several, as a tuple. Raises TraceError for anything else."""
    several = isinstance(traces, Iterable) and not isinstance(traces, Trace | str)
    members = tuple(traces) if several else (traces,)
    for member in members:
        if not isinstance(member, Trace):
            raise TraceError(f"expected traces, as pk.read_trace or pk.measure give them; got {type(member).__name__}")
    return members


def check_combinable(traces: Sequence[Trace], analysis: str) -> None:
    """Raise TraceError for an empty list, and for traces with different settings or a common prompt."""
    if not traces:
        raise TraceError(f"{analysis} needs at least one trace, got none")
    for first, other in combinations(traces, 2):
        shared = (*_SHARED, "chat_template") if first.run.dataset == other.run.dataset else _SHARED
        different = [name for name in shared if getattr(first.run, name) != getattr(other.run, name)]
        if different:
            values = [f"{getattr(trace.run, different[0])} in {_trace_name(trace)}" for trace in (first, other)]
            raise TraceError(
                f"expected traces of one {different[0].replace('_', ' ')}, got {' and '.join(values)}; give them singly"
            )
        if missing := set(first.run.configs) ^ set(other.run.configs):
            label = min(config.label() for config in missing)
            raise TraceError(
                f"expected the same configurations in every trace, got '{label}' in only one of {_trace_name(first)} "
                f"and {_trace_name(other)}; measure what is missing, or give the traces singly"
            )
    check_no_duplicate_prompts(traces, _trace_name)


def _trace_name(trace: Trace) -> str:
    """Return a trace's path, or its data set if it has no path, for error messages."""
    return trace.source or f"a trace of {trace.run.dataset}"
