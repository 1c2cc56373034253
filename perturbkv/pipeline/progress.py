"""Progress: rich's bar in a terminal, the browser's in a notebook, else a line each half minute; seconds of phases.

Phases are timed only inside `time_phases`; elsewhere they are noted for the lines of progress, which costs nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


@dataclass
class Bar:
    """A progress bar: the numbers of all items, if it is known, and of those that are done."""

    total: int | None
    done: int

    def advance(self) -> None:
        """Count one more item as done."""
        self.done += 1
        self.draw()

    def update(self, done: int, total: int) -> None:
        """Set the number of items done and the total."""
        self.done, self.total = done, total
        self.draw()

    def draw(self) -> None:
        """Draw the bar with the current counts; one that is printed as lines is not."""

    def text(self) -> str:
        """Return the counts as text: '3 of 8 done'."""
        return f"{self.done} done" if self.total is None else f"{self.done} of {self.total} done"


def bar(
    label: str,
    total: int | None = None,
    done: int = 0,
    *,
    shown: bool = True,
    console: Console | None = None,
    status: Callable[[], str] = str,
) -> AbstractContextManager[Bar]:
    """Show progress inside the block: a bar in a notebook's cell or on a terminal, else a line each half minute.

    Args:
        label: text in front of the bar.
        total: number of items; None: not known yet.
        done: number of items that are done before the block.
        shown: whether anything is drawn.
        console: where lines and bar go, by default stderr.
        status: called whenever the bar is drawn; returns a text to show next to it, such as `7 of 8 workers`.

    The bar disappears after the block.
    """
    screen = console or Console(stderr=True)
    if shown and screen.is_jupyter:
        return _notebook_bar(label, total, done, status)
    if shown and not screen.is_terminal:
        return _line_bar(label, total, done, screen, status)
    return _terminal_bar(label, total, done, screen, shown, status)


LINE_S = 30.0
"""Seconds between two lines of progress."""
_open_phases: list[str] = []
"""Names of the phases that this process is in, the outermost first."""


@contextmanager
def _line_bar(label: str, total: int | None, done: int, screen: Console, status: Callable[[], str]) -> Iterator[Bar]:
    """Print a line of progress each `LINE_S` seconds inside the block, also while one item takes long."""
    counted, began, ended = Bar(total, done), time.monotonic(), threading.Event()

    def print_lines() -> None:
        while not ended.wait(LINE_S):
            doing = ", ".join(filter(None, (*_open_phases[:1], status())))
            elapsed = _format_seconds(time.monotonic() - began)
            text = f"{label}: {counted.text()} after {elapsed}{f' ({doing})' if doing else ''}"
            with suppress(OSError):  # a closed pipe, which the command itself tells
                screen.print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield counted
    finally:
        ended.set()
        thread.join()


@contextmanager
def _terminal_bar(
    label: str, total: int | None, done: int, screen: Console, shown: bool, status: Callable[[], str]
) -> Iterator[Bar]:
    """Show a rich progress bar on a terminal inside the block; it has fewer columns where there is a status."""
    wide = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    narrow = (BarColumn(bar_width=12), MofNCompleteColumn(), _TextColumn(lambda task: _format_rate(task.speed)))
    columns = (
        TextColumn("{task.description}"),
        *(narrow if status() else wide),
        TextColumn("left"),
        TimeRemainingColumn(),
        *([_TextColumn(lambda task: status())] if status() else []),
    )
    with Progress(*columns, console=screen, disable=not shown, transient=True) as drawn:
        yield _TerminalBar(total, done, drawn, drawn.add_task(label, total=total, completed=done))


class _TextColumn(ProgressColumn):
    """A column with the text of a function, called whenever the bar is drawn."""

    def __init__(self, text: Callable[[Task], str]) -> None:
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        """Return the column's current text, the same for every task, cut to the terminal's width."""
        return Text(self._text(task), no_wrap=True, overflow="ellipsis")


def _format_rate(per_second: float | None) -> str:
    """Return a rate in items per second as text per minute; empty where it is not known yet."""
    return "" if per_second is None else f"{60 * per_second:.3g}/min"


@contextmanager
def _notebook_bar(label: str, total: int | None, done: int, status: Callable[[], str]) -> Iterator[Bar]:
    """Show an HTML progress bar in the notebook's cell inside the block."""
    from IPython.display import display

    handle = display(_mime_bundle(label), raw=True, display_id=True)
    try:
        yield _NotebookBar(total, done, handle, label, status)
    finally:
        handle.update({"text/plain": "", "text/html": ""}, raw=True)


@dataclass
class _TerminalBar(Bar):
    """A bar of rich, a task of `drawn`."""

    drawn: Progress
    task: TaskID

    def draw(self) -> None:
        """Draw the bar with the current counts."""
        self.drawn.update(self.task, completed=self.done, total=self.total)


@dataclass
class _NotebookBar(Bar):
    """A bar of the browser, drawn into IPython's display `handle`; rich's own would need another package there."""

    handle: Any
    label: str
    status: Callable[[], str]

    def __post_init__(self) -> None:
        self.first, self.began = self.done, time.monotonic()
        self.draw()

    def update(self, done: int, total: int) -> None:
        """Set the number of items done and the total."""
        if self.total is None:  # the first update: items done before it say nothing about the rate
            self.first = done
        super().update(done, total)

    def draw(self) -> None:
        """Redraw the bar in the cell with the current counts, rate and remaining time."""
        elapsed = time.monotonic() - self.began
        total, new = self.total, self.done - self.first
        count = f"{self.done}" if total is None else f"{self.done} of {total}"
        left = (
            f", about {_format_seconds(elapsed / new * (total - self.done))} left"
            if total is not None and new > 0
            else ""
        )
        status = self.status()
        rate = f", {_format_rate(new / elapsed)}" if status and new > 0 else ""
        text = f"{self.label}: {count}, {_format_seconds(elapsed)}{left}{rate}{f', {status}' if status else ''}"
        html_bar = "" if total is None else f'<progress value="{self.done}" max="{total}"></progress> '
        self.handle.update(_mime_bundle(text, html_bar), raw=True)


def _mime_bundle(text: str, html_bar: str = "") -> dict[str, str]:
    """Return MIME type -> content of a bar, as plain text and HTML, for IPython's display."""
    return {"text/plain": text, "text/html": f"{html_bar}{text}"}


def _format_seconds(seconds: float) -> str:
    """Return a duration as text, such as 0:01:30."""
    return str(timedelta(seconds=round(seconds)))


@dataclass
class Clock:
    """The durations of phases in seconds, by name; a nested phase counts in the outer one too.

    `wait` waits until the device has finished.
    """

    wait: Callable[[], None]
    seconds: dict[str, float] = field(default_factory=dict)


_timing_clock: ContextVar[Clock | None] = ContextVar("perturbkv_clock", default=None)


@contextmanager
def time_phases(wait: Callable[[], None] = lambda: None) -> Iterator[dict[str, float]]:
    """Measure the phases inside the block, and yield phase name -> seconds.

    `wait` is called at both ends of a phase, and waits until the device has finished.
    """
    clock = Clock(wait)
    token = _timing_clock.set(clock)
    try:
        yield clock.seconds
    finally:
        _timing_clock.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Add the block's duration to the phase `name` inside `time_phases`; lines of progress name the outermost phase."""
    clock = _timing_clock.get()
    _open_phases.append(name)
    if clock:
        clock.wait()
    start = time.perf_counter()
    try:
        yield
    finally:
        _open_phases.pop()
        if clock:
            clock.wait()
            clock.seconds[name] = clock.seconds.get(name, 0.0) + time.perf_counter() - start
