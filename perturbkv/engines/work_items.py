"""The work of workers: measuring a sample, or some of its configurations, and answering a prompt.

Policies and scores from files are loaded by name in the worker, registered ones by importing their module. A prompt
travels with its ids as an array's bytes, many times smaller than a tuple.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.plugins import refers_to_file
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.engines.scheduler import Work
from perturbkv.engines.worker import Do, Models, ModelSpec
from perturbkv.errors import ConfigError, PluginError
from perturbkv.pipeline.answers.answer_rows import AnsweredPrompt, answer_prompt
from perturbkv.pipeline.answers.generation import AnswerOptions
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import Finished, Missing
from perturbkv.pipeline.sample.one_sample import trace
from perturbkv.scoring.score_registry import SCORES
from perturbkv.selection.policies import registry
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.trace import FailedSample, SampleTrace

_PROGRAM = "__main__"


def registered_modules(run: RunConfig) -> tuple[str, ...]:
    """Return the modules that register a run's plug-ins.

    Raises ConfigError for one that no other process can import.
    """
    modules = {name: _plugin_class(name).__module__ for name in run.plugins if not refers_to_file(name)}
    for name, module in modules.items():
        if module == _PROGRAM:
            msg = (
                f"'{name}' is defined in the program itself, which worker processes do not run; put it into a file of "
                f"its own and write my_file.py:{_plugin_class(name).__name__}, or measure without workers"
            )
            raise ConfigError(msg)
    return tuple(dict.fromkeys(modules.values()))


def import_registered(names: tuple[str, ...], run: RunConfig) -> None:
    """Import the modules that register a run's plug-ins. Raises PluginError for a missing one or another version."""
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


def _plugin_class(name: str) -> type:
    """Return the class that was registered; for a policy that is a score, the score."""
    if name in SCORES.names():
        return SCORES.load(name)
    return registry.info(name)


_IDS = "token_ids"


@dataclass(frozen=True)
class PackedPrompt:
    """A prompt whose token ids are int32 bytes."""

    ids: bytes
    others: dict[str, Any]

    @classmethod
    def pack(cls, prompt: Prompt) -> PackedPrompt:
        """Return the prompt with its ids as bytes."""
        names = (field.name for field in dataclasses.fields(prompt) if field.name != _IDS)
        ids = np.asarray(prompt.token_ids, dtype=np.int32).tobytes()
        return cls(ids, {name: getattr(prompt, name) for name in names})

    def unpack(self) -> Prompt:
        """Return the prompt with its ids as a tuple."""
        return Prompt(**{_IDS: tuple(np.frombuffer(self.ids, dtype=np.int32).tolist()), **self.others})


@dataclass(frozen=True)
class Part:
    """Some configurations of a sample, by their indices in the run."""

    prompt: PackedPrompt
    configs: Sequence[int]


@dataclass(frozen=True)
class MeasureTask:
    """The task of tracing samples; the run's data-set options stay behind, as no number depends on them.

    Attributes:
        model: the model.
        run: the run's configuration.
        resources: what each worker may use.
        modules: modules that register the run's plug-in policies and scores.
    """

    model: ModelSpec
    run: RunConfig
    resources: Resources
    modules: tuple[str, ...]

    def prepare(self, models: Models) -> Do:
        """Load the model and return the function that measures a `Part`."""
        import_registered(self.modules, self.run)
        adapter, run = models.get(self.model), ResolvedRun.from_run(self.run)

        def measure(part: Part) -> SampleTrace | FailedSample:
            prompt, results = part.prompt.unpack(), list[SampleTrace | FailedSample]()
            configs = tuple(run.configs[index] for index in part.configs)
            trace(adapter, [prompt], run, self.resources, results.append, {prompt.sample_id: configs})
            return results[0]

        return measure


def measure_work(planned: Plan, model: ModelSpec, missing: Missing, finished: Finished, shares: int) -> Work:
    """Return the work of what a run lacks, each sample's configurations split into at most `shares` items."""
    run = replace(planned.run, dataset_options={})
    indices = {config: index for index, config in enumerate(run.configs)}
    prompts = [prompt for prompt in planned.prompts if prompt.sample_id in missing]
    todo = [(prompt, share) for prompt in prompts for share in split_configs(missing[prompt.sample_id], shares)]

    def item(index: int) -> Part:
        prompt, configs = todo[index]
        return Part(
            PackedPrompt.pack(prompt),
            range(len(indices)) if configs == run.configs else [indices[one] for one in configs],
        )

    def done(index: int, sample: SampleTrace | FailedSample) -> None:
        finished(sample, todo[index][1])

    def failed(index: int, why: str) -> None:
        prompt, configs = todo[index]
        finished(FailedSample(prompt.sample_id, f"{why} on sample '{prompt.sample_id}'"), configs)

    task = MeasureTask(model, run, planned.resources, registered_modules(planned.run))
    return Work(task, [_size(prompt, share) for prompt, share in todo], item, done, failed)


def split_configs(configs: Sequence[EvictionConfig], shares: int) -> list[tuple[EvictionConfig, ...]]:
    """Return the configurations split into at most `shares` tuples of about one size."""
    return [tuple(configs[first::shares]) for first in range(min(shares, len(configs)))]


def _size(prompt: Prompt, configs: Sequence[EvictionConfig]) -> int:
    """Return a number that grows with a prompt's computing time."""
    return len(prompt.token_ids) * (1 + len(configs))


Done = Callable[[Prompt, AnsweredPrompt], None]
Failed = Callable[[Prompt, str], None]


@dataclass(frozen=True)
class AnswerTask:
    """The task of answering prompts; the attributes are those of `MeasureTask`."""

    model: ModelSpec
    run: RunConfig
    options: AnswerOptions
    resources: Resources
    modules: tuple[str, ...]

    def prepare(self, models: Models) -> Do:
        """Load the model and return the function that answers a `PackedPrompt`."""
        import_registered(self.modules, self.run)
        adapter, run = models.get(self.model), ResolvedRun.from_run(self.run)

        def answer(packed: PackedPrompt) -> AnsweredPrompt:
            return answer_prompt(adapter, packed.unpack(), run, self.options, self.resources)

        return answer


def answer_work(
    planned: Plan, model: ModelSpec, options: AnswerOptions, prompts: Sequence[Prompt], done: Done, failed: Failed
) -> Work:
    """Return the work of answering some of a run's prompts."""
    run = replace(planned.run, dataset_options={})
    return Work(
        AnswerTask(model, run, options, planned.resources, registered_modules(planned.run)),
        [len(prompt.token_ids) for prompt in prompts],
        lambda index: PackedPrompt.pack(prompts[index]),
        lambda index, answers: done(prompts[index], answers),
        lambda index, why: failed(prompts[index], f"{why} on sample '{prompts[index].sample_id}'"),
    )
