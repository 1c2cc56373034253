"""The screen of every command: tables and JSON on stdout, notes and progress on stderr."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from perturbkv.display import Part, Table, show
from perturbkv.escaping import escape_control_characters, escape_json, escape_line

if TYPE_CHECKING:
    from perturbkv.analyses.result import Result
    from perturbkv.pipeline.progress import Bar

SCHEMA = 1
"""Of every JSON document of ours, as docs/json.md describes it; it rises when a key changes its meaning or goes."""
_NUMBER = r"(?:-?\d[\d.eE+-]*|null)"
_NUMBERS = re.compile(rf"\[\n *{_NUMBER}(?:,\n *{_NUMBER})*\n *\]")  # with newlines, which no text in JSON holds
_NARROWEST, _USUAL = 20, 80


class Screen(Console):
    """A console that leaves it to the command what happens when nobody reads any more."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, which `main` ends with, instead of leaving with 1."""
        raise BrokenPipeError


def screen(**more: Any) -> Screen:
    """Return a console of at least 20 columns, whatever COLUMNS says; of 80 where it says nothing that can be drawn."""
    told = Screen(**more)
    if told.width < _NARROWEST:
        return Screen(width=_USUAL if told.width < 1 else _NARROWEST, **more)
    return told


out = screen()
err = screen(stderr=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, as `perturbkv.display.Table` says."""
    show(out, Table(title, columns, list(rows)))


def part(shown: Part) -> None:
    """Print a table, a passage or a line of a result."""
    show(out, shown)


def say(text: str, bold: bool = False) -> None:
    """Print a line of results on stdout, wrapped at the terminal's width; nothing in it is read as markup."""
    out.print(
        escape_control_characters(text), highlight=False, markup=False, emoji=False, style="bold" if bold else None
    )


def result(results: Sequence[Result], title: str, about: str = "", explain: bool = False) -> None:
    """Print results of one command: conclusions, the run, tables, notes once; and what `explain` gives where asked."""
    for one in results:
        say(one.conclusion())
    say("")
    say(title, bold=True)
    if about:
        say(about)
    for shown in [shown for one in results for shown in one.body()]:
        part(shown)
    say("\n".join(_distinct_notes(results)))
    for shown in [shown for one in results for shown in one.explain()] if explain else []:
        part(shown)


def _distinct_notes(results: Sequence[Result]) -> list[str]:
    """Return the notes of all results, without repetitions and without a note that another one completes."""
    notes = list(dict.fromkeys(line for result in results for line in result.notes().splitlines()))
    return [note for note in notes if sum(other.startswith(note.removesuffix(".")) for other in notes) == 1]


def as_json(document: Mapping[str, Any], ascii_only: bool = False) -> str:
    """Return indented JSON that says which schema it follows, lists of numbers on one line each."""
    text = json.dumps({"schema": SCHEMA, **document}, indent=2, ensure_ascii=ascii_only, allow_nan=False)
    return (
        _NUMBERS.sub(lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), escape_json(text))
        + "\n"
    )


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document on stdout, never wrapped or coloured; ASCII where stdout takes no more."""
    text = as_json(document)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = as_json(document, ascii_only=True)
    sys.stdout.write(text)


def note(text: str) -> None:
    """Print one line on stderr."""
    err.print(escape_line(text), highlight=False, soft_wrap=True, markup=False, emoji=False)


class _Notes(logging.Handler):
    """A handler that prints what the library logs."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def show_log() -> None:
    """Print what the library logs, from now on; nothing of other libraries."""
    log = logging.getLogger("perturbkv")
    log.setLevel(logging.INFO)
    log.handlers = [_Notes()]


def progress(
    what: str, total: int | None = None, done: int = 0, beside: Callable[[], str] = str
) -> AbstractContextManager[Bar]:
    """Return a bar with the time left on stderr, and what `beside` says; nothing where stderr is no terminal."""
    from perturbkv.pipeline.progress import bar

    return bar(what, total, done, console=err, beside=beside)
