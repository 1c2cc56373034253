"""Scores and budgets -> which entries stay (METHOD: Select), for all configurations of a layer at once.

What a configuration keeps is written as cutoffs: the entries whose rank lies below them. Configurations that rank
alike (a `RankingGroup`) share their orders, so that one more budget, alpha or policy costs comparisons and no sort.
Nothing here waits for the device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from perturbkv.configs.blocks import Blocks
from perturbkv.configs.budget import whole_entries
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.devices import on_device
from perturbkv.selection import blocks as whole_blocks
from perturbkv.selection.policies import registry
from perturbkv.selection.policies.base import LayerBudget
from perturbkv.selection.ranking import Ends, LayerStatistics, Ranking, Scores, at_ends
from perturbkv.theory import WORK

_STEP_BYTES = 64 * 2**20
"""Working memory of one step of the selection."""
_Rows = Int[Tensor, " row"] | slice


@dataclass(frozen=True)
class KeptSets:
    """Which of the n prompt entries stay, per kept set (query head or key/value head).

    `stage1` holds stage 1 and what always stays, the window with it: always a subset of `kept`.
    """

    kept: Bool[Tensor, "*config kept_head key"]
    stage1: Bool[Tensor, "*config kept_head key"]


@dataclass(frozen=True, eq=False)
class Budgets:
    """Blocks of the prefix per configuration and kept set: all that stay, those of stage 1, the first, the recent ones.

    `kept` holds `stage1`, which holds `first` and `recent`: those of both ends that stay whatever their scores. Beside
    them stays the tail of `blocks`, in which the `window` entries lie. Without blocks each holds one entry.
    """

    kept: Int[Tensor, "config kept_head"]
    stage1: Int[Tensor, "config kept_head"]
    first: Int[Tensor, "config kept_head"]
    recent: Int[Tensor, "config kept_head"]
    blocks: Blocks
    window: int

    @property
    def kept_entries(self) -> Int[Tensor, "config kept_head"]:
        """All entries that stay."""
        return self.kept * self.blocks.size + self.blocks.tail

    @property
    def stage1_entries(self) -> Int[Tensor, "config kept_head"]:
        """Entries before the window that stage 1 takes, or that always stay."""
        return self.stage1 * self.blocks.size + self.blocks.tail - self.window

    def stays(
        self, place: Int[Tensor, "kept_head prefix"], begin: Int[Tensor, " #kept_head"], rows: _Rows
    ) -> Bool[Tensor, "config kept_head prefix"]:
        """Whether the blocks at these places of the prefix are among the first or the recent ones."""
        first, recent = self.first[rows].unsqueeze(-1), self.recent[rows].unsqueeze(-1)
        return at_ends(place, begin.unsqueeze(-1), place.shape[-1], first, recent)


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

    def kept_sets(self, rows: _Rows = slice(None)) -> KeptSets:
        """Masks of some of the group's configurations, by their place in it."""
        ranks = self.first.ranks
        stage1 = ranks < self.stage1_cut[rows].unsqueeze(-1)
        if self.protects:
            place = torch.arange(ranks.shape[-1], device=ranks.device).expand_as(ranks)
            stage1 |= self.budgets.stays(place, self.begin, rows)
        kept = stage1 | (self.second.ranks < self.cut[rows].unsqueeze(-1))
        return KeptSets(*(whole_blocks.entries(each, self.budgets.blocks) for each in (kept, stage1)))


def ranking_groups(
    configs: Sequence[EvictionConfig], scores: Callable[[EvictionConfig], Scores], prompt_tokens: int
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


def select(config: EvictionConfig, statistics: LayerStatistics, prompt_tokens: int) -> KeptSets:
    """The entries that one configuration keeps in one layer: (kept_head, n). Raises what `ranking_groups` raises."""
    scores = Scores(statistics)
    (only,) = ranking_groups([config], lambda _: scores, prompt_tokens)
    found = only.kept_sets()
    return KeptSets(found.kept[0], found.stage1[0])


def _group(
    places: Sequence[int],
    configs: Sequence[EvictionConfig],
    scores: Scores,
    first: Ranking,
    second: Ranking,
    prompt_tokens: int,
) -> RankingGroup:
    budgets = _budgets(configs, scores, prompt_tokens)
    begin = scores.statistics.begin // budgets.blocks.size
    protects = any(any(_ends(config, prompt_tokens)) for config in configs)
    steps = [_cuts(first, second, budgets, begin if protects else None, rows) for rows in _steps(len(configs), first)]
    stage1_cut, cut = (torch.cat(kind) for kind in zip(*steps, strict=True))
    return RankingGroup(tuple(places), first, second, budgets, begin, protects, stage1_cut, cut)


def _steps(configs: int, ranking: Ranking) -> Iterator[slice]:
    """Configurations whose masks and counts fit the working memory."""
    each = 6 * ranking.ranks.numel()
    size = max(1, _STEP_BYTES // max(1, each))
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


def _budgets(configs: Sequence[EvictionConfig], scores: Scores, prompt_tokens: int) -> Budgets:
    """Every configuration's, inside what its kept sets hold; they rank alike, so that their blocks are the same."""
    device, window = scores.statistics.norms.device, min(configs[0].window, prompt_tokens)
    blocks = configs[0].blocks(prompt_tokens)
    ends = [_ends(config, prompt_tokens) for config in configs]
    shared = [_allocate(config, scores, prompt_tokens) for config in configs]
    kept = torch.stack([counts.to(device, non_blocking=True) for counts in shared])
    if scores.statistics.valid is not None:
        kept = torch.minimum(kept, blocks.before - scores.statistics.begin // blocks.size)
    asked_first, asked_recent = on_device(ends, device).unsqueeze(1).unbind(dim=-1)
    recent = torch.minimum(kept, asked_recent)
    first = torch.minimum(kept - recent, asked_first)
    always = first + recent
    if scores.has_own_stages(configs[0]):
        stage1 = torch.stack([scores.first_counts(config, _settled(config, prompt_tokens)) for config in configs])
    else:
        least = on_device([[_guaranteed(config, prompt_tokens)] for config in configs], device)
        stage1 = torch.maximum(_stage1(configs, kept - always, always + blocks.tail_blocks), least)
    return Budgets(kept, torch.minimum(always + stage1, kept), first, recent, blocks, window)


def _allocate(config: EvictionConfig, scores: Scores, prompt_tokens: int) -> Int[Tensor, " kept_head"]:
    """Blocks of each kept set's prefix: those that always stay, and its part of the others as the policy shares out."""
    statistics, blocks = scores.statistics, config.blocks(prompt_tokens)
    ends, given = _settled(config, prompt_tokens), None
    if statistics.head_scores:
        by_head = torch.tensor(statistics.head_scores, dtype=WORK)
        given = by_head.view(statistics.layers, scores.kept_heads(config), -1).mean(dim=-1)
    available = LayerBudget(
        kept_heads=scores.kept_heads(config),
        kept=blocks.tail_blocks + ends.always + ends.free,
        always=blocks.tail_blocks + ends.always,
        layer=statistics.layer,
        layers=statistics.layers,
        prefix=sys.maxsize if statistics.valid is not None else blocks.before - ends.always,
        heads_in_order=lambda: scores.heads_in_order(config, ends),
        head_scores=given,
        of_model=statistics.of_model and functools.partial(statistics.of_model, config, ends),
        window=blocks.tail_blocks,
    )
    return registry.build(config.policy).allocate(config, available) + ends.always


def _settled(config: EvictionConfig, prompt_tokens: int) -> Ends:
    """What always stays at both ends, and what the budget buys beside it."""
    first, recent = _ends(config, prompt_tokens)
    bought = config.blocks(prompt_tokens).bought(config.allowed_entries(prompt_tokens))
    return Ends(first, recent, bought - first - recent)


def _ends(config: EvictionConfig, prompt_tokens: int) -> tuple[int, int]:
    """Blocks before the tail that stay for entries that are first, or recent; no more in all than the budget buys."""
    allowed, window = config.allowed_entries(prompt_tokens), min(config.window, prompt_tokens)
    blocks = config.blocks(prompt_tokens)
    policy = registry.build(config.policy)
    first = min(policy.first_entries(config, allowed), allowed - window)
    recent = min(policy.recent_entries(config, allowed), allowed - first)
    bought = blocks.bought(allowed)
    first_blocks = min(blocks.first(first), bought)
    return first_blocks, min(blocks.recent(recent), bought - first_blocks)


def _guaranteed(config: EvictionConfig, prompt_tokens: int) -> int:
    """Blocks beside those that always stay that stage 1 takes at least."""
    blocks = config.blocks(prompt_tokens)
    kept = blocks.tail_blocks + blocks.bought(config.allowed_entries(prompt_tokens))
    always = blocks.tail_blocks + sum(_ends(config, prompt_tokens))
    return registry.build(config.policy).guaranteed(config, kept, always)


def _stage1(
    configs: Sequence[EvictionConfig], free: Int[Tensor, "config kept_head"], always: Int[Tensor, "config kept_head"]
) -> Int[Tensor, "config kept_head"]:
    """Blocks that stage 1 takes of `free` ones beside those that `always` stay (METHOD: Select)."""
    alpha = on_device([[config.selection["alpha"]] for config in configs], free.device, WORK)
    total = on_device([[config.selection["split"] == "total"] for config in configs], free.device)
    of_prefix = whole_entries(alpha * free)
    of_total = (whole_entries(alpha * (free + always)) - always).clamp(min=0)
    return torch.where(total, of_total, of_prefix).to(torch.int64)
