"""Escaping of untrusted text, and text with highlighted spans: in colours where there are some, else in brackets.

Model answers, file names and attributes of a trace must not move the cursor, set the window's title or reverse the
line: control and invisible characters are replaced by visible signs or escapes.
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
"""Unicode categories of characters that a terminal interprets or does not show."""
_NEWLINE, _TAB, _SPACE = "↵", "⇥", "␣"


@dataclass(frozen=True)
class TextStyle:
    """A style of highlighted text: rich's style, the brackets used without colours, and the CSS in a notebook."""

    style: str
    opens: str
    closes: str
    css: str


STYLES: Mapping[str, TextStyle] = {
    "kept": TextStyle("bold", "[=", "=]", "font-weight:bold"),
    "lost": TextStyle("black on yellow", "[-", "-]", "background:#de8f05;color:black"),
    "gained": TextStyle("black on bright_cyan", "{+", "+}", "background:#56b4e9;color:black"),
    "dropped": TextStyle("dim", "", "", "color:#888"),
    "plain": TextStyle("", "", "", ""),
    "aside": TextStyle("italic", "", "", "font-style:italic"),
}
"""Styles of tokens that both sides of a comparison keep, the first alone, the second alone, neither; of plain text; of
a remark."""


@dataclass(frozen=True)
class Span:
    """Text in one style, a key of `STYLES`; a span of style "aside" is on a line of its own."""

    text: str
    style: str


@dataclass(frozen=True)
class HighlightedText:
    """Text with highlighted spans; markup and hidden characters in it are escaped."""

    spans: Sequence[Span]

    def to_rich(self, coloured: bool) -> Text:
        """Return the text for a terminal, with colours where `coloured`, else with brackets."""
        from rich.text import Text

        result = Text()
        for span in self.spans:
            style = STYLES[span.style]
            if span.style == "aside" and result.plain and not result.plain.endswith("\n"):
                result.append("\n")
            text = show_control_characters(span.text)
            result.append(text if coloured or not style.opens else _bracket(text, style), style.style or None)
            if span.style == "aside":
                result.append("\n")
        result.rstrip()
        return result

    def as_html(self) -> str:
        """Return the text as HTML for a notebook."""
        return f'<p style="font-family:monospace">{"".join(map(_span_html, self.spans))}</p>'


def show_control_characters(text: str) -> str:
    """Return the text with visible signs for control and invisible characters; newlines also break the line."""
    return "".join(map(_visible_sign, text))


def _visible_sign(character: str) -> str:
    """Return a visible sign for a control or invisible character; any other character is returned unchanged."""
    code = ord(character)
    if character in "\n\t":
        return f"{_NEWLINE}\n" if character == "\n" else _TAB
    if code < 32 or code == 127:
        return chr(0x2400 + code) if code < 32 else "\u2421"
    return f"<U+{code:04X}>" if unicodedata.category(character) in _HIDDEN else character


def _bracket(text: str, style: TextStyle) -> str:
    """Return the text in its style's brackets, outer whitespace outside; in blank text, spaces become visible signs."""
    inner = text.strip(" \n")
    if not inner:
        return f"{style.opens}{text.replace(' ', _SPACE)}{style.closes}"
    begin = text.index(inner)
    return f"{text[:begin]}{style.opens}{inner}{style.closes}{text[begin + len(inner) :]}"


def _span_html(span: Span) -> str:
    """Return a span as an HTML element in its style."""
    text = html.escape(show_control_characters(span.text)).replace("\n", "<br>")
    line_break = "<br>" if span.style == "aside" else ""
    return f'{line_break}<span style="{STYLES[span.style].css}">{text}</span>{line_break}'


_INTERPRETED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but newline and tab
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # invisible: directions, ends of lines
    "\ud800-\udfff\U000e0000-\U000e007f]"  # lone surrogates, which UTF-8 cannot encode; tags
)
_LINE_BREAKS = re.compile(r"[\n\t]")


def escape_control_characters(text: str) -> str:
    r"""Return the text with control and invisible characters escaped as `\x1b`; newlines and tabs stay.

    Joiners (U+200C, U+200D) stay too: scripts and emoji need them.
    """
    return _INTERPRETED.sub(_escape_match, text)


def escape_line(text: str) -> str:
    r"""Return the text as one line: escaped as by `escape_control_characters`, and newlines and tabs escaped too."""
    return _LINE_BREAKS.sub(_escape_match, escape_control_characters(text))


def escape_markdown(text: str) -> str:
    """Return the text as one line with Markdown's special characters escaped by backslashes."""
    return "".join(f"\\{sign}" if sign in r"\`*_{}[]<>#|~$&" else sign for sign in escape_line(text))


def escape_json(document: str) -> str:
    r"""Return an equivalent JSON document with control and invisible characters as escapes such as `\u202e`."""
    return _INTERPRETED.sub(lambda match: json.dumps(match[0])[1:-1], document)


def _escape_match(match: re.Match[str]) -> str:
    r"""Return the escape sequence of a matched character, such as `\x1b`."""
    return match[0].encode("unicode_escape").decode()
