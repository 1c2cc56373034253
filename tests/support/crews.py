"""Workers that are none: a crew in this process whose clock and deaths a test decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from perturbkv.engines.scheduler import Work, WorkerExit
from perturbkv.engines.worker import Do, Reply, Task, WorkerDevice, WorkerModel


@dataclass(frozen=True)
class Nothing:
    """A task of no work."""

    def prepare(self, model: WorkerModel) -> Do:
        return str


@dataclass
class FakeCrew:
    """Answers at once: `script` says what becomes of an item at its so-manieth attempt, by default that it is done."""

    count: int = 2
    script: Callable[[Any, int], Reply | WorkerExit] = lambda item, attempt: Reply(item)
    begun: Callable[[int], Reply | WorkerExit] = lambda place: Reply()
    attempts: dict[Any, int] = field(default_factory=dict)
    order: list[Any] = field(default_factory=list)
    hired: list[int] = field(default_factory=list)
    dismissed: list[int] = field(default_factory=list)
    prepared: list[int] = field(default_factory=list)
    _answers: deque[tuple[int, Reply | WorkerExit]] = field(default_factory=deque)

    @property
    def devices(self) -> Sequence[WorkerDevice]:
        return [WorkerDevice("cpu", 1)] * self.count

    def hire(self, worker: int) -> None:
        self.hired.append(worker)
        self._answers.append((worker, Reply()))

    def begin(self, worker: int, task: Task) -> None:
        self.prepared.append(worker)
        self._answers.append((worker, self.begun(worker)))

    def do(self, worker: int, item: Any) -> None:
        self.order.append(item)
        self.attempts[item] = self.attempts.get(item, 0) + 1
        answer = self.script(item, self.attempts[item])
        if answer is not HANGING:
            self._answers.append((worker, answer))

    def poll(self, seconds: float) -> list[tuple[int, Reply | WorkerExit]]:
        return [self._answers.popleft()] if self._answers else []

    def dismiss(self, worker: int) -> None:
        self.dismissed.append(worker)

    def close(self) -> None:
        pass


HANGING = Reply("never given")


@dataclass
class Told:
    """What a run told of its items."""

    done: dict[int, Any] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def work(self, sizes: Sequence[int], task: Task | None = None) -> Work:
        """Items that are their own places."""
        return Work(task or Nothing(), sizes, lambda item: item, self.done.__setitem__, self.failed.__setitem__)
