"""Runs, configurations and results as JSON values: every choice with its own type, a configuration with its label."""

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
"""Types of the entries of a trace's provenance that are no text."""


def config_object(config: EvictionConfig) -> dict[str, Any]:
    """Return a configuration as a JSON object: its label and choices, a budget as 128 entries or 0.05 of the prompt."""
    return {"label": config.label(), **config.to_document()}


def config_columns(config: EvictionConfig) -> dict[str, str]:
    """Return a configuration as columns of a data frame: label, policy, selection and budget, all as text."""
    return {
        "config": config.label(),
        "policy": config.policy.name,
        "selection": config.selection.name,
        "budget": str(config.budget),
    }


def setting_object(configs: Iterable[EvictionConfig]) -> dict[str, Any]:
    """Return the choices that all configurations share, as a JSON object."""
    first, *others = (config.to_document() for config in configs)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def run_object(run: RunConfig) -> dict[str, Any]:
    """Return a run as a JSON object: its choices, and its configurations as `config_object` gives them."""
    return {**json.loads(run.to_json()), "configs": [config_object(config) for config in run.configs]}


def provenance_object(attrs: Mapping[str, str]) -> dict[str, Any]:
    """Return a trace's provenance as a JSON object, with numbers and booleans where the file has them as text."""
    return {name: _TYPES.get(name, str)(text) for name, text in attrs.items()}


def json_value(value: Any) -> Any:
    """Return a value that JSON can hold: arrays as nested lists, NaN and infinities as None.

    A record becomes its declared columns, another dataclass its fields, a budget its number.
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
