"""Writing of samples by another thread while a GPU reads the next prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

_MOST_WAITING = 2


class Finisher:
    """A thread that does the host's work of one sample after the other, in order; at most two are begun or waiting.

    Its `with` block ends when all are done, also after an exception or Ctrl-C: no measured sample is lost. Raises what
    the work raises, when the next one is handed over or at the block's end.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="perturbkv-finishing")
        self._waiting: deque[Future[object]] = deque()

    def __enter__(self) -> Finisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            for work in self._waiting:
                work.result()

    def add(self, work: Callable[[], object]) -> None:
        """Let the thread do `work`, after waiting while two others are not done."""
        while len(self._waiting) >= _MOST_WAITING or (self._waiting and self._waiting[0].done()):
            self._waiting.popleft().result()  # of those that are done, too, to raise what they raised
        self._waiting.append(self._thread.submit(work))
