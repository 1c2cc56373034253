"""A run's traces made by workers: a sample, or some of its configurations, is one item.

Policies and scores of others in a worker: those of files load by their names, registered ones with their module.

A prompt as it travels to a worker: its ids as the bytes of an array, which are many times smaller than a tuple.

A run's answers given by workers: a prompt is one item.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.plugins import of_file
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.engines.scheduler import Work
from perturbkv.engines.worker import Do, Models, ModelSpec
from perturbkv.errors import ConfigError, PluginError
from perturbkv.pipeline.answers.answered import Answered, Asked, answered
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import Finished, Missing
from perturbkv.pipeline.sample.one_sample import trace
from perturbkv.scoring.score_registry import SCORES
from perturbkv.selection.policies import registry
from perturbkv.trace import FailedSample, SampleTrace

_PROGRAM = "__main__"


def registered_modules(run: RunConfig) -> tuple[str, ...]:
    """The modules that register a run's plug-ins. Raises ConfigError for one that no other process can import."""
    found = {name: _module(name) for name in run.plugins if not of_file(name)}
    for name, module in found.items():
        if module == _PROGRAM:
            msg = (
                f"'{name}' is defined in the program itself, which worker processes do not run; put it into a file of "
                f"its own and write my_file.py:{_class(name).__name__}, or measure with engine='here'"
            )
            raise ConfigError(msg)
    return tuple(dict.fromkeys(found.values()))


def bring_registered(names: tuple[str, ...], run: RunConfig) -> None:
    """Import what registers a run's plug-ins. Raises PluginError where one is missing here, or is another version."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            msg = f"module '{name}', which registers a policy or score of the run, cannot be imported here: {error}"
            raise PluginError(msg) from error
    if not run.plugins:
        return
    here = {name: version for config in run.configs for name, version in registry.plugins(config).items()}
    for name, version in run.plugins.items():
        if here.get(name) != version:
            msg = f"expected '{name}' as the run was planned with it, got another version of it here; copy its file"
            raise PluginError(msg)


def _module(name: str) -> str:
    return _class(name).__module__


def _class(name: str) -> type:
    """The class that was registered: of a policy that is a score, the score."""
    if name in SCORES.names():
        return SCORES.info(name)
    return registry.info(name)


_IDS = "token_ids"


@dataclass(frozen=True)
class Packed:
    """A prompt, its token ids as int32 bytes."""

    ids: bytes
    others: dict[str, Any]

    @classmethod
    def of(cls, prompt: Prompt) -> Packed:
        """From the prompt."""
        names = (field.name for field in dataclasses.fields(prompt) if field.name != _IDS)
        ids = np.asarray(prompt.token_ids, dtype=np.int32).tobytes()
        return cls(ids, {name: getattr(prompt, name) for name in names})

    def prompt(self) -> Prompt:
        """The prompt that it was made of."""
        return Prompt(**{_IDS: tuple(np.frombuffer(self.ids, dtype=np.int32).tolist()), **self.others})


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
        bring_registered(self.modules, self.run)
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

    task = Measuring(model, run, planned.resources, registered_modules(planned.run))
    return Work(task, [_size(prompt, share) for prompt, share in todo], item, done, failed)


def shared(configs: Sequence[EvictionConfig], shares: int) -> list[tuple[EvictionConfig, ...]]:
    """The configurations in at most so many shares of about one size."""
    return [tuple(configs[first::shares]) for first in range(min(shares, len(configs)))]


def _size(prompt: Prompt, configs: Sequence[EvictionConfig]) -> int:
    """What grows with how long a prompt takes."""
    return len(prompt.token_ids) * (1 + len(configs))


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
        bring_registered(self.modules, self.run)
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
        Answering(model, run, asked, planned.resources, registered_modules(planned.run)),
        [len(prompt.token_ids) for prompt in prompts],
        lambda index: Packed.of(prompts[index]),
        lambda index, made: done(prompts[index], made),
        lambda index, why: failed(prompts[index], f"{why} on sample '{prompts[index].sample_id}'"),
    )
