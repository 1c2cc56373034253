"""Traces -> everything that a page shows: a JSON document, blocks of bytes beside it, and what stands at its head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from perturbkv.analyses.measurements import at_step
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.errors import TraceError
from perturbkv.reporting.document import Head, Payload
from perturbkv.reporting.head_measures import ANALYSIS
from perturbkv.reporting.page_blocks import Blocks, limit
from perturbkv.reporting.portable import name_of, portable
from perturbkv.reporting.sides import numbered
from perturbkv.reporting.trace_part import trace_part
from perturbkv.trace import Trace

FORMAT = 1


def payload(traces: Sequence[Trace], *, full: bool = False) -> Payload:
    """Everything that a page of these traces shows.

    Args:
        traces: at least one.
        full: hold every head's tokens and four bytes of each number, however large the page gets.

    Raises TraceError for no trace, for one without a complete sample, and for one that holds NaN in a complete sample.
    """
    if not traces:
        msg = "report needs at least one trace, got none"
        raise TraceError(msg)
    names = numbered([name_of(trace) for trace in traces])
    held = [portable(at_step(trace, ANALYSIS, 0)) for trace in traces]
    parts: list[dict[str, Any]] = []
    blocks: dict[str, bytes] = {}
    for number, (trace, name) in enumerate(zip(held, names, strict=True)):
        own = Blocks(f"t{number}", np.inf if full else _room(held, trace))
        parts.append(plain(trace_part(trace, own, name, full)))
        blocks |= own.blocks
    heads = tuple(_head(part) for part in parts)
    document = {"format": FORMAT, "made_with": _made_with(), "traces": parts}
    return Payload(" | ".join(dict.fromkeys(head.title for head in heads)), heads, document, blocks)


def _room(traces: Sequence[Trace], own: Trace) -> float:
    """Bytes that one trace's blocks may take: a share of all, as many as it has values."""
    every = sum(map(_values, traces))
    return limit(every) * _values(own) / every


def _values(trace: Trace) -> int:
    """Samples × configurations × heads."""
    return int(trace.ok.sum()) * int(np.prod(trace.arrays["kept_count"].shape[1:]))


def _head(part: dict[str, Any]) -> Head:
    facts = tuple((label, value) for label, value in part["facts"])
    return Head(part["name"], part["title"], facts, tuple(part["warnings"]))


def _made_with() -> str:
    from perturbkv import __version__

    return f"perturbkv {__version__}"
