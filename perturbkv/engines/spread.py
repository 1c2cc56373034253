"""Runs spread over workers, which keep their model from one run to the next."""

from __future__ import annotations

from collections.abc import Sequence

from perturbkv.configs.engine import EngineConfig
from perturbkv.engines.crew import Crew
from perturbkv.engines.measuring import measuring
from perturbkv.engines.scheduler import Scheduler
from perturbkv.engines.task import ModelSpec
from perturbkv.pipeline.plan import Plan
from perturbkv.pipeline.run import Finished, Missing


class Spread:
    """The engine of worker processes and of a cluster's actors.

    Args:
        chosen: how the runs are spread.
        plans: every run that is to come, all of one model.
        crew: who measures.
    """

    def __init__(self, chosen: EngineConfig, plans: Sequence[Plan], crew: Crew) -> None:
        self.crew = crew
        self._scheduler = Scheduler(crew, chosen.timeout_per_sample)
        self._shares = len(crew.places) if chosen.by_configs else 1
        self._model = ModelSpec.of(plans[0], max(plan.caches_bytes() for plan in plans))

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure what is missing, the longest prompts first. Raises what a worker raises, and WorkerError."""
        self._scheduler.run(measuring(planned, self._model, missing, finished, self._shares))

    def alive(self) -> str:
        """For a progress bar: `7 of 8 workers`."""
        return self._scheduler.alive()
