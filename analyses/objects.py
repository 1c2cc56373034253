"""Runs and configurations as JSON holds them: every choice as its own type, a configuration with its label."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from perturbkv.configs.budget import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig

_TYPES: Mapping[str, Callable[[str], Any]] = {
    "format_version": int,
    "seed": int,
    "random_weights": lambda text: text == "true",
    "quantised_weights": lambda text: text == "true",
}
"""What stands in a trace's provenance, where it is no text."""


def config_object(config: EvictionConfig) -> dict[str, Any]:
    """The label, then every choice; a budget is a number: 128 are entries, 0.05 a share of the prompt."""
    return {"label": config.label(), **_choices(config)}


def columns_of(config: EvictionConfig) -> dict[str, str]:
    """A configuration as columns of a data frame: its label, and of its choices those that are most asked for.

    A budget is text: 128 are entries, 0.05 a share of the prompt.
    """
    return {
        "config": config.label(),
        "policy": config.policy,
        "selection": config.selection,
        "budget": str(config.budget),
    }


def config_of(document: Mapping[str, Any]) -> EvictionConfig:
    """The configuration that `config_object` made this of."""
    choices = {name: value for name, value in document.items() if name != "label"}
    return EvictionConfig(**{**choices, "budget": Budget(choices["budget"])})


def setting_object(configs: Iterable[EvictionConfig]) -> dict[str, Any]:
    """The choices that all of some configurations share."""
    first, *others = map(_choices, configs)
    return {name: value for name, value in first.items() if all(one[name] == value for one in others)}


def run_object(run: RunConfig) -> dict[str, Any]:
    """A run as its trace stores it, each configuration with its label."""
    return {**json.loads(run.to_json()), "configs": [config_object(config) for config in run.configs]}


def provenance_object(attrs: Mapping[str, str]) -> dict[str, Any]:
    """Provenance, which a trace file holds as text, each entry as what it is."""
    return {name: _TYPES.get(name, str)(text) for name, text in attrs.items()}


def _choices(config: EvictionConfig) -> dict[str, Any]:
    return {**dataclasses.asdict(config), "budget": config.budget.value}
