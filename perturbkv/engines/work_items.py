"""A run's traces made by workers: a sample, or some of its configurations, is one item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.engines import registered
from perturbkv.engines.crew import Work
from perturbkv.engines.packing import Packed
from perturbkv.engines.task import Do, Models, ModelSpec
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import Finished, Missing
from perturbkv.pipeline.sample.one_sample import trace
from perturbkv.trace import FailedSample, SampleTrace


@dataclass(frozen=True)
class Part:
    """Some configurations of a sample, by their places in the run."""

    prompt: Packed
    configs: Sequence[int]


@dataclass(frozen=True)
class Measuring:
    """Trace samples; what the run says of its data stays behind, as no number depends on it.

    Attributes:
        model: what is measured.
        run: how.
        resources: what each worker may take.
        modules: that hold the run's policies and scores of others.
    """

    model: ModelSpec
    run: RunConfig
    resources: Resources
    modules: tuple[str, ...]

    def prepare(self, models: Models) -> Do:
        """Load the model; one item is a `Part`."""
        registered.bring(self.modules, self.run)
        adapter = models.get(self.model)

        def measured(part: Part) -> SampleTrace | FailedSample:
            prompt, found = part.prompt.prompt(), list[SampleTrace | FailedSample]()
            configs = tuple(self.run.configs[place] for place in part.configs)
            trace(adapter, [prompt], self.run, self.resources, found.append, {prompt.sample_id: configs})
            return found[0]

        return measured


def measuring(planned: Plan, model: ModelSpec, missing: Missing, finished: Finished, shares: int) -> Work:
    """The work of what a run lacks, every sample's configurations in at most so many shares."""
    run = replace(planned.run, dataset_options={})
    place = {config: index for index, config in enumerate(run.configs)}
    prompts = [prompt for prompt in planned.prompts if prompt.sample_id in missing]
    todo = [(prompt, share) for prompt in prompts for share in shared(missing[prompt.sample_id], shares)]

    def item(index: int) -> Part:
        prompt, configs = todo[index]
        return Part(Packed.of(prompt), range(len(place)) if configs == run.configs else [place[one] for one in configs])

    def done(index: int, sample: SampleTrace | FailedSample) -> None:
        finished(sample, todo[index][1])

    def failed(index: int, why: str) -> None:
        prompt, configs = todo[index]
        finished(FailedSample(prompt.sample_id, f"{why} on sample '{prompt.sample_id}'"), configs)

    task = Measuring(model, run, planned.resources, registered.modules(planned.run))
    return Work(task, [_size(prompt, share) for prompt, share in todo], item, done, failed)


def shared(configs: Sequence[EvictionConfig], shares: int) -> list[tuple[EvictionConfig, ...]]:
    """The configurations in at most so many shares of about one size."""
    return [tuple(configs[first::shares]) for first in range(min(shares, len(configs)))]


def _size(prompt: Prompt, configs: Sequence[EvictionConfig]) -> int:
    """What grows with how long a prompt takes."""
    return len(prompt.token_ids) * (1 + len(configs))
