"""Choice of the engine: this process, or a pool of workers that keep their model from one run to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Protocol

import torch

from perturbkv.configs.resources import Workers
from perturbkv.datasets.encode import Prompt
from perturbkv.engines import processes
from perturbkv.engines import ray as actors
from perturbkv.engines.processes import Processes
from perturbkv.engines.scheduler import Crew, Scheduler
from perturbkv.engines.work_items import Done, Failed, answer_work, measure_work
from perturbkv.engines.worker import ModelSpec
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import pick_device
from perturbkv.pipeline.answers.answer_rows import answer_prompt
from perturbkv.pipeline.answers.generation import AnswerOptions
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import Engine, Finished, Missing
from perturbkv.pipeline.sample.one_sample import trace
from perturbkv.trace import FailedSample, SampleTrace


class LocalEngine:
    """The engine that measures in this process, one sample after the other, with one model.

    Args:
        plans: all runs that will be measured, all with the same model; loading it checks that the largest caches of
            any of them fit. Empty: those of the first run are checked.
    """

    def __init__(self, plans: Sequence[Plan] = ()) -> None:
        self._plans = plans
        self._model: Adapter | None = None

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure what is missing, in the order of the samples. Raises ModelError where the model cannot be loaded."""
        prompts = [prompt for prompt in planned.prompts if prompt.sample_id in missing]
        configs = {sample_id: tuple(configs) for sample_id, configs in missing.items()}

        def pass_on(sample: SampleTrace | FailedSample) -> None:
            finished(sample, configs[sample.sample_id])

        trace(self._load(planned), prompts, planned.resolved, planned.resources, pass_on, configs)

    def answer(
        self, planned: Plan, options: AnswerOptions, prompts: Sequence[Prompt], done: Done, failed: Failed
    ) -> None:
        """Answer prompts in their order; `done` gets each with its answers. Raises as `answer_prompt`."""
        for prompt in prompts:
            done(prompt, answer_prompt(self._load(planned), prompt, planned.resolved, options, planned.resources))

    def alive(self) -> str:
        """Return the text about living workers for a progress bar, which is empty: there are no workers."""
        return ""

    def _load(self, planned: Plan) -> Adapter:
        """Return the model, loaded by the first call."""
        if self._model is None:
            self._model = max(self._plans or [planned], key=Plan.caches_bytes).model()
        return self._model


class WorkerEngine:
    """The engine that measures on workers: processes of this machine or actors of a cluster.

    Args:
        chosen: the engine's options.
        plans: all runs that will be measured, all with the same model.
        scheduler: the scheduler of the workers.
    """

    def __init__(self, chosen: Workers, plans: Sequence[Plan], scheduler: Scheduler) -> None:
        self._scheduler, self._timeout = scheduler, chosen.timeout_per_sample
        self._shares = scheduler.size if chosen.by_configs else 1
        self._model = ModelSpec.from_plan(plans[0], max(plan.caches_bytes() for plan in plans))

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure what is missing, the longest prompts first. Raises what a worker raises, and WorkerError."""
        self._scheduler.run(measure_work(planned, self._model, missing, finished, self._shares), self._timeout)

    def answer(
        self, planned: Plan, options: AnswerOptions, prompts: Sequence[Prompt], done: Done, failed: Failed
    ) -> None:
        """Answer prompts, the longest first; `done` or `failed` gets each. Raises as `measure`."""
        self._scheduler.run(answer_work(planned, self._model, options, prompts, done, failed), self._timeout)

    def alive(self) -> str:
        """Return the text about living workers for a progress bar: `7 of 8 workers`."""
        return self._scheduler.alive()


class AnsweringEngine(Engine, Protocol):
    """An engine that answers prompts too, and counts its living workers."""

    def answer(
        self, planned: Plan, options: AnswerOptions, prompts: Sequence[Prompt], done: Done, failed: Failed
    ) -> None:
        """Answer prompts; `done` gets each with its answers, or `failed` gets it with the reason."""

    def alive(self) -> str:
        """Return the text about living workers for a progress bar: `7 of 8 workers`; empty without workers."""


@contextmanager
def open_engine(chosen: Workers, plans: Sequence[Plan]) -> Iterator[AnsweringEngine]:
    """Yield the chosen engine for runs with the same model; its workers end with the block.

    The model is loaded when something is measured. Raises a PerturbkvError before that for unavailable devices or
    workers.
    """
    if chosen.engine == "here":
        yield LocalEngine(plans)
        return
    largest = max(plans, key=Plan.caches_bytes)
    processes.check_device(largest)
    with _open_crew(chosen, largest) as crew, closing(crew):
        yield WorkerEngine(chosen, plans, Scheduler(crew))


@contextmanager
def _open_crew(chosen: Workers, largest: Plan) -> Iterator[Crew]:
    """Yield the workers, of processes or of a Ray cluster, each with memory for the plan `largest`."""
    if chosen.engine == "workers":
        yield Processes(processes.worker_devices(chosen, largest))
        return
    with actors.connect_ray(chosen) as ray:
        needed, device = processes.needed_bytes(largest), largest.placement.device.type
        yield actors.Actors(ray, actors.assign_seats(chosen, actors.list_nodes(ray), device, needed))


def pick_run_device(chosen: Workers, name: str) -> torch.device:
    """Return the device of a run from its name; for `auto` on a cluster, whether the cluster has GPUs decides.

    Raises ConfigError for a device that does not exist.
    """
    remote = chosen.engine == "ray" and not torch.cuda.is_available() and actors.ray_address(chosen)
    if not remote or name not in ("auto", "cuda"):
        return pick_device(name)
    if name == "cuda":
        return torch.device(name)
    with actors.connect_ray(chosen, log=False) as ray:
        return torch.device("cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu")
