"""What every command prints with: tables and JSON on stdout, notes and progress on stderr."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console

from perturbkv.display import Part, Table, show
from perturbkv.pipeline.progress import Bar, bar

SCHEMA = 1
"""Of every JSON document of ours, as docs/json.md describes it; it rises when a key changes its meaning or goes."""
_NUMBER = r"(?:-?\d[\d.eE+-]*|null)"
_NUMBERS = re.compile(rf"\[\s+{_NUMBER}(?:,\s+{_NUMBER})*\s+\]")
out = Console()
err = Console(stderr=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, as `perturbkv.display.Table` says."""
    show(out, Table(title, columns, list(rows)))


def part(found: Part) -> None:
    """Print a table, a passage or a line of a result."""
    show(out, found)


def say(text: str, bold: bool = False) -> None:
    """A line of results on stdout, wrapped at the terminal's width; nothing in it is read as markup."""
    out.print(text, highlight=False, markup=False, emoji=False, style="bold" if bold else None)


def as_json(document: Mapping[str, Any]) -> str:
    """Indented JSON that says which schema it follows, lists of numbers on one line each."""
    whole = {"schema": SCHEMA, **document}
    text = json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False)
    return _NUMBERS.sub(lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text) + "\n"


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout, never wrapped or coloured."""
    sys.stdout.write(as_json(document))


def note(text: str) -> None:
    """One line on stderr."""
    err.print(text, highlight=False, soft_wrap=True, markup=False)


class _Notes(logging.Handler):
    """What the library has to say, as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def show_log() -> None:
    """Print what the library logs, from now on; nothing of other libraries."""
    log = logging.getLogger("perturbkv")
    log.setLevel(logging.INFO)
    log.handlers = [_Notes()]


def progress(what: str, total: int | None = None, done: int = 0) -> AbstractContextManager[Bar]:
    """A bar with the time left on stderr; nothing where stderr is no terminal."""
    return bar(what, total, done, console=err)
