"""What a run will do, checked before a weight is loaded: lengths, budgets, memory, and what is decoded together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perturbkv.cache import positions
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Batches, Resources, Shape, plan_batches
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt, check_length
from perturbkv.datasets.prompts import Prompts
from perturbkv.errors import BudgetError
from perturbkv.models.adapter import check_sliding_window
from perturbkv.models.loading import ModelFiles, load_weights
from perturbkv.selection import compatibility
from perturbkv.selection.policies import registry

if TYPE_CHECKING:
    import torch

    from perturbkv.models.adapter import Adapter

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What is measured of every prompt, whatever the configuration.

    Attributes:
        steps: decode steps, teacher-forced on the full run.
        scenario, cache, save: as in `RunConfig`.
        generate: tokens generated from every cache and scored; None: as many as the dataset says.
        head_scores: one row of scores per layer, for `headkv`.
        text: whether the trace holds the prompts' text.
        leave_out_unfit: a budget that some prompt makes no larger than the window is left out instead of refused.
    """

    steps: int = 1
    scenario: str = "regular"
    cache: str = "ragged"
    save: tuple[str, ...] = ()
    generate: int | None = 0
    head_scores: Sequence[Sequence[float]] = ()
    text: bool = True
    leave_out_unfit: bool = False


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
        resources: what it may take.
        batches: how the configurations of the largest prompt are decoded.
        text: whether its trace holds the prompts' text: no number depends on it, so it is no part of `run`.
        loaded: the model, where it was loaded already.
    """

    files: ModelFiles
    placement: Placement
    prompts: Prompts
    run: RunConfig
    resources: Resources
    batches: Batches
    text: bool = True
    loaded: Adapter | None = None

    def model(self) -> Adapter:
        """The model with its weights, loaded where it is not yet. Raises ModelError."""
        place = self.placement
        return self.loaded or load_weights(self.files, place.dtype, place.device, self.run.seed, place.device_map)


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
    positions.check(configs, files.config, files.name)
    generate = prompts.generation_length if settings.generate is None else settings.generate
    _check_prompts(prompts, settings.scenario, files.config, max(settings.steps, generate), files.name)
    run = RunConfig(
        model=files.name,
        dataset=prompts.dataset,
        configs=fitting(configs, prompts, settings.scenario, settings.leave_out_unfit),
        revision=files.revision,
        random_weights=files.random_weights,
        dataset_options=dict(prompts.options),
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
    for name in compatibility.counted_twice(run.configs):
        _log.info("value norms are in %s already; the selection two-stage multiplies ν in again", name)
    batches = _batches(files, run, prompts, placement.dtype, resources)
    return Plan(files, placement, prompts, run, resources, batches, settings.text, loaded)


def fitting(
    configs: Sequence[EvictionConfig], prompts: Sequence[Prompt], scenario: str, leave_out_unfit: bool
) -> tuple[EvictionConfig, ...]:
    """The configurations whose budget exceeds the window in every prompt.

    Raises BudgetError for one that does not, or with `leave_out_unfit` where none is left; those left out are logged.
    """
    fit: list[EvictionConfig] = []
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
        prompt.parts(scenario)
        check_length(prompt, int(model_config.max_position_embeddings), after)
        check_sliding_window(model_config, len(prompt.token_ids) + after, prompt.sample_id, name)


def _batches(
    files: ModelFiles, run: RunConfig, prompts: Sequence[Prompt], dtype: torch.dtype, resources: Resources
) -> Batches:
    """How the configurations of the largest prompt are decoded. Raises ConfigError where one exceeds the bound."""
    shape = Shape.of(files.config, dtype.itemsize, files.parameters())
    planned = []
    for prompt in prompts:
        context, question = prompt.parts(run.scenario)
        decoded = len(question) + max(run.steps, run.generate)
        planned.append(plan_batches(run.configs, shape, len(context), decoded, resources.max_bytes))
    return max(planned, key=lambda batches: (len(batches.places), batches.largest_bytes))
