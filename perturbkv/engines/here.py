"""In this process, one sample after the other."""

from __future__ import annotations

from perturbkv.pipeline.plan import Plan
from perturbkv.pipeline.run import Finished, Missing
from perturbkv.pipeline.samples import trace


class Here:
    """The engine that needs nothing."""

    def measure(self, planned: Plan, missing: Missing, finished: Finished) -> None:
        """Measure the samples in their order. Raises ModelError where the model cannot be loaded."""
        todo = [prompt for prompt in planned.prompts if prompt.sample_id in missing]
        wanted = {name: tuple(configs) for name, configs in missing.items()}
        trace(planned.model(), todo, planned.run, planned.resources, finished, wanted)
