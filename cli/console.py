"""Output of every command: tables and JSON on stdout, notes and progress on stderr."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from perturbkv.display import Table, print_part
from perturbkv.escaping import escape_control_characters, escape_json, escape_line

if TYPE_CHECKING:
    from perturbkv.analyses.result import Result
    from perturbkv.pipeline.progress import Bar

SCHEMA = 1
"""The schema version of every JSON document, see reference/json.md; it rises when a key changes its meaning or goes."""
_NUMBER = r"(?:-?\d[\d.eE+-]*|null)"
_NUMBERS = re.compile(rf"\[\n *{_NUMBER}(?:,\n *{_NUMBER})*\n *\]")  # with newlines, which no text in JSON holds


class Screen(Console):
    """A console that raises BrokenPipeError where the reader closed the pipe, instead of exiting."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, which `main` turns into the exit code."""
        raise BrokenPipeError


out: Screen = Screen()
err: Screen = Screen(stderr=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on stdout; a column whose name begins with `#` holds numbers."""
    print_part(out, Table(title, columns, list(rows)))


def say(text: str, bold: bool = False) -> None:
    """Print text verbatim on stdout, without interpreting markup, wrapped at the terminal's width."""
    out.print(
        escape_control_characters(text), highlight=False, markup=False, emoji=False, style="bold" if bold else None
    )


def print_results(results: Sequence[Result], title: str, subtitle: str = "", explain: bool = False) -> None:
    """Print results: conclusions, title and subtitle, tables and notes; with `explain` also the meaning of columns.

    An empty subtitle is left out.
    """
    for one in results:
        say(one.conclusion())
    say("")
    say(title, bold=True)
    if subtitle:
        say(subtitle)
    for part in [part for one in results for part in one.body()]:
        print_part(out, part)
    notes = list(dict.fromkeys(line for one in results for line in one.notes().splitlines()))
    # without those that begin another one; a note is a beginning of itself
    say("\n".join(note for note in notes if sum(other.startswith(note.removesuffix(".")) for other in notes) == 1))
    for part in [part for one in results for part in one.explain()] if explain else []:
        print_part(out, part)


def as_json(document: Mapping[str, Any], ascii_only: bool = False) -> str:
    """Return a document as indented JSON with its schema version; a list of numbers is on a single line."""
    text = json.dumps({"schema": SCHEMA, **document}, indent=2, ensure_ascii=ascii_only, allow_nan=False)
    return (
        _NUMBERS.sub(lambda match: " ".join(match[0].split()).replace("[ ", "[").replace(" ]", "]"), escape_json(text))
        + "\n"
    )


def print_json(document: Mapping[str, Any]) -> None:
    """Print a JSON document on stdout, never wrapped or coloured; in ASCII where stdout is not in UTF-8."""
    sys.stdout.write(as_json(document, ascii_only="utf" not in (sys.stdout.encoding or "utf-8").lower()))


def note(text: str) -> None:
    """Print a text as one line on stderr."""
    err.print(escape_line(text), highlight=False, soft_wrap=True, markup=False, emoji=False)


class _Notes(logging.Handler):
    """A log handler that prints every record as a note."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record as a note."""
        note(record.getMessage())


def show_log() -> None:
    """Print the log messages of this library, and of no other, as notes from now on."""
    log = logging.getLogger("perturbkv")
    log.setLevel(logging.INFO)
    log.handlers = [_Notes()]


def progress(
    label: str, total: int | None = None, done: int = 0, status: Callable[[], str] = str
) -> AbstractContextManager[Bar]:
    """Return a progress bar on stderr with the time left and the text of `status`, shown only on a terminal."""
    from perturbkv.pipeline.progress import bar

    return bar(label, total, done, console=err, status=status)
