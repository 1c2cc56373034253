"""Reference configurations of a method: without pooling and stages, and with the decoding query known.

Each step of the chain method -> without pooling -> with the known query changes one thing, so that the ratios of their
L are the costs of pooling and stages, of not knowing the query, and of the criterion itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perturbkv.configs.choice import Choice, as_choice
from perturbkv.configs.eviction import EvictionConfig

_POLICY = "snapkv"
"""The policy whose score is the window's attention, which estimates the realised A; other scores have no such
reference.
"""
_BY_ATTENTION = ("attention", "attention-unpooled", "two-stage-uniform", "hindsight-attention")
_BY_VALUES = ("two-stage", "hindsight")
KNOWN_QUERY_SELECTIONS = ("hindsight-attention", "hindsight")
"""Selections that know the query."""


def without_pooling(config: EvictionConfig) -> EvictionConfig | None:
    """Return the configuration that ranks entries by the window's mean attention Ā, or Ā ν, without pooling and stages.

    A hindsight method is returned as it is; None for a method that ranks by neither.
    """
    if not _ranks_by_attention(config):
        return None
    if config.selection.name in KNOWN_QUERY_SELECTIONS:
        return config
    if config.selection.name in _BY_VALUES:
        return replace(config, selection=_selection_with_norm(config, "two-stage", alpha=0.0))
    return _without_pooling_options(config, as_choice("attention-unpooled"))


def with_known_query(config: EvictionConfig) -> EvictionConfig | None:
    """Return the configuration that ranks entries by the realised A or A ν, whichever the given method estimates.

    None for a method that estimates neither.
    """
    if not _ranks_by_attention(config):
        return None
    by_values = config.selection.name in _BY_VALUES
    return _without_pooling_options(
        config, _selection_with_norm(config, "hindsight") if by_values else as_choice("hindsight-attention")
    )


def with_references(configs: Sequence[EvictionConfig]) -> tuple[EvictionConfig, ...]:
    """Return the configurations by budget, each group followed by its references: without pooling, with known query."""
    budgets = dict.fromkeys(config.budget for config in configs)
    ordered: list[EvictionConfig] = []
    for budget in budgets:
        group = [config for config in configs if config.budget == budget]
        references = [reference(config) for reference in (without_pooling, with_known_query) for config in group]
        ordered += [*group, *(config for config in references if config is not None)]
    return tuple(dict.fromkeys(ordered))


def _ranks_by_attention(config: EvictionConfig) -> bool:
    """Return whether a method ranks entries by attention, or by attention times value norm."""
    return config.policy.name == _POLICY and config.selection.name in (*_BY_ATTENTION, *_BY_VALUES)


def _without_pooling_options(config: EvictionConfig, selection: Choice) -> EvictionConfig:
    """Return the configuration with another selection and without its policy's options, such as pooling."""
    return replace(config, selection=selection, policy=config.policy.without(config.policy.options))


def _selection_with_norm(config: EvictionConfig, name: str, **parameters: float) -> Choice:
    """Return the selection `name` with the given parameters, and with the configuration's norm unless it is l1."""
    norm = config.selection.options.get("norm", "l1")
    return Choice(name, parameters if norm == "l1" else {**parameters, "norm": norm})
