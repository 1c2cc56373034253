"""A run's answers given by workers: a prompt is one item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.engines import registered
from perturbkv.engines.crew import Work
from perturbkv.engines.packing import Packed
from perturbkv.engines.task import Do, Models, ModelSpec
from perturbkv.pipeline.answers.answering import Answered, Asked, answered
from perturbkv.pipeline.run.plan import Plan

Done = Callable[[Prompt, Answered], None]
Failed = Callable[[Prompt, str], None]


@dataclass(frozen=True)
class Answering:
    """Answer prompts; the attributes are those of `Measuring`."""

    model: ModelSpec
    run: RunConfig
    asked: Asked
    resources: Resources
    modules: tuple[str, ...]

    def prepare(self, models: Models) -> Do:
        """Load the model; one item is a `Packed` prompt."""
        registered.bring(self.modules, self.run)
        adapter = models.get(self.model)

        def answer(packed: Packed) -> Answered:
            return answered(adapter, packed.prompt(), self.run, self.asked, self.resources)

        return answer


def answering(
    planned: Plan, model: ModelSpec, asked: Asked, prompts: Sequence[Prompt], done: Done, failed: Failed
) -> Work:
    """The work of answering some of a run's prompts."""
    run = replace(planned.run, dataset_options={})
    return Work(
        Answering(model, run, asked, planned.resources, registered.modules(planned.run)),
        [len(prompt.token_ids) for prompt in prompts],
        lambda index: Packed.of(prompts[index]),
        lambda index, made: done(prompts[index], made),
        lambda index, why: failed(prompts[index], f"{why} on sample '{prompts[index].sample_id}'"),
    )
