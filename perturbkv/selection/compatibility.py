"""What goes together: a policy with a selection, a granularity, a cache, a prompt's length, and with generation."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.selections import EVICT_NOTHING, SELECTIONS
from perturbkv.errors import BudgetError, ConfigError
from perturbkv.selection.policies.registry import build, info, known, names
from perturbkv.selection.resolved_config import ResolvedConfig, resolve

if TYPE_CHECKING:
    from perturbkv.selection.policies.base import Policy


def pairs() -> list[tuple[str, str, str]]:
    """Return the policies, selections and caches that combine, as `perturbkv list policies` prints them."""

    def fits(policy: type[Policy]) -> tuple[Any, ...]:
        return policy.selections, policy.caches()

    return [
        (", ".join(one.name for one in alike), _listed(selections), " or ".join(caches))
        for (selections, caches), alike in groupby(sorted(known(), key=fits), key=fits)
    ]


def _listed(selections: tuple[str, ...]) -> str:
    return "every selection but position" if len(selections) == len(SELECTIONS) - 2 else ", ".join(selections)


def check(config: EvictionConfig, cache: str = "ragged") -> None:
    """Raise ConfigError where policy and selection, granularity or cache do not go together."""
    policy = info(config.policy.name)
    if config.selection.name not in policy.selections:
        what = f"policy '{policy.name}' does not combine with selection '{config.selection.name}'"
        raise ConfigError(_refusal(what))
    if policy.budgets == "by head" and config.granularity.name == "layer":
        msg = (
            f"policy '{policy.name}' shares budgets out by head, and granularity 'layer' keeps one set for all heads; "
            "choose kv or query, or another policy"
        )
        raise ConfigError(msg)
    resolved = resolve(config)
    if resolved.system.first_stage is not None and config.block > 1:
        msg = (
            f"policy '{policy.name}' chooses single entries in a stage 1 of its own; leave block of the granularity out"
        )
        raise ConfigError(msg)
    if cache not in policy.caches():
        budgets = f"policy '{policy.name}' shares budgets out {policy.budgets}"
        raise ConfigError(_refusal(f"{budgets}, which a {cache} cache cannot hold"))
    _check_sign(resolved)
    _check_correction(resolved)


def _check_correction(config: ResolvedConfig) -> None:
    """Raise ConfigError where nothing can stand in for the entries that went."""
    if not config.corrected:
        return
    if config.quantised:
        msg = (
            f"correction '{config.correction}' stands in for entries of full precision; leave precision "
            f"'{config.precision}' or the correction out"
        )
        raise ConfigError(msg)
    if config.in_cache:
        msg = (
            f"correction '{config.correction}' predicts by queries at the prompt's positions, and positions=in-cache "
            "moves them; use positions=kept, or leave the correction out"
        )
        raise ConfigError(msg)


def check_ends(config: ResolvedConfig, prompt_tokens: int) -> None:
    """Raise BudgetError where the budget leaves nothing to rank beside what the policy always keeps of a prompt.

    A policy that ranks by position is left alone, and a prompt of which nothing is evicted.
    """
    kept = config.kept_entries(prompt_tokens)
    if kept >= prompt_tokens or config.is_external or config.selection.name == "position":
        return
    policy = config.system
    first, recent = policy.first_entries(config, kept), max(config.window, policy.recent_entries(config, kept))
    if kept <= first + recent:
        msg = (
            f"budget {config.budget} keeps {kept} entries of {prompt_tokens}, no more than policy '{policy.name}' "
            f"always keeps: the first {first} and the last {recent}; raise the budget, or lower its own options"
        )
        raise BudgetError(msg)


def counted_twice(configs: Iterable[ResolvedConfig]) -> list[str]:
    """Scores that hold value norms already, in configurations that multiply ν in again."""
    staged = [config.system.score for config in configs if config.selection.name == "two-stage"]
    return list(dict.fromkeys(score.called for score in staged if score.holds_norms))


def _check_sign(config: ResolvedConfig) -> None:
    """Raise ConfigError where scores below 0 would be multiplied or mixed (METHOD: Scores of later methods)."""
    policy = config.system
    multiplied = f"selection '{config.selection.name}'" if config.selection.name == "two-stage" else ""
    user = f"policy '{policy.name}'" if policy.mixes else multiplied
    if policy.score.signed and user:
        msg = (
            f"{user} multiplies or mixes scores, and '{policy.score.called}' gives some below 0; choose selection "
            "attention with equal budgets"
        )
        raise ConfigError(msg)


def check_compressible(config: EvictionConfig) -> None:
    """Raise ConfigError where a cache that grows cannot be compressed again by this configuration."""
    if config.is_external:
        msg = (
            f"policy '{config.policy.name}' is asked once, for the prompt; --compress-every works with policies of ours"
        )
        raise ConfigError(msg)
    if not config.evicts:
        msg = f"policy '{config.policy.name}' evicts nothing, so that nothing is compressed: leave --compress-every out"
        raise ConfigError(msg)
    resolved = resolve(config)
    if config.quantised and resolved.in_cache:
        msg = (
            "positions=in-cache turns keys at each compression, and those in few bits would be rounded again; "
            "--compress-every works with precision full or positions=kept"
        )
        raise ConfigError(msg)
    if config.corrected:
        msg = (
            f"correction '{config.correction}' is stored once, for the prompt; --compress-every works with "
            "correction none"
        )
        raise ConfigError(msg)
    if not _compressible(resolved.system):
        able = ", ".join(name for name in names() if _compressible(build(Choice(name))))
        msg = (
            f"policy '{config.policy.name}' looks at what decoding forgets, or at all layers at once; --compress-every "
            f"works with {able}"
        )
        raise ConfigError(msg)
    if resolved.system.score.whole_layer and resolved.system.budgets == "by head":
        msg = (
            f"policy '{config.policy}' compares all heads of a layer, whose entries differ once its budgets are by "
            "head; --compress-every works with it where budgets are alike, such as of snapkv"
        )
        raise ConfigError(msg)


def _compressible(policy: Policy) -> bool:
    return not policy.score.carries_history() and not policy.whole_model and policy.name not in EVICT_NOTHING


def needs_all_layers(config: ResolvedConfig) -> bool:
    """Whether no layer can be evicted before the last one is read."""
    policy = config.system
    return policy.whole_model or policy.score.replay is not None


def check_generating(config: EvictionConfig) -> None:
    """Raise ConfigError where a configuration needs to know the next query, which generation does not have.

    One that reads pages is asked when the query is there.
    """
    if config.selection.name in ("hindsight", "hindsight-attention") and not config.reads_pages:
        msg = (
            f"selection '{config.selection.name}' looks at the next query, which generation does not have; choose "
            "another selection"
        )
        raise ConfigError(msg)


def _refusal(what: str) -> str:
    """One line: what does not work, and all that does."""
    return f"{what}; {works()}"


def works() -> str:
    """Everything that combines, in one line: the table of `perturbkv list policies`."""
    listed = "; ".join(f"{policies} with {selections} in a {caches} cache" for policies, selections, caches in pairs())
    return f"what works (perturbkv list policies): {listed}"
