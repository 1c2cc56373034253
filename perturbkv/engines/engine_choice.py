"""Choice of the engine: this process, or a pool of workers that keep their model from one run to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

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
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import Finished, Missing
from perturbkv.pipeline.sample.one_sample import trace
from perturbkv.trace import FailedSample, SampleTrace


class LocalEngine:
    """The engine that measures sample after sample in this process, with one model.

    Args:
        plans: all runs that will be measured, all with the same model; loading it checks that the largest caches of
            any of them fit. Empty: those of the first run are checked.
    """

    def __init__(self, plans: Sequence[Plan] = ()) -> None:
        self._plans = plans
        self._model: Adapter | None = None

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure the missing samples in their order. Raises ModelError if the model cannot be loaded."""
        prompts = [prompt for prompt in planned.prompts if prompt.sample_id in missing]
        configs = {sample_id: tuple(configs) for sample_id, configs in missing.items()}

        def pass_on(sample: SampleTrace | FailedSample) -> None:
            finished(sample, configs[sample.sample_id])

        trace(self._load(planned), prompts, planned.resolved, planned.resources, pass_on, configs)

    def answer(self, planned: Plan, divergence: bool, prompts: Sequence[Prompt], done: Done, failed: Failed) -> None:
        """Answer prompts in their order; `done` is called with every prompt and its answers."""
        for prompt in prompts:
            done(prompt, answer_prompt(self._load(planned), prompt, planned.resolved, divergence, planned.resources))

    def describe_workers(self) -> str:
        """Return the progress bar's text on living workers: empty, as there are none."""
        return ""

    def _load(self, planned: Plan) -> Adapter:
        """Return the model, which the first call loads."""
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
        """Measure the missing samples, longest prompts first. Raises the workers' exceptions, and WorkerError."""
        self._scheduler.run(measure_work(planned, self._model, missing, finished, self._shares), self._timeout)

    def answer(self, planned: Plan, divergence: bool, prompts: Sequence[Prompt], done: Done, failed: Failed) -> None:
        """Answer prompts, longest first; `done` or `failed` is called for every prompt. Raises as `measure`."""
        self._scheduler.run(answer_work(planned, self._model, divergence, prompts, done, failed), self._timeout)

    def describe_workers(self) -> str:
        """Return the progress bar's text on living workers: `7 of 8 workers`."""
        return self._scheduler.describe_workers()


AnsweringEngine = LocalEngine | WorkerEngine
"""An engine that also answers prompts and counts its living workers."""


@contextmanager
def open_engine(chosen: Workers, plans: Sequence[Plan]) -> Iterator[AnsweringEngine]:
    """Yield the chosen engine for runs of one model; its workers are ended after the block.

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
    """Yield the workers, processes or Ray actors, with memory for the largest plan."""
    if chosen.engine == "workers":
        yield Processes(processes.worker_devices(chosen, largest))
        return
    with actors.connect_ray(chosen) as ray:
        needed, device = processes.needed_bytes(largest), largest.placement.device.type
        yield actors.Actors(ray, actors.assign_seats(chosen, actors.list_nodes(ray), device, needed))


def pick_run_device(chosen: Workers, name: str) -> torch.device:
    """Return a run's device from its name; `auto` on a cluster is CUDA if the cluster has GPUs.

    Raises ConfigError for a device that does not exist.
    """
    remote = chosen.engine == "ray" and not torch.cuda.is_available() and actors.ray_address(chosen)
    if not remote or name not in ("auto", "cuda"):
        return pick_device(name)
    if name == "cuda":
        return torch.device(name)
    with actors.connect_ray(chosen, log=False) as ray:
        return torch.device("cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu")
