"""A bar for long work: drawn by rich in a terminal, by the browser in a notebook."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar(Protocol):
    """How far the work is."""

    def one_more(self) -> None:
        """One more is done."""

    def at(self, done: int, total: int) -> None:
        """So many are done, of so many."""


@contextmanager
def bar(
    what: str, total: int | None = None, done: int = 0, *, shown: bool = True, console: Console | None = None
) -> Iterator[Bar]:
    """A bar with the time left: in the notebook's cell, or on stderr unless a console is given.

    Nothing is drawn where it is not `shown`, or the console is neither a terminal nor a notebook. Nothing is left of it
    behind the block.
    """
    screen = console or Console(stderr=True)
    if shown and screen.is_jupyter:
        with _in_notebook(what, total, done) as drawn:
            yield drawn
    else:
        with _in_terminal(what, total, done, screen, shown) as drawn:
            yield drawn


@contextmanager
def _in_terminal(what: str, total: int | None, done: int, screen: Console, shown: bool) -> Iterator[Bar]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    visible = shown and screen.is_terminal
    with Progress(*columns, console=screen, disable=not visible, transient=True) as drawn:
        yield _TerminalBar(drawn, what, total, done)


@contextmanager
def _in_notebook(what: str, total: int | None, done: int) -> Iterator[Bar]:
    from IPython.display import display

    handle = display(_mime(what), raw=True, display_id=True)
    try:
        yield _NotebookBar(handle, what, total, done)
    finally:
        handle.update({"text/plain": "", "text/html": ""}, raw=True)


class _TerminalBar:
    def __init__(self, drawn: Progress, what: str, total: int | None, done: int) -> None:
        self._drawn, self._task = drawn, drawn.add_task(what, total=total, completed=done)

    def one_more(self) -> None:
        self._drawn.advance(self._task)

    def at(self, done: int, total: int) -> None:
        self._drawn.update(self._task, completed=done, total=total)


class _NotebookBar:
    """What rich would draw needs a package of its own in a notebook; a browser draws a bar by itself."""

    def __init__(self, handle: Any, what: str, total: int | None, done: int) -> None:
        self._handle, self._what, self._total, self._done = handle, what, total, done
        self._first, self._began = done, time.monotonic()
        self._draw()

    def one_more(self) -> None:
        self._done += 1
        self._draw()

    def at(self, done: int, total: int) -> None:
        if self._total is None:
            self._first = done
        self._done, self._total = done, total
        self._draw()

    def _draw(self) -> None:
        gone = time.monotonic() - self._began
        total, new = self._total, self._done - self._first
        count = f"{self._done}" if total is None else f"{self._done} of {total}"
        left = f", about {_clock(gone / new * (total - self._done))} left" if total is not None and new > 0 else ""
        text = f"{self._what}: {count}, {_clock(gone)}{left}"
        drawn = "" if total is None else f'<progress value="{self._done}" max="{total}"></progress> '
        self._handle.update(_mime(text, drawn), raw=True)


def _mime(text: str, drawn: str = "") -> dict[str, str]:
    return {"text/plain": text, "text/html": f"{drawn}{text}"}


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
