"""Which traces may be looked at as one: graded answers of different prompts, one model, the same configurations."""

from __future__ import annotations

import json
from collections.abc import Sequence

from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_SHARED = ("model", "revision", "scenario", "dtype", "cache", "chat_template")
"""What such traces have in common."""


def check_together(traces: Sequence[Trace], analysis: str) -> None:
    """Raise TraceError for traces that hold no answers, or do not belong together."""
    if not traces:
        msg = f"{analysis} needs at least one trace, got none"
        raise TraceError(msg)
    for trace in traces:
        _check_answers(trace, analysis)
        _check_alike(traces[0], trace)
    _check_once(traces)


def _check_answers(trace: Trace, analysis: str) -> None:
    if not {"score", "score_full"} <= trace.arrays.keys():
        msg = (
            f"{analysis} needs graded answers, {_named(trace)} holds none; make a trace that does: "
            f"perturbkv {analysis} --model {trace.run.model} --dataset {trace.run.dataset}"
        )
        raise TraceError(msg)


def _check_alike(first: Trace, other: Trace) -> None:
    wrong = [name for name in _SHARED if getattr(first.run, name) != getattr(other.run, name)]
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


def _check_once(traces: Sequence[Trace]) -> None:
    """A prompt that is there twice would count as two."""
    seen: dict[tuple[str, str], str] = {}
    for trace in traces:
        data = json.dumps([trace.run.dataset, trace.run.dataset_options, trace.run.seed], sort_keys=True)
        for sample in trace.sample_ids:
            if (data, sample) in seen:
                msg = (
                    f"expected every prompt once, got sample '{sample}' of {trace.run.dataset} in "
                    f"{seen[data, sample]} and in {_named(trace)}; leave one of the traces out"
                )
                raise TraceError(msg)
        seen |= {(data, sample): _named(trace) for sample in trace.sample_ids}


def _named(trace: Trace) -> str:
    return trace.source or f"a trace of {trace.run.dataset}"
