"""What the benchmark's processes do about workers: runs like the demo's, carried out by crews and clocked."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from perturbkv.benchmark.stand_ins import Sleeping, until_ready
from perturbkv.benchmark.subprocesses import Result, peak
from perturbkv.configs.engine import EngineConfig
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.datasets.prompts import load
from perturbkv.engines import joining
from perturbkv.engines import ray as actors
from perturbkv.engines.crew import Crew
from perturbkv.engines.nodes import Seat
from perturbkv.engines.processes import Processes
from perturbkv.engines.scheduler import Scheduler
from perturbkv.engines.task import ModelSpec, Task
from perturbkv.engines.work_items import measuring
from perturbkv.engines.worker import Place
from perturbkv.models.loading import open_model, pick_dtype
from perturbkv.pipeline.run.plan import Placement, Plan, Settings, plan
from perturbkv.pipeline.run.running import Finished, Missing, run_to_file
from perturbkv.pipeline.sample.one_sample import trace_sample
from perturbkv.selection.grid import grid
from perturbkv.storage.output import Lock
from perturbkv.storage.run.journal_part import Journal
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.trace import FailedSample, SampleTrace

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
            ray = stack.enter_context(joining.joined(chosen))
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
