"""Scores and budgets -> which entries stay (METHOD: Select), for all configurations of a layer at once.

What a configuration keeps is written as cutoffs: the entries whose rank lies below them. Configurations that rank
alike (a `RankingGroup`) share their orders, so that one more budget, alpha or policy costs comparisons and no sort.
Nothing here waits for the device.

Kept sets that come from outside, a press or another cache's, among those of ours: measured and evicted alike.

Nobody says in which order such a set was filled, so it has no stages: all of it is its stage 1, `σ` is its retained
mass, and `θ̂` and its relaxation equal `θ`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from perturbkv.devices import working_bytes
from perturbkv.selection import ranking as whole_blocks
from perturbkv.selection.budgets import Budgets, Rows, budgets_of
from perturbkv.selection.layer_statistics import LayerStatistics
from perturbkv.selection.ranking import Ranking, Scores
from perturbkv.selection.resolved_config import ResolvedConfig

_STEP_BYTES = 64 * 2**20
"""Working memory of one step of the selection."""


@dataclass(frozen=True)
class KeptSets:
    """Which of the n prompt entries stay, per kept set (query head or key/value head).

    `stage1` holds stage 1 and what always stays, the window with it: always a subset of `kept`.
    """

    kept: Bool[Tensor, "*config kept_head key"]
    stage1: Bool[Tensor, "*config kept_head key"]


@dataclass(frozen=True, eq=False)
class RankingGroup:
    """Configurations that rank one layer's entries alike.

    Attributes:
        places: which of the run's configurations they are.
        first, second: ranking of stage 1 and of the rest; the same one for a selection without stages.
        budgets: how many blocks stay, of one entry each where nothing else is asked for.
        begin: place of each kept set's first block.
        protects: whether any block before the window stays because of its place.
        stage1_cut, cut: a block stays in stage 1, or beside it, where its rank lies below.
    """

    places: tuple[int, ...]
    first: Ranking
    second: Ranking
    budgets: Budgets
    begin: Int[Tensor, " #kept_head"]
    protects: bool
    stage1_cut: Int[Tensor, "config kept_head"]
    cut: Int[Tensor, "config kept_head"]

    @property
    def kept_heads(self) -> int:
        """Kept sets of each configuration."""
        return len(self.first.ranks)

    def kept_sets(self, rows: Rows = slice(None)) -> KeptSets:
        """Masks of some of the group's configurations, by their place in it."""
        ranks = self.first.ranks
        stage1 = ranks < self.stage1_cut[rows].unsqueeze(-1)
        if self.protects:
            place = torch.arange(ranks.shape[-1], device=ranks.device).expand_as(ranks)
            stage1 |= self.budgets.stays(place, self.begin, rows)
        kept = stage1 | (self.second.ranks < self.cut[rows].unsqueeze(-1))
        return KeptSets(*(whole_blocks.block_entries(each, self.budgets.blocks) for each in (kept, stage1)))


def ranking_groups(
    configs: Sequence[ResolvedConfig], scores: Callable[[ResolvedConfig], Scores], prompt_tokens: int
) -> list[RankingGroup]:
    """What every configuration keeps in one layer; `scores` gives the layer's scores for a configuration.

    The groups, and the configurations in each, come in the same order in all layers.

    Raises BudgetError where a budget leaves nothing beside the window, ConfigError where headkv has no scores.
    """
    alike: dict[tuple[Scores, Ranking, Ranking], list[int]] = {}
    for place, config in enumerate(configs):
        own = scores(config)
        first = own.first(config)
        alike.setdefault((own, first, own.second(config) or first), []).append(place)
    return [
        _group(places, [configs[place] for place in places], own, first, second, prompt_tokens)
        for (own, first, second), places in alike.items()
    ]


def select(config: ResolvedConfig, statistics: LayerStatistics, prompt_tokens: int) -> KeptSets:
    """The entries that one configuration keeps in one layer: (kept_head, n). Raises what `ranking_groups` raises."""
    scores = Scores(statistics)
    (only,) = ranking_groups([config], lambda _: scores, prompt_tokens)
    found = only.kept_sets()
    return KeptSets(found.kept[0], found.stage1[0])


def _group(
    places: Sequence[int],
    configs: Sequence[ResolvedConfig],
    scores: Scores,
    first: Ranking,
    second: Ranking,
    prompt_tokens: int,
) -> RankingGroup:
    budgets = budgets_of(configs, scores, prompt_tokens)
    begin = scores.statistics.begin // budgets.blocks.size
    protects = any(config.ends(prompt_tokens).always for config in configs)
    steps = [_cuts(first, second, budgets, begin if protects else None, rows) for rows in _steps(len(configs), first)]
    stage1_cut, cut = (torch.cat(kind) for kind in zip(*steps, strict=True))
    return RankingGroup(tuple(places), first, second, budgets, begin, protects, stage1_cut, cut)


def _steps(configs: int, ranking: Ranking) -> Iterator[slice]:
    """Configurations whose masks and counts fit the working memory."""
    each = 6 * ranking.ranks.numel()
    size = max(1, working_bytes(ranking.ranks.device, _STEP_BYTES) // max(1, each))
    return (slice(start, start + size) for start in range(0, configs, size))


def _cuts(
    first: Ranking, second: Ranking, budgets: Budgets, begin: Tensor | None, rows: slice
) -> tuple[Tensor, Tensor]:
    """Cutoffs of stage 1, which passes over what always stays, and of stage 2, which passes over both.

    `begin` is None where nothing before the window always stays.
    """
    stage1, kept = budgets.stage1[rows], budgets.kept[rows]
    stage1_cut = stage1
    if begin is not None:
        taken = budgets.stays(first.order, begin, rows)
        stage1_cut = _cut(taken, stage1 - budgets.first[rows] - budgets.recent[rows])
    elif first is second:
        return stage1_cut, kept
    taken = first.ranks.gather(-1, second.order) < stage1_cut.unsqueeze(-1)
    if begin is not None:
        taken |= budgets.stays(second.order, begin, rows)
    return stage1_cut, _cut(taken, kept - stage1)


def _cut(
    taken: Bool[Tensor, "config kept_head place"], wanted: Int[Tensor, "config kept_head"]
) -> Int[Tensor, "config kept_head"]:
    """How many places of an order have to be passed to meet `wanted` entries that are not taken yet."""
    free = (~taken).cumsum(dim=-1, dtype=torch.int32)
    passed = torch.searchsorted(free, wanted.unsqueeze(-1).to(torch.int32)).squeeze(-1) + 1
    return torch.where(wanted > 0, passed, 0)


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
    configs: Sequence[ResolvedConfig],
    scores: Callable[[ResolvedConfig], Scores],
    prompt_tokens: int,
    given: Mapping[ResolvedConfig, Bool[Tensor, "kv_head key"]],
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
