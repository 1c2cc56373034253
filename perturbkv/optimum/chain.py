"""What a method would keep without its pooling and stages, and what it would keep if it knew the query.

Each step of the chain method -> plain -> knowing changes one thing, so that the factors between their L tell what
pooling and stages cost, what not knowing the query costs, and what the criterion itself does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perturbkv.configs.choice import Choice, as_choice
from perturbkv.configs.eviction import EvictionConfig

_POLICY = "snapkv"
"""Its score is the window's attention, which estimates the realised A; others' scores have no such twin."""
_BY_ATTENTION = ("attention", "attention-unpooled", "two-stage-uniform", "hindsight-attention")
_BY_VALUES = ("two-stage", "hindsight")
KNOWING = ("hindsight-attention", "hindsight")
"""Selections that know the query."""


def plain(config: EvictionConfig) -> EvictionConfig | None:
    """Top-k of the window's mean Ā, or of Ā ν, with neither pooling nor stages; of hindsight itself.

    None for a method that ranks by neither.
    """
    if config.selection.name in KNOWING or not _ranks(config):
        return config if _ranks(config) else None
    if config.selection.name in _BY_VALUES:
        return replace(config, selection=_selection(config, "two-stage", alpha=0.0))
    return _unpooled(config, as_choice("attention-unpooled"))


def knowing(config: EvictionConfig) -> EvictionConfig | None:
    """Top-k of the realised A, or of A ν, whichever the method estimates. None for a method that estimates neither."""
    if not _ranks(config):
        return None
    by_values = config.selection.name in _BY_VALUES
    return _unpooled(config, _selection(config, "hindsight") if by_values else as_choice("hindsight-attention"))


def with_references(configs: Sequence[EvictionConfig]) -> tuple[EvictionConfig, ...]:
    """The same, those of a budget together, and behind them what each would keep plainly and with the query known."""
    budgets = dict.fromkeys(config.budget for config in configs)
    found: list[EvictionConfig] = []
    for budget in budgets:
        own = [config for config in configs if config.budget == budget]
        more = [reference(config) for reference in (plain, knowing) for config in own]
        found += [*own, *(config for config in more if config is not None)]
    return tuple(dict.fromkeys(found))


def _ranks(config: EvictionConfig) -> bool:
    return config.policy.name == _POLICY and config.selection.name in (*_BY_ATTENTION, *_BY_VALUES)


def _unpooled(config: EvictionConfig, selection: Choice) -> EvictionConfig:
    """The same with a selection that pools nothing, so that how the policy pools goes unsaid."""
    return replace(config, selection=selection, policy=config.policy.without(config.policy.options))


def _selection(config: EvictionConfig, name: str, **more: float) -> Choice:
    """A selection with this one's norm, where it is told."""
    norm = config.selection.options.get("norm", "l1")
    told = {**more, **({} if norm == "l1" else {"norm": norm})}
    return as_choice(f"{name}({', '.join(f'{key}={value}' for key, value in told.items())})" if told else name)
