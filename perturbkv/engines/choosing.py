"""The engine that a user chose: this process, or a pool of workers that keep their model from one run to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from perturbkv.configs.resources import Workers
from perturbkv.datasets.encode import Prompt
from perturbkv.engines import processes
from perturbkv.engines import ray as actors
from perturbkv.engines.processes import Processes
from perturbkv.engines.scheduler import Crew, Scheduler
from perturbkv.engines.work_items import Done, Failed, answering, measuring
from perturbkv.engines.worker import ModelSpec
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import pick_device
from perturbkv.pipeline.answers.answered import answered
from perturbkv.pipeline.answers.generation import AnswerOptions
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import Engine, Finished, Missing
from perturbkv.pipeline.sample.one_sample import trace
from perturbkv.trace import FailedSample, SampleTrace


class Here:
    """The engine of this process, which measures one sample after the other."""

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure the samples in their order. Raises ModelError where the model cannot be loaded."""
        todo = [prompt for prompt in planned.prompts if prompt.sample_id in missing]
        wanted = {name: tuple(configs) for name, configs in missing.items()}

        def measured(sample: SampleTrace | FailedSample) -> None:
            finished(sample, wanted[sample.sample_id])

        trace(planned.model(), todo, planned.resolved, planned.resources, measured, wanted)


class HereTogether:
    """The engine of this process for several runs of one model, loaded once, when the first of them lacks a sample."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._largest = max(plans, key=Plan.caches_bytes)
        self._model: Adapter | None = None

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure as `Here` does; memory is needed for the caches of the run that takes most."""
        Here().measure(replace(planned, loaded=self._loaded()), missing, finished)

    def answer(
        self, planned: Plan, options: AnswerOptions, prompts: Sequence[Prompt], done: Done, failed: Failed
    ) -> None:
        """Answer prompts in their order; `done` gets each answer. Raises what the pipeline's `answer` raises."""
        for prompt in prompts:
            done(prompt, answered(self._loaded(), prompt, planned.resolved, options, planned.resources))

    def alive(self) -> str:
        """Return an empty text: there are no workers."""
        return ""

    def _loaded(self) -> Adapter:
        self._model = self._model or self._largest.model()
        return self._model


class WorkerEngine:
    """The engine of worker processes and of a cluster's actors.

    Args:
        chosen: the engine's options.
        plans: every run that will be measured, all of one model.
        scheduler: the scheduler of the workers.
    """

    def __init__(self, chosen: Workers, plans: Sequence[Plan], scheduler: Scheduler) -> None:
        self._scheduler, self._timeout = scheduler, chosen.timeout_per_sample
        self._shares = scheduler.size if chosen.by_configs else 1
        self._model = ModelSpec.of(plans[0], max(plan.caches_bytes() for plan in plans))

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure what is missing, the longest prompts first. Raises what a worker raises, and WorkerError."""
        self._scheduler.run(measuring(planned, self._model, missing, finished, self._shares), self._timeout)

    def answer(
        self, planned: Plan, options: AnswerOptions, prompts: Sequence[Prompt], done: Done, failed: Failed
    ) -> None:
        """Answer prompts, the longest first; `done` or `failed` gets each. Raises as `measure`."""
        self._scheduler.run(answering(planned, self._model, options, prompts, done, failed), self._timeout)

    def alive(self) -> str:
        """Return the workers for a progress bar: `7 of 8 workers`."""
        return self._scheduler.alive()


class Measuring(Engine, Protocol):
    """An engine that answers prompts too, and counts its living workers."""

    def answer(
        self, planned: Plan, options: AnswerOptions, prompts: Sequence[Prompt], done: Done, failed: Failed
    ) -> None:
        """Answer prompts; `done` or `failed` gets each."""

    def alive(self) -> str:
        """Return the workers for a progress bar: `7 of 8 workers`; empty where there are none."""


@contextmanager
def engine(chosen: Workers, plans: Sequence[Plan]) -> Iterator[Measuring]:
    """Yield the engine for runs of one model, which is loaded when the first of them lacks a sample.

    Its workers end with the block. Raises a PerturbkvError for unavailable devices or workers, before a weight is
    loaded.
    """
    if chosen.engine == "here":
        yield HereTogether(plans)
        return
    largest = max(plans, key=Plan.caches_bytes)
    processes.check_device(chosen, largest)
    with _crew(chosen, largest) as crew, closing(crew):
        yield WorkerEngine(chosen, plans, Scheduler(crew))


@contextmanager
def _crew(chosen: Workers, largest: Plan) -> Iterator[Crew]:
    if chosen.engine == "workers":
        yield Processes(processes.worker_places(chosen, largest))
        return
    with actors.connect_ray(chosen) as ray:
        needed, device = processes.needed_bytes(largest), largest.placement.device.type
        yield actors.Actors(ray, actors.seats(chosen, actors.nodes(ray), device, needed))


def device(chosen: Workers, name: str) -> torch.device:
    """Return the device of a run, by its name or `auto`: a cluster's workers may have GPUs that this machine lacks.

    Raises ConfigError for a device that does not exist.
    """
    if chosen.engine != "ray" or torch.cuda.is_available() or not actors.ray_address(chosen):
        return pick_device(name)
    if name == "cuda":
        return torch.device(name)
    if name != "auto":
        return pick_device(name)
    with actors.connect_ray(chosen, told=False) as ray:
        return torch.device("cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu")
