"""Every item is done or failed by name, none more than twice, whatever ends a worker; told without any process."""

from __future__ import annotations

import logging
import time
import tracemalloc
from dataclasses import dataclass

import pytest
import torch

from perturbkv.engines.scheduler import ItemQueue, Scheduler, WorkerExit
from perturbkv.engines.worker import LogBuffer, Reply, Worker, WorkerModel
from perturbkv.errors import ActivationError, NoMemoryError, WorkerError
from tests.support.crews import HANGING, FakeCrew, Nothing, Told


def test_every_item_is_done_once_the_largest_first() -> None:
    crew, told = FakeCrew(count=3), Told()
    Scheduler(crew).run(told.work([5, 9, 1, 7]))
    assert told.done == {0: 0, 1: 1, 2: 2, 3: 3}
    assert crew.order == [1, 3, 0, 2]
    assert not told.failed


def test_no_more_workers_are_hired_than_there_are_items() -> None:
    crew = FakeCrew(count=8)
    Scheduler(crew).run(Told().work([1, 1]))
    assert sorted(crew.hired) == [0, 1]


def test_an_item_whose_worker_ends_is_done_again_last() -> None:
    crew, told = FakeCrew(count=1, script=lambda item, attempt: _ends(item == 0 and attempt == 1, item)), Told()
    Scheduler(crew).run(told.work([3, 2, 1]))
    assert crew.order == [0, 1, 2, 0]
    assert told.done == {0: 0, 1: 1, 2: 2}


def test_an_item_that_ends_two_workers_is_failed_and_the_others_are_done() -> None:
    crew, told = FakeCrew(script=lambda item, attempt: _ends(item == 1, item)), Told()
    Scheduler(crew).run(told.work([1] * 6))
    assert sorted(told.done) == [0, 2, 3, 4, 5]
    assert told.failed == {1: "its worker ended twice (signal 9)"}
    assert max(crew.attempts.values()) == 2


def test_a_worker_that_hangs_is_dismissed_and_its_item_counts_as_ended() -> None:
    crew, told = FakeCrew(script=lambda item, attempt: HANGING if item == 0 else Reply(item)), Told()
    Scheduler(crew).run(told.work([1, 1, 1]), timeout=0.05)
    assert told.failed == {0: "its worker ended twice (over 0.05 seconds)"}
    assert len(crew.dismissed) == 2
    assert sorted(told.done) == [1, 2]


def test_two_kinds_of_ends_are_both_told() -> None:
    waiting = ItemQueue([1])
    assert waiting.record_exit(waiting.take(), "signal 9") is None
    assert (
        waiting.record_exit(waiting.take(), "over 3 seconds")
        == "its worker ended twice (signal 9, then over 3 seconds)"
    )


def test_where_no_worker_can_begin_the_run_ends_in_one_line() -> None:
    crew = FakeCrew(begun=lambda place: WorkerExit("signal 11"))
    with pytest.raises(WorkerError, match="every worker ended before it could measure, the last by signal 11"):
        Scheduler(crew).run(Told().work([1] * 5))
    assert len(crew.hired) == 4


def test_one_worker_that_cannot_begin_leaves_its_work_to_the_others() -> None:
    crew, told = FakeCrew(begun=lambda place: WorkerExit("exit code 1") if place else Reply()), Told()
    Scheduler(crew).run(told.work([1] * 5))
    assert len(told.done) == 5


def test_a_machine_on_which_everything_dies_is_not_tried_for_ever() -> None:
    crew, told = FakeCrew(script=lambda item, attempt: WorkerExit("signal 9")), Told()
    with pytest.raises(WorkerError, match="10 workers ended without a sample done between"):
        Scheduler(crew).run(told.work([1] * 1000))
    assert sum(crew.attempts.values()) == 10


def test_an_error_of_ours_travels_as_itself_and_names_the_worker() -> None:
    class Refusing(Nothing):
        def prepare(self, model: object) -> None:
            where = "logits"
            raise ActivationError(where, "p7")

    reply = Worker(FakeCrew().devices[0], LogBuffer()).begin(Refusing())  # type: ignore[arg-type]
    crew = FakeCrew(count=1, begun=lambda place: reply)
    with pytest.raises(ActivationError, match=r"^worker 1 \(cpu\): logits hold NaN or Inf in sample 'p7'$") as caught:
        Scheduler(crew).run(Told().work([1]))
    assert (caught.value.where, caught.value.sample) == ("logits", "p7")


def test_a_fault_that_nobody_foresaw_comes_with_its_traceback() -> None:
    class Broken(Nothing):
        def prepare(self, model: object) -> None:
            raise ZeroDivisionError

    reply = Worker(FakeCrew().devices[0], LogBuffer()).begin(Broken())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="(?s)worker 1.*in prepare.*ZeroDivisionError"):
        Scheduler(FakeCrew(begun=lambda place: reply)).run(Told().work([1]))


def test_what_every_worker_logs_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log = (("perturbkv.models", logging.WARNING, "the file is read as it is"),)
    crew = FakeCrew(count=4, script=lambda item, attempt: Reply(item, log=log))
    Scheduler(crew).run(Told().work([1] * 20))
    assert [one.getMessage() for one in caplog.records] == ["the file is read as it is"]


def test_workers_stay_prepared_from_one_run_to_the_next() -> None:
    crew, task = FakeCrew(), Nothing()
    scheduler = Scheduler(crew)
    scheduler.run(Told().work([1] * 4, task))
    scheduler.run(Told().work([1] * 4, task))
    assert (len(crew.hired), sorted(crew.prepared)) == (2, [0, 1])
    scheduler.run(Told().work([1] * 4, Nothing()))
    assert len(crew.hired) == 2
    assert len(crew.prepared) >= 3, "another task is begun"


@pytest.mark.slow
def test_ten_thousand_samples_cost_milliseconds_each_and_no_memory() -> None:
    """One that needs none: what is kept does not grow with what was done."""

    def peak(items: int) -> tuple[float, int]:
        work = Told().work([1] * items)
        quiet = type(work)(work.task, work.sizes, work.item, lambda *_: None, lambda *_: None)
        began = time.perf_counter()
        tracemalloc.start()
        Scheduler(FakeCrew(count=8, script=_blank)).run(quiet)
        (_, most), seconds = tracemalloc.get_traced_memory(), time.perf_counter() - began
        tracemalloc.stop()
        return seconds / items, most

    (_, few), (each, many) = peak(1000), peak(10_000)
    assert each < 0.003
    assert many < few + 9_000 * 200, "a place of an item is all that waits"


def _blank(item: object, attempt: int) -> Reply:
    return Reply(bytes(10_000))


def _ends(ends: bool, item: int) -> Reply | WorkerExit:
    return WorkerExit("signal 9") if ends else Reply(item)


def test_no_memory_is_no_attempt() -> None:
    """A worker that says so ends the run: the same prompt would not fit a second time."""
    error = NoMemoryError("there is not enough memory on the GPU")
    crew = FakeCrew(script=lambda item, attempt: Reply(error=(type(error), error.args, {})))
    with pytest.raises(NoMemoryError, match=r"worker \d \(cpu\): there is not enough memory on the GPU"):
        Scheduler(crew).run(Told().work([1, 1]))
    assert max(crew.attempts.values()) == 1


def test_a_model_is_loaded_once_for_several_tasks() -> None:
    loaded: list[str] = []

    @dataclass(frozen=True)
    class Spec:
        name: str

        def load(self, device: torch.device) -> object:
            loaded.append(self.name)
            return object()

    model = WorkerModel(torch.device("cpu"))
    one = model.get(Spec("a"))  # type: ignore[arg-type]
    assert model.get(Spec("a")) is one  # type: ignore[arg-type]
    assert model.get(Spec("b")) is not one  # type: ignore[arg-type]
    assert loaded == ["a", "b"]
