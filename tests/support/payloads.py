"""Payloads for tests of the page around them: by hand, of a small trace, and with a text of one's own everywhere."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

from perturbkv.reporting.page_blocks import Payload, TraceHeader
from perturbkv.reporting.payload import payload
from perturbkv.trace import FailedSample, Trace
from tests.support.traces import run_config, sample_trace

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    "\"'><svg onload=alert(3)>",
    "<!--<script>",
    "javascript:alert(4)",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;&amp;",
    "\u2028\u2029",
)
"""Texts that a page must show as they are."""
_STRUCTURE = {
    "format", "arrays", "prompts", "blocks", "distances", "interval", "key", "kind", "distance", "compare", "start"
}  # fmt: skip
"""Keys of the document below which no text of others stands."""


_STAGED = {"measures": [{"key": "sigma_stage1"}]}
"""The measure without which a page has no part on Assumption 1."""


def small_payload(text: str = "m", **more: Any) -> Payload:
    """The least that makes a page: every text is this one, and what else the document says."""
    head = TraceHeader("a.h5", text, (("model", text), (text, "1")), (text,))
    document = {
        "format": 1,
        "made_with": "perturbkv 0.1.0",
        "traces": [{"name": text, "title": text, **_STAGED, **more}],
    }
    return Payload("m · d", (head,), document, {"b0": b"\x4b\x04\x00"})


def small_trace(samples: int = 3, **run: Any) -> Trace:
    """A trace that holds everything that a trace may hold; its last sample failed."""
    measured = [sample_trace(f"s{place}", optional=True, seed=place) for place in range(samples - 1)]
    attributes = {"model": "m", "perturbkv_version": "0.1.0"}
    return Trace.from_samples(run_config(samples, **run), [*measured, FailedSample("f", "NaN in layer 1")], attributes)


def reported(*traces: Trace) -> Payload:
    """What a page of these traces shows, of the small one where there is none."""
    return payload(traces or (small_trace(),))


def everywhere(text: str) -> Payload:
    """The same with this text in place of every text that may be somebody else's."""
    one = reported()
    document: Any = _filled(one.document, text)
    for trace in document["traces"]:
        trace["failed"] = [{"id": text, "reason": text}]
        answers = trace["answers"]
        answers["expected"] = [[text]] * len(trace["samples"])
        for side in (answers["full"], *answers["configs"]):
            side["texts"] = [text] * len(trace["samples"])
        trace["lacks"].pop("answers_text", None)
    headers = tuple(TraceHeader(text, text, ((text, text),), (text, text)) for _ in one.headers)
    blocks = {
        name: _said(block, text) if "-text" in name or "-read" in name else block for name, block in one.blocks.items()
    }
    return replace(one, document=document, headers=headers, blocks=blocks)


def _filled(held: Any, text: str) -> Any:
    if isinstance(held, dict):
        return {name: one if name in _STRUCTURE else _filled(one, text) for name, one in held.items()}
    if isinstance(held, list | tuple):
        return [_filled(one, text) for one in held]
    return text if isinstance(held, str) else held


def _said(block: bytes, text: str) -> bytes:
    """A prompt's block with this text for every token."""
    told = json.loads(zlib.decompress(block, -15))
    told["pieces"] = [text] * len(told["pieces"])
    made = zlib.compressobj(wbits=-15)
    return made.compress(json.dumps(told).encode()) + made.flush()
