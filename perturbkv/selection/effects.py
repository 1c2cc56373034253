"""Options of a configuration that make no difference to its kept sets.

Configurations that differ in no other option are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import CORRECTION_OPTIONS, PRECISION_OPTIONS
from perturbkv.configs.selections import (
    GRANULARITY_OPTIONS,
    SCORED,
    SELECTION_OPTIONS,
    STAGED,
    UNION,
    WINDOW_QUERIES,
    reduction,
)

if TYPE_CHECKING:
    from perturbkv.selection.policies.base import Policy

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


def options_without_effect(config: EvictionConfig, policy: Policy) -> dict[OwnedOption, str]:
    """Return ineffective option -> what the option needs to take effect, for a configuration with this policy."""
    staged, unpooled = config.selection.name in STAGED, policy.score.pooling()[0] == "none"
    reduces = policy.score.reduces
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
    elif unpooled:
        needs |= {("policy", name): _POOLS for name in _POOLING[1:] if _width_has_no_effect(policy, name)}
        needs["selection", "score"] = _POOLS
    if reduces:
        needs["granularity", "reduce"] = f"a score that leaves it to the granularity: '{policy.score.name}' does not"
    if policy.ranks_by_another:
        needs |= {("policy", name): "the policy's own score, without by" for name in (*_POOLING, WINDOW_QUERIES)}
    if not staged:
        needs["granularity", "product"] = "a two-stage selection"
    elif reduction(config.granularity) == UNION:
        needs["granularity", "product"] = "a reduce of mean or max: of a union, each head ranks by its own product"
    elif _product_has_no_effect(config, unpooled, reduces):
        needs["granularity", "product"] = "the value norms, a maximum or pooling: a mean of means is the same mean"
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
    known = {
        "policy": policy.options(),
        "selection": SELECTION_OPTIONS[config.selection.name],
        "granularity": GRANULARITY_OPTIONS[config.granularity.name],
        "precision": PRECISION_OPTIONS[config.precision.name],
        "correction": CORRECTION_OPTIONS[config.correction.name],
    }
    return {(owner, name): need for (owner, name), need in needs.items() if name in known[owner]}


def _width_has_no_effect(policy: Policy, name: str) -> bool:
    """Return whether `name` is the policy's option for the pooling width, while nothing is pooled."""
    return name in policy.score_options and policy.score.pool == "none"


def _product_has_no_effect(config: EvictionConfig, unpooled: bool, reduces: str) -> bool:
    """Return whether both orders of product and mean over a head group agree: ν ≡ 1 and only means are taken."""
    raw = unpooled or config.selection.options.get("score") == "accumulated"
    means = not reduces and reduction(config.granularity) == "mean"
    return config.selection.name == "two-stage-uniform" and raw and means
