"""What a run will do, checked before a weight is loaded: lengths, budgets, memory, and what is decoded together.

Which configurations of a prompt are decoded together, and whether their caches have to lie in memory for it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from perturbkv import memory
from perturbkv.cache import entries
from perturbkv.configs import alpha_table, selections
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import check_configurations
from perturbkv.configs.precision import check_fill
from perturbkv.configs.resources import Batches, Resources, Shape, plan_batches
from perturbkv.configs.run import METRICS, RunConfig, Settings
from perturbkv.datasets.encode import Prompt, check_length, check_vocabulary
from perturbkv.datasets.prompts import Prompts
from perturbkv.errors import BudgetError
from perturbkv.models.adapter import check_long_rotations, check_sliding_window
from perturbkv.models.loading import ModelFiles, check_memory, device_exists, load_weights
from perturbkv.pipeline.answers import grading
from perturbkv.pipeline.variants import presses
from perturbkv.selection import compatibility
from perturbkv.selection.policies import registry
from perturbkv.selection.resolved_config import ResolvedConfig, ResolvedRun, resolve

if TYPE_CHECKING:
    import torch

    from perturbkv.models.adapter import Adapter


def passing(run: ResolvedRun) -> bool:
    """Whether evicted caches are read once or, with a question, twice, and all they hold lies in the full one as well.

    Copying the kept entries out for each pass then takes less than holding them.
    """
    changed = any(config.quantised or config.in_cache for config in run.configs)
    return run.steps == 1 and not run.generate and not changed


def batches_of(prompt: Prompt, run: ResolvedRun, shape: Shape, resources: Resources) -> Batches:
    """The batches of one prompt. Raises ConfigError where a configuration exceeds the bound on memory."""
    context, question = prompt.parts(run.scenario)
    decoded = len(question) + max(run.steps, run.generate)
    bound = resources.max_bytes
    return plan_batches(run.configs, shape, len(context), decoded, run.steps, bound, passing=passing(run))


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """In which precision and where a model computes; `device_map` is a key of `models.loading.DEVICE_MAPS`."""

    dtype: torch.dtype
    device: torch.device
    device_map: str = "none"


@dataclass(frozen=True)
class Plan:
    """A run that is known to be possible.

    Attributes:
        files: the model, weights unread.
        placement: where it computes.
        prompts: what is measured.
        run: how, as the trace records it.
        configs: its configurations, resolved.
        resources: what it may take.
        batches: how the configurations of the largest prompt are decoded.
        text: whether its trace holds text of prompts and answers: no number depends on it, and it is no part of `run`.
        kept: whether its trace holds the kept positions, likewise.
        loaded: the model, where it was loaded already.
    """

    files: ModelFiles
    placement: Placement
    prompts: Prompts
    run: RunConfig
    configs: tuple[ResolvedConfig, ...]
    resources: Resources
    batches: Batches
    text: bool = True
    kept: bool = True
    loaded: Adapter | None = None

    @functools.cached_property
    def resolved(self) -> ResolvedRun:
        """The run with its resolved configurations: what measures it takes."""
        return ResolvedRun.from_run(self.run, self.configs)

    def model(self) -> Adapter:
        """The model with its weights, loaded where it is not yet, with room for the longest prompt's caches.

        Raises ModelError, and NoMemoryError where the device does not hold them.
        """
        place = self.placement
        if self.loaded is None and place.device_map == "none":
            check_memory(self.files, place.dtype, place.device, self.caches_bytes())
        return self.loaded or load_weights(self.files, place.dtype, place.device, self.run.seed, place.device_map)

    def narrowed(self, samples: Collection[str], configs: Sequence[EvictionConfig]) -> Plan:
        """The plan of some of the prompts, by their ids, at other configurations. Raises PerturbkvErrors."""
        run, chosen = self.run, tuple(prompt for prompt in self.prompts if prompt.sample_id in samples)
        asked = (run.steps, run.scenario, run.cache, run.save, run.generate, run.head_scores, self.text, self.kept)
        prompts = replace(self.prompts, prompts=chosen)
        return plan(self.files, self.placement, prompts, configs, Settings(*asked), self.resources, self.loaded)

    def caches_bytes(self) -> int:
        """What the longest prompt's full cache and the largest batch of evicted ones take."""
        shape = Shape.from_config(self.files.config, self.placement.dtype.itemsize, 0)
        return (
            shape.full_cache_bytes(max(len(prompt.token_ids) for prompt in self.prompts)) + self.batches.largest_bytes
        )


def plan(
    files: ModelFiles,
    placement: Placement,
    prompts: Prompts,
    configs: Sequence[EvictionConfig],
    settings: Settings,
    resources: Resources,
    loaded: Adapter | None = None,
) -> Plan:
    """Check everything that can be checked without the weights. Raises PerturbkvErrors."""
    check_configurations(len(configs))
    resolved = tuple(map(resolve, configs))
    entries.check_positions(resolved, files.config, files.name)
    presses.check_sources(resolved, files.config, files.name)
    alpha_table.check_tables([config.alpha for config in configs], files.config)
    generate = _own_length(prompts) if settings.generate is None else settings.generate
    selections.check_sparse_prefill(
        [config.policy for config in configs], settings.steps, generate, files.config, files.name
    )
    _check_prompts(prompts, settings.scenario, files.config, max(settings.steps, generate), files.name)
    graded = _grading(prompts, settings.scored) if generate else {}
    fit = fitting(resolved, prompts, settings.scenario, settings.leave_out_unfit)
    run = RunConfig(
        model=files.name,
        dataset=prompts.dataset,
        configs=tuple(config for config in configs if config in fit),
        revision=files.revision,
        random_weights=files.random_weights,
        dataset_options={**prompts.options, **graded},
        samples=len(prompts),
        seed=prompts.seed,
        steps=settings.steps,
        max_tokens=prompts.max_tokens,
        chat_template=prompts.chat_template,
        dtype=str(placement.dtype).removeprefix("torch."),
        device=placement.device.type,
        save=settings.save,
        scenario=settings.scenario,
        cache=settings.cache,
        head_scores=tuple(map(tuple, settings.head_scores)),
        generate=generate,
        plugins={name: version for config in configs for name, version in registry.plugins(config).items()},
    )
    for name in compatibility.scores_with_norms_counted_twice(fit):
        _log.info("value norms are in %s already; the selection two-stage multiplies ν in again", name)
    shape = Shape.from_config(files.config, placement.dtype.itemsize, files.weights_bytes(placement.dtype))
    check_fill([config.precision for config in configs], shape.d_head, files.name)
    if generate and settings.scored:
        resources = _with_room(resources, shape, run, prompts, placement, loaded)
    batches = _batches(shape, ResolvedRun.from_run(run, fit), prompts, resources)
    return Plan(files, placement, prompts, run, fit, resources, batches, settings.text, settings.kept, loaded)


def _own_length(prompts: Prompts) -> int:
    """Tokens of an answer at most, as the data say; told where some of a file's data sets say less."""
    length, recorded = prompts.generation_length, prompts.options.get("wording", {})
    own = {name: one["generation_length"] for name, one in recorded.items() if "generation_length" in one}
    less = [f"{name}'s {tokens}" for name, tokens in own.items() if tokens < length]
    if less:
        _log.info(
            "every answer to %s may have %d tokens, not %s: scores of these are not LongBench's; give each data set a "
            "file of its own", prompts.dataset, length, ", ".join(less),
        )  # fmt: skip
    return length


def _grading(prompts: Prompts, scored: bool) -> dict[str, list[str]]:
    """The names of the metrics that grade the prompts' answers. Raises DatasetError where one cannot."""
    if scored:
        grading.check_answers(prompts)
    return {METRICS: sorted({metric.name for metric in grading.metrics_of(prompts).values()})}


def fitting(
    configs: Sequence[ResolvedConfig], prompts: Sequence[Prompt], scenario: str, leave_out_unfit: bool
) -> tuple[ResolvedConfig, ...]:
    """The configurations whose budget exceeds the window in every prompt.

    Raises BudgetError for one that does not, or with `leave_out_unfit` where none is left; those left out are logged.
    """
    fit: list[ResolvedConfig] = []
    refused: dict[str, BudgetError] = {}
    for config in configs:
        try:
            for prompt in prompts:
                compatibility.check_ends(config, len(prompt.parts(scenario)[0]))
        except BudgetError as error:
            refused[str(config.budget)] = error
        else:
            fit.append(config)
    if refused and not (leave_out_unfit and fit):
        raise next(iter(refused.values()))
    for reason in refused.values():
        _log.info("left out: %s", reason)
    return tuple(fit)


def _check_prompts(prompts: Sequence[Prompt], scenario: str, model_config: Any, after: int, name: str) -> None:
    """Raise DatasetError where a prompt and the `after` tokens decoded behind it are more than the model can take."""
    for prompt in prompts:
        read, total = len(prompt.parts(scenario)[0]), len(prompt.token_ids) + after
        check_vocabulary(prompt, int(model_config.vocab_size), name)
        check_length(prompt, int(model_config.max_position_embeddings), after)
        check_sliding_window(model_config, total, prompt.sample_id, name, after)
        check_long_rotations(model_config, read, total, prompt.sample_id, name, after)


def _with_room(
    resources: Resources,
    shape: Shape,
    run: RunConfig,
    prompts: Sequence[Prompt],
    placement: Placement,
    loaded: Adapter | None,
) -> Resources:
    """The bound on memory of a run that generates, where the user gave none and the model lies on one device.

    Every batch decodes whole answers, so that fewer and larger ones are worth memory: at most half of what is free
    beside weights and full cache, and at most twice what these take.
    """
    if resources.max_bytes is not None or placement.device_map != "none" or not device_exists(placement.device):
        return resources
    tokens = max(len(prompt.parts(run.scenario)[0]) for prompt in prompts)
    whole = shape.weights_bytes + shape.full_cache_bytes(tokens)
    beside = shape.full_cache_bytes(tokens) if loaded else whole
    bound = min(2 * whole, (memory.free_bytes(placement.device) - beside) // 2)
    decoded = max(len(prompt.token_ids) for prompt in prompts) - tokens + max(run.steps, run.generate)
    largest = max(shape.row_bytes(config, tokens, decoded, run.steps) for config in run.configs)
    return replace(resources, max_bytes=bound) if bound > max(whole // 2, largest) else resources


def _batches(shape: Shape, run: ResolvedRun, prompts: Sequence[Prompt], resources: Resources) -> Batches:
    """How the configurations of the largest prompt are decoded. Raises ConfigError where one exceeds the bound."""
    planned = [batches_of(prompt, run, shape, resources) for prompt in prompts]
    return max(planned, key=lambda batches: (len(batches.indices), batches.largest_bytes))
