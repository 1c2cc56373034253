"""The known eviction systems, by name, and their configurations with all options resolved.

The systems are the files of this folder, what `register_policy` and installed packages add, and every score, with equal
budgets; names are known before any is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import TYPE_CHECKING, Any, cast

from perturbkv.configs.choice import UNNAMED, Choice
from perturbkv.configs.eviction import CHOICES, EvictionConfig
from perturbkv.configs.option import complete_choice
from perturbkv.configs.plugins import Catalogue, class_digest, is_builtin, load_class, refers_to_file
from perturbkv.configs.selections import SELECTIONS
from perturbkv.errors import ConfigError, PluginError, UnknownNameError
from perturbkv.scoring import score_registry as scores
from perturbkv.scoring.score_registry import SCORES
from perturbkv.selection import effects

if TYPE_CHECKING:
    from perturbkv.scoring.score import Score
    from perturbkv.selection.policies.base import Policy
    from perturbkv.selection.policies.external import Outside


def _base() -> type[Policy]:
    from perturbkv.selection.policies.base import Policy as Base

    return Base


_POLICIES: Catalogue[Policy] = Catalogue(
    "policy",
    "perturbkv.selection.policies",
    _base,
    excluded=("base", "external", "kvpress", "registry"),
    reserved=lambda: SELECTIONS,
)


_OUTSIDE = {"given": "external", "kvpress": "kvpress"}
"""What stands before the colon of a policy from outside -> the module that has it."""


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Add a policy, a frozen dataclass; works as a decorator.

    Raises ConfigError for what is no policy, and where the name is taken.
    """
    return _POLICIES.register(policy, names())


def register_score(score: type[Score]) -> type[Score]:
    """Add a score, a frozen dataclass; works as a decorator. It is a policy too, with equal budgets.

    Raises ConfigError for what is no score, and where the name is taken.
    """
    return SCORES.register(score, names())


def names() -> list[str]:
    """Every policy's name, SnapKV's first and those that were added last; nothing is imported."""
    found = [*_POLICIES.names(), *SCORES.names()]
    added = [*SCORES.registered, *_POLICIES.registered]
    return sorted(dict.fromkeys(found), key=lambda name: (name in added, name != "snapkv"))


def known() -> list[type[Policy]]:
    """Every policy."""
    return [info(name) for name in names()]


def info(name: str) -> type[Policy]:
    """The policy's class. Raises UnknownNameError with the known names, the nearest first, and PluginError."""
    if _from_outside(name):
        return _outside(name)
    if name in _POLICIES.names() or (refers_to_file(name) and not _is_score(name)):
        return _POLICIES.load(name)
    if name not in SCORES.names() and not refers_to_file(name):
        raise UnknownNameError(name, "policy", names())
    return _by_score(cast("Any", SCORES.load(name)), name)  # classes are hashed as such


def _is_score(name: str) -> bool:
    """Whether a class of a user's own file is a score. Raises PluginError for one that is neither that nor a policy."""
    found = load_class(name)
    if isinstance(found, type) and not issubclass(found, (SCORES.base(), _POLICIES.base())):
        msg = f"expected '{name}' to be a subclass of Score or Policy, got {found.__name__}"
        raise PluginError(msg)
    return isinstance(found, type) and issubclass(found, SCORES.base())


@functools.cache
def _by_score(score: type[Score], name: str) -> type[Policy]:
    from perturbkv.selection.policies.base import ByScore

    return ByScore.of(score, name)


def plugins(config: EvictionConfig) -> dict[str, str]:
    """Score or policy that is not ours -> what tells this version of it from others."""
    policy = info(config.policy.name)
    by = config.policy.options.get("by", scores.OWN)
    used = {config.policy.name: getattr(policy, "scored", policy)}
    used |= {by.name: SCORES.load(by.name)} if isinstance(by, Choice) else {}
    return {name: class_digest(known) for name, known in used.items() if not is_builtin(known)}


def _from_outside(name: str) -> bool:
    prefix, colon, _ = name.partition(":")
    return bool(colon) and prefix in _OUTSIDE


def _outside(name: str) -> type[Outside]:
    """The class of a policy from outside: `kvpress:SnapKVPress`."""
    found = importlib.import_module(f"{__package__}.{_OUTSIDE[name.partition(':')[0]]}")
    return cast("type[Outside]", found.policy(name))


def build(choice: Choice) -> Policy:
    """The policy with its options, those that were not given at their defaults. Raises as `complete_choice`."""
    if _from_outside(choice.name):
        return _outside(choice.name)()  # what its options say matters to whoever runs it
    whole = choice if choice.defaults is not None else _completed(choice)
    return info(choice.name)(**whole.options)


def spelled(choice: Choice) -> Choice:
    """The choice with a score that stands first without a name, `adakv(caote)`, under its name: `adakv(by=caote)`."""
    if UNNAMED not in choice.options or "by" in choice.options or "by" not in info(choice.name).options():
        return choice
    return Choice(choice.name, {name or "by": value for name, value in choice.options.items()})


def _completed(choice: Choice) -> Choice:
    if _from_outside(choice.name):
        return _outside(choice.name).completed(choice)
    whole = complete_choice(spelled(choice), f"policy '{choice.name}'", info(choice.name).options())
    by = whole.options.get("by")
    if not isinstance(by, Choice):
        return whole.without(["by"])
    own = info(choice.name)().score.name
    return dataclasses.replace(whole, options={**whole.options, "by": _ranked_by(by, own)})


def _ranked_by(by: Choice, own: str) -> Choice:
    """The other score of a policy, resolved. Raises ConfigError for its `own`."""
    if by.name == own:
        msg = f"by={by} is the policy's own score; leave by out and give pool and kernel to the policy"
        raise ConfigError(msg)
    return scores.resolved(by)


def resolved(config: EvictionConfig) -> EvictionConfig:
    """The configuration with every option that makes a difference: what a run is planned with and a trace stores.

    Raises UnknownNameError, and ConfigError for an option that its owner lacks, of a wrong value or without effect.
    """
    info(config.policy.name).check(config)
    whole = dataclasses.replace(config, policy=_completed(config.policy))
    idle = effects.idle(whole, build(whole.policy))
    for (owner, name), needs in idle.items():
        choice: Choice = getattr(whole, owner)
        if name in choice.shown_options:
            msg = f"{name} of {owner} '{choice.name}' has no effect here: it needs {needs}; leave it out"
            raise ConfigError(msg)
    left = {owner: getattr(whole, owner).without(name for of, name in idle if of == owner) for owner in CHOICES}
    return dataclasses.replace(whole, **left)
