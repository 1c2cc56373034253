"""The known eviction systems, by name: what each combines with, and its configurations with all options resolved.

The systems are the files of this folder and what `register_policy` adds; names are known before any is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import CHOICES, EvictionConfig
from perturbkv.configs.selections import SELECTIONS
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.selection import effects

if TYPE_CHECKING:
    from perturbkv.selection.policies.base import Policy

_PACKAGE = "perturbkv.selection.policies"
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_NO_POLICY = ("base", "outside", "presses", "registry")
_OUTSIDE = {"given": "outside", "kvpress": "presses"}
"""What stands before the colon of a policy from outside -> the module that has it."""
_ADDED: dict[str, type[Policy]] = {}


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Add a policy, a frozen dataclass; works as a decorator.

    Raises ConfigError for what is no policy, and where the name is taken.
    """
    from perturbkv.selection.policies.base import Policy as Base

    if not (inspect.isclass(policy) and issubclass(policy, Base) and "__dataclass_params__" in vars(policy)):
        msg = f"expected a subclass of Policy that is a frozen dataclass, got {policy!r}"
        raise ConfigError(msg)
    name = getattr(policy, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in SELECTIONS:
        msg = f"expected a policy's name of small letters, digits, '-' and '_' that no selection has, got {name!r}"
        raise ConfigError(msg)
    if bare := [field.name for field in dataclasses.fields(policy) if "option" not in field.metadata]:
        msg = f"policy '{name}': expected {bare[0]} to be an option(default, 'what it does'), got a plain field"
        raise ConfigError(msg)
    if policy.name in names():
        msg = f"a policy named '{policy.name}' is registered already; choose another name"
        raise ConfigError(msg)
    _ADDED[policy.name] = policy
    return policy


def names() -> list[str]:
    """Every policy's name, SnapKV's first and those that were added last; nothing is imported."""
    files = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    files.sort(key=lambda name: name != "snapkv")
    return [*(name.replace("_", "-") for name in files if name not in _NO_POLICY), *_ADDED]


def known() -> list[type[Policy]]:
    """Every policy."""
    return [info(name) for name in names()]


def info(name: str) -> type[Policy]:
    """The policy's class. Raises UnknownNameError with the known names, the nearest first."""
    if name in _ADDED:
        return _ADDED[name]
    if ":" in name:
        return _outside(name)
    if name not in names():
        raise UnknownNameError(name, "policy", names())
    module = importlib.import_module(f"{_PACKAGE}.{name.replace('-', '_')}")
    (found,) = (one for one in vars(module).values() if inspect.isclass(one) and vars(one).get("name") == name)
    return cast("type[Policy]", found)


def _outside(name: str) -> type[Policy]:
    prefix = name.partition(":")[0]
    if prefix not in _OUTSIDE:
        raise UnknownNameError(name, "policy", [*names(), *(f"{known}:…" for known in _OUTSIDE)])
    return cast("type[Policy]", importlib.import_module(f"{_PACKAGE}.{_OUTSIDE[prefix]}").policy(name))


@functools.cache
def build(choice: Choice) -> Policy:
    """The policy with its options, those that were not given at their defaults. Raises as `completed`."""
    return info(choice.name).made(choice if choice.usual is not None else _completed(choice))


def _completed(choice: Choice) -> Choice:
    return info(choice.name).completed(choice)


def resolved(config: EvictionConfig) -> EvictionConfig:
    """The configuration with every option that makes a difference: what a run is planned with and a trace stores.

    Raises UnknownNameError, and ConfigError for an option that its owner lacks, of a wrong value or without effect.
    """
    info(config.policy.name).check(config)
    whole = dataclasses.replace(config, policy=_completed(config.policy))
    idle = effects.idle(whole, build(whole.policy))
    for (owner, name), needs in idle.items():
        choice: Choice = getattr(whole, owner)
        if name in choice.told:
            msg = f"{name} of {owner} '{choice.name}' has no effect here: it needs {needs}; leave it out"
            raise ConfigError(msg)
    left = {owner: getattr(whole, owner).without(name for of, name in idle if of == owner) for owner in CHOICES}
    return dataclasses.replace(whole, **left)


def pairs() -> list[tuple[str, str, str]]:
    """Which policies combine with which selections and caches: rows of names, as `perturbkv policies` prints them."""

    def fits(policy: type[Policy]) -> tuple[Any, ...]:
        return policy.selections, policy.caches()

    return [
        (", ".join(one.name for one in alike), _listed(selections), " or ".join(caches))
        for (selections, caches), alike in groupby(sorted(known(), key=fits), key=fits)
    ]


def _listed(selections: tuple[str, ...]) -> str:
    return "every selection but position" if len(selections) == len(SELECTIONS) - 2 else ", ".join(selections)


def check(config: EvictionConfig, cache: str = "ragged") -> None:
    """Raise ConfigError where the policy does not take the configuration's selection, or the cache not its budgets."""
    policy = info(config.policy.name)
    if config.selection.name not in policy.selections:
        what = f"policy '{policy.name}' does not combine with selection '{config.selection.name}'"
        raise ConfigError(_refusal(what))
    if cache not in policy.caches():
        budgets = f"policy '{policy.name}' shares budgets out {policy.budgets}"
        raise ConfigError(_refusal(f"{budgets}, which a {cache} cache cannot hold"))


def check_compressible(config: EvictionConfig) -> None:
    """Raise ConfigError where a cache that grows cannot be compressed again by this configuration."""
    if config.given:
        msg = (
            f"policy '{config.policy.name}' is asked once, for the prompt; --compress-every works with policies of ours"
        )
        raise ConfigError(msg)
    if info(config.policy.name).carries_history:
        able = ", ".join(one.name for one in known() if not one.carries_history)
        msg = f"policy '{config.policy.name}' counts queries that decoding forgets; --compress-every works with {able}"
        raise ConfigError(msg)


def check_generating(config: EvictionConfig) -> None:
    """Raise ConfigError where a configuration needs to know the next query, which generation does not have."""
    if config.selection.name in ("hindsight", "hindsight-attention"):
        msg = (
            f"selection '{config.selection.name}' looks at the next query, which generation does not have; choose "
            "another selection"
        )
        raise ConfigError(msg)


def _refusal(what: str) -> str:
    """One line: what does not work, and all that does."""
    return f"{what}; {works()}"


def works() -> str:
    """Everything that combines, in one line: the table of `perturbkv policies`."""
    listed = "; ".join(f"{policies} with {selections} in a {caches} cache" for policies, selections, caches in pairs())
    return f"what works (perturbkv policies): {listed}"
