"""Configurations as trace files of format 1 and 2 hold them: every option in one list, whether it mattered or not.

This table is history: it never changes when a policy does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig

_POOLED = {"pool": "max", "kernel": 7}
_UNPOOLED = {"pool": "none", "kernel": 7}
_POLICIES: Mapping[str, Mapping[str, Any]] = {
    "snapkv": _POOLED,
    "pyramidkv": {"pyramid_beta": 20.0, "pyramid_line": "prefix", **_POOLED},
    "adakv": {"floor": 0.2, "safeguard": "mixture", **_POOLED},
    "headkv": {"head_beta": 1.01, **_POOLED},
    "h2o": {"recent": 0.5, **_UNPOOLED},
    "scissorhands": {"history": 400, **_UNPOOLED},
    "tova": _UNPOOLED,
    "random": {"seed": 0, **_UNPOOLED},
    "streaming-llm": {"sinks": 4, "positions": "kept"},
}
"""Policy -> its options and their defaults, under the names that they had."""
_STAGE1 = {"alpha": 0.25, "split": "prefix"}
_SCORE = {"stage2_score": "accumulated"}
_SELECTIONS: Mapping[str, Mapping[str, Any]] = {
    "two-stage": {**_SCORE, "epsilon": 0.0},
    "two-stage-uniform": _SCORE,
    "random": {"seed": 0},
}
_GROUP = {"group_score": "mean", "group_product": "product-of-means"}
_NAMES = {
    "pyramid_beta": "beta", "pyramid_line": "line", "head_beta": "beta", "stage2_score": "score",
    "group_score": "reduce", "group_product": "product",
}  # fmt: skip
_KEPT = ("budget", "window", "protect_first", "protect_recent")
_LATER = {"protect_first": 0, "protect_recent": 0}
_LISTED: Mapping[str, Any] = {
    "policy": "snapkv", "selection": "two-stage", "window": 32, "alpha": 0.25, "split": "prefix",
    "stage2_score": "accumulated", "epsilon": 0.0, "pool": "max", "kernel": 7, "granularity": "query",
    "group_score": "mean", "group_product": "product-of-means", "sinks": 4, "seed": 0, "pyramid_beta": 20.0,
    "pyramid_line": "prefix", "floor": 0.2, "safeguard": "mixture", "head_beta": 1.01, "recent": 0.5, "history": 400,
    "protect_first": 0, "protect_recent": 0, "positions": "kept",
}  # fmt: skip
"""Every choice of format 2 in the order of its labels, and what its labels did not say."""
_SHORT = {"stage2_score": "s2", "epsilon": "eps", "group_score": "group", "group_product": "product"}
_VOTED = ("pool", "kernel", "history", "group_score")
"""Options that mattered only where attention was looked at."""


def configurations(entries: Sequence[Mapping[str, Any]]) -> tuple[EvictionConfig, ...]:
    """The configurations of a run, each once more what it was: those that differ in an idle option alone stay apart.

    Raises KeyError, TypeError, ConfigError for entries that are none.
    """
    made = [_configuration(entry) for entry in entries]
    return tuple(
        dataclasses.replace(config, twin=_otherwise(entry, entries[made.index(config)]))
        for entry, config in zip(entries, made, strict=True)
    )


def label(entry: Mapping[str, Any]) -> str:
    """How format 2 named a configuration."""
    said = {"policy": f"{entry['policy']}:{entry['selection']}", "budget": f"b={entry['budget']}"}
    said |= {"alpha": f"a={entry['alpha']:g}", "window": f"w={entry['window']}"}
    said["pool"] = "unpooled" if entry["pool"] == "none" else f"{entry['pool']}{entry['kernel']}"
    said["granularity"] = entry["granularity"]
    unsaid = [name for name in _LISTED if name not in (*said, "selection", "kernel")]
    others = [(name, entry[name]) for name in unsaid if name in entry and entry[name] != _LISTED[name]]
    return " ".join(
        [*said.values(), *(f"{_SHORT.get(name, name.replace('_', '-'))}={value}" for name, value in others)]
    )


def _configuration(entry: Mapping[str, Any]) -> EvictionConfig:
    of_group = _GROUP if entry["granularity"] == "kv" else {}
    return EvictionConfig(
        policy=_own(entry, "policy", _POLICIES[entry["policy"]]),
        selection=_own(entry, "selection", {**_STAGE1, **_SELECTIONS.get(entry["selection"], {})}),
        granularity=_own(entry, "granularity", of_group),
        **{name: entry.get(name, _LATER.get(name)) for name in _KEPT},
    )


def _own(entry: Mapping[str, Any], owner: str, defaults: Mapping[str, Any]) -> Choice:
    """Options of one owner under today's names, as far as they made a difference."""
    without = _without_effect(entry, owner)
    held = {name: type(default)(entry.get(name, default)) for name, default in defaults.items() if name not in without}
    usual = frozenset(_NAMES.get(name, name) for name, value in held.items() if value == defaults[name])
    return Choice(entry[owner], {_NAMES.get(name, name): value for name, value in held.items()}, usual)


def _without_effect(entry: Mapping[str, Any], owner: str) -> set[str]:
    """Options of a policy, selection or granularity that made no difference to what the entry kept."""
    staged, competes = entry["selection"] in ("two-stage", "two-stage-uniform"), entry["policy"] == "adakv"
    scored = staged or competes or entry["selection"] in ("attention", "attention-unpooled")
    pooled = scored and (competes or entry["selection"] != "attention-unpooled")
    raw = entry["pool"] == "none" or entry.get("stage2_score") == "accumulated"
    means = entry["selection"] == "two-stage-uniform" and raw and entry.get("group_score", "mean") == "mean"
    found = {"group_product"} if means or not staged else set()
    if not scored:
        found |= {*_VOTED, "seed"} if owner == "policy" else set(_VOTED)
    elif not pooled:
        found |= {"pool", "kernel"}
    elif entry["pool"] == "none":
        found |= {"kernel", "stage2_score"}
    return found


def _otherwise(entry: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """What the entry says otherwise than the first one that is the same configuration."""
    return " ".join(f"{name.replace('_', '-')}={value}" for name, value in entry.items() if first[name] != value)
