"""Checking everything of a run that can be checked before a weight is loaded: data, lengths, budgets, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from perturbkv.cli import console
from perturbkv.cli.options import RunOptions
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Batches, Resources, Shape, plan_batches
from perturbkv.configs.run import RunConfig
from perturbkv.errors import BudgetError

if TYPE_CHECKING:
    import torch

    from perturbkv.datasets.encode import EncodedPrompt
    from perturbkv.models.loading import ModelFiles


@dataclass(frozen=True)
class Encoded:
    """The prompts of a run as token ids, and what came with their dataset.

    Attributes:
        prompts: at least one.
        options: what the dataset wants recorded.
        chat_template: whether the prompts went through one.
        generation_length: tokens of an answer at most, where the user does not say.
    """

    prompts: tuple[EncodedPrompt, ...]
    options: dict[str, Any]
    chat_template: bool
    generation_length: int

    @property
    def cut(self) -> int:
        """How many samples lost their middle."""
        return sum(prompt.cut_tokens > 0 for prompt in self.prompts)


def encode_prompts(options: RunOptions, tokenizer: Any) -> Encoded:
    """Load the dataset and encode it. Raises DatasetError and ConfigError for all that is wrong with the data."""
    from perturbkv.datasets import registry as datasets
    from perturbkv.datasets.encode import encode

    asked = datasets.DatasetOptions(
        samples=options.sample_count, seed=options.seed, data_dir=options.data_dir, haystack=options.haystack,
        at_most=options.samples is None,
    )  # fmt: skip
    if options.lengths:
        asked = replace(asked, lengths=options.lengths)
    if options.depths:
        asked = replace(asked, depths=options.depths)
    loaded = datasets.load(options.dataset, asked, tokenizer)
    template = options.chat_template
    if template is None:
        template = bool(tokenizer.chat_template) and loaded.chat_template
    prompts = tuple(
        encode(sample, tokenizer, chat_template=template, max_tokens=options.max_tokens) for sample in loaded.samples
    )
    return Encoded(prompts, loaded.options, template, loaded.generation_length)


def _check_prompts(prompts: Sequence[EncodedPrompt], options: RunOptions, model_config: Any, after: int) -> None:
    """Raise DatasetError where a prompt and the `after` tokens decoded behind it are more than the model can take."""
    from perturbkv.datasets.encode import check_length
    from perturbkv.models.adapter import check_sliding_window

    for prompt in prompts:
        prompt.parts(options.scenario)
        check_length(prompt, int(model_config.max_position_embeddings), after)
        check_sliding_window(model_config, len(prompt.token_ids) + after, prompt.sample_id, options.model)


@dataclass(frozen=True)
class Plan:
    """A run that is known to be possible, before any weight is loaded."""

    files: ModelFiles
    dtype: torch.dtype
    device: torch.device
    encoded: Encoded
    run: RunConfig
    resources: Resources
    batches: Batches
    device_map: str = "none"


def fitting(
    configs: Sequence[EvictionConfig], prompts: Sequence[EncodedPrompt], scenario: str, leave_out_unfit: bool
) -> tuple[EvictionConfig, ...]:
    """The configurations whose budget exceeds the window in every prompt.

    Raises BudgetError for one that does not, or with `leave_out_unfit` where none is left; those left out are said.
    """
    fit: list[EvictionConfig] = []
    refused: dict[str, BudgetError] = {}
    for config in configs:
        try:
            for prompt in prompts:
                config.kept_entries(len(prompt.parts(scenario)[0]))
        except BudgetError as error:
            refused[str(config.budget)] = error
        else:
            fit.append(config)
    if refused and not (leave_out_unfit and fit):
        raise next(iter(refused.values()))
    for reason in refused.values():
        console.note(f"left out: {reason}")
    return tuple(fit)


def plan(
    options: RunOptions, configs: Sequence[EvictionConfig], leave_out_unfit: bool = False, generate: int | None = 0
) -> Plan:
    """Check everything that can be checked without the weights. Raises PerturbkvErrors.

    `leave_out_unfit`: a budget that some prompt makes no larger than the window is left out instead of refused.
    `generate`: tokens generated from every cache and scored; None: as many as the dataset says.
    """
    from perturbkv.cache import positions
    from perturbkv.datasets import registry as datasets
    from perturbkv.models.loading import open_model, pick_device, pick_dtype
    from perturbkv.scoring import head_scores, value_norms
    from perturbkv.selection.policies import registry as policies

    datasets.check_name(options.dataset)
    resources, device = options.resources, pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    value_norms.check_kernel(resources.norm_kernel, device)
    files = open_model(options.model, options.seed)
    positions.check(configs, files.config, files.name)
    needed = [config.policy for config in configs if policies.info(config.policy).needs_scores]
    scores = head_scores.given(options.head_scores, files.config, needed[0] if needed else None, policies.works())
    encoded = encode_prompts(options, files.tokenizer)
    generate = encoded.generation_length if generate is None else generate
    _check_prompts(encoded.prompts, options, files.config, max(options.step_count, generate))
    run = RunConfig(
        model=options.model,
        dataset=options.dataset,
        configs=fitting(configs, encoded.prompts, options.scenario, leave_out_unfit),
        revision=files.revision,
        random_weights=files.random_weights,
        dataset_options=encoded.options,
        samples=len(encoded.prompts),
        seed=options.seed,
        steps=options.step_count,
        max_tokens=options.max_tokens,
        chat_template=encoded.chat_template,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        save=tuple(options.save or ()),
        scenario=options.scenario,
        cache=options.cache,
        head_scores=scores,
        generate=generate,
    )
    batches = _batches(files, run, encoded.prompts, dtype, resources)
    return Plan(files, dtype, device, encoded, run, resources, batches, options.device_map)


def _batches(
    files: ModelFiles,
    run: RunConfig,
    prompts: Sequence[EncodedPrompt],
    dtype: torch.dtype,
    resources: Resources,
) -> Batches:
    """How the configurations of the largest prompt are decoded. Raises ConfigError where one exceeds the bound."""
    shape = Shape.of(files.config, dtype.itemsize, files.parameters())
    planned = []
    for prompt in prompts:
        context, question = prompt.parts(run.scenario)
        decoded = len(question) + max(run.steps, run.generate)
        planned.append(plan_batches(run.configs, shape, len(context), decoded, resources.max_bytes))
    return max(planned, key=lambda batches: (len(batches.places), batches.largest_bytes))
