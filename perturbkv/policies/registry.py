"""The known eviction systems, by name. Imports no torch: a policy's module is imported when it is built."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from perturbkv.config import SELECTIONS, EvictionConfig
from perturbkv.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from perturbkv.policies.base import Policy

BY_SCORE = tuple(name for name in SELECTIONS if name != "position")


@dataclass(frozen=True)
class PolicyInfo:
    """A registered policy: what it is, where it is from, which selections it combines with."""

    name: str
    summary: str
    paper: str
    selections: tuple[str, ...]
    implementation: str


_REGISTRY: dict[str, PolicyInfo] = {}


def register(info: PolicyInfo) -> None:
    """Add a policy. Raises ConfigError where the name is taken."""
    if info.name in _REGISTRY:
        msg = f"a policy named '{info.name}' is registered already; choose another name"
        raise ConfigError(msg)
    _REGISTRY[info.name] = info


def known() -> list[PolicyInfo]:
    """Every registered policy, in the order of registration."""
    return list(_REGISTRY.values())


def info(name: str) -> PolicyInfo:
    """The policy's entry. Raises UnknownNameError with the known names, the nearest first."""
    if name not in _REGISTRY:
        raise UnknownNameError(name, "policy", _REGISTRY)
    return _REGISTRY[name]


def check(config: EvictionConfig) -> None:
    """Raise ConfigError where the policy does not take the configuration's selection."""
    policy = info(config.policy)
    if config.selection not in policy.selections:
        msg = f"policy '{policy.name}' takes the selections {', '.join(policy.selections)}; got '{config.selection}'"
        raise ConfigError(msg)


def build(name: str) -> Policy:
    """The policy itself."""
    module, _, attribute = info(name).implementation.partition(":")
    return cast("Policy", getattr(importlib.import_module(module), attribute)())


register(
    PolicyInfo(
        "snapkv",
        "the last queries' attention votes; the same budget for every head",
        "https://arxiv.org/abs/2404.14469",
        BY_SCORE,
        "perturbkv.policies.snapkv:SnapKV",
    )
)
register(
    PolicyInfo(
        "streaming-llm",
        "the first entries and the most recent ones, whatever they hold",
        "https://arxiv.org/abs/2309.17453",
        ("position",),
        "perturbkv.policies.streaming_llm:StreamingLLM",
    )
)
