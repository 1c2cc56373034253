"""The work of workers: measuring a sample, or some of its configurations, and answering a prompt.

Policies and scores from files are loaded by name in the worker, registered ones by importing their module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.plugins import refers_to_file
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.engines.scheduler import Work
from perturbkv.engines.worker import Do, ModelSpec, WorkerModel
from perturbkv.errors import ConfigError, PluginError
from perturbkv.pipeline.answers.answer_rows import AnsweredPrompt, answer_prompt
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import Finished, Missing
from perturbkv.pipeline.sample.one_sample import trace
from perturbkv.scoring.score_registry import SCORES
from perturbkv.selection.policies import registry
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.trace import FailedSample, SampleTrace


def registered_modules(run: RunConfig) -> tuple[str, ...]:
    """Return the names of the modules that register a run's plug-ins.

    Raises ConfigError for one that no other process can import.
    """
    files = {file for config in run.configs for file in registry.option_files(config)}
    names = [name for name in run.plugins if not refers_to_file(name) and name not in files]
    modules = {name: _plugin_class(name).__module__ for name in names}
    for name, module in modules.items():
        if module == "__main__":
            raise ConfigError(
                f"'{name}' is defined in the program itself, which worker processes do not run; put it into a file of "
                f"its own and write my_file.py:{_plugin_class(name).__name__}, or measure without workers"
            )
    return tuple(dict.fromkeys(modules.values()))


def import_plugins(modules: tuple[str, ...], run: RunConfig) -> None:
    """Import the modules that register a run's plug-ins, and check the plug-ins' versions.

    Raises PluginError for a module that cannot be imported, and for another version of a plug-in than the run's.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise PluginError(
                f"module '{name}', which registers a policy or score of the run, cannot be imported here: {error}"
            ) from error
    if not run.plugins:
        return
    versions = {name: version for config in run.configs for name, version in registry.plugin_digests(config).items()}
    for name, version in run.plugins.items():
        if versions.get(name) != version:
            raise PluginError(
                f"expected '{name}' as the run was planned with it, got another version of it here; copy its file"
            )


def _plugin_class(name: str) -> type:
    """Return the class registered under a plug-in's name; for a policy generated from a score, the score's class."""
    return SCORES.load(name) if name in SCORES.names() else registry.policy_class(name)


@dataclass(frozen=True)
class MeasureItem:
    """A prompt to measure, and the run's indices of the configurations to measure on it."""

    prompt: Prompt
    configs: Sequence[int]


@dataclass(frozen=True)
class MeasureTask:
    """The task of measuring the samples of a run.

    Attributes:
        model: the model.
        run: the run's configuration, without dataset options, on which no number depends.
        resources: what each worker may use.
        modules: modules that register the run's plug-in policies and scores.
    """

    model: ModelSpec
    run: RunConfig
    resources: Resources
    modules: tuple[str, ...]

    def prepare(self, model: WorkerModel) -> Do:
        """Load the model and return the function that measures a `MeasureItem`."""
        import_plugins(self.modules, self.run)
        adapter, run = model.get(self.model), ResolvedRun.from_run(self.run)

        def measure(item: MeasureItem) -> SampleTrace | FailedSample:
            results = list[SampleTrace | FailedSample]()
            configs = tuple(run.configs[index] for index in item.configs)
            trace(adapter, [item.prompt], run, self.resources, results.append, {item.prompt.sample_id: configs})
            return results[0]

        return measure


def measure_work(planned: Plan, model: ModelSpec, missing: Missing, finished: Finished, shares: int) -> Work:
    """Return the work of measuring a run's missing samples, with at most `shares` items per sample.

    `finished` gets every measured or failed sample, and the configurations of its item.
    """
    run = replace(planned.run, dataset_options={})
    indices = {config: index for index, config in enumerate(run.configs)}
    prompts = [prompt for prompt in planned.prompts if prompt.sample_id in missing]
    todo = [(prompt, configs) for prompt in prompts for configs in _split(missing[prompt.sample_id], shares)]

    def item(index: int) -> MeasureItem:
        prompt, configs = todo[index]
        return MeasureItem(prompt, [indices[config] for config in configs])

    def done(index: int, sample: SampleTrace | FailedSample) -> None:
        finished(sample, todo[index][1])

    def failed(index: int, why: str) -> None:
        prompt, configs = todo[index]
        finished(FailedSample(prompt.sample_id, f"{why} on sample '{prompt.sample_id}'"), configs)

    task = MeasureTask(model, run, planned.resources, registered_modules(planned.run))
    sizes = [len(prompt.token_ids) * (1 + len(configs)) for prompt, configs in todo]
    return Work(task, sizes, item, done, failed)


def _split(configs: Sequence[EvictionConfig], shares: int) -> list[tuple[EvictionConfig, ...]]:
    """Return the configurations split into at most `shares` tuples of about equal length."""
    return [tuple(configs[first::shares]) for first in range(min(shares, len(configs)))]


Done = Callable[[Prompt, AnsweredPrompt], None]
"""Callback with a prompt and its answers."""
Failed = Callable[[Prompt, str], None]
"""Callback with a prompt that could not be answered, and the reason."""


@dataclass(frozen=True)
class AnswerTask:
    """The task of answering the prompts of a run, with attributes of `MeasureTask`; `divergence` as `answer` has it."""

    model: ModelSpec
    run: RunConfig
    divergence: bool
    resources: Resources
    modules: tuple[str, ...]

    def prepare(self, model: WorkerModel) -> Do:
        """Load the model and return the function that answers a prompt."""
        import_plugins(self.modules, self.run)
        adapter, run = model.get(self.model), ResolvedRun.from_run(self.run)

        def answer(prompt: Prompt) -> AnsweredPrompt:
            return answer_prompt(adapter, prompt, run, self.divergence, self.resources)

        return answer


def answer_work(
    planned: Plan, model: ModelSpec, divergence: bool, prompts: Sequence[Prompt], done: Done, failed: Failed
) -> Work:
    """Return the work of answering the given prompts of a run; `done` or `failed` is called for each."""
    run = replace(planned.run, dataset_options={})
    return Work(
        AnswerTask(model, run, divergence, planned.resources, registered_modules(planned.run)),
        [len(prompt.token_ids) for prompt in prompts],
        lambda index: prompts[index],
        lambda index, answers: done(prompts[index], answers),
        lambda index, why: failed(prompts[index], f"{why} on sample '{prompts[index].sample_id}'"),
    )
