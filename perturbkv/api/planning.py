"""What a notebook gave becomes a plan, or one clear error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.prompts import Prompts, gathered
from perturbkv.errors import ConfigError, ModelError
from perturbkv.models import user_model
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import ModelFiles
from perturbkv.pipeline.run.plan import Placement, Plan, Settings, plan
from perturbkv.scoring import head_scores, value_norms
from perturbkv.selection import compatibility
from perturbkv.selection.grid import unique
from perturbkv.selection.policies import registry as policies

CONFIGS = "configurations, as pk.grid makes them"
_Kind = TypeVar("_Kind")


def planned(
    model: Adapter,
    prompts: Iterable[Prompt],
    configs: Iterable[EvictionConfig],
    settings: Settings,
    resources: Resources,
    kept: bool = False,
) -> Plan:
    """The plan; with `kept` a given model's weights are told apart from all others: its trace may be gone on with."""
    chosen = unique(map(policies.resolved, all_of(EvictionConfig, configs, CONFIGS)))
    held = held_prompts(prompts)
    check_model(model)
    for config in chosen:
        compatibility.check(config, settings.cache)
    needed = any(policies.info(config.policy.name).needs_scores for config in chosen)
    scores = head_scores.checked(settings.head_scores, len(model.layers), model.heads) if needed else ()
    value_norms.check_kernel(resources.norm_kernel, model.device)
    files = ModelFiles.of(model)
    if kept and files.revision == user_model.GIVEN:
        files = replace(files, revision=user_model.fingerprint(model))
    placement = Placement(model.dtype, torch.device(model.device))
    return plan(files, placement, held, chosen, replace(settings, head_scores=scores), resources, model)


def held_prompts(prompts: Iterable[Prompt]) -> Prompts:
    """One prompt, a series of them, or what `load_prompts` gives. Raises ConfigError for anything else."""
    if isinstance(prompts, Prompts):
        return gathered(prompts)
    return gathered(all_of(Prompt, prompts, "prompts: pk.Prompt.from_text"))


def all_of(kind: type[_Kind], given: Any, what: str) -> tuple[_Kind, ...]:
    """One object, or any series of them, as a tuple. Raises ConfigError for anything else."""
    listed = (given,) if isinstance(given, kind) or not isinstance(given, Iterable) else tuple(given)
    for one in listed:
        if not isinstance(one, kind):
            msg = f"expected {what}; got {type(one).__name__}"
            raise ConfigError(msg)
    return listed


def check_model(model: Any) -> None:
    """Raise ModelError for what `load_model` did not give."""
    if not isinstance(model, Adapter):
        msg = f"expected a model from pk.load_model, got {type(model).__name__}"
        raise ModelError(msg)
