"""The page's content security policy: no network at all, and no script or style but those written here."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

PLOT_CLASS = "plot-d6a7b5"
"""The class of Plot's figures where none is asked for. Another one is another text, which the policy refuses."""
_FIGURE = """\
:where(.{name}) {{
  --plot-background: white;
  display: block;
  height: auto;
  height: intrinsic;
  max-width: 100%;
}}
:where(.{name} text),
:where(.{name} tspan) {{
  white-space: pre;
}}"""
_RAMP = """\
:where(.{name}-ramp) {{
  display: block;
  height: auto;
  height: intrinsic;
  max-width: 100%;
  overflow: visible;
}}
:where(.{name}-ramp text) {{
  white-space: pre;
}}"""
_SWATCHES = """\
:where(.{name}-swatches) {{
  font-family: system-ui, sans-serif;
  font-size: 10px;
  margin-bottom: 0.5em;
}}
:where(.{name}-swatch > svg) {{
  margin-right: 0.5em;
  overflow: visible;
}}
"""
_WRAPPED = """\
:where(.{name}-swatches-wrap) {{
  display: flex;
  align-items: center;
  min-height: 33px;
  flex-wrap: wrap;
}}
:where(.{name}-swatches-wrap .{name}-swatch) {{
  display: inline-flex;
  align-items: center;
  margin-right: 1em;
}}"""
_IN_COLUMNS = """\
:where(.{name}-swatches-columns .{name}-swatch) {{
  display: flex;
  align-items: center;
  break-inside: avoid;
  padding-bottom: 1px;
}}
:where(.{name}-swatches-columns .{name}-swatch::before) {{
  flex-shrink: 0;
}}
:where(.{name}-swatches-columns .{name}-swatch-label) {{
  white-space: nowrap;
  overflow: hidden;
  text-overflow: ellipsis;
}}"""
PLOT_STYLES = tuple(
    text.format(name=PLOT_CLASS) for text in (_FIGURE, _RAMP, _SWATCHES + _WRAPPED, _SWATCHES + _IN_COLUMNS)
)
"""What Plot writes into the `<style>` of its figures, its colour ramps and its swatches, in lines or in columns."""


def policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """The policy that lets exactly these inline scripts and styles, and Plot's own styles, be used.

    Args:
        scripts: text between the tags of each inline script.
        styles: text between the tags of each inline style.

    Returns:
        The content of the `<meta http-equiv="Content-Security-Policy">`.
    """
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(map(_source, scripts)),
        "style-src": " ".join(map(_source, (*styles, *PLOT_STYLES))),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {allowed}" for name, allowed in rules.items())


def _source(text: str) -> str:
    """`'sha256-…'` of an inline script or style; browsers hash its UTF-8."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
