"""What the benchmark's processes do about workers: runs like the demo's, carried out by crews and clocked.

What workers are given to do where not the measuring counts but all that is around it.

Shards of a run of many samples, which are not measured but written, and the same samples written once.
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
from perturbkv.configs.resources import EngineConfig, Resources
from perturbkv.configs.run import Shard
from perturbkv.datasets.prompts import load
from perturbkv.engines import ray as actors
from perturbkv.engines.processes import Processes
from perturbkv.engines.ray import Seat
from perturbkv.engines.scheduler import Crew, Scheduler, Work
from perturbkv.engines.work_items import Part, measuring
from perturbkv.engines.worker import Do, Models, ModelSpec, Place, Task
from perturbkv.errors import PerturbkvError, WorkerError
from perturbkv.models.loading import open_model, pick_dtype
from perturbkv.pipeline.run.plan import Placement, Plan, Settings, plan
from perturbkv.pipeline.run.running import Finished, Missing, PromptTexts, run_to_file
from perturbkv.pipeline.sample.one_sample import trace_sample
from perturbkv.selection.grid import grid
from perturbkv.storage.output import Lock
from perturbkv.storage.run.joining import ShardWriter
from perturbkv.storage.run.journal import Journal, journal_path
from perturbkv.storage.run.shards import ShardRecord, beside
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.trace import FailedSample, SampleTrace

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


_CPU = torch.device("cpu")
_PLACE = Place("cpu", threads=1)
_SAMPLE = "sample"


def planned(model: str, samples: int) -> Plan:
    """The demo's run of so many samples, which share one prompt: to make ten thousand would be most of the time."""
    files = open_model(model)
    demo = load("needle", files.tokenizer, samples=1, positions=int(files.config.max_position_embeddings))
    named = tuple(replace(demo[0], sample_id=f"{number:05}") for number in range(samples))
    configs = grid(128, selection=("attention", "two-stage"))
    placement = Placement(pick_dtype("auto", _CPU), _CPU)
    return plan(files, placement, replace(demo, prompts=named), configs, Settings(), Resources())


def one_sample(model: str, folder: str) -> Result:
    """Measure a sample of the demo and keep it for those that sleep; its bytes in a journal, and seconds."""
    ready = planned(model, 1)
    adapter, start = ready.model(), time.perf_counter()
    sample = trace_sample(adapter, ready.prompts[0], ready.run)
    spent, journal = time.perf_counter() - start, Journal(Path(folder) / _SAMPLE)
    journal.begin(ready.run)
    kept = journal.append(sample, ready.run.labels())
    return {"bytes": kept.path.stat().st_size, "seconds": spent}


def kept_sample(folder: str) -> SampleTrace:
    """What `one_sample` kept."""
    (kept,) = Journal(Path(folder) / _SAMPLE).entries()
    return SampleTrace(kept.sample_id, kept.arrays())


class Clocked:
    """An engine of workers that notes what each of its runs takes.

    Args:
        crew: who measures.
        plan: one of the runs that are to come.
        task: what is done instead of measuring; None: nothing is.
    """

    def __init__(self, crew: Crew, plan: Plan, task: Task | None = None) -> None:
        self.spent: list[dict[str, float]] = []
        self._crew, self._task, self._scheduler = crew, task, Scheduler(crew)
        self._model = ModelSpec.of(plan, plan.caches_bytes())
        real = measuring(plan, self._model, {}, lambda sample, configs: None, 1).task
        self.ready = until_ready(self._scheduler, task or real, len(crew.places))

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """As `Spread`; `spent` gets the seconds that passed and those of this process's CPU."""
        work = measuring(planned, self._model, missing, finished, 1)
        start, used = time.perf_counter(), time.process_time()
        self._scheduler.run(replace(work, task=self._task or work.task))
        self.spent.append({"passed": time.perf_counter() - start, "cpu": time.process_time() - used})


@contextmanager
def crews(engine: str, sizes: Sequence[int]) -> Iterator[list[Crew]]:
    """Crews of so many workers, of one thread each; Ray's are on one node, which is started here.

    They may be more than there are cores: Ray is told that they take none.
    """
    made: list[Crew]
    with ExitStack() as stack:
        if engine == "ray":
            chosen = EngineConfig(engine, workers=sum(sizes), ray_address="local")
            ray = stack.enter_context(actors.joined_ray(chosen))
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
    """Seconds of one worker with `each` samples, and of so many with as many each, in turns; and until all are ready.

    `pause` is what a sample takes that sleeps; None: it is measured.
    """
    runs = {1: planned(model, each), workers: planned(model, each * workers)}
    task = None if pause is None else Sleeping(pause, kept_sample(folder))
    with crews(engine, list(runs)) as made:
        engines = [Clocked(crew, run, task) for crew, run in zip(made, runs.values(), strict=True)]
        for _ in range(repeats):
            for clocked, run in zip(engines, runs.values(), strict=True):
                with tempfile.TemporaryDirectory(dir=folder) as beside:
                    run_to_file(run, clocked, Path(beside) / "trace.h5")
    one, all_ = engines
    return {
        "one": [turn["passed"] for turn in one.spent], "all": [turn["passed"] for turn in all_.spent],
        "ready": {"one": one.ready, "all": all_.ready},
    }  # fmt: skip


def coordinating(engine: str, workers: int, samples: int, model: str, folder: str) -> Result:
    """What so many samples take of the process that gives them out to workers that answer at once.

    `handing` is without keeping what they answer, `writing` with a journal, `finishing` the trace's file out of it:
    seconds that passed, and those of this process's CPU. `ready` is until the workers are, `peak` the most bytes of
    this process.
    """
    run, found = planned(model, samples), Result()

    def work() -> None:
        with crews(engine, [workers]) as (crew,), tempfile.TemporaryDirectory(dir=folder) as beside:
            clocked = Clocked(crew, run, Sleeping(0, kept_sample(folder)))
            clocked.measure(run, dict.fromkeys(run.prompts.ids, run.run.configs), lambda sample, configs: None)
            found["finishing"] = _into_file(run, clocked, Path(beside) / "trace.h5")
            found.update(zip(("handing", "writing"), clocked.spent, strict=True), ready=clocked.ready)

    _, found["peak"] = peak(work, _CPU)
    return found


def _into_file(run: Plan, engine: Clocked, path: Path) -> dict[str, float]:
    """A whole run; what the file takes after the journal."""
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
    """Seconds of merging so many shards, and the bytes of the process that does; of writing their samples, and `once`.

    `journals` is what the shards' journals take, `once` the file of a run that has one, of the same entries.
    """
    run, place = planned(model, samples), Path(folder) / f"merging-{samples}"
    place.mkdir()
    start = time.perf_counter()
    _write_shards(run, shards, place / "merged.h5", folder)
    found: Result = {"journals": time.perf_counter() - start}
    if once:
        found["once"] = _written_once(run, place)
    return found | {"merging": _merged(place / "merged.h5")}


def _write_shards(run: Plan, count: int, path: Path, folder: str) -> None:
    """Journals of all shards, with the text of the prompt, which all samples share."""
    text = PromptTexts(run.prompts, run.files.tokenizer.decode)[run.prompts[0].sample_id]
    sample, texts = kept_sample(folder), dict.fromkeys(run.prompts.ids, text)
    for number in range(1, count + 1):
        record = ShardRecord(Shard(number, count), run.run, tuple(run.prompts.ids), {}, text=True)
        writer = ShardWriter(path, record, texts)
        for name, configs in writer.missing().items():
            writer.append(replace(sample, sample_id=name), configs)
        writer.finish()


def _written_once(run: Plan, place: Path) -> float:
    """Seconds of the file of a run without shards, whose journal has the shards' own files."""
    path = place / "once.h5"
    journal = Journal(journal_path(path))
    journal.begin(run.run)
    for shard in beside(place / "merged.h5"):
        for entry in shard.journal.folder.glob("*.npz"):
            os.link(entry, journal.folder / entry.name)
    writer = TraceWriter(path, run.run, run.prompts.ids, {})
    start = time.perf_counter()
    writer.finish()
    return time.perf_counter() - start


def _merged(path: Path) -> dict[str, Any]:
    """Seconds and bytes of merging. Raises PerturbkvError where its process fails."""
    finished = subprocess.run([*_MERGING, str(path)], capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        lines = finished.stderr.strip().splitlines() or ["no message"]
        msg = f"merging failed: {lines[-1]}"
        raise PerturbkvError(msg)
    told: dict[str, Any] = json.loads(finished.stdout)
    return told
