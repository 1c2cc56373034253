"""Work of the benchmark's processes with many workers: timed runs that sleep or measure, and merging of shards.

Shards of a run of many samples are written without measuring, and so are the same samples in one file.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from os import getpid
from pathlib import Path

import torch

from benchmarks.subprocesses import measure_memory
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources, Workers
from perturbkv.configs.run import Settings, Shard
from perturbkv.datasets.prompts import load
from perturbkv.engines import ray as actors
from perturbkv.engines.processes import Processes
from perturbkv.engines.ray import Seat
from perturbkv.engines.scheduler import Crew, Scheduler, Work
from perturbkv.engines.work_items import MeasureItem, measure_work
from perturbkv.engines.worker import Do, ModelSpec, Task, WorkerDevice, WorkerModel
from perturbkv.errors import WorkerError
from perturbkv.models.loading import open_model, pick_dtype
from perturbkv.pipeline.run.plan import Placement, Plan, plan
from perturbkv.pipeline.run.running import Finished, Missing, PromptTexts, run_to_file
from perturbkv.pipeline.sample.one_sample import trace_sample
from perturbkv.selection.grid import grid
from perturbkv.selfcheck.rows import Result, run_json
from perturbkv.storage.output import Lock
from perturbkv.storage.run.journal import Journal, journal_path
from perturbkv.storage.run.shard_merging import ShardWriter
from perturbkv.storage.run.shards import ShardRecord, find_shards
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.trace import FailedSample, SampleTrace

_LONGEST = 300.0
"""Most seconds until all workers are ready."""
_DELAY = 0.1
"""Seconds by which a worker delays its answer, so that every worker gets an item."""


@dataclass(frozen=True)
class SleepTask:
    """A task that sleeps instead of measuring, and returns a stored sample under its item's id.

    Attributes:
        seconds: seconds per item.
        sample: a sample of the size of a measured one.
    """

    seconds: float
    sample: SampleTrace

    def prepare(self, model: WorkerModel) -> Do:
        """Return the function that sleeps for a `MeasureItem`; no model is loaded."""

        def sleep(item: MeasureItem) -> SampleTrace:
            time.sleep(self.seconds)
            return replace(self.sample, sample_id=item.prompt.sample_id)

        return sleep


@dataclass(frozen=True)
class _RollCall:
    """A task that prepares another task, and returns the id of its process."""

    task: Task

    def prepare(self, model: WorkerModel) -> Callable[[int], int]:
        """Prepare the wrapped task; return a function that waits briefly and returns the process's id."""
        self.task.prepare(model)

        def process_id(item: int) -> int:
            time.sleep(_DELAY)
            return getpid()

        return process_id


def wait_until_ready(scheduler: Scheduler, task: Task, workers: int) -> float:
    """Wait until `workers` workers have prepared a task, and return the elapsed seconds.

    Raises WorkerError where they take more than five minutes, or end.
    """
    start, call, ids = time.perf_counter(), _RollCall(task), set[int]()
    while len(ids) < workers:
        ids.clear()
        scheduler.run(Work(call, [1] * workers, lambda item: item, lambda item, one: ids.add(one), _raise_failure))
        if time.perf_counter() - start > _LONGEST:
            raise WorkerError(
                f"expected {workers} workers within {_LONGEST:g} seconds, got {len(ids)}; end what else runs here"
            )
    return time.perf_counter() - start


def _raise_failure(item: int, why: str) -> None:
    """Raise WorkerError with the reason of a failed item."""
    raise WorkerError(why)


_CPU = torch.device("cpu")
_DEVICE = WorkerDevice("cpu", threads=1)
_SAMPLE = "sample"


def demo_plan(model: str, samples: int) -> Plan:
    """Return the plan of a run whose `samples` samples share one prompt, as encoding many prompts would be slow."""
    files = open_model(model)
    demo = load("needle", files.tokenizer, samples=1, positions=int(files.config.max_position_embeddings))
    prompts = tuple(replace(demo[0], sample_id=f"{number:05}") for number in range(samples))
    configs = grid(128, selection=("attention", "two-stage"))
    placement = Placement(pick_dtype("auto", _CPU), _CPU)
    return plan(files, placement, replace(demo, prompts=prompts), configs, Settings(1), Resources())


def store_one_sample(model: str, folder: str) -> Result:
    """Measure a sample and store it for sleeping workers; return its bytes in a journal, and its seconds."""
    ready = demo_plan(model, 1)
    adapter, start = ready.model(), time.perf_counter()
    sample = trace_sample(adapter, ready.prompts[0], ready.resolved)
    spent, journal = time.perf_counter() - start, Journal(Path(folder) / _SAMPLE)
    journal.begin(ready.run)
    entry = journal.append(sample, ready.run.labels())
    return {"bytes": entry.path.stat().st_size, "seconds": spent}


def stored_sample(folder: str) -> SampleTrace:
    """Return the sample that `one_sample` stored in the folder."""
    (entry,) = Journal(Path(folder) / _SAMPLE).entries()
    return SampleTrace(entry.sample_id, entry.arrays())


class TimedEngine:
    """An engine of workers that records the time of every run.

    Args:
        crew: the workers.
        plan: one of the runs that will be measured.
        task: the task that replaces measuring; None: measuring.

    Attributes:
        spent: wall seconds (`passed`) and this process's CPU seconds (`cpu`) of every run so far.
        ready: seconds until all workers had prepared the task.
    """

    def __init__(self, crew: Crew, plan: Plan, task: Task | None = None) -> None:
        self.spent: list[dict[str, float]] = []
        self._crew, self._task, self._scheduler = crew, task, Scheduler(crew)
        self._model = ModelSpec.from_plan(plan, plan.caches_bytes())
        real = measure_work(plan, self._model, {}, lambda sample, configs: None, 1).task
        self.ready: float = wait_until_ready(self._scheduler, task or real, len(crew.devices))

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure a run; append its wall seconds and this process's CPU seconds to the attribute `spent`."""
        work = measure_work(planned, self._model, missing, finished, 1)
        start, used = time.perf_counter(), time.process_time()
        self._scheduler.run(replace(work, task=self._task or work.task))
        self.spent.append({"passed": time.perf_counter() - start, "cpu": time.process_time() - used})


@contextmanager
def open_crews(engine: str, sizes: Sequence[int]) -> Iterator[list[Crew]]:
    """Yield one crew per size, with one thread per worker; Ray crews share one node, which is started here.

    There may be more workers than cores, as Ray counts none for them.
    """
    opened: list[Crew]
    with ExitStack() as stack:
        if engine == "ray":
            chosen = Workers(engine, workers=sum(sizes), ray_address="local")
            ray = stack.enter_context(actors.connect_ray(chosen))
            seat = Seat(_DEVICE, actors.list_nodes(ray)[0].key, cpus=0, gpus=0, memory=0)
            opened = [actors.Actors(ray, [seat] * size) for size in sizes]
        else:
            opened = [Processes([_DEVICE] * size) for size in sizes]
        for one in opened:
            stack.callback(one.close)
        yield opened


def time_speed_up(
    engine: str, workers: int, each: int, repeats: int, model: str, folder: str, pause: float | None
) -> Result:
    """Return the seconds of runs by one worker and by all, `each` samples per worker, and their seconds to start.

    `folder` has the sample that sleeping workers answer with. `pause`: seconds that a worker sleeps per sample; None:
    it measures. The two are timed in turns.
    """
    runs = {1: demo_plan(model, each), workers: demo_plan(model, each * workers)}
    task = None if pause is None else SleepTask(pause, stored_sample(folder))
    with open_crews(engine, list(runs)) as opened:
        engines = [TimedEngine(crew, run, task) for crew, run in zip(opened, runs.values(), strict=True)]
        for _ in range(repeats):
            for timed, run in zip(engines, runs.values(), strict=True):
                with tempfile.TemporaryDirectory(dir=folder) as temporary:
                    run_to_file(run, timed, Path(temporary) / "trace.h5")
    single, several = engines
    return {
        "one": [turn["passed"] for turn in single.spent], "all": [turn["passed"] for turn in several.spent],
        "ready": {"one": single.ready, "all": several.ready},
    }  # fmt: skip


def time_coordination(engine: str, workers: int, samples: int, model: str, folder: str) -> Result:
    """Return the times and peak memory of the coordinating process in a run with workers that answer at once.

    `handing` is without storing the answers, `writing` with a journal, `finishing` the file of the trace from it: wall
    seconds and CPU seconds of this process. `ready` is the time until the workers are ready, `peak` the peak bytes.
    """
    run, result = demo_plan(model, samples), Result()

    def work() -> None:
        with open_crews(engine, [workers]) as (crew,), tempfile.TemporaryDirectory(dir=folder) as temporary:
            timed = TimedEngine(crew, run, SleepTask(0, stored_sample(folder)))
            timed.measure(run, dict.fromkeys(run.prompts.ids, run.run.configs), lambda sample, configs: None)
            result["finishing"] = _measure_to_file(run, timed, Path(temporary) / "trace.h5")
            result.update(zip(("handing", "writing"), timed.spent, strict=True), ready=timed.ready)

    _, result["peak"] = measure_memory(work, _CPU)
    return result


def _measure_to_file(run: Plan, engine: TimedEngine, path: Path) -> dict[str, float]:
    """Measure a run into a file; return the wall and CPU seconds of writing the file from the journal."""
    with Lock(path):
        writer = TraceWriter(path, run.run, run.prompts.ids, {})

        def finished(sample: SampleTrace | FailedSample, configs: Sequence[EvictionConfig]) -> None:
            writer.append(sample, configs)

        engine.measure(run, writer.missing(), finished)
        start, used = time.perf_counter(), time.process_time()
        writer.finish()
        return {"passed": time.perf_counter() - start, "cpu": time.process_time() - used}


_MERGING = (sys.executable, "-m", "benchmarks.merging")


def time_merging(samples: int, shards: int, model: str, folder: str, once: bool) -> Result:
    """Return the seconds and peak bytes of merging shards; with `once` also the seconds of writing an unsharded file.

    `journals` are the seconds of the shards' journals.
    """
    run, parent = demo_plan(model, samples), Path(folder) / f"merging-{samples}"
    parent.mkdir()
    start = time.perf_counter()
    _write_shards(run, shards, parent / "merged.h5", folder)
    result: Result = {"journals": time.perf_counter() - start}
    if once:
        result["once"] = _time_single_file(run, parent)
    return result | {"merging": run_json([*_MERGING, str(parent / "merged.h5")], "merging")}


def _write_shards(run: Plan, count: int, path: Path, folder: str) -> None:
    """Write the journals of all shards, and the text of the prompt that they share."""
    text = PromptTexts(run.prompts, run.files.tokenizer.decode)[run.prompts[0].sample_id]
    sample, texts = stored_sample(folder), dict.fromkeys(run.prompts.ids, text)
    for number in range(1, count + 1):
        record = ShardRecord(Shard(number, count), run.run, tuple(run.prompts.ids), {})
        writer = ShardWriter(path, record, texts)
        for name, configs in writer.missing().items():
            writer.append(replace(sample, sample_id=name), configs)
        writer.finish()


def _time_single_file(run: Plan, folder: Path) -> float:
    """Return the seconds of writing an unsharded run's file, from a journal with the entries of all shards."""
    path = folder / "once.h5"
    journal = Journal(journal_path(path))
    journal.begin(run.run)
    for shard in find_shards(folder / "merged.h5"):
        for entry in shard.journal.folder.glob("*.npz"):
            os.link(entry, journal.folder / entry.name)
    writer = TraceWriter(path, run.run, run.prompts.ids, {})
    start = time.perf_counter()
    writer.finish()
    return time.perf_counter() - start
