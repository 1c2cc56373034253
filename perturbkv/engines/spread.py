"""Runs spread over workers, which keep their model from one run to the next."""

from __future__ import annotations

from collections.abc import Sequence

from perturbkv.configs.engine import EngineConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.engines.answering import Done, Failed, answering
from perturbkv.engines.scheduler import Scheduler
from perturbkv.engines.task import ModelSpec
from perturbkv.engines.work_items import measuring
from perturbkv.pipeline.answers.answering import Asked
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import Finished, Missing


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
