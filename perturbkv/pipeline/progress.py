"""A bar for long work, in terminals and notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar:
    """How far the work is."""

    def __init__(self, drawn: Progress, what: str, total: int | None, done: int) -> None:
        self._drawn, self._task = drawn, drawn.add_task(what, total=total, completed=done)

    def one_more(self) -> None:
        """One more is done."""
        self._drawn.advance(self._task)

    def at(self, done: int, total: int) -> None:
        """So many are done, of so many."""
        self._drawn.update(self._task, completed=done, total=total)


@contextmanager
def bar(
    what: str, total: int | None = None, done: int = 0, *, shown: bool = True, console: Console | None = None
) -> Iterator[Bar]:
    """A bar with the time left, on stderr unless a console is given.

    Nothing is drawn where it is not `shown`, or the console is neither a terminal nor a notebook.
    """
    screen = console or Console(stderr=True)
    visible = shown and (screen.is_terminal or screen.is_jupyter)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, disable=not visible, transient=True) as drawn:
        yield Bar(drawn, what, total, done)
