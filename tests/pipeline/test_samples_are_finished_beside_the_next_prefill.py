"""A sample is written while the next prompt is read: in order, two at most waiting, none lost."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest

import perturbkv as pk
from perturbkv.errors import DeviceError
from perturbkv.pipeline.sample import one_sample
from perturbkv.pipeline.sample.one_sample import Finisher
from tests.rehearsal.models import ONE, WITH_COMPILER, rehearsal, tiny
from tests.support.models import token_ids
from tests.support.resolved import resolved_run


def test_work_is_done_in_order_and_at_most_two_wait() -> None:
    done: list[int] = []
    gate = threading.Semaphore(0)

    def work(number: int) -> None:
        gate.acquire()
        done.append(number)

    with Finisher() as finisher:
        for number in range(2):
            finisher.add(partial(work, number))
        third = threading.Thread(target=finisher.add, args=(partial(work, 2),))
        third.start()
        third.join(0.2)
        assert third.is_alive(), "two are waiting"
        gate.release(3)
        third.join()
    assert done == [0, 1, 2]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError])
def test_nothing_measured_is_lost_where_the_run_ends_early(raised: type[BaseException]) -> None:
    done: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.05)
        done.append(number)

    with pytest.raises(raised), Finisher() as finisher:
        for number in range(2):
            finisher.add(partial(work, number))
        raise raised
    assert done == [0, 1]


@pytest.mark.parametrize("others", [0, 1, 3])
def test_what_the_work_raises_is_raised(others: int) -> None:
    def fails() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), Finisher() as finisher:
        finisher.add(fails)
        for _ in range(others):
            finisher.add(lambda: None)


@pytest.mark.slow
@WITH_COMPILER
def test_samples_of_a_gpu_are_finished_by_another_thread_and_in_order() -> None:
    prompts = [pk.Prompt(f"p{number}", token_ids(40, seed=number), 0) for number in range(3)]
    run, seen = resolved_run(pk.grid(16, window=4)), []

    def finished(sample: Any) -> None:
        seen.append((sample.sample_id, threading.current_thread() is threading.main_thread()))

    with rehearsal():
        assert one_sample.trace(tiny(devices=ONE), prompts, run, finished=finished) == []
    assert seen == [("p0", False), ("p1", False), ("p2", False)]
    seen.clear()
    assert one_sample.trace(tiny(), prompts, run, finished=finished) == []
    assert seen == [("p0", True), ("p1", True), ("p2", True)]


@pytest.mark.slow
@WITH_COMPILER
@pytest.mark.parametrize("words", ["CUDA error: illegal access", "CUBLAS_STATUS_EXECUTION_FAILED when calling"])
def test_a_gpu_that_fails_is_one_line_and_what_was_measured_stays(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [pk.Prompt(f"p{number}", token_ids(40, seed=number), 0) for number in range(3)]
    run, seen, plain = resolved_run(pk.grid(16, window=4)), [], one_sample.trace_sample

    def fails(adapter: Any, prompt: Any, *more: Any) -> Any:
        if prompt.sample_id == "p2":
            raise RuntimeError(f"{words}\nCUDA kernel errors might be asynchronously reported")
        return plain(adapter, prompt, *more)

    monkeypatch.setattr(one_sample, "trace_sample", fails)
    with rehearsal(), pytest.raises(DeviceError) as raised:
        one_sample.trace(tiny(devices=ONE), prompts, run, finished=lambda sample: seen.append(sample.sample_id))
    assert str(raised.value).startswith(f"the GPU or its driver failed ({words}); where a run keeps finished samples")
    assert seen == ["p0", "p1"]
