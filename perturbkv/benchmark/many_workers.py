"""Work of the benchmark's processes on workers: timed runs of sleeping or measuring crews, and merging of shards.

Shards of a run of many samples are written without measuring, and so are the same samples in one file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from os import getpid
from pathlib import Path
from typing import Any

import torch

from perturbkv.benchmark.subprocesses import Result, peak
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources, Workers
from perturbkv.configs.run import Settings, Shard
from perturbkv.datasets.prompts import load
from perturbkv.engines import ray as actors
from perturbkv.engines.processes import Processes
from perturbkv.engines.ray import Seat
from perturbkv.engines.scheduler import Crew, Scheduler, Work
from perturbkv.engines.work_items import Part, measuring
from perturbkv.engines.worker import Do, Models, ModelSpec, Place, Task
from perturbkv.errors import PerturbkvError, WorkerError
from perturbkv.models.loading import open_model, pick_dtype
from perturbkv.pipeline.run.plan import Placement, Plan, plan
from perturbkv.pipeline.run.running import Finished, Missing, PromptTexts, run_to_file
from perturbkv.pipeline.sample.one_sample import trace_sample
from perturbkv.selection.grid import grid
from perturbkv.storage.output import Lock
from perturbkv.storage.run.journal import Journal, journal_path
from perturbkv.storage.run.shard_merging import ShardWriter
from perturbkv.storage.run.shards import ShardRecord, find_shards
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.trace import FailedSample, SampleTrace

_LONGEST = 300.0
"""Seconds until all workers have to be ready."""
_CALLED = 0.1
"""Seconds by which a worker delays its answer, so that the others get an item too."""


@dataclass(frozen=True)
class Sleeping:
    """The task of sleeping instead of measuring; the answer is a sample measured before, under the item's id.

    Attributes:
        seconds: seconds per item.
        sample: a sample of the size of a measured one.
    """

    seconds: float
    sample: SampleTrace

    def prepare(self, models: Models) -> Do:
        """Return the function that sleeps for a `Part`; no model is loaded."""

        def sleeping_answer(part: Part) -> SampleTrace:
            time.sleep(self.seconds)
            return replace(self.sample, sample_id=part.prompt.prompt().sample_id)

        return sleeping_answer


@dataclass(frozen=True)
class _RollCall:
    """The task of loading what another task needs, and returning the process's id."""

    task: Task

    def prepare(self, models: Models) -> Callable[[int], int]:
        self.task.prepare(models)

        def here(item: int) -> int:
            time.sleep(_CALLED)
            return getpid()

        return here


def until_ready(scheduler: Scheduler, task: Task, workers: int) -> float:
    """Return the seconds until `workers` workers are ready, with everything loaded that a task needs.

    Raises WorkerError where they are not within five minutes, or end.
    """
    start, call, there = time.perf_counter(), _RollCall(task), set[int]()
    while len(there) < workers:
        there.clear()
        scheduler.run(Work(call, [1] * workers, lambda item: item, lambda item, who: there.add(who), _raise_failure))
        if time.perf_counter() - start > _LONGEST:
            msg = f"expected {workers} workers within {_LONGEST:g} seconds, got {len(there)}; end what else runs here"
            raise WorkerError(msg)
    return time.perf_counter() - start


def _raise_failure(item: int, why: str) -> None:
    raise WorkerError(why)


_CPU = torch.device("cpu")
_PLACE = Place("cpu", threads=1)
_SAMPLE = "sample"


def demo_plan(model: str, samples: int) -> Plan:
    """Return the demo's run of `samples` samples, which share one prompt, as making prompts would take too long."""
    files = open_model(model)
    demo = load("needle", files.tokenizer, samples=1, positions=int(files.config.max_position_embeddings))
    named = tuple(replace(demo[0], sample_id=f"{number:05}") for number in range(samples))
    configs = grid(128, selection=("attention", "two-stage"))
    placement = Placement(pick_dtype("auto", _CPU), _CPU)
    return plan(files, placement, replace(demo, prompts=named), configs, Settings(), Resources())


def one_sample(model: str, folder: str) -> Result:
    """Measure a sample of the demo and store it for sleeping workers; return its bytes in a journal, and seconds."""
    ready = demo_plan(model, 1)
    adapter, start = ready.model(), time.perf_counter()
    sample = trace_sample(adapter, ready.prompts[0], ready.resolved)
    spent, journal = time.perf_counter() - start, Journal(Path(folder) / _SAMPLE)
    journal.begin(ready.run)
    kept = journal.append(sample, ready.run.labels())
    return {"bytes": kept.path.stat().st_size, "seconds": spent}


def kept_sample(folder: str) -> SampleTrace:
    """Return the sample that `one_sample` stored."""
    (kept,) = Journal(Path(folder) / _SAMPLE).entries()
    return SampleTrace(kept.sample_id, kept.arrays())


class Clocked:
    """An engine of workers that records the time of each of its runs.

    Args:
        crew: the workers.
        plan: one of the runs that will be measured.
        task: the task that replaces measuring; None: measuring.
    """

    def __init__(self, crew: Crew, plan: Plan, task: Task | None = None) -> None:
        self.spent: list[dict[str, float]] = []
        self._crew, self._task, self._scheduler = crew, task, Scheduler(crew)
        self._model = ModelSpec.of(plan, plan.caches_bytes())
        real = measuring(plan, self._model, {}, lambda sample, configs: None, 1).task
        self.ready = until_ready(self._scheduler, task or real, len(crew.places))

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure as `Spread` does; `spent` gets the wall seconds and this process's CPU seconds."""
        work = measuring(planned, self._model, missing, finished, 1)
        start, used = time.perf_counter(), time.process_time()
        self._scheduler.run(replace(work, task=self._task or work.task))
        self.spent.append({"passed": time.perf_counter() - start, "cpu": time.process_time() - used})


@contextmanager
def crews(engine: str, sizes: Sequence[int]) -> Iterator[list[Crew]]:
    """Yield crews of these sizes, one thread per worker; Ray's are on one node, which is started here.

    There may be more workers than cores: Ray is told that they take none.
    """
    made: list[Crew]
    with ExitStack() as stack:
        if engine == "ray":
            chosen = Workers(engine, workers=sum(sizes), ray_address="local")
            ray = stack.enter_context(actors.connect_ray(chosen))
            seat = Seat(_PLACE, actors.nodes(ray)[0].key, cpus=0, gpus=0, memory=0)
            made = [actors.Actors(ray, [seat] * size) for size in sizes]
        else:
            made = [Processes([_PLACE] * size) for size in sizes]
        for one in made:
            stack.callback(one.close)
        yield made


def speed_up(
    engine: str, workers: int, each: int, repeats: int, model: str, folder: str, pause: float | None
) -> Result:
    """Return the seconds of one worker and of all, with `each` samples per worker, and until they are ready.

    `pause`: seconds that a worker sleeps per sample; None: it measures. The two are timed in turns.
    """
    runs = {1: demo_plan(model, each), workers: demo_plan(model, each * workers)}
    task = None if pause is None else Sleeping(pause, kept_sample(folder))
    with crews(engine, list(runs)) as made:
        engines = [Clocked(crew, run, task) for crew, run in zip(made, runs.values(), strict=True)]
        for _ in range(repeats):
            for clocked, run in zip(engines, runs.values(), strict=True):
                with tempfile.TemporaryDirectory(dir=folder) as temporary:
                    run_to_file(run, clocked, Path(temporary) / "trace.h5")
    one, all_ = engines
    return {
        "one": [turn["passed"] for turn in one.spent], "all": [turn["passed"] for turn in all_.spent],
        "ready": {"one": one.ready, "all": all_.ready},
    }  # fmt: skip


def coordinating(engine: str, workers: int, samples: int, model: str, folder: str) -> Result:
    """Return the time and memory that a run takes of the coordinating process, its workers answering at once.

    `handing` is without storing the answers, `writing` with a journal, `finishing` the trace's file from it: wall
    seconds and this process's CPU seconds. `ready` is until the workers are, `peak` the peak bytes of this process.
    """
    run, found = demo_plan(model, samples), Result()

    def work() -> None:
        with crews(engine, [workers]) as (crew,), tempfile.TemporaryDirectory(dir=folder) as temporary:
            clocked = Clocked(crew, run, Sleeping(0, kept_sample(folder)))
            clocked.measure(run, dict.fromkeys(run.prompts.ids, run.run.configs), lambda sample, configs: None)
            found["finishing"] = _into_file(run, clocked, Path(temporary) / "trace.h5")
            found.update(zip(("handing", "writing"), clocked.spent, strict=True), ready=clocked.ready)

    _, found["peak"] = peak(work, _CPU)
    return found


def _into_file(run: Plan, engine: Clocked, path: Path) -> dict[str, float]:
    """Measure a whole run into a file; return the seconds of the file after the journal."""
    with Lock(path) as lock:
        writer = TraceWriter(path, run.run, run.prompts.ids, {})

        def finished(sample: SampleTrace | FailedSample, configs: Sequence[EvictionConfig]) -> None:
            lock.check()
            writer.append(sample, configs)

        engine.measure(run, writer.missing(), finished)
        start, used = time.perf_counter(), time.process_time()
        writer.finish()
        return {"passed": time.perf_counter() - start, "cpu": time.process_time() - used}


_MERGING = (sys.executable, "-m", "perturbkv.benchmark.merging")


def merging(samples: int, shards: int, model: str, folder: str, once: bool) -> Result:
    """Return the seconds and peak bytes of merging shards, with `once` also the seconds of writing the samples once.

    `journals`: seconds of the shards' journals, `once`: of the file of a run with one journal of the same entries.
    """
    run, place = demo_plan(model, samples), Path(folder) / f"merging-{samples}"
    place.mkdir()
    start = time.perf_counter()
    _write_shards(run, shards, place / "merged.h5", folder)
    found: Result = {"journals": time.perf_counter() - start}
    if once:
        found["once"] = _time_single_file(run, place)
    return found | {"merging": _time_merge(place / "merged.h5")}


def _write_shards(run: Plan, count: int, path: Path, folder: str) -> None:
    """Write the journals of all shards, with the text of the prompt, which all samples share."""
    text = PromptTexts(run.prompts, run.files.tokenizer.decode)[run.prompts[0].sample_id]
    sample, texts = kept_sample(folder), dict.fromkeys(run.prompts.ids, text)
    for number in range(1, count + 1):
        record = ShardRecord(Shard(number, count), run.run, tuple(run.prompts.ids), {}, text=True)
        writer = ShardWriter(path, record, texts)
        for name, configs in writer.missing().items():
            writer.append(replace(sample, sample_id=name), configs)
        writer.finish()


def _time_single_file(run: Plan, place: Path) -> float:
    """Return the seconds of the file of a run without shards, whose journal has the shards' own files."""
    path = place / "once.h5"
    journal = Journal(journal_path(path))
    journal.begin(run.run)
    for shard in find_shards(place / "merged.h5"):
        for entry in shard.journal.folder.glob("*.npz"):
            os.link(entry, journal.folder / entry.name)
    writer = TraceWriter(path, run.run, run.prompts.ids, {})
    start = time.perf_counter()
    writer.finish()
    return time.perf_counter() - start


def _time_merge(path: Path) -> dict[str, Any]:
    """Return the seconds and peak bytes of merging. Raises PerturbkvError where its process fails."""
    finished = subprocess.run([*_MERGING, str(path)], capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        lines = finished.stderr.strip().splitlines() or ["no message"]
        msg = f"merging failed: {lines[-1]}"
        raise PerturbkvError(msg)
    told: dict[str, Any] = json.loads(finished.stdout)
    return told
