"""`perturbkv ablation`: which ingredient of the two-stage selection brings its gain, or which method perturbs least.

`perturbkv restriction`: what one kept set for all heads and whole blocks cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.cli import console
from perturbkv.cli.choices import apart
from perturbkv.cli.option_routing import with_options
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.session import open_study
from perturbkv.configs.choice import Choice, as_choice, halves, parse, split
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.selections import EVICT_NOTHING
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from perturbkv.selection.policies.base import Policy


_ALPHAS = (0.0, 0.25, 0.5)
_UNSTAGED = ["attention", "attention-unpooled", "value", "random", "hindsight-attention", "hindsight"]
_STAGED = ["two-stage-uniform", "two-stage"]
_EVERY = "all"
_STAGED_ON = ("snapkv", "pyramidkv", "adakv")


@with_options
def ablation(
    run: RunOptions,
    look: LookOptions,
    methods: Annotated[
        str | None,
        Option(
            metavar="NAMES", help="Rank whole methods instead: all, or policies separated by commas", show_default=False
        ),
    ] = None,
) -> None:
    """Tell apart what each ingredient of a method brings.

    Un-pooling, the value norms and the group's product, between the baseline and hindsight. Without --granularity both
    are measured: one kept set per query head, and one per kv head, where alone the group's product is a choice.
    With --methods every policy is ranked against snapkv, and against random entries with the same protection.
    """
    if methods is not None:
        _rank(run, look, methods)
        return
    study = open_study("ablation", run, look, lambda: _configs(run))
    if study is None:
        return
    from perturbkv.analyses.ablation.ablation import ablation as analyse

    result = analyse(study.trace, look.step)
    study.save(result.plot(study.width_mm), result.identity, "ablation")
    study.show(result)


def _rank(run: RunOptions, look: LookOptions, asked: str) -> None:
    named = [name.strip() for name in split(asked, ",") if name.strip()]
    if not named:
        msg = "--methods takes all, or policies such as caote,h2o; got none"
        raise ConfigError(msg)
    if _EVERY in named and len(named) > 1:
        msg = f"--methods takes all, which is every policy at its defaults, or names; got both in '{asked}', give one"
        raise ConfigError(msg)
    only = () if named == [_EVERY] else tuple(apart("--methods", named))
    study = open_study("ablation", run, look, lambda: _methods(run, only), stems=["methods"])
    if study is None:
        return
    from perturbkv.analyses.ablation.methods import methods as analyse

    result = analyse(study.trace, look.step, only)
    study.save(result.plot(study.width_mm), result.identity, "methods")
    dataclasses.replace(study, name="methods").show(result)


def _methods(run: RunOptions, only: Sequence[str]) -> tuple[EvictionConfig, ...]:
    """Each method as it is meant, two stages on three of them, and the controls of the same protection."""
    from perturbkv.analyses.ablation.methods import CONTROLS, baseline_of, control
    from perturbkv.selection.policies.registry import resolved

    if "policy" in run.typed:
        msg = "--policy has no effect here: --methods names the policies; leave it out"
        raise ConfigError(msg)
    named = map(_meant, only) if only else _all(run)
    one_alpha = dataclasses.replace(run, alpha=run.alpha and run.alpha[:1])  # without stages all α keep the same
    found = one_alpha.configs(list(dict.fromkeys(["snapkv:attention", *named])))
    if len({(one.policy, one.selection.name) for one in found}) < 2:
        msg = "--methods needs another method than snapkv, which it compares them with; name one, or all"
        raise ConfigError(msg)
    controls = []
    for config in found:
        base = baseline_of([one for one in found if _alike(one, config)])
        wanted = [control(base, config, selection) for selection in CONTROLS] if base else []
        controls += [resolved(one) for one in wanted if one is not None]
    return tuple(dict.fromkeys([*found, *controls]))


def _alike(one: EvictionConfig, other: EvictionConfig) -> bool:
    """Whether two methods are compared: at one budget, with kept sets of one kind."""
    return (one.budget, one.granularity.name, one.block) == (other.budget, other.granularity.name, other.block)


def _all(run: RunOptions) -> list[str]:
    """Every policy that can run as asked for; SnapKV unpooled, as most others are; two stages on three of them."""
    from perturbkv.selection.policies import registry

    known = [policy for policy in registry.known() if policy.name != "random"]
    fitting = [policy.name for policy in known if _fits(run, policy)]
    if left := [policy.name for policy in known if policy.name not in fitting]:
        why = "left out, as it evicts nothing, or needs head scores, another cache or another granularity"
        console.note(f"{why}: {', '.join(left)}")
    staged = [f"{name}:two-stage" for name in _STAGED_ON if name in fitting]
    return [*map(_meant, fitting), "snapkv:attention-unpooled", *staged]


def _fits(run: RunOptions, policy: type[Policy]) -> bool:
    """Whether a policy evicts, and can run with the given scores, cache and granularities."""
    asked = [as_choice(name) for name in run.granularity or []]
    shared = any(one.name == "layer" for one in asked) and policy.budgets == "by head"
    in_blocks = any(int(one.options.get("block", 1)) > 1 for one in asked) and policy().first_stage is not None
    scored = run.head_scores is not None or not policy.needs_scores
    return policy.name not in EVICT_NOTHING and scored and run.cache in policy.caches() and not shared and not in_blocks


def _meant(method: str) -> str:
    """A policy with its own selection: what its score, or its places, say alone."""
    from perturbkv.selection.policies import registry

    if len(halves(method)) > 1:
        return method
    return f"{method}:{registry.info(parse(method).name).selections[0]}"


def _configs(run: RunOptions) -> tuple[EvictionConfig, ...]:
    """The whole chain at every α; what has no stages once."""
    from perturbkv.analyses.ablation.ingredients import MEAN_OF_PRODUCTS

    alphas = run.alpha or list(_ALPHAS)
    made: list[EvictionConfig] = []
    for granularity in map(as_choice, run.granularity or ["query", "kv"]):
        plain = granularity.without(["product"])
        wanted = dataclasses.replace(run, granularity=[str(plain)])
        made += dataclasses.replace(wanted, alpha=run.alpha and run.alpha[:1]).configs(_UNSTAGED)
        made += dataclasses.replace(wanted, alpha=alphas).configs(_STAGED)
        if granularity.name != "query":
            product = Choice(plain.name, {**plain.options, "product": MEAN_OF_PRODUCTS})
            grouped = dataclasses.replace(wanted, alpha=alphas, granularity=[str(product)])
            made += grouped.configs(["two-stage"])
    return tuple(dict.fromkeys(made))


_SELECTIONS = ["attention", "two-stage"]
_BLOCKS = (16, 32)


@with_options
def restriction(run: RunOptions, look: LookOptions) -> None:
    """Tell what an engine's restrictions cost.

    One kept set for all heads of a layer, and whole blocks, against one set of single entries per kv head at the same
    budget. Without --granularity: kv, layer and query, blocks of 16 and 32.
    """
    study = open_study("restriction", run, look, lambda: _restriction_configs(run))
    if study is None:
        return
    from perturbkv.analyses.ablation.restriction import restriction as analyse

    result = analyse(study.trace, look.step)
    study.save(result.plot(study.width_mm), result.identity, "restriction")
    study.show(result)


def _restriction_configs(run: RunOptions) -> tuple[EvictionConfig, ...]:
    """Both selections under every restriction, the baseline first."""
    asked = ["kv", *(run.granularity or _usual(run))]
    return dataclasses.replace(run, granularity=list(dict.fromkeys(asked))).configs(_SELECTIONS)


def _usual(run: RunOptions) -> list[str]:
    """Whole blocks per head and per layer; per head alone where a policy shares budgets out between heads."""
    from perturbkv.selection.policies import registry

    by_head = any(registry.info(parse(name).name).budgets == "by head" for name in run.policy or [])
    names = ["kv"] if by_head else ["kv", "layer"]
    blocks = [f"{name}(block={size})" for size in _BLOCKS for name in names]
    return [*names, *blocks, "query"]
