"""Text of which some parts are marked: in colours where there are some, in brackets where there are none.

Foreign text as it may be shown: what a terminal obeys, or shows nobody, is written out.

A model's answer, a file's name and an attribute of somebody's trace are text: none of them moves the cursor, titles the
window or turns the line around.
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
"""Unicode's categories of what a terminal obeys, or does not show."""
_NEWLINE, _TAB, _SPACE = "↵", "⇥", "␣"


@dataclass(frozen=True)
class Look:
    """How one kind of text looks: rich's style, what stands around it without colours, its style in a notebook."""

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
"""Of both sides of a comparison, of the first alone, of the second alone, of neither; plain text; a remark of ours."""


@dataclass(frozen=True)
class Span:
    """Text of one look, a key of `LOOKS`; an aside stands on a line of its own."""

    text: str
    look: str


@dataclass(frozen=True)
class Passage:
    """Spans one behind the other; nothing in them is read as markup, and nothing hidden stays hidden."""

    spans: Sequence[Span]

    def drawn(self, coloured: bool) -> Text:
        """The passage for a terminal."""
        from rich.text import Text

        drawn = Text()
        for span in self.spans:
            look = LOOKS[span.look]
            if span.look == "aside" and drawn.plain and not drawn.plain.endswith("\n"):
                drawn.append("\n")
            said = visible(span.text)
            drawn.append(said if coloured or not look.opens else _marked(said, look), look.style or None)
            if span.look == "aside":
                drawn.append("\n")
        drawn.rstrip()
        return drawn

    def as_html(self) -> str:
        """The passage for a notebook."""
        return f'<p style="font-family:monospace">{"".join(map(_as_html, self.spans))}</p>'


def visible(text: str) -> str:
    """The text with a sign for everything that a terminal would obey or hide; a newline keeps its effect."""
    return "".join(map(_sign, text))


def _sign(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return f"{_NEWLINE}\n" if character == "\n" else _TAB
    if code < 32 or code == 127:
        return chr(0x2400 + code) if code < 32 else "\u2421"
    return f"<U+{code:04X}>" if unicodedata.category(character) in _HIDDEN else character


def _marked(text: str, look: Look) -> str:
    """The text between its marks, which do not enclose outer whitespace; spaces alone are a sign each."""
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
