"""Kept sets that come from outside, a press or another cache's, among those of ours: measured and evicted alike.

Nobody says in which order such a set was filled, so it has no stages: all of it is its stage 1, `σ` is its retained
mass, and `θ̂` and its relaxation equal `θ`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.selection.kept_sets import KeptSets, RankingGroup, ranking_groups
from perturbkv.selection.ranking import Scores


@dataclass(frozen=True, eq=False)
class GivenBudgets:
    """Entries of each configuration and kept set."""

    kept_entries: Int[Tensor, "config kv_head"]

    @property
    def stage1_entries(self) -> Int[Tensor, "config kv_head"]:
        """All of them."""
        return self.kept_entries


@dataclass(frozen=True, eq=False)
class GivenGroup:
    """Configurations whose kept sets are given.

    Attributes:
        places: which of the run's configurations they are.
        kept: what each keeps in this layer; a window is part of it like any other entry.
    """

    places: tuple[int, ...]
    kept: Bool[Tensor, "config kv_head key"]

    @property
    def kept_heads(self) -> int:
        """Kept sets of each configuration."""
        return self.kept.shape[1]

    @property
    def budgets(self) -> GivenBudgets:
        """How many entries are kept."""
        return GivenBudgets(self.kept.sum(dim=-1))

    def kept_sets(self, rows: Int[Tensor, " row"] | slice = slice(None)) -> KeptSets:
        """Masks of some of the group's configurations, by their place in it."""
        return KeptSets(self.kept[rows], self.kept[rows])


Group = RankingGroup | GivenGroup
"""What some configurations keep in one layer."""


def kept_groups(
    configs: Sequence[EvictionConfig],
    scores: Callable[[EvictionConfig], Scores],
    prompt_tokens: int,
    given: Mapping[EvictionConfig, Bool[Tensor, "kv_head key"]],
) -> list[Group]:
    """`ranking_groups` of the configurations that rank, and what the others were given, in one order in all layers.

    Those that evict nothing are left out.
    """
    ours = [place for place, config in enumerate(configs) if config not in given and config.evicts]
    ranked = ranking_groups([configs[place] for place in ours], scores, prompt_tokens)
    found: list[Group] = [
        dataclasses.replace(group, places=tuple(ours[place] for place in group.places)) for group in ranked
    ]
    theirs = tuple(place for place, config in enumerate(configs) if config in given)
    if theirs:
        found.append(GivenGroup(theirs, torch.stack([given[configs[place]] for place in theirs])))
    return found
