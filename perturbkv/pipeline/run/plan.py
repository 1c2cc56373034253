"""The plan of a run, checked before a weight is loaded: lengths, budgets, memory, batches of configurations."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perturbkv import memory
from perturbkv.cache import entries
from perturbkv.configs import alpha_table, cache_contents
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.layer_types import measured_layers, reading_layers, soft_cap
from perturbkv.configs.option import check_configurations
from perturbkv.configs.precision import check_precisions
from perturbkv.configs.resources import Batches, Resources, Shape, plan_batches
from perturbkv.configs.run import ISOLATED_EVERY, METRICS, RunConfig, Settings
from perturbkv.datasets.encode import Prompt, check_length, check_vocabulary
from perturbkv.datasets.prompts import Prompts, check_answers, metrics_of
from perturbkv.devices import dtype_name
from perturbkv.errors import BudgetError
from perturbkv.models.adapter import check_long_rotations, check_sliding_window
from perturbkv.models.loading import ModelFiles, check_memory, device_exists, load_weights
from perturbkv.pipeline.variants import given_sets
from perturbkv.pipeline.variants.readers import maker_of
from perturbkv.selection import compatibility
from perturbkv.selection.policies import registry
from perturbkv.selection.resolved_config import ResolvedConfig, ResolvedRun, resolve

if TYPE_CHECKING:
    import torch

    from perturbkv.models.adapter import Adapter


def copies_each_pass(run: ResolvedRun) -> bool:
    """Return whether a run's caches copy their kept entries from the full cache in every pass, and store none.

    Copies take less memory, and more rows go through the linear layers at once. A run that generates reads its caches
    too often, and entries of a configuration's own are not in the full cache.
    """
    return not run.generate and not any(maker_of(config).has_own_tensors for config in run.configs)


def plan_prompt_batches(prompt: Prompt, run: ResolvedRun, shape: Shape, resources: Resources) -> Batches:
    """Return the batches of configurations for one prompt. Raises ConfigError where one exceeds the memory bound."""
    context, question = prompt.parts(run.scenario)
    decoded = len(question) + max(run.steps, run.generate)
    bound = resources.max_bytes
    recorded = run.recorded_steps
    return plan_batches(run.configs, shape, len(context), decoded, recorded, bound, passing=copies_each_pass(run))


_log = logging.getLogger(__name__)
_RUN_SETTINGS = (
    "steps", "scenario", "cache", "save", "effect_gradient", "generate", "head_scores", "text", "compress_every",
    "compress_over", "isolated_every",
)  # fmt: skip
"""Settings that a run records."""


@dataclass(frozen=True)
class Placement:
    """The precision and device of a model; `device_map` is a key of `models.loading.DEVICE_MAPS`."""

    dtype: torch.dtype
    device: torch.device
    device_map: str = "none"


@dataclass(frozen=True)
class Plan:
    """A run that passed all checks.

    Attributes:
        files: the model without its weights.
        placement: its precision and device.
        prompts: the prompts.
        run: the configuration of the run, as the trace records it.
        configs: its configurations, resolved.
        resources: bounds on memory, and kernels.
        batches: batches of the configurations for the largest prompt.
        with_text: whether the trace gets the text of prompts and answers; no number depends on it, so `run` lacks it.
        kept: whether the trace gets the kept positions, likewise.
        loaded: the model, where it is loaded already.
    """

    files: ModelFiles
    placement: Placement
    prompts: Prompts
    run: RunConfig
    configs: tuple[ResolvedConfig, ...]
    resources: Resources
    batches: Batches
    with_text: bool = True
    kept: bool = True
    loaded: Adapter | None = None

    @functools.cached_property
    def resolved(self) -> ResolvedRun:
        """The run with resolved configurations."""
        return ResolvedRun.from_run(self.run, self.configs)

    @property
    def shape(self) -> Shape:
        """Dimensions of the model, with the number type of the run's precision."""
        dtype = self.placement.dtype
        return Shape.from_config(self.files.config, dtype.itemsize, self.files.weights_bytes(dtype))

    def model(self) -> Adapter:
        """Return the model with its weights, loaded unless it is already.

        Raises ModelError, and NoMemoryError where the device cannot hold the weights and the longest prompt's caches.
        """
        placement = self.placement
        if self.loaded is None and placement.device_map == "none":
            check_memory(self.files, placement.dtype, placement.device, self.caches_bytes())
        return self.loaded or load_weights(
            self.files, placement.dtype, placement.device, self.run.seed, placement.device_map
        )

    def narrow(self, samples: Collection[str], configs: Sequence[EvictionConfig]) -> Plan:
        """Return the plan of the prompts with ids `samples` and of the given configurations. Raises PerturbkvErrors."""
        run, chosen = self.run, tuple(prompt for prompt in self.prompts if prompt.sample_id in samples)
        same = {name: getattr(run, name) for name in _RUN_SETTINGS}
        settings = Settings(**same, prompts=self.with_text, kept=self.kept)
        prompts = replace(self.prompts, prompts=chosen)
        return plan(self.files, self.placement, prompts, configs, settings, self.resources, self.loaded)

    def caches_bytes(self) -> int:
        """Return the bytes of the longest prompt's full cache and of the largest batch of evicted caches."""
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
    """Return the plan of a run, after every check that needs no weights. Raises PerturbkvErrors."""
    check_configurations(len(configs))
    resolved = tuple(map(resolve, configs))
    entries.check_positions(resolved, files.config, files.name)
    given_sets.check_sources(resolved, files.config, files.name)
    compatibility.check_soft_cap(resolved, soft_cap(files.config), files.name)
    alpha_table.check_tables([config.alpha for config in configs], files.config)
    if loaded is not None:  # else, when the first prompt is read
        compatibility.check_gates(resolved, loaded.has_gates, files.name)
    generate = _answer_length(prompts) if settings.generate is None else settings.generate
    policies = [config.policy for config in configs]
    steps = cache_contents.default_steps(policies) if settings.steps is None else settings.steps
    cache_contents.check_sparse_prefill(policies, steps, generate, settings.save, files.config, files.name)
    _check_prompts(prompts, settings, steps, generate, files)
    if generate and settings.scored:
        check_answers(prompts)
    grading = {METRICS: sorted({metric.name for metric in metrics_of(prompts).values()})} if generate else {}
    fit = fitting_configs(resolved, prompts, settings.scenario, settings.leave_out_unfit)
    stride = ISOLATED_EVERY if settings.compress_every or settings.compress_over else 1
    run = RunConfig(
        model=files.name,
        dataset=prompts.dataset,
        configs=tuple(config for config in configs if config in fit),
        revision=files.revision,
        random_weights=files.random_weights,
        dataset_options={**prompts.options, **grading},
        samples=len(prompts),
        seed=prompts.seed,
        steps=steps,
        max_tokens=prompts.max_tokens,
        chat_template=prompts.chat_template,
        dtype=dtype_name(placement.dtype),
        device=placement.device.type,
        save=settings.save,
        effect_gradient=settings.effect_gradient,
        scenario=settings.scenario,
        cache=settings.cache,
        head_scores=tuple(map(tuple, settings.head_scores)),
        generate=generate,
        text=settings.text,
        plugins={name: version for config in configs for name, version in registry.plugin_digests(config).items()},
        compress_every=settings.compress_every,
        compress_over=settings.compress_over,
        isolated_every=stride if settings.isolated_every is None else settings.isolated_every,
    )
    for name in compatibility.scores_with_norms_counted_twice(fit):
        _log.info("value norms are in %s already; the selection two-stage multiplies ν in again", name)
    shape = Shape.from_config(files.config, placement.dtype.itemsize, files.weights_bytes(placement.dtype))
    stored = sorted({*measured_layers(files.config)} - reading_layers(files.config))
    check_precisions([config.precision for config in configs], stored, shape.d_key, shape.d_value, files.name)
    if generate and settings.scored:
        resources = _bound_memory(resources, shape, run, prompts, placement, loaded)
    resolved_run = ResolvedRun.from_run(run, fit)
    compatibility.check_compressions(resolved_run, measured=settings.scored or not generate)
    if run.compress_every >= max(run.steps, generate):
        _log.info("caches are never compressed again: no text is longer than %d tokens", run.compress_every)
    lengths = {prompt.sample_id: len(prompt.token_ids) for prompt in prompts}
    for config in fit:
        compatibility.check_protected_prompts(config, lengths)
    planned = [plan_prompt_batches(prompt, resolved_run, shape, resources) for prompt in prompts]
    batches = max(planned, key=lambda each: (len(each.indices), each.largest_bytes))
    return Plan(files, placement, prompts, run, fit, resources, batches, settings.prompts, settings.kept, loaded)


def _answer_length(prompts: Prompts) -> int:
    """Return the longest answer length, in tokens, of the prompts' data sets; log data sets with shorter answers."""
    length, wording = prompts.generation_length, prompts.options.get("wording", {})
    lengths = {name: entry["generation_length"] for name, entry in wording.items() if "generation_length" in entry}
    if shorter := [f"{name}'s {tokens}" for name, tokens in lengths.items() if tokens < length]:
        _log.info(
            "every answer to %s may have %d tokens, not %s: scores of these are not LongBench's; give each data set a "
            "file of its own", prompts.dataset, length, ", ".join(shorter),
        )  # fmt: skip
    return length


def fitting_configs(
    configs: Sequence[ResolvedConfig], prompts: Sequence[Prompt], scenario: str, leave_out_unfit: bool
) -> tuple[ResolvedConfig, ...]:
    """Return the configurations whose budget exceeds the number of always-kept entries in every prompt.

    Raises BudgetError where a configuration does not fit; with `leave_out_unfit` only where none fits, and logs those
    that are left out. Raises ConfigError where the text's queries alone shall vote (`window_queries=text`), and a
    prompt's window has none of them, or has no others.
    """
    fit: list[ResolvedConfig] = []
    refused: dict[str, BudgetError] = {}
    for config in configs:
        try:
            for prompt in prompts:
                tokens = len(prompt.parts(scenario)[0])
                compatibility.check_ends(config, tokens)
                compatibility.check_window_queries(config, prompt.sample_id, tokens, prompt.template_tail)
        except BudgetError as error:
            refused[str(config.budget)] = error
        else:
            fit.append(config)
    if refused and not (leave_out_unfit and fit):
        raise next(iter(refused.values()))
    for reason in refused.values():
        _log.info("left out: %s", reason)
    return tuple(fit)


def _check_prompts(prompts: Sequence[Prompt], settings: Settings, steps: int, generate: int, files: ModelFiles) -> None:
    """Raise DatasetError or ModelError for a prompt that the model cannot read, with the tokens decoded after it.

    It lacks the text of `settings`, or has tokens that are not the model's, or more of them than the model, its sliding
    window or its rotations support. At most `steps` of a text are decoded, and `generate` tokens of an answer.
    """
    config, name = files.config, files.name
    for prompt in prompts:
        decoded = max(prompt.step_count(settings.text, steps), generate)
        context, total = len(prompt.parts(settings.scenario)[0]), len(prompt.token_ids) + decoded
        check_vocabulary(prompt, int(config.vocab_size), name, settings.text)
        check_length(prompt, int(config.max_position_embeddings), decoded)
        check_sliding_window(config, total, prompt.sample_id, name, decoded)
        check_long_rotations(config, context, total, prompt.sample_id, name, decoded)


def _bound_memory(
    resources: Resources,
    shape: Shape,
    run: RunConfig,
    prompts: Sequence[Prompt],
    placement: Placement,
    loaded: Adapter | None,
) -> Resources:
    """Return the resources with a default memory bound for a run that generates, unless the user set a bound.

    Every batch decodes whole answers, so that larger batches are worth memory: at most half of what is free besides
    weights and full cache, and at most twice what these take. Only for a model on one device.
    """
    if resources.max_bytes is not None or placement.device_map != "none" or not device_exists(placement.device):
        return resources
    tokens = max(len(prompt.parts(run.scenario)[0]) for prompt in prompts)
    resident = shape.weights_bytes + shape.full_cache_bytes(tokens)
    occupied = shape.full_cache_bytes(tokens) if loaded else resident  # a loaded model's weights are not free any more
    bound = min(2 * resident, (memory.free_bytes(placement.device) - occupied) // 2)
    decoded = max(len(prompt.token_ids) for prompt in prompts) - tokens + max(run.steps, run.generate)
    largest = max(shape.row_bytes(config, tokens, decoded, run.recorded_steps) for config in run.configs)
    return replace(resources, max_bytes=bound) if bound > max(resident // 2, largest) else resources
