"""Which traces may be looked at as one: graded answers of different prompts, one model, the same configurations.

No prompt may count twice: one can stand in two traces under other names of its file, its data set or its metric.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
    """Return the content of the file, whatever its name; else the data set and what it was made with."""
    options = trace.run.dataset_options
    if digest := options.get("file_sha256"):
        return digest
    return [trace.run.dataset, {name: value for name, value in options.items() if name != METRICS}, trace.run.seed]


_SHARED = ("model", "revision", "scenario", "dtype", "cache")
"""What such traces have in common; those of one data set also whether their prompts went through a chat template."""


def as_traces(given: Any) -> tuple[Trace, ...]:
    """Return a trace, or a series of them, as a tuple. Raises TraceError for anything else."""
    series = isinstance(given, Iterable) and not isinstance(given, Trace | str)
    held = tuple(given) if series else (given,)
    for one in held:
        if not isinstance(one, Trace):
            msg = f"expected traces, as pk.read_trace or pk.measure give them; got {type(one).__name__}"
            raise TraceError(msg)
    return held


def check_together(traces: Sequence[Trace], analysis: str) -> None:
    """Raise TraceError for traces that hold no answers, or do not belong together."""
    if not traces:
        msg = f"{analysis} needs at least one trace, got none"
        raise TraceError(msg)
    for place, trace in enumerate(traces):
        _check_answers(trace, analysis)
        for other in traces[:place]:
            _check_alike(other, trace)
    check_once(traces, _named)


def _check_answers(trace: Trace, analysis: str) -> None:
    if not {"score", "score_full"} <= trace.arrays.keys():
        msg = (
            f"{analysis} needs graded answers, {_named(trace)} holds none; make a trace that does: "
            f"perturbkv quality --model {trace.run.model} --dataset {trace.run.dataset}"
        )
        raise TraceError(msg)


def _check_alike(first: Trace, other: Trace) -> None:
    shared = (*_SHARED, "chat_template") if first.run.dataset == other.run.dataset else _SHARED
    wrong = [name for name in shared if getattr(first.run, name) != getattr(other.run, name)]
    if wrong:
        told = [f"{getattr(trace.run, wrong[0])} in {_named(trace)}" for trace in (first, other)]
        msg = f"expected traces of one {wrong[0].replace('_', ' ')}, got {' and '.join(told)}; give them singly"
        raise TraceError(msg)
    if missing := set(first.run.configs) ^ set(other.run.configs):
        label = min(config.label() for config in missing)
        msg = (
            f"expected the same configurations in every trace, got '{label}' in only one of {_named(first)} and "
            f"{_named(other)}; measure what is missing, or give the traces singly"
        )
        raise TraceError(msg)


def _named(trace: Trace) -> str:
    return trace.source or f"a trace of {trace.run.dataset}"
