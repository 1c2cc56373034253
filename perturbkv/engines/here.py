"""In this process, one sample after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perturbkv.datasets.encode import Prompt
from perturbkv.engines.answering import Done, Failed
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.answering import Asked, answered
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import Finished, Missing
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
