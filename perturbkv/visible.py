"""Foreign text as it may be shown: what a terminal obeys, or shows nobody, is written out.

A model's answer, a file's name and an attribute of somebody's trace are text: none of them moves the cursor, titles the
window or turns the line around.
"""

from __future__ import annotations

import json
import re

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but newline and tab
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # unseen: directions, ends of lines
    "\ud800-\udfff\U000e0000-\U000e007f]"  # halves of pairs, which no UTF-8 holds; tags
)
_IN_A_LINE = re.compile(r"[\n\t]")


def plain(text: str) -> str:
    r"""The text with `\x1b` for an escape character and the like; newlines and tabs stay.

    What joins letters (U+200C, U+200D) stays too: scripts and emoji need it.
    """
    return _OBEYED.sub(_written, text)


def line(text: str) -> str:
    r"""The same in one line, as a name has to be: `\n` and `\t` for newlines and tabs."""
    return _IN_A_LINE.sub(_written, plain(text))


def in_json(document: str) -> str:
    r"""A JSON document that says the same with `\u202e` for such characters, halves of pairs among them."""
    return _OBEYED.sub(lambda found: json.dumps(found[0])[1:-1], document)


def _written(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
