"""Running English prose that every Python carries: CPython's language reference in `pydoc_data.topics`."""

from __future__ import annotations

import functools
import re

_MARKUP = re.compile(r"\*\*|``|`|\"\"|\[\d+\]_?|\|")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_ODD = re.compile(r"::|[=<>{}\\^~_@#]|\.\.\.|\(\)|--")


@functools.cache
def sentences() -> tuple[str, ...]:
    """Plain sentences of the manual, in its own order: no code, tables, headings or grammar."""
    from pydoc_data.topics import topics

    found = [sentence for name in sorted(topics) for block in _paragraphs(topics[name]) for sentence in _split(block)]
    return tuple(dict.fromkeys(found))


def _paragraphs(text: str) -> list[str]:
    """Blocks of unindented lines that read as prose."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith((" ", "*", "-", "+", "["))]
    return [" ".join(block.split()) for block in blocks if not re.search(r"^[=\-*~^\"]{4,}$", block, re.MULTILINE)]


def _split(paragraph: str) -> list[str]:
    cleaned = re.sub(r"\*(\w+)\*", r"\1", _MARKUP.sub("", paragraph))
    return [sentence for sentence in _SENTENCE_END.split(cleaned) if _is_plain(sentence)]


def _is_plain(sentence: str) -> bool:
    words = sentence.split()
    return (
        6 <= len(words) <= 60
        and sentence[0].isupper()
        and sentence[-1] in ".!?"
        and not _ODD.search(sentence)
        and not any(character.isdigit() for character in sentence)
    )
