"""Words that terminals, spreadsheets, browsers and typesetters obey: here they are names and texts."""

from __future__ import annotations

import re

WORDS = {
    "a closing tag": "Who? [/INST]",
    "a style": "[bold red]bold[/bold red]",
    "a link": "[link=https://example.org]here[/link]",
    "an open bracket": "[",
    "a title": "\x1b]0;owned\x07",
    "a cleared screen": "\x1b[2J\x1b[H",
    "8-bit codes": "\x9b31m",
    "CR": "good\rbad",
    "LF": "first\nerror: second",
    "a tab": "a\tb",
    "backspaces": "abc\b\b\bxyz",
    "bidi": "\u202egnp.exe\u2066",
    "a line separator": "a\u2028b",
    "an emoji's name": ":smile: :warning:",
    "an emoji": "👩\u200d🔬 漢字 é",
    "a formula": "=cmd|' /C calc'!A0",
    "plus": "+1+cmd",
    "minus": "-2+3",
    "at": "@SUM(1)",
    "broken mathtext": r"$\frac{1",
    "mathtext": "$x_1^2$ $",
    "TeX": r"a_b^c\d{e}~#%&",
    "XML": "<b>&amp;\"'--></b>]]>",
    "format": "%s {0} {x!r} %(a)s",
    "underscore": "_hidden",
    "long": "x" * 900,
}
_OBEYED = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def obeyed(said: str) -> str | None:
    """What is wrong with text for a screen: a character that a terminal would obey, and some of what is around it."""
    found = _OBEYED.search(said)
    return f"{found[0]!r} in {said[max(0, found.start() - 30) : found.end() + 10]!r}" if found else None


def shows(said: str, text: str) -> bool:
    """Whether those letters stand in the order of the text; what is escaped between them does not matter."""
    place = 0
    squeezed = "".join(said.split()).replace("\\'", "'").replace("\\\\", "\\")
    for part in filter(None, re.split(r"[^\x21-\x7e]+", text)):
        place = squeezed.find(part, place) + len(part)
        if place < len(part):
            return False
    return True
