"""What workers are given to do where not the measuring counts but all that is around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from os import getpid

from perturbkv.engines.crew import Work
from perturbkv.engines.scheduler import Scheduler
from perturbkv.engines.task import Do, Models, Task
from perturbkv.engines.work_items import Part
from perturbkv.errors import WorkerError
from perturbkv.trace import SampleTrace

_LONGEST = 300.0
"""Seconds until all workers have to be ready."""
_CALLED = 0.1
"""Seconds that a worker keeps to itself what it answers: long enough for the others to be asked, too."""


@dataclass(frozen=True)
class Sleeping:
    """Sleep instead of measuring, and answer with a sample that was measured before, under the item's name.

    Attributes:
        seconds: of every item.
        sample: as large as a measured one.
    """

    seconds: float
    sample: SampleTrace

    def prepare(self, models: Models) -> Do:
        """No model; one item is a `Part`."""

        def slept(part: Part) -> SampleTrace:
            time.sleep(self.seconds)
            return replace(self.sample, sample_id=part.prompt.prompt().sample_id)

        return slept


@dataclass(frozen=True)
class _RollCall:
    """Load what a task needs, and say who did."""

    task: Task

    def prepare(self, models: Models) -> Callable[[int], int]:
        self.task.prepare(models)

        def here(item: int) -> int:
            time.sleep(_CALLED)
            return getpid()

        return here


def until_ready(scheduler: Scheduler, task: Task, workers: int) -> float:
    """Seconds until so many workers are there, with all that a task needs loaded.

    Raises WorkerError where they are not within five minutes, or end.
    """
    start, call, there = time.perf_counter(), _RollCall(task), set[int]()
    while len(there) < workers:
        there.clear()
        scheduler.run(Work(call, [1] * workers, lambda item: item, lambda item, who: there.add(who), _given_up))
        if time.perf_counter() - start > _LONGEST:
            msg = f"expected {workers} workers within {_LONGEST:g} seconds, got {len(there)}; end what else runs here"
            raise WorkerError(msg)
    return time.perf_counter() - start


def _given_up(item: int, why: str) -> None:
    raise WorkerError(why)
