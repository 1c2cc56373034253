"""Scheduling of a run's items on workers: an item whose worker ends gets one more attempt."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from perturbkv.engines.worker import LogLine, Reply, Task, WorkerDevice
from perturbkv.errors import WorkerError


@dataclass(frozen=True)
class WorkerExit:
    """The end of a worker; `reason` in words, such as `signal 9`."""

    reason: str


@dataclass(frozen=True)
class Work:
    """The items of one run.

    Attributes:
        task: the task that is done with each item.
        sizes: size of each item, in any unit.
        item: function from an item's index to the object that is sent to a worker.
        done: callback with an item's index and its result.
        failed: callback with the index of an item that was given up, and the reason.
    """

    task: Task
    sizes: Sequence[int]
    item: Callable[[int], Any]
    done: Callable[[int, Any], None]
    failed: Callable[[int, str], None]


class Crew(Protocol):
    """A pool of workers, addressed by their index; none runs until it is hired.

    Every order is answered by one `Reply`, the first by `hire`'s own; a worker that ends answers with `WorkerExit`.
    """

    @property
    def devices(self) -> Sequence[WorkerDevice]:
        """The device of each worker."""

    def hire(self, worker: int) -> None:
        """Start the worker of this index, if it is not running."""

    def begin(self, worker: int, task: Task) -> None:
        """Order a worker to prepare a task."""

    def do(self, worker: int, item: Any) -> None:
        """Order a worker to process an item of its task."""

    def poll(self, seconds: float) -> list[tuple[int, Reply | WorkerExit]]:
        """Return (worker, reply or exit) for all answers within `seconds`; a worker's exit is reported once."""

    def dismiss(self, worker: int) -> None:
        """End a worker at once, even while it is busy; its pending answer is dropped."""

    def close(self) -> None:
        """End all workers, within seconds."""


MOST_ATTEMPTS = 2
"""Attempts at an item before it is given up."""


class ItemQueue:
    """A queue of items by index, the largest first; an item whose worker ended is queued once more, last.

    Args:
        sizes: size of each item; the largest begin first, so that none is waited for at the end.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._waiting = deque(sorted(range(len(sizes)), key=lambda item: -sizes[item]))
        self._ends: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> int:
        """Remove the next item and return its index."""
        return self._waiting.popleft()

    def record_exit(self, item: int, reason: str) -> str | None:
        """Record that an item's worker ended; return the reason for giving up the item, None if it is queued again."""
        ends = self._ends.setdefault(item, [])
        ends.append(reason)
        if len(ends) < MOST_ATTEMPTS:
            self._waiting.append(item)
            return None
        reasons = reason if len(set(ends)) == 1 else ", then ".join(ends)
        del self._ends[item]
        return f"its worker ended twice ({reasons})"

    def record_done(self, item: int) -> None:
        """Record that an item is done."""
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
class _WorkerState:
    """A worker's state and its pending order.

    Attributes:
        running: whether the worker runs.
        order: the order that it has not answered: `start`, `begin`, or an item's index; None: it is idle.
        since: when the order was sent, on the monotonic clock.
        task: the task that the worker has prepared.
        failed_starts: how often in a row it ended before it was ready.
    """

    running: bool = False
    order: str | int | None = None
    since: float = 0.0
    task: Task | None = None
    failed_starts: int = 0


class Scheduler:
    """A scheduler of items on a pool of workers.

    Args:
        crew: the workers, none of them hired yet; they stay from one run to the next.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._states = [_WorkerState() for _ in crew.devices]
        self._log_lines: set[LogLine] = set()
        self._ends, self._most_ends = 0, max(_MOST_ENDS, 3 * len(self._states))

    def describe_workers(self) -> str:
        """Return the progress bar's text on living workers: `7 of 8 workers`."""
        alive = sum(state.running and state.order != "start" for state in self._states)
        return f"{alive} of {len(self._states)} workers"

    @property
    def size(self) -> int:
        """Number of workers, running or not."""
        return len(self._states)

    def run(self, work: Work, timeout: float | None = None) -> None:
        """Process every item of a work; its `done` or `failed` is called as soon as an item ends.

        An item whose worker ends is done again, once, and given up when that worker ends too. A worker that takes
        longer than `timeout` seconds for an item is ended; None: never.

        Raises what a worker raises, its message beginning with the worker's name; WorkerError where no worker is left.
        """
        waiting, limit, self._ends = ItemQueue(work.sizes), math.inf if timeout is None else timeout, 0
        while True:
            self._send_items(work, waiting)
            if not waiting and not any(isinstance(state.order, int) for state in self._states):
                return
            now = time.monotonic()
            begun = [state.since for state in self._states if isinstance(state.order, int)]
            wait = max(0.0, min([_LONGEST_WAIT, *(since + limit - now for since in begun)]))
            for worker, answer in self._crew.poll(wait):
                if isinstance(answer, WorkerExit):
                    self._handle_exit(work, waiting, worker, answer.reason)
                else:
                    self._handle_reply(work, waiting, worker, answer)
            for worker, state in enumerate(self._states):
                if isinstance(state.order, int) and time.monotonic() - state.since >= limit:
                    self._crew.dismiss(worker)
                    self._handle_exit(work, waiting, worker, f"over {limit:g} seconds")

    def _send_items(self, work: Work, waiting: ItemQueue) -> None:
        """Send an item to every idle worker, and start further workers, while items wait."""
        for worker, state in enumerate(self._states):
            if not waiting or state.order is not None or not state.running:
                continue
            if state.task is not work.task:  # which it prepares first
                self._crew.begin(worker, work.task)
                state.task, state.order = work.task, "begin"
            else:
                state.order, state.since = waiting.take(), time.monotonic()
                self._crew.do(worker, work.item(state.order))
        starting = sum(isinstance(state.order, str) for state in self._states)
        for worker, state in enumerate(self._states):
            if starting < len(waiting) and not state.running and state.failed_starts < _MOST_STARTS:
                self._crew.hire(worker)
                state.running, state.task, state.order = True, None, "start"
                starting += 1

    def _handle_reply(self, work: Work, waiting: ItemQueue, worker: int, answer: Reply) -> None:
        """Log a reply's lines that were not logged before, raise its exception, or pass on the result of an item."""
        state = self._states[worker]
        order, state.order = state.order, None
        for line in answer.log:
            if line not in self._log_lines:
                if len(self._log_lines) >= _REMEMBERED:
                    self._log_lines.clear()
                self._log_lines.add(line)
                name, level, message = line
                logging.getLogger(name).log(level, "%s", message)
        if error := answer.exception(self._worker_name(worker)):
            raise error
        if order == "begin":
            state.failed_starts = 0
        if isinstance(order, int):
            self._ends = 0
            waiting.record_done(order)
            self._send_items(work, waiting)  # first, so that nobody idles while this answer is written to the disk
            work.done(order, answer.value)

    def _handle_exit(self, work: Work, waiting: ItemQueue, worker: int, reason: str) -> None:
        """Queue again or give up the item of a worker that ended.

        Raises WorkerError if too many workers end, or none is left that can be started again.
        """
        state = self._states[worker]
        order, state.order, state.running = state.order, None, False
        self._ends += 1
        if not isinstance(order, int):
            state.failed_starts += 1
            if all(not state.running and state.failed_starts >= _MOST_STARTS for state in self._states):
                raise WorkerError(
                    f"every worker ended before it could measure, the last by {reason}; fewer --workers need less "
                    "memory"
                )
        elif given_up := waiting.record_exit(order, reason):
            work.failed(order, given_up)
        else:
            _log.warning("%s ended (%s); what it did is done again", self._worker_name(worker), reason)
        if self._ends >= self._most_ends:
            last = f"the last by {reason}; look for what ends them"
            raise WorkerError(f"{self._ends} workers ended without a sample done between, {last}")

    def _worker_name(self, worker: int) -> str:
        """Return a worker's name for people: `worker 1 (cuda:0, 10.0.0.1)`."""
        device = self._crew.devices[worker]
        return f"worker {worker + 1} ({', '.join(filter(None, (device.device, device.node)))})"
