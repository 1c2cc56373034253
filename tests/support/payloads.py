"""Payloads by hand, for tests of the page around them."""

from __future__ import annotations

from typing import Any

from perturbkv.report.document import Head, Payload

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    "\"'><svg onload=alert(3)>",
    "<!--<script>",
    "javascript:alert(4)",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;&amp;",
    "\u2028\u2029\ud800",
)
"""Texts that a page must show as they are."""


def small_payload(text: str = "m", **more: Any) -> Payload:
    """A payload whose every text is this one, beside keys that the page reads."""
    head = Head("a.h5", text, (("model", text), (text, "1")), (text,))
    document = {"format": 1, "made_with": "perturbkv 0.1.0", "traces": [{"name": text, "title": text, **more}]}
    return Payload("m · d", (head,), document, {"b0": b"\x4b\x04\x00"})
