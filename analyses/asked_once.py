"""No prompt may count twice: one can stand in two traces under other names of its file, its data set or its metric."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np

from perturbkv.configs.run import METRICS
from perturbkv.errors import TraceError
from perturbkv.trace import Trace


def check_once(traces: Sequence[Trace], named: Callable[[Trace], str]) -> None:
    """Raise TraceError for a prompt that two of the traces hold; `named` says how a trace is called."""
    seen: dict[str, str] = {}
    for trace in traces:
        found: dict[str, str] = {}
        for place in np.flatnonzero(trace.ok):
            where = f"sample '{trace.sample_ids[place]}' of {trace.run.dataset} in {named(trace)}"
            keys = _keys(trace, int(place))
            if before := next((seen[key] for key in keys if key in seen), None):
                msg = f"expected every prompt once, got {before} and {where}, the same; leave one of the traces out"
                raise TraceError(msg)
            found |= dict.fromkeys(keys, where)
        seen |= found


def _keys(trace: Trace, place: int) -> list[str]:
    """What tells a prompt: where it comes from and its name there; and, where its text is stored, its tokens."""
    keys = [json.dumps([_origin(trace), trace.sample_ids[place]])]
    if "prompt_token" in trace.arrays and (count := int(trace.arrays["prompt_count"][place])):
        start = int(trace.arrays["prompt_offset"][place])
        tokens = np.asarray(trace.arrays["prompt_token"][start : start + count], dtype=np.int32)
        keys.append(hashlib.sha256(tokens.tobytes()).hexdigest())
    return keys


def _origin(trace: Trace) -> object:
    """The content of the file, whatever its name; else the data set and what it was made with."""
    options = trace.run.dataset_options
    if digest := options.get("file_sha256"):
        return digest
    return [trace.run.dataset, {name: value for name, value in options.items() if name != METRICS}, trace.run.seed]
