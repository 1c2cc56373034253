"""The known eviction systems by name, and configurations with all options that make a difference.

The systems are the files of this folder, those that `register_policy` and installed packages add, and every score, with
equal budgets; names are known before any is imported. Configurations are the same where they differ only in options
that make no difference to their kept sets.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from perturbkv.configs.cache_contents import SOMEBODYS
from perturbkv.configs.choice import UNNAMED, Choice, as_choice
from perturbkv.configs.eviction import CHOICES, EvictionConfig
from perturbkv.configs.option import complete_choice
from perturbkv.configs.plugins import (
    Catalogue,
    check_class_file,
    class_digest,
    instantiate,
    is_builtin,
    load_class,
    refers_to_file,
)
from perturbkv.configs.precision import CORRECTION_OPTIONS, PRECISION_OPTIONS, has_integers
from perturbkv.configs.selections import (
    GRANULARITY_OPTIONS,
    SCORED,
    SELECTION_OPTIONS,
    SELECTIONS,
    STAGED,
    UNION,
    WINDOW_QUERIES,
    reduction,
)
from perturbkv.errors import ConfigError, PluginError, UnknownNameError
from perturbkv.scoring import score_registry as scores
from perturbkv.scoring.score_registry import SCORES
from perturbkv.user_files import sha256

if TYPE_CHECKING:
    from perturbkv.scoring.score import Score
    from perturbkv.selection.policies.base import Policy
    from perturbkv.selection.policies.external import ExternalPolicy


def _base() -> type[Policy]:
    """Return the class `Policy`, imported on first use."""
    from perturbkv.selection.policies.base import Policy as Base

    return Base


_POLICIES: Catalogue[Policy] = Catalogue(
    "policy",
    "perturbkv.selection.policies",
    _base,
    excluded=("base", "caches", "checked", "external", "kvpress", "registry"),
    reserved=lambda: SELECTIONS,
)


_EXTERNAL_MODULES = {"given": "external", "kvpress": "kvpress", "cache": "caches"}
"""Part of an external policy's name before the colon -> its module."""


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Register a policy class, a frozen dataclass; usable as a decorator.

    Raises ConfigError for what is no policy, and where the name is taken.
    """
    return _POLICIES.register(policy, names())


def register_score(score: type[Score]) -> type[Score]:
    """Register a score class, a frozen dataclass, and the equal-budget policy that ranks by it; usable as a decorator.

    Raises ConfigError for what is no score, and where the name is taken.
    """
    return SCORES.register(score, names())


def names() -> list[str]:
    """Return the names of all policies, SnapKV first and registered ones last, without importing their modules."""
    every = [*_POLICIES.names(), *SCORES.names()]
    added = [*SCORES.registered, *_POLICIES.registered]
    return sorted(dict.fromkeys(every), key=lambda name: (name in added, name != "snapkv"))


def all_policies() -> list[type[Policy]]:
    """Return the classes of all policies, in the order of `names`."""
    return [policy_class(name) for name in names()]


def policy_class(name: str) -> type[Policy]:
    """Return the policy class of this name, a score's or an external one too. Raises UnknownNameError, PluginError."""
    if is_external(name):
        return _external_class(name)
    if name in _POLICIES.names() or (refers_to_file(name) and not _is_score(name)):
        return _POLICIES.load(name)
    if name not in SCORES.names() and not refers_to_file(name):
        raise UnknownNameError(name, "policy", names(), _hint(name))
    return _score_policy(cast("Any", SCORES.load(name)), name)  # classes are hashed as such


def check_name(choice: Choice) -> None:
    """Raise UnknownNameError for an unknown policy or score of a choice, PluginError for a file that is not there.

    No module of a policy is imported; of kvpress' presses nothing is known then.
    """
    name = choice.name
    if is_external(name):
        return
    _check_known(name, "policy", names(), _hint(name))
    by = choice.options.get("by", choice.options.get(UNNAMED) if name in _POLICIES.names() else None)
    if isinstance(by, str | Choice) and (score := as_choice(by).name) != scores.OWN:
        _check_known(score, "score", SCORES.names())


def _check_known(name: str, kind: str, known: Sequence[str], hint: str = "") -> None:
    """Raise UnknownNameError for a name that is not among `known`, PluginError for a user's file that is not there."""
    if refers_to_file(name):
        check_class_file(name)
    elif name not in known:
        raise UnknownNameError(name, kind, known, hint)


def _hint(name: str) -> str:
    """Return what to do about the unknown name of a policy."""
    selection = f"it is a selection, which is written after a policy: snapkv:{name}"
    return selection if name in SELECTIONS else "see `perturbkv list policies`"


def _is_score(name: str) -> bool:
    """Return whether the class in a user's file is a score. Raises PluginError for neither score nor policy."""
    kind = load_class(name)
    if isinstance(kind, type) and not issubclass(kind, (SCORES.base(), _POLICIES.base())):
        raise PluginError(f"expected '{name}' to be a subclass of Score or Policy, got {kind.__name__}")
    return isinstance(kind, type) and issubclass(kind, SCORES.base())


@functools.cache
def _score_policy(score: type[Score], name: str) -> type[Policy]:
    """Return the equal-budget policy class, called `name`, that ranks by the score class."""
    from perturbkv.selection.policies.base import ByScore

    return ByScore.subclass_for(score, name)


def plugin_digests(config: EvictionConfig) -> dict[str, str]:
    """Return name -> digest of the external scores and policies of a configuration, and of its options' files."""
    policy = policy_class(config.policy.name)
    by = config.policy.options.get("by", scores.OWN)
    used: dict[str, Any] = {config.policy.name: getattr(policy, "scored", policy)}
    if config.cache_contents is SOMEBODYS:
        used[config.policy.name] = importlib.import_module(f"{__package__}.caches").code_of(config.policy.name)
    used |= {by.name: SCORES.load(by.name)} if isinstance(by, Choice) else {}
    digests = {name: class_digest(kind) for name, kind in used.items() if not is_builtin(kind)}
    return digests | {file: sha256(Path(file)).hex()[:16] for file in option_files(config)}


def option_files(config: EvictionConfig) -> list[str]:
    """Return the paths of the files that options of a configuration's policy and score name."""
    policy, by = config.policy, config.policy.options.get("by")
    choices = [(policy, policy_class(policy.name).options())]
    choices += [(by, SCORES.load(by.name).options())] if isinstance(by, Choice) else []
    named = [choice.options.get(name) for choice, options in choices for name, known in options.items() if known.path]
    return [file for file in named if file]


def is_external(name: str) -> bool:
    """Return whether a policy name denotes external kept sets, such as `kvpress:SnapKVPress`."""
    prefix, colon, _ = name.partition(":")
    return bool(colon) and prefix in _EXTERNAL_MODULES


def has_own_code(name: str) -> bool:
    """Return whether somebody's code makes the cache of a policy of this name: a press, or `cache:…`."""
    return is_external(name) and not name.startswith("given:")


def _external_class(name: str) -> type[ExternalPolicy]:
    """Return the policy class of external kept sets, such as `kvpress:SnapKVPress`."""
    module = importlib.import_module(f"{__package__}.{_EXTERNAL_MODULES[name.partition(':')[0]]}")
    return cast("type[ExternalPolicy]", module.policy_class(name))


def build(choice: Choice) -> Policy:
    """Return the policy object of a choice, with defaults for missing options. Raises as `complete_choice`."""
    if is_external(choice.name):
        return _external_class(choice.name)()  # its options matter only to the code that runs it
    complete = choice if choice.defaults is not None else _complete(choice)
    kind = policy_class(choice.name)
    policy = instantiate(kind, complete.options, f"policy '{choice.name}'")
    if not is_builtin(kind):
        from perturbkv.selection.policies.checked import check_policy

        check_policy(policy)
    return policy


def name_first_argument(choice: Choice) -> Choice:
    """Return the choice with its unnamed first argument named `by`: `adakv(caote)` becomes `adakv(by=caote)`."""
    if UNNAMED not in choice.options or "by" in choice.options or "by" not in policy_class(choice.name).options():
        return choice
    return Choice(choice.name, {name or "by": value for name, value in choice.options.items()})


def _complete(choice: Choice) -> Choice:
    """Return the choice of a policy with all its options, defaults included. Raises as `complete_choice`."""
    if is_external(choice.name):
        return _external_class(choice.name).complete(choice)
    complete = complete_choice(
        name_first_argument(choice), f"policy '{choice.name}'", policy_class(choice.name).options()
    )
    by = complete.options.get("by")
    if not isinstance(by, Choice):
        return complete.drop(["by"])
    if by.name == policy_class(choice.name)().score.name:
        raise ConfigError(f"by={by} is the policy's own score; leave by out and give pool and kernel to the policy")
    return dataclasses.replace(complete, options={**complete.options, "by": scores.complete(by)})


def normalise(config: EvictionConfig) -> EvictionConfig:
    """Return the configuration reduced to its effective options, as it is planned and stored.

    Raises UnknownNameError, and ConfigError for an option that its owner lacks, of a wrong value or without effect.
    """
    policy_class(config.policy.name).check(config)
    complete = dataclasses.replace(config, policy=_complete(config.policy))
    without_effect = options_without_effect(complete, build(complete.policy))
    for (owner, name), needs in without_effect.items():
        choice: Choice = getattr(complete, owner)
        if name in choice.shown_options:
            raise ConfigError(f"{name} of {owner} '{choice.name}' has no effect here: it needs {needs}; leave it out")
    effective = {
        owner: getattr(complete, owner).drop(name for other, name in without_effect if other == owner)
        for owner in CHOICES
    }
    return dataclasses.replace(complete, **effective)


OwnedOption = tuple[str, str]
"""A field of `EvictionConfig` that is a choice, and the name of one of its options."""
_POOLING = ("pool", "kernel")
_LOOKS = "a selection or policy that looks at attention"
_POOLED = "a selection or policy that looks at pooled attention"
_POOLS = "a pool other than none"
_BLOCKS = "a block of several entries"
_PAGES = "a policy that keeps entries or blocks: pages are as long as page of the policy says"
_LINES = "a policy that keeps entries or blocks: a line is a line of entries"
_SCORES = "a selection by score"
_INTEGERS = "integers, such as bits=4: other formats have scales of their own"


def options_without_effect(config: EvictionConfig, policy: Policy) -> dict[OwnedOption, str]:
    """Return ineffective option -> what the option needs to take effect, for a configuration with this policy."""
    needs = {**_needs_of_score_options(config, policy), **_needs_of_product(config, policy), **_needs_of_units(config)}
    needs |= {} if has_integers(config.precision) else {("precision", "group"): _INTEGERS}
    known = {
        "policy": policy.options(),
        "selection": SELECTION_OPTIONS[config.selection.name],
        "granularity": GRANULARITY_OPTIONS[config.granularity.name],
        "precision": PRECISION_OPTIONS[config.precision.name],
        "correction": CORRECTION_OPTIONS[config.correction.name],
    }
    return {(owner, name): need for (owner, name), need in needs.items() if name in known[owner]}


def _needs_of_score_options(config: EvictionConfig, policy: Policy) -> dict[OwnedOption, str]:
    """Return option -> what it needs, for the options of a score, its pooling and its reduction that have no effect."""
    scored = config.selection.name in SCORED or policy.competes
    pooled = scored and (config.selection.name != "attention-unpooled" or policy.competes)
    needs: dict[OwnedOption, str] = {}
    if not scored:
        protects = policy.ranks_by_another and policy.score.first_entries > 0
        unused = [name for name in policy.score_options if not (protects and name == "by")]
        needs |= {("policy", name): _LOOKS for name in unused}
        needs["granularity", "reduce"] = _LOOKS
    elif not pooled:
        needs |= {("policy", name): _POOLED for name in _POOLING if name in policy.score_options}
    elif _is_unpooled(policy):
        if "kernel" in policy.score_options and policy.score.pool == "none":
            needs["policy", "kernel"] = _POOLS
        needs["selection", "score"] = _POOLS
    if policy.score.reduces:
        needs["granularity", "reduce"] = f"a score that leaves it to the granularity: '{policy.score.name}' does not"
    if policy.ranks_by_another:
        needs |= {("policy", name): "the policy's own score, without by" for name in (*_POOLING, WINDOW_QUERIES)}
    return needs


def _needs_of_product(config: EvictionConfig, policy: Policy) -> dict[OwnedOption, str]:
    """Return what the granularity's `product` needs, where both orders of product and mean over a head group agree."""
    raw = _is_unpooled(policy) or config.selection.options.get("score") == "accumulated"
    means = not policy.score.reduces and reduction(config.granularity) == "mean"
    if config.selection.name not in STAGED:
        need = "a two-stage selection"
    elif reduction(config.granularity) == UNION:
        need = "a reduce of mean or max: of a union, each head ranks by its own product"
    elif config.selection.name == "two-stage-uniform" and raw and means:  # ν ≡ 1, and only means are taken
        need = "the value norms, a maximum or pooling: a mean of means is the same mean"
    else:
        return {}
    return {("granularity", "product"): need}


def _needs_of_units(config: EvictionConfig) -> dict[OwnedOption, str]:
    """Return option -> what it needs, for the options without effect on the pages, lines or blocks that are kept."""
    needs: dict[OwnedOption, str] = {}
    if config.reads_pages:
        needs |= {("granularity", name): _PAGES for name in ("block", "block_score")}
        needs["selection", "epsilon"] = "a score that is accumulated: pages are bounded"
    elif config.has_sparse_prefill:
        needs |= {("granularity", name): _LINES for name in ("block", "block_score")}
        needs |= {("selection", name): "a score of entries: lines are summed" for name in ("epsilon", "score", "split")}
    elif config.block == 1:
        needs |= {("granularity", "block"): _BLOCKS, ("granularity", "block_score"): _BLOCKS}
    elif config.selection.name == "position":
        needs["granularity", "block_score"] = _SCORES
    return needs


def _is_unpooled(policy: Policy) -> bool:
    """Return whether nothing is pooled after the policy's score is computed."""
    return policy.score.pooling()[0] == "none"
