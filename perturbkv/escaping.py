"""Escaping of foreign text, and text with highlighted spans: in colours where there are some, else in brackets.

A model's answer, a file's name and an attribute of a trace are text: none of them may move the cursor, title the window
or reverse the line. Control characters and invisible ones are replaced by visible signs or escapes.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode's categories of characters that a terminal obeys, or does not show."""
_NEWLINE, _TAB, _SPACE = "↵", "⇥", "␣"


@dataclass(frozen=True)
class Look:
    """A style of text: rich's style, the brackets without colours, and the CSS in a notebook."""

    style: str
    opens: str
    closes: str
    css: str


LOOKS: Mapping[str, Look] = {
    "kept": Look("bold", "[=", "=]", "font-weight:bold"),
    "lost": Look("black on yellow", "[-", "-]", "background:#de8f05;color:black"),
    "gained": Look("black on bright_cyan", "{+", "+}", "background:#56b4e9;color:black"),
    "dropped": Look("dim", "", "", "color:#888"),
    "plain": Look("", "", "", ""),
    "aside": Look("italic", "", "", "font-style:italic"),
}
"""Tokens kept by both sides of a comparison, by the first alone, by the second alone, by neither; plain text; a remark.
"""


@dataclass(frozen=True)
class Span:
    """Text of one look, a key of `LOOKS`; an aside is on a line of its own."""

    text: str
    look: str


@dataclass(frozen=True)
class Passage:
    """Consecutive spans of text; markup and hidden characters in them are escaped."""

    spans: Sequence[Span]

    def drawn(self, coloured: bool) -> Text:
        """Return the text for a terminal."""
        from rich.text import Text

        drawn = Text()
        for span in self.spans:
            look = LOOKS[span.look]
            if span.look == "aside" and drawn.plain and not drawn.plain.endswith("\n"):
                drawn.append("\n")
            said = visible(span.text)
            drawn.append(said if coloured or not look.opens else _bracket(said, look), look.style or None)
            if span.look == "aside":
                drawn.append("\n")
        drawn.rstrip()
        return drawn

    def as_html(self) -> str:
        """Return the text for a notebook."""
        return f'<p style="font-family:monospace">{"".join(map(_as_html, self.spans))}</p>'


def visible(text: str) -> str:
    """Return the text with a sign for every control or invisible character; a newline keeps its effect."""
    return "".join(map(_sign, text))


def _sign(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return f"{_NEWLINE}\n" if character == "\n" else _TAB
    if code < 32 or code == 127:
        return chr(0x2400 + code) if code < 32 else "\u2421"
    return f"<U+{code:04X}>" if unicodedata.category(character) in _HIDDEN else character


def _bracket(text: str, look: Look) -> str:
    """Return the text in brackets that exclude outer whitespace; a text of spaces becomes signs."""
    inner = text.strip(" \n")
    if not inner:
        return f"{look.opens}{text.replace(' ', _SPACE)}{look.closes}"
    begin = text.index(inner)
    return f"{text[:begin]}{look.opens}{inner}{look.closes}{text[begin + len(inner) :]}"


def _as_html(span: Span) -> str:
    said = html.escape(visible(span.text)).replace("\n", "<br>")
    around = ("<br>", "<br>") if span.look == "aside" else ("", "")
    return f'{around[0]}<span style="{LOOKS[span.look].css}">{said}</span>{around[1]}'


_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but newline and tab
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # unseen: directions, ends of lines
    "\ud800-\udfff\U000e0000-\U000e007f]"  # halves of pairs, which no UTF-8 holds; tags
)
_IN_A_LINE = re.compile(r"[\n\t]")


def plain(text: str) -> str:
    r"""Return the text with `\x1b` for an escape character and the like; newlines and tabs stay.

    Joiners (U+200C, U+200D) stay too: scripts and emoji need them.
    """
    return _OBEYED.sub(_escape, text)


def line(text: str) -> str:
    r"""Return the text as `plain` does, in one line, as names need it: `\n` and `\t` for newlines and tabs."""
    return _IN_A_LINE.sub(_escape, plain(text))


def in_json(document: str) -> str:
    r"""Return an equivalent JSON document with `\u202e` for such characters, lone surrogates among them."""
    return _OBEYED.sub(lambda found: json.dumps(found[0])[1:-1], document)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
