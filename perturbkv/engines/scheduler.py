"""Scheduling a run's items on workers, one by one: an item whose worker ends gets a second attempt and no more."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from perturbkv.engines.worker import Place, Reply, Said, Task
from perturbkv.errors import WorkerError


@dataclass(frozen=True)
class Gone:
    """A worker that ended; `how` in words, such as `signal 9`."""

    how: str


@dataclass(frozen=True)
class Work:
    """The items of one run.

    Attributes:
        task: what is done with each.
        sizes: size of every item, in any unit.
        item: makes the object that is sent, when it is sent.
        done: gets an item's result.
        failed: gets an item that was given up, and the reason.
    """

    task: Task
    sizes: Sequence[int]
    item: Callable[[int], Any]
    done: Callable[[int, Any], None]
    failed: Callable[[int, str], None]


class Crew(Protocol):
    """A pool of workers by index, none of which runs until it is hired.

    Every order is answered by one `Reply`, the first by `hire`'s own; a worker that ends answers with `Gone`.
    """

    @property
    def places(self) -> Sequence[Place]:
        """The devices of the workers."""

    def hire(self, place: int) -> None:
        """Start the worker of this index, where none runs."""

    def begin(self, place: int, task: Task) -> None:
        """Order a worker to prepare a task."""

    def do(self, place: int, item: Any) -> None:
        """Order a worker to do an item of its task."""

    def poll(self, seconds: float) -> list[tuple[int, Reply | Gone]]:
        """Wait at most `seconds` for the next answers and return them; each worker's end is reported once."""

    def dismiss(self, place: int) -> None:
        """End a worker at once, whatever it does; its pending answer is dropped."""

    def close(self) -> None:
        """End all workers, within seconds."""


MOST = 2


class Waiting:
    """A queue of items, the largest first; one whose worker ended is queued once more, last.

    Args:
        sizes: size of each item; the longest begin first, so that none is waited for at the end.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._waiting = deque(sorted(range(len(sizes)), key=lambda place: -sizes[place]))
        self._ends: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> int:
        """Return the next item's index."""
        return self._waiting.popleft()

    def ended(self, item: int, how: str) -> str | None:
        """Note that an attempt ended its worker.

        Return None where another attempt follows, else why the item is given up.
        """
        ends = self._ends.setdefault(item, [])
        ends.append(how)
        if len(ends) < MOST:
            self._waiting.append(item)
            return None
        told = how if len(set(ends)) == 1 else ", then ".join(ends)
        del self._ends[item]
        return f"its worker ended twice ({told})"

    def done(self, item: int) -> None:
        """Note that the item needs no further attempt."""
        self._ends.pop(item, None)


_log = logging.getLogger(__name__)
_LONGEST_WAIT = 1.0
"""Seconds between checks for hanging workers."""
_MOST_STARTS = 2
"""Starts of a worker that ends before it could do anything."""
_MOST_ENDS = 10
"""Workers that may end one after the other without an item done in between."""
_REMEMBERED = 1000
"""Number of log lines that are remembered, so that they are not repeated."""


@dataclass
class _Seat:
    """A worker's state and its pending order.

    Attributes:
        there: whether the worker runs.
        asked: the pending order: `start`, `begin`, or an item's index; None where there is none.
        since: when the order was sent, on the monotonic clock.
        task: the task that the worker has prepared.
        failed_starts: how often in a row it ended before it was ready.
    """

    there: bool = False
    asked: str | int | None = None
    since: float = 0.0
    task: Task | None = None
    failed_starts: int = 0


class Scheduler:
    """Scheduler of a pool of workers.

    Args:
        crew: the workers, none of them hired yet; they stay from one run to the next.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._timeout: float | None = None
        self._seats = [_Seat() for _ in crew.places]
        self._said: dict[Said, None] = {}
        self._ends, self._most_ends = 0, max(_MOST_ENDS, 3 * len(self._seats))

    def alive(self) -> str:
        """Return the workers for a progress bar: `7 of 8 workers`."""
        there = sum(seat.there and seat.asked != "start" for seat in self._seats)
        return f"{there} of {len(self._seats)} workers"

    @property
    def size(self) -> int:
        """The largest number of workers."""
        return len(self._seats)

    def run(self, work: Work, timeout: float | None = None) -> None:
        """Do every item: `done` or `failed` gets each, as it is ready.

        An item whose worker ends is done again, once, and given up when that worker ends too. A worker that takes
        longer than `timeout` seconds for an item is ended; None: never.

        Raises what a worker raises, its message beginning with the worker's name; WorkerError where no worker is left.
        """
        waiting, self._ends, self._timeout = Waiting(work.sizes), 0, timeout
        while True:
            self._hand_out(work, waiting)
            if not waiting and not any(isinstance(seat.asked, int) for seat in self._seats):
                return
            for place, answer in self._crew.poll(self._patience()):
                if isinstance(answer, Gone):
                    self._handle_end(work, waiting, place, answer.how)
                else:
                    self._handle_reply(work, waiting, place, answer)
            self._end_hanging(work, waiting)

    def _hand_out(self, work: Work, waiting: Waiting) -> None:
        """Send an item to every idle worker, as long as items wait."""
        for place, seat in enumerate(self._seats):
            if waiting and seat.asked is None and seat.there:
                self._next(work, waiting, place, seat)
        coming = sum(isinstance(seat.asked, str) for seat in self._seats)
        for place, seat in enumerate(self._seats):
            if coming < len(waiting) and not seat.there and seat.failed_starts < _MOST_STARTS:
                self._crew.hire(place)
                seat.there, seat.task, seat.asked = True, None, "start"
                coming += 1

    def _next(self, work: Work, waiting: Waiting, place: int, seat: _Seat) -> None:
        if seat.task is not work.task:
            self._crew.begin(place, work.task)
            seat.task, seat.asked = work.task, "begin"
        else:
            seat.asked, seat.since = waiting.take(), time.monotonic()
            self._crew.do(place, work.item(seat.asked))

    def _patience(self) -> float:
        """Return the seconds until a worker may count as hanging."""
        if self._timeout is None:
            return _LONGEST_WAIT
        left = [seat.since + self._timeout for seat in self._seats if isinstance(seat.asked, int)]
        return max(0.0, min([_LONGEST_WAIT, *(end - time.monotonic() for end in left)]))

    def _handle_reply(self, work: Work, waiting: Waiting, place: int, answer: Reply) -> None:
        seat = self._seats[place]
        asked, seat.asked = seat.asked, None
        for line in answer.said:
            self._say(line)
        if error := answer.exception(self._name(place)):
            raise error
        if asked == "begin":
            seat.failed_starts = 0
        if isinstance(asked, int):
            self._ends = 0
            waiting.done(asked)
            self._hand_out(work, waiting)  # first, so that nobody idles while this answer is written to the disk
            work.done(asked, answer.value)

    def _handle_end(self, work: Work, waiting: Waiting, place: int, how: str) -> None:
        """Handle the end of a worker, whether it was doing an item or not."""
        seat = self._seats[place]
        asked, seat.asked, seat.there = seat.asked, None, False
        self._ends += 1
        if not isinstance(asked, int):
            seat.failed_starts += 1
            self._check_some_left(how)
        elif reason := waiting.ended(asked, how):
            work.failed(asked, reason)
        else:
            _log.warning("%s ended (%s); what it did is done again", self._name(place), how)
        if self._ends >= self._most_ends:
            msg = (
                f"{self._ends} workers ended without a sample done between, the last by {how}; look for what ends them"
            )
            raise WorkerError(msg)

    def _check_some_left(self, how: str) -> None:
        if all(not seat.there and seat.failed_starts >= _MOST_STARTS for seat in self._seats):
            msg = f"every worker ended before it could measure, the last by {how}; fewer --workers need less memory"
            raise WorkerError(msg)

    def _end_hanging(self, work: Work, waiting: Waiting) -> None:
        if self._timeout is None:
            return
        for place, seat in enumerate(self._seats):
            if isinstance(seat.asked, int) and time.monotonic() - seat.since >= self._timeout:
                self._crew.dismiss(place)
                self._handle_end(work, waiting, place, f"over {self._timeout:g} seconds")

    def _say(self, line: Said) -> None:
        """Log a worker's line, once however many workers send it."""
        if line not in self._said:
            if len(self._said) >= _REMEMBERED:
                self._said.clear()
            self._said[line] = None
            name, level, message = line
            logging.getLogger(name).log(level, "%s", message)

    def _name(self, place: int) -> str:
        where = self._crew.places[place]
        return f"worker {place + 1} ({', '.join(filter(None, (where.device, where.node)))})"
