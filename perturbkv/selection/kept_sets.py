"""Kept sets from scores and budgets (METHOD: Select), for all configurations of a layer at once.

A kept set is stored as cutoffs: it has the entries whose rank lies below them. Configurations that rank alike (a
`RankingGroup`) share their orders, so that one more budget, alpha or policy costs comparisons and no sort. Nothing here
waits for the device.

External kept sets, of a press or of another cache, are measured and evicted like ours (`ExternalGroup`). The order in
which they were filled is not known, so they have no stages: the whole set is stage 1, `σ` is its retained mass, and
`θ̂` and its relaxation equal `θ`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from perturbkv.devices import working_bytes
from perturbkv.selection.budgets import Budgets, Rows, compute_budgets
from perturbkv.selection.layer_statistics import LayerStatistics
from perturbkv.selection.ranking import Ranking, Scores, block_entries
from perturbkv.selection.resolved_config import ResolvedConfig

_STEP_BYTES = 64 * 2**20
"""Working memory of one step of the selection."""


@dataclass(frozen=True)
class KeptSets:
    """Masks of the n prompt entries that stay, per kept set (query head or key/value head).

    `stage1` is stage 1 with all entries that always stay, the window included: a subset of `kept`.
    """

    kept: Bool[Tensor, "*config kept_head key"]
    stage1: Bool[Tensor, "*config kept_head key"]


@dataclass(frozen=True, eq=False)
class RankingGroup:
    """Configurations with the same rankings of one layer's entries.

    Attributes:
        config_indices: indices of the configurations in the run.
        first, second: ranking of stage 1 and of the rest; the same one for a selection without stages.
        budgets: numbers of blocks that stay, of one entry each unless the granularity has a block.
        begin: index of each kept set's first block.
        has_protected: whether any block before the window stays because of its position.
        stage1_cut, cut: a block stays in stage 1, or in stage 2, where its rank lies below.
    """

    config_indices: tuple[int, ...]
    first: Ranking
    second: Ranking
    budgets: Budgets
    begin: Int[Tensor, " #kept_head"]
    has_protected: bool
    stage1_cut: Int[Tensor, "config kept_head"]
    cut: Int[Tensor, "config kept_head"]

    @property
    def kept_heads(self) -> int:
        """Number of kept sets per configuration."""
        return len(self.first.ranks)

    def kept_sets(self, rows: Rows = slice(None)) -> KeptSets:
        """Return the kept sets of the configurations in the slice `rows` of the group."""
        ranks = self.first.ranks
        stage1 = ranks < self.stage1_cut[rows].unsqueeze(-1)
        if self.has_protected:
            index = torch.arange(ranks.shape[-1], device=ranks.device).expand_as(ranks)
            stage1 |= self.budgets.is_always_kept(index, self.begin, rows)
        kept = stage1 | (self.second.ranks < self.cut[rows].unsqueeze(-1))
        return KeptSets(*(block_entries(each, self.budgets.blocks) for each in (kept, stage1)))

    def kept_sets_per_step(self, rows: Rows) -> list[KeptSets]:
        """Return the kept sets of the configurations in the slice `rows`: a single one for all steps."""
        return [self.kept_sets(rows)]


Rankings = tuple[Ranking, Ranking | None]
"""Rankings of stage 1 and of stage 2, None for a selection without stages."""


def rankings(config: ResolvedConfig, scores: Scores) -> Rankings:
    """Return the rankings of a configuration by the scores of one layer, or of several joined to one."""
    return scores.first_ranking(config), scores.second_ranking(config)


def move_rankings(shared: Mapping[ResolvedConfig, Rankings], device: torch.device) -> dict[ResolvedConfig, Rankings]:
    """Return the rankings on a device; a ranking of several configurations stays one object."""
    moved = {ranking: ranking.to(device) for pair in shared.values() for ranking in pair if ranking}
    return {config: (moved[first], second and moved[second]) for config, (first, second) in shared.items()}


def ranking_groups(
    configs: Sequence[ResolvedConfig],
    scores: Callable[[ResolvedConfig], Scores],
    prompt_tokens: int,
    shared: Mapping[ResolvedConfig, Rankings] = MappingProxyType({}),
) -> list[RankingGroup]:
    """Return one layer's configurations, grouped by equal ranking; `scores` gives each configuration's scores there.

    `shared` has the rankings of configurations whose kept sets all layers share. The groups, and the configurations in
    each, come in the same order in all layers.

    Raises BudgetError where a budget leaves nothing besides the window, ConfigError where headkv has no scores.
    """
    by_ranking: dict[tuple[Scores, Ranking, Ranking], list[int]] = {}
    for index, config in enumerate(configs):
        layer_scores = scores(config)
        first, second = shared[config] if config in shared else rankings(config, layer_scores)
        key = (layer_scores, first, second or first)
        by_ranking.setdefault(key, []).append(index)
    return [
        _make_ranking_group(indices, [configs[index] for index in indices], *key, prompt_tokens)
        for key, indices in by_ranking.items()
    ]


def select(
    config: ResolvedConfig,
    statistics: LayerStatistics,
    prompt_tokens: int,
    shared: Mapping[ResolvedConfig, Rankings] = MappingProxyType({}),
) -> KeptSets:
    """Return a configuration's kept sets in one layer, as masks (kept_head, n). Raises as `ranking_groups`.

    `shared` has the configuration's rankings where all layers share its kept sets.
    """
    scores = Scores(statistics)
    (group,) = ranking_groups([config], lambda _: scores, prompt_tokens, shared)
    sets = group.kept_sets()
    return KeptSets(sets.kept[0], sets.stage1[0])


def _make_ranking_group(
    indices: Sequence[int],
    configs: Sequence[ResolvedConfig],
    scores: Scores,
    first: Ranking,
    second: Ranking,
    prompt_tokens: int,
) -> RankingGroup:
    """Return the group of the configurations `indices`, with the rankings of stage 1 and of the rest."""
    budgets = compute_budgets(configs, scores, prompt_tokens)
    begin = scores.statistics.begin // budgets.blocks.size
    has_protected = any(config.prefix_counts(prompt_tokens).always for config in configs)
    steps = [
        _cutoffs(first, second, budgets, begin if has_protected else None, rows)
        for rows in _config_slices(len(configs), first)
    ]
    stage1_cut, cut = (torch.cat(kind) for kind in zip(*steps, strict=True))
    return RankingGroup(tuple(indices), first, second, budgets, begin, has_protected, stage1_cut, cut)


def _config_slices(configs: int, ranking: Ranking) -> Iterator[slice]:
    """Yield slices of the range of `configs` configurations, each small enough for the working memory."""
    config_bytes = 6 * ranking.ranks.numel()
    size = max(1, working_bytes(ranking.ranks.device, _STEP_BYTES) // max(1, config_bytes))
    return (slice(start, start + size) for start in range(0, configs, size))


def _cutoffs(
    first: Ranking, second: Ranking, budgets: Budgets, begin: Tensor | None, rows: slice
) -> tuple[Tensor, Tensor]:
    """Return the cutoff ranks (config, kept_head) of stage 1 and of stage 2; entries with lower ranks stay.

    Stage 1 passes over the entries that always stay, stage 2 over these and those of stage 1. `begin` is the index of
    each kept set's first block; None where no entry before the window always stays.
    """
    stage1, kept = budgets.stage1[rows], budgets.kept[rows]
    if begin is None and first is second:
        return stage1, kept  # both stages take the beginning of one order
    stage1_ranks = first.ranks.gather(-1, second.order)
    if begin is None:
        return stage1, _cutoff(stage1_ranks < stage1.unsqueeze(-1), kept - stage1)
    always = budgets.is_always_kept(first.order, begin, rows)
    stage1_cut = _cutoff(always, stage1 - budgets.first[rows] - budgets.recent[rows])
    taken = stage1_ranks < stage1_cut.unsqueeze(-1)
    taken |= budgets.is_always_kept(second.order, begin, rows)
    return stage1_cut, _cutoff(taken, kept - stage1)


def _cutoff(
    taken: Bool[Tensor, "config kept_head rank"], count: Int[Tensor, "config kept_head"]
) -> Int[Tensor, "config kept_head"]:
    """Return the rank below which exactly `count` entries are not yet `taken`, a mask ordered by rank."""
    free = (~taken).cumsum(dim=-1, dtype=torch.int32)
    length = torch.searchsorted(free, count.unsqueeze(-1).to(torch.int32)).squeeze(-1) + 1
    return torch.where(count > 0, length, 0)


@dataclass(frozen=True, eq=False)
class EntryCounts:
    """Numbers of kept entries, and of those before the window that stage 1 takes or that always stay."""

    kept_entries: Int[Tensor, "config kept_head"]
    stage1_entries: Int[Tensor, "config kept_head"]


@dataclass(frozen=True, eq=False)
class ExternalGroup:
    """Configurations with external kept sets.

    Attributes:
        config_indices: indices of the configurations in the run.
        kept: mask of the entries that stay in this layer, the window's among them.
    """

    config_indices: tuple[int, ...]
    kept: Bool[Tensor, "config kv_head key"]

    @property
    def kept_heads(self) -> int:
        """Number of kept sets per configuration."""
        return self.kept.shape[1]

    @property
    def budgets(self) -> EntryCounts:
        """Numbers of kept entries; stage 1 has the same numbers, as there is no stage 2."""
        counts = self.kept.sum(dim=-1)
        return EntryCounts(counts, counts)

    def kept_sets(self, rows: Rows = slice(None)) -> KeptSets:
        """Return the kept sets of the configurations in the slice `rows` of the group."""
        return KeptSets(self.kept[rows], self.kept[rows])

    def kept_sets_per_step(self, rows: Rows) -> list[KeptSets]:
        """Return the kept sets of the configurations in the slice `rows`: a single one for all steps."""
        return [self.kept_sets(rows)]


Group = RankingGroup | ExternalGroup
"""Configurations with their kept sets of one layer."""


def kept_groups(
    configs: Sequence[ResolvedConfig],
    scores: Callable[[ResolvedConfig], Scores],
    prompt_tokens: int,
    external: Mapping[ResolvedConfig, Bool[Tensor, "kv_head key"]],
    shared: Mapping[ResolvedConfig, Rankings] = MappingProxyType({}),
) -> list[Group]:
    """Return one layer's groups of evicting configurations: `ranking_groups`, and one group of `external` kept sets.

    Groups come in the same order in all layers; configurations that evict nothing are left out.
    """
    ranked_indices = [index for index, config in enumerate(configs) if config not in external and config.evicts]
    ranked = ranking_groups([configs[index] for index in ranked_indices], scores, prompt_tokens, shared)
    groups: list[Group] = [
        dataclasses.replace(group, config_indices=tuple(ranked_indices[index] for index in group.config_indices))
        for group in ranked
    ]
    external_indices = tuple(index for index, config in enumerate(configs) if config in external)
    if external_indices:
        groups.append(
            ExternalGroup(external_indices, torch.stack([external[configs[index]] for index in external_indices]))
        )
    return groups


def kept_masks_of(groups: Sequence[Group]) -> dict[int, Bool[Tensor, "kept_head n"]]:
    """Return index of a configuration -> the masks of its kept sets, of one layer's groups."""
    masks: dict[int, Tensor] = {}
    for group in groups:
        masks |= dict(zip(group.config_indices, group.kept_sets().kept, strict=True))
    return masks
