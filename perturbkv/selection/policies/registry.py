"""The known eviction systems, by name, and what each combines with. A policy's module is imported when it is built."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from perturbkv.configs.budget import Budget
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import IN_CACHE, SELECTIONS, EvictionConfig, from_preset
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.selection.policies.parameters import SELECTION_PARAMETERS, Parameter, own

if TYPE_CHECKING:
    from perturbkv.selection.policies.base import Policy

BY_SCORE = tuple(name for name in SELECTIONS if name != "position")
_PLACE = "perturbkv.selection.policies."


@dataclass(frozen=True)
class PolicyInfo:
    """A registered policy: what it is, where it is from, and what it combines with.

    Attributes:
        name, summary, paper: what it is and its source; empty where no paper is its source.
        implementation: `module:class`.
        selections: the selections it takes.
        budgets: what shares them out: `uniform`, `by layer`, or `by head`, which needs a ragged cache.
        defaults: choices that the system makes otherwise than the presets.
        needs_scores: whether head scores have to be given.
        carries_history: whether its score counts queries from before the last compression, which decoding forgets.
        parameters: its own options, as `name(option=value)` takes them.
        in_cache: whether its kept keys may stand at 0 … b − 1, for which all kept sets have to be equally long.
    """

    name: str
    summary: str
    paper: str
    implementation: str
    selections: tuple[str, ...] = BY_SCORE
    budgets: str = "uniform"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs_scores: bool = False
    carries_history: bool = False
    in_cache: bool = False
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    @property
    def caches(self) -> tuple[str, ...]:
        """Cache layouts that can hold its budgets."""
        return ("ragged",) if self.budgets == "by head" else ("ragged", "rectangular")


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


def configured(preset: str, budget: Budget, policy: str, **overrides: Any) -> EvictionConfig:
    """The preset with the policy's own defaults over it, and over both each override that is not None."""
    chosen = {name: value for name, value in overrides.items() if value is not None}
    return from_preset(preset, budget, policy=policy, **{**info(policy).defaults, **chosen})


def pairs() -> list[tuple[str, str, str]]:
    """Which policies combine with which selections and caches: rows of names, as `perturbkv policies` prints them."""
    ordered = sorted(_REGISTRY.values(), key=lambda one: (one.selections, one.caches))
    return [
        (", ".join(one.name for one in alike), _listed(selections), " or ".join(caches))
        for (selections, caches), alike in groupby(ordered, key=lambda one: (one.selections, one.caches))
    ]


def _listed(selections: tuple[str, ...]) -> str:
    return "every selection but position" if selections == BY_SCORE else ", ".join(selections)


def check(config: EvictionConfig, cache: str = "ragged") -> None:
    """Raise ConfigError where the policy does not take the configuration's selection or positions.

    And where the cache does not take its budgets.
    """
    policy = info(config.policy)
    check_positions(config)
    if config.selection not in policy.selections:
        raise ConfigError(_refusal(f"policy '{policy.name}' does not combine with selection '{config.selection}'"))
    if cache not in policy.caches:
        budgets = f"policy '{policy.name}' shares budgets out {policy.budgets}"
        raise ConfigError(_refusal(f"{budgets}, which a {cache} cache cannot hold"))


def check_positions(config: EvictionConfig) -> None:
    """Raise ConfigError where the policy leaves entries at their own positions and the configuration does not."""
    if config.positions == IN_CACHE and not info(config.policy).in_cache:
        able = ", ".join(one.name for one in known() if one.in_cache)
        msg = (
            f"policy '{config.policy}' leaves every entry at its own position; --positions in-cache works with {able} "
            f"alone: leave it out, or give {able} a grid of its own in a --config file"
        )
        raise ConfigError(msg)


def check_compressible(config: EvictionConfig) -> None:
    """Raise ConfigError where a cache that grows cannot be compressed again by this configuration."""
    able = ", ".join(one.name for one in known() if not one.carries_history)
    if info(config.policy).carries_history:
        msg = f"policy '{config.policy}' counts queries that decoding forgets; --compress-every works with {able}"
        raise ConfigError(msg)


def check_generating(config: EvictionConfig) -> None:
    """Raise ConfigError where a configuration needs to know the next query, which generation does not have."""
    if config.selection in ("hindsight", "hindsight-attention"):
        msg = (
            f"selection '{config.selection}' looks at the next query, which generation does not have; choose another "
            "selection"
        )
        raise ConfigError(msg)


def _refusal(what: str) -> str:
    """One line: what does not work, and all that does."""
    return f"{what}; {works()}"


def works() -> str:
    """Everything that combines, in one line: the table of `perturbkv policies`."""
    listed = "; ".join(f"{policies} with {selections} in a {caches} cache" for policies, selections, caches in pairs())
    return f"what works (perturbkv policies): {listed}"


def own_choices(policy: Choice, selection: Choice) -> dict[str, Any]:
    """Fields of `EvictionConfig` that a policy and a selection name as their own parameters.

    Raises ConfigError for an option that its owner lacks, one without a name, and a value of another kind.
    """
    of_selection = SELECTION_PARAMETERS.get(selection.name, {})
    return {
        **own(policy, f"policy '{policy.name}'", info(policy.name).parameters),
        **own(selection, f"selection '{selection.name}'", of_selection),
    }


def build(name: str) -> Policy:
    """The policy itself."""
    module, _, attribute = info(name).implementation.partition(":")
    return cast("Policy", getattr(importlib.import_module(module), attribute)())


_UNPOOLED = {"pool": "none"}
for _info in (
    PolicyInfo(
        "snapkv",
        "the last queries' attention votes; the same budget for every head",
        "https://arxiv.org/abs/2404.14469",
        _PLACE + "snapkv:SnapKV",
    ),
    PolicyInfo(
        "pyramidkv",
        "snapkv's votes; lower layers keep more than upper ones",
        "https://arxiv.org/abs/2406.02069",
        _PLACE + "pyramidkv:PyramidKV",
        budgets="by layer",
        parameters={
            "beta": Parameter("pyramid_beta", "the last layer keeps (b − w) / beta entries of the prefix"),
            "line": Parameter("pyramid_line", "prefix: b − w lies on the line between layers; total: b, window inside"),
        },
    ),
    PolicyInfo(
        "adakv",
        "snapkv's votes; a layer's heads compete for its budget",
        "https://arxiv.org/abs/2407.11550",
        _PLACE + "adakv:AdaKV",
        budgets="by head",
        parameters={
            "floor": Parameter("floor", "share that every head keeps: of b − w, or of b where it is guaranteed"),
            "safeguard": Parameter(
                "safeguard", "mixture of uniform and competing budgets, or guaranteed: own best first"
            ),
        },
    ),
    PolicyInfo(
        "headkv",
        "snapkv's votes; budgets by given head scores (--head-scores)",
        "https://arxiv.org/abs/2410.19258",
        _PLACE + "headkv:HeadKV",
        budgets="by head",
        needs_scores=True,
        parameters={"beta": Parameter("head_beta", "one beta-th of b − w is shared out by head scores")},
    ),
    PolicyInfo(
        "h2o",
        "all queries vote; half of the budget is recent entries",
        "https://arxiv.org/abs/2306.14048",
        _PLACE + "h2o:H2O",
        defaults=_UNPOOLED,
        carries_history=True,
        parameters={"recent": Parameter("recent", "share of b that is most recent entries")},
    ),
    PolicyInfo(
        "scissorhands",
        "how often the last queries gave an entry more than the average weight",
        "https://arxiv.org/abs/2305.17118",
        _PLACE + "scissorhands:Scissorhands",
        defaults={"pool": "none", "window": 10},
        carries_history=True,
        parameters={"history": Parameter("history", "last queries whose votes count")},
    ),
    PolicyInfo(
        "tova",
        "the last query's attention, averaged over heads",
        "https://arxiv.org/abs/2401.06104",
        _PLACE + "tova:TOVA",
        defaults={"pool": "none", "window": 1},
    ),
    PolicyInfo(
        "random",
        "seeded random votes: what any method has to beat",
        "",
        _PLACE + "random_votes:Random",
        defaults=_UNPOOLED,
    ),
    PolicyInfo(
        "streaming-llm",
        "the first entries and the most recent ones, whatever they hold",
        "https://arxiv.org/abs/2309.17453",
        _PLACE + "streaming_llm:StreamingLLM",
        selections=("position",),
        in_cache=True,
        parameters={
            "sinks": Parameter("sinks", "first entries that stay"),
            "positions": Parameter("positions", "kept: keys at their places of the prompt; in-cache: at 0 … b − 1"),
        },
    ),
):
    register(_info)
