"""From what a user chose to the engine that measures, and its end.

In this process, one sample after the other.

Runs spread over workers, which keep their model from one run to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from perturbkv.configs.resources import EngineConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.engines import processes
from perturbkv.engines import ray as actors
from perturbkv.engines.processes import Processes
from perturbkv.engines.scheduler import Crew, Scheduler
from perturbkv.engines.work_items import Done, Failed, answering, measuring
from perturbkv.engines.worker import ModelSpec
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import pick_device
from perturbkv.pipeline.answers.answered import Asked, answered
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import Engine, Finished, Missing
from perturbkv.pipeline.sample.one_sample import trace
from perturbkv.trace import FailedSample, SampleTrace


class Here:
    """The engine that needs nothing."""

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure the samples in their order. Raises ModelError where the model cannot be loaded."""
        todo = [prompt for prompt in planned.prompts if prompt.sample_id in missing]
        wanted = {name: tuple(configs) for name, configs in missing.items()}

        def measured(sample: SampleTrace | FailedSample) -> None:
            finished(sample, wanted[sample.sample_id])

        trace(planned.model(), todo, planned.run, planned.resources, measured, wanted)


class HereTogether:
    """The same for several runs of one model, which is loaded once, when the first of them lacks a sample."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._largest = max(plans, key=Plan.caches_bytes)
        self._model: Adapter | None = None

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """As `Here`; there has to be room for the caches of the run that takes most."""
        Here().measure(replace(planned, loaded=self._loaded()), missing, finished)

    def answer(self, planned: Plan, asked: Asked, prompts: Sequence[Prompt], done: Done, failed: Failed) -> None:
        """Answer prompts in their order; `done` gets each. Raises what the pipeline's `answer` raises."""
        for prompt in prompts:
            done(prompt, answered(self._loaded(), prompt, planned.run, asked, planned.resources))

    def alive(self) -> str:
        """Nobody but this process."""
        return ""

    def _loaded(self) -> Adapter:
        self._model = self._model or self._largest.model()
        return self._model


class Spread:
    """The engine of worker processes and of a cluster's actors.

    Args:
        chosen: how the runs are spread.
        plans: every run that is to come, all of one model.
        scheduler: of the workers that measure.
    """

    def __init__(self, chosen: EngineConfig, plans: Sequence[Plan], scheduler: Scheduler) -> None:
        self._scheduler, self._timeout = scheduler, chosen.timeout_per_sample
        self._shares = scheduler.size if chosen.by_configs else 1
        self._model = ModelSpec.of(plans[0], max(plan.caches_bytes() for plan in plans))

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure what is missing, the longest prompts first. Raises what a worker raises, and WorkerError."""
        self._scheduler.run(measuring(planned, self._model, missing, finished, self._shares), self._timeout)

    def answer(self, planned: Plan, asked: Asked, prompts: Sequence[Prompt], done: Done, failed: Failed) -> None:
        """Answer prompts, the longest first; `done` or `failed` gets each. Raises as `measure`."""
        self._scheduler.run(answering(planned, self._model, asked, prompts, done, failed), self._timeout)

    def alive(self) -> str:
        """For a progress bar: `7 of 8 workers`."""
        return self._scheduler.alive()


class Measuring(Engine, Protocol):
    """An engine that answers too, and says how many of its workers are there."""

    def answer(self, planned: Plan, asked: Asked, prompts: Sequence[Prompt], done: Done, failed: Failed) -> None:
        """Answer prompts; `done` or `failed` gets each."""

    def alive(self) -> str:
        """For a progress bar: `7 of 8 workers`; empty where there are none."""


@contextmanager
def engine(chosen: EngineConfig, plans: Sequence[Plan]) -> Iterator[Measuring]:
    """The engine for runs of one model, which is loaded when the first of them lacks a sample.

    Its workers end with the block. Raises PerturbkvErrors for what cannot be had, before a weight is loaded.
    """
    if chosen.name == "here":
        yield HereTogether(plans)
        return
    largest = max(plans, key=Plan.caches_bytes)
    processes.check_device(chosen, largest)
    with _crew(chosen, largest) as crew, closing(crew):
        yield Spread(chosen, plans, Scheduler(crew))


@contextmanager
def _crew(chosen: EngineConfig, largest: Plan) -> Iterator[Crew]:
    if chosen.name == "workers":
        yield Processes(processes.worker_places(chosen, largest))
        return
    with actors.joined_ray(chosen) as ray:
        needed, device = processes.needed_bytes(largest), largest.placement.device.type
        yield actors.Actors(ray, actors.seats(chosen, actors.nodes(ray), device, needed))


def device(chosen: EngineConfig, name: str) -> torch.device:
    """Where a run computes, by its name or `auto`: a cluster's workers may have GPUs that this machine lacks.

    Raises ConfigError for a device that is not there.
    """
    if chosen.name != "ray" or torch.cuda.is_available() or not actors.ray_address(chosen):
        return pick_device(name)
    if name == "cuda":
        return torch.device(name)
    if name != "auto":
        return pick_device(name)
    with actors.joined_ray(chosen, told=False) as ray:
        return torch.device("cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu")
