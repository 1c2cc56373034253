"""Runs and configurations as JSON holds them: every choice as its own type, a configuration with its label."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from perturbkv.configs.entry_counts import Budget
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
    """Return the label, then every choice; a budget is a number: 128 are entries, 0.05 a share of the prompt."""
    return {"label": config.label(), **config.to_document()}


def columns_of(config: EvictionConfig) -> dict[str, str]:
    """Return a configuration as columns of a data frame: its label, and of its choices those that are most asked for.

    A budget is text: 128 are entries, 0.05 a share of the prompt.
    """
    return {
        "config": config.label(),
        "policy": config.policy.name,
        "selection": config.selection.name,
        "budget": str(config.budget),
    }


def config_of(document: Mapping[str, Any]) -> EvictionConfig:
    """Return the configuration that `config_object` made this of."""
    return EvictionConfig.from_document({name: value for name, value in document.items() if name != "label"})


def setting_object(configs: Iterable[EvictionConfig]) -> dict[str, Any]:
    """Return the choices that all of some configurations share."""
    first, *others = (config.to_document() for config in configs)
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in others)}


def run_object(run: RunConfig) -> dict[str, Any]:
    """Return a run as its trace stores it, each configuration with its label."""
    return {**json.loads(run.to_json()), "configs": [config_object(config) for config in run.configs]}


def provenance_object(attrs: Mapping[str, str]) -> dict[str, Any]:
    """Provenance, which a trace file holds as text, each entry as what it is."""
    return {name: _TYPES.get(name, str)(text) for name, text in attrs.items()}


def json_value(value: Any) -> Any:
    """Return the value as JSON can hold it: arrays as nested lists, NaN and infinities as None.

    A record is its declared columns, another dataclass its fields, a configuration its object, a budget its number.
    """
    if isinstance(value, EvictionConfig):
        return config_object(value)
    if isinstance(value, Budget):
        return value.value
    if hasattr(type(value), "columns"):
        return value.to_dict()
    if is_dataclass(value):
        return json_value(vars(value))
    if isinstance(value, dict):
        return {str(key): json_value(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(part) for part in value]
    if isinstance(value, np.ndarray):
        return json_value(value.tolist())
    if isinstance(value, np.generic):
        return json_value(value.item())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value
