"""Scores and budgets -> which entries stay (METHOD: Select), for all configurations of a layer at once.

What a configuration keeps is written as cutoffs: the entries whose rank lies below them. Configurations that rank alike
(a `Family`) share their orders, so that one more budget, alpha or policy costs comparisons and no sort. Nothing here
waits for the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from perturbkv.devices import on_device
from perturbkv.eviction import EvictionConfig
from perturbkv.policies import registry
from perturbkv.policies.base import Room
from perturbkv.ranking import LayerStatistics, Ranking, Scores
from perturbkv.theory import WORK

_STEP_BYTES = 64 * 2**20
"""Working memory of one step of the selection."""


@dataclass(frozen=True)
class KeptSets:
    """Which of the n prompt entries stay, per kept set (query head or key/value head).

    `stage1` holds stage 1 and the window: always a subset of `kept`.
    """

    kept: Bool[Tensor, "*config kept_head key"]
    stage1: Bool[Tensor, "*config kept_head key"]


@dataclass(frozen=True, eq=False)
class Budgets:
    """Prefix entries per configuration and kept set: all that stay, those of stage 1, those that stay as recent.

    Each holds the next; `window` entries stay beside them.
    """

    kept: Int[Tensor, "config kept_head"]
    stage1: Int[Tensor, "config kept_head"]
    recent: Int[Tensor, "config kept_head"]
    window: int


@dataclass(frozen=True, eq=False)
class Family:
    """Configurations that rank one layer's entries alike.

    Attributes:
        places: which of the run's configurations they are.
        first, second: ranking of stage 1 and of the rest; the same one for a selection without stages.
        budgets: how many entries stay.
        recent: whether any entry before the window stays because it is recent.
        stage1_cut, cut: an entry stays in stage 1, or beside it, where its rank lies below.
    """

    places: tuple[int, ...]
    first: Ranking
    second: Ranking
    budgets: Budgets
    recent: bool
    stage1_cut: Int[Tensor, "config kept_head"]
    cut: Int[Tensor, "config kept_head"]

    @property
    def kept_heads(self) -> int:
        """Kept sets of each configuration."""
        return len(self.first.ranks)

    def kept_sets(self, rows: Int[Tensor, " row"] | slice = slice(None)) -> KeptSets:
        """Masks of some of the family's configurations, by their place in it."""
        stage1 = self.first.ranks < self.stage1_cut[rows].unsqueeze(-1)
        if self.recent:
            stage1 |= _from_end(self.first.ranks) <= self.budgets.recent[rows].unsqueeze(-1)
        kept = stage1 | (self.second.ranks < self.cut[rows].unsqueeze(-1))
        return KeptSets(_with_window(kept, self.budgets.window), _with_window(stage1, self.budgets.window))


def families(
    configs: Sequence[EvictionConfig], scores: Callable[[EvictionConfig], Scores], prompt_tokens: int
) -> list[Family]:
    """What every configuration keeps in one layer; `scores` gives the layer's scores for a configuration.

    The families, and the configurations in each, come in the same order in all layers.

    Raises BudgetError where a budget leaves nothing beside the window, ConfigError where headkv has no scores.
    """
    alike: dict[tuple[Scores, Ranking, Ranking], list[int]] = {}
    for place, config in enumerate(configs):
        own = scores(config)
        first = own.first(config)
        alike.setdefault((own, first, own.second(config) or first), []).append(place)
    return [
        _family(places, [configs[place] for place in places], own, first, second, prompt_tokens)
        for (own, first, second), places in alike.items()
    ]


def select(config: EvictionConfig, statistics: LayerStatistics, prompt_tokens: int) -> KeptSets:
    """The entries that one configuration keeps in one layer: (kept_head, n). Raises what `families` raises."""
    scores = Scores(statistics)
    (only,) = families([config], lambda _: scores, prompt_tokens)
    found = only.kept_sets()
    return KeptSets(found.kept[0], found.stage1[0])


def _family(
    places: Sequence[int],
    configs: Sequence[EvictionConfig],
    scores: Scores,
    first: Ranking,
    second: Ranking,
    prompt_tokens: int,
) -> Family:
    budgets = _budgets(configs, scores, prompt_tokens)
    recent = any(_recent(config, prompt_tokens) > 0 for config in configs)
    steps = [_cuts(first, second, budgets, recent, rows) for rows in _steps(len(configs), first)]
    stage1_cut, cut = (torch.cat(kind) for kind in zip(*steps, strict=True))
    return Family(tuple(places), first, second, budgets, recent, stage1_cut, cut)


def _steps(configs: int, ranking: Ranking) -> Iterator[slice]:
    """Configurations whose masks and counts fit the working memory."""
    each = 6 * ranking.ranks.numel()
    size = max(1, _STEP_BYTES // max(1, each))
    return (slice(start, start + size) for start in range(0, configs, size))


def _cuts(first: Ranking, second: Ranking, budgets: Budgets, recent: bool, rows: slice) -> tuple[Tensor, Tensor]:
    """Cutoffs of stage 1, which passes over recent entries, and of stage 2, which passes over both."""
    stays, stage1, kept = budgets.recent[rows], budgets.stage1[rows], budgets.kept[rows]
    stage1_cut = stage1
    if recent:
        taken = _from_end(first.ranks).gather(-1, first.order) <= stays.unsqueeze(-1)
        stage1_cut = _cut(taken, stage1 - stays)
    if first is second and not recent:
        return stage1_cut, kept
    in_order = first.ranks.gather(-1, second.order)
    taken = in_order < stage1_cut.unsqueeze(-1)
    if recent:
        taken |= _from_end(first.ranks).gather(-1, second.order) <= stays.unsqueeze(-1)
    return stage1_cut, _cut(taken, kept - stage1)


def _cut(
    taken: Bool[Tensor, "config kept_head place"], wanted: Int[Tensor, "config kept_head"]
) -> Int[Tensor, "config kept_head"]:
    """How many places of an order have to be passed to meet `wanted` entries that are not taken yet."""
    free = (~taken).cumsum(dim=-1, dtype=torch.int32)
    passed = torch.searchsorted(free, wanted.unsqueeze(-1).to(torch.int32)).squeeze(-1) + 1
    return torch.where(wanted > 0, passed, 0)


def _budgets(configs: Sequence[EvictionConfig], scores: Scores, prompt_tokens: int) -> Budgets:
    """Every configuration's, inside what its kept sets hold."""
    device, window = scores.statistics.norms.device, min(configs[0].window, prompt_tokens)
    shared = [_allocate(config, scores, prompt_tokens) for config in configs]
    kept = torch.stack([counts.to(device, non_blocking=True) for counts in shared])
    if scores.statistics.valid is not None:
        kept = torch.minimum(kept, scores.statistics.valid.sum(dim=-1))
    asked = on_device([_recent(config, prompt_tokens) for config in configs], device)
    recent = torch.minimum(kept, asked.unsqueeze(-1))
    return Budgets(kept, recent + _stage1(configs, kept - recent, recent + window), recent, window)


def _allocate(config: EvictionConfig, scores: Scores, prompt_tokens: int) -> Int[Tensor, " kept_head"]:
    """Prefix entries of each kept set, as the policy shares them out."""
    statistics, window = scores.statistics, min(config.window, prompt_tokens)
    given = statistics.head_scores
    if given is not None:
        given = given.view(statistics.layers, scores.kept_heads(config), -1).mean(dim=-1)
    room = Room(
        kept_heads=scores.kept_heads(config),
        kept=config.tokens(prompt_tokens),
        window=window,
        layer=statistics.layer,
        layers=statistics.layers,
        prefix=statistics.prefix if statistics.valid is None else sys.maxsize,
        heads_in_order=lambda: scores.heads_in_order(config),
        head_scores=given,
    )
    return registry.build(config.policy).allocate(config, room)


def _recent(config: EvictionConfig, prompt_tokens: int) -> int:
    """Entries before the window that stay because they are recent."""
    kept, window = config.tokens(prompt_tokens), min(config.window, prompt_tokens)
    return max(0, min(registry.build(config.policy).recent(config, kept), kept) - window)


def _stage1(
    configs: Sequence[EvictionConfig], free: Int[Tensor, "config kept_head"], always: Int[Tensor, "config kept_head"]
) -> Int[Tensor, "config kept_head"]:
    """Entries that stage 1 takes of `free` beside the `always` kept ones (METHOD: Select)."""
    alpha = on_device([[config.alpha] for config in configs], free.device, WORK)
    total = on_device([[config.split == "total"] for config in configs], free.device)
    of_prefix = (alpha * free + 1e-9).floor()
    of_total = ((alpha * (free + always) + 1e-9).floor() - always).clamp(min=0)
    return torch.where(total, of_total, of_prefix).to(torch.int64)


def _from_end(prefix: Int[Tensor, "kept_head prefix"]) -> Int[Tensor, "kept_head prefix"]:
    """1 for the last entry of the prefix, 2 for the one before it, …; the prefix is aligned at its end."""
    return torch.arange(prefix.shape[-1], 0, -1, device=prefix.device).expand_as(prefix)


def _with_window(prefix: Bool[Tensor, "config kept_head prefix"], window: int) -> Bool[Tensor, "config kept_head key"]:
    """The window's entries always stay."""
    return torch.cat([prefix, prefix.new_ones(*prefix.shape[:-1], window)], dim=-1)
