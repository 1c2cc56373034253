"""Lines of a sparse prefill: the entries (vertical lines) and offsets (slash lines) that a layer's heads attend to.

Lines are chosen from the attention of the prompt's last queries, or from that × ν (METHOD: Lines that a prefill looks
along). The first entries are verticals, and the local band is slashes, in every choice. Configurations with a sparse
prefill evict nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.configs.entry_counts import round_down_entries
from perturbkv.configs.selections import PROMPT_QUERIES
from perturbkv.devices import to_device
from perturbkv.scoring.window_attention import draw_uniform, reduce_group
from perturbkv.selection.budgets import Rows
from perturbkv.selection.kept_sets import EntryCounts, KeptSets
from perturbkv.selection.policies.vertical_slash import VerticalSlash
from perturbkv.selection.ranking import rank
from perturbkv.selection.resolved_config import ResolvedConfig
from perturbkv.theory import WORK


@dataclass(frozen=True, eq=False)
class Lines:
    """The lines of each kept set of a layer.

    Attributes:
        vertical: mask of the entries that all later queries attend to.
        slash: mask of the offsets d such that the query at position p attends to the entry p − d.
    """

    vertical: Bool[Tensor, "kept_head key"]
    slash: Bool[Tensor, "kept_head key"]

    def attention_mask(self, positions: Int[Tensor, " query"]) -> Bool[Tensor, "kept_head query key"]:
        """Return the causal mask of the entries attended to by the queries at the given positions."""
        n = self.slash.shape[1]
        offsets = F.pad(self.slash.flip(-1), (0, n - 1))  # from n − 1 down to 0, then the negative ones
        # the n offsets from p down to p − n + 1 are those of the query at position p from the entries 0 … n − 1
        on_slash = offsets.unfold(-1, n, 1)[:, n - 1 - positions]
        causal = torch.arange(n, device=positions.device) <= positions.unsqueeze(-1)
        return on_slash | (self.vertical.unsqueeze(1) & causal)


@dataclass(frozen=True, eq=False)
class LastQueries:
    """The attention and norms of one layer from which lines are chosen.

    Attributes:
        attention: attention weights of the prompt's last queries, 0 on later entries.
        norms: ν of each entry, in the norm that the selection uses.
        kv_heads: number of key/value heads.
        layer: index among the measured layers.
        sample: the sample's id, for the seed of `random`.
    """

    attention: Float[Tensor, "head query key"]
    norms: Float[Tensor, "head key"]
    kv_heads: int
    layer: int
    sample: str


@dataclass(frozen=True, eq=False)
class ChosenLines:
    """The chosen lines, and those of them that stage 1 takes or that are in every choice."""

    lines: Lines
    stage1: Lines


def choose_lines(config: ResolvedConfig, queries: LastQueries) -> ChosenLines:
    """Return the chosen lines of a configuration, for a budget below the prompt's length."""
    policy = line_policy(config)
    kept_heads, n = _kept_heads(config, queries), queries.attention.shape[-1]
    free = config.kept_entries(n) - config.window - policy.first
    verticals = int(round_down_entries(policy.vertical * free))
    alphas = to_device(config.alphas(queries.layer, kept_heads), queries.attention.device, WORK)
    entry_scores, offset_scores = _line_scores(config, queries, kept_heads)
    vertical, vertical1 = _choose_lines_of_kind(*entry_scores, verticals, alphas, policy.first, n - config.window)
    slash, slash1 = _choose_lines_of_kind(*offset_scores, free - verticals, alphas, config.window, n - policy.first)
    return ChosenLines(Lines(vertical, slash), Lines(vertical1, slash1))


def all_lines(config: ResolvedConfig, queries: LastQueries) -> ChosenLines:
    """Return all verticals and all slashes, for a budget that covers the prompt."""
    norms = queries.norms
    mask = torch.ones(_kept_heads(config, queries), norms.shape[1], dtype=torch.bool, device=norms.device)
    return ChosenLines(Lines(mask, mask), Lines(mask, mask))


def diagonal_sums(weights: Float[Tensor, "head query key"]) -> Float[Tensor, "head key"]:
    """Return, per offset d = 0 … n − 1, the last queries' total weight on the entries d positions before them.

    Read backwards from the last key, row r has offset d at d + queries − 1 − r; a strided view lines the offsets up.
    """
    heads, queries, n = weights.shape
    backwards = torch.nn.functional.pad(weights.flip(-1), (0, queries)).contiguous()
    width = n + queries
    shifted = backwards.as_strided((heads, queries, n), (queries * width, width - 1, 1), queries - 1)
    return shifted.sum(dim=1)


def _column_sums(weights: Float[Tensor, "head query key"]) -> Float[Tensor, "head key"]:
    """Return the total weight of the last queries on each entry."""
    return weights.sum(dim=1)


def _line_scores(
    config: ResolvedConfig, queries: LastQueries, kept_heads: int
) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """Return the scores (kept_head, key) of the entries, and those of the offsets: of stage 1, then of stage 2 each.

    None in place of the latter where there are no stages.
    """
    if config.selection.name == "random":
        n, seed = queries.attention.shape[-1], config.selection["seed"]
        numbers = draw_uniform(2 * kept_heads, n, seed, queries.sample, queries.layer).to(queries.attention.device)
        return (numbers[:kept_heads], None), (numbers[kept_heads:], None)
    first, second = _line_weights(config, queries)
    if second is None:
        return (_column_sums(first), None), (diagonal_sums(first), None)
    return (_column_sums(first), _column_sums(second)), (diagonal_sums(first), diagonal_sums(second))


def _line_weights(config: ResolvedConfig, queries: LastQueries) -> tuple[Tensor, Tensor | None]:
    """Return the weights (kept_head, query, key) that lines are scored by: A in stage 1, A ν in stage 2.

    None in place of the latter where there are no stages.
    """
    options, attention = config.granularity.options, _summed_attention(config, queries.attention.to(WORK))
    kept_heads = _kept_heads(config, queries)
    shared = _reduce_queries(attention, kept_heads, options.get("reduce", "mean"))
    if config.selector.second is None:
        return shared, None
    norms = queries.norms.to(WORK)
    if options.get("product") == "mean-of-products":
        return shared, _reduce_queries(attention * norms.unsqueeze(1), kept_heads, "mean")
    return shared, shared * reduce_group(norms, kept_heads).unsqueeze(1)


def _summed_attention(
    config: ResolvedConfig, attention: Float[Tensor, "head query key"]
) -> Float[Tensor, "head query key"]:
    """Return the attention to sum along lines, with 0 on the always-kept first entries and local band, if excluded."""
    policy = line_policy(config)
    if policy.sums == "all":
        return attention
    queries, n = attention.shape[1:]
    entry = torch.arange(n, device=attention.device)
    offset = entry[n - queries :].unsqueeze(-1) - entry
    return attention.masked_fill((entry < policy.first) | (offset < config.window), 0.0)


def _kept_heads(config: ResolvedConfig, queries: LastQueries) -> int:
    """Return the number of kept sets in a layer."""
    return len(queries.norms) if config.granularity.name == "query" else queries.kv_heads


def _reduce_queries(
    weights: Float[Tensor, "head query key"], kept_heads: int, reduction: str
) -> Float[Tensor, "kept query key"]:
    """Return weights per kept set, reduced by `reduction` over the query heads that share a kept set."""
    return reduce_group(weights.flatten(1), kept_heads, reduction).view(kept_heads, *weights.shape[1:])


def _choose_lines_of_kind(
    first: Float[Tensor, "kept_head key"],
    second: Float[Tensor, "kept_head key"] | None,
    count: int,
    alphas: Float[Tensor, " kept_head"],
    always: int,
    end: int,
) -> tuple[Bool[Tensor, "kept_head key"], Bool[Tensor, "kept_head key"]]:
    """Return the masks of all chosen lines of a kind (verticals or slashes) and of those in stage 1.

    Stage 1 takes the best ⌊α · `count`⌋ by `first`, stage 2 the rest of `count` by `second` (None: by `first`), both
    among the indices `always` … `end` − 1; ties go to the smaller index. Indices below `always` are in both masks.
    """
    index = torch.arange(first.shape[1], device=first.device)
    excluded, always_chosen = (index < always) | (index >= end), (index < always).expand_as(first)
    stage1_count = round_down_entries(alphas * count).unsqueeze(-1)
    stage1 = rank(first.masked_fill(excluded, -torch.inf)).ranks < stage1_count
    rest = (first if second is None else second).masked_fill(excluded | stage1, -torch.inf)
    return always_chosen | stage1 | (rank(rest).ranks < count - stage1_count), always_chosen | stage1


Positions = tuple[int, ...]
"""Positions in a prompt, ascending."""
_NO_LAYER = -1
"""Layer index for the seed of positions, which are the same in all layers."""


def last_positions(count: int, prompt_tokens: int) -> Positions:
    """Return the positions of a prompt's last `count` queries."""
    return tuple(range(max(0, prompt_tokens - count), prompt_tokens))


def measured_positions(config: ResolvedConfig, prompt_tokens: int, sample: str) -> Positions:
    """Return the positions of the queries with measured isolated quantities, one in each 32nd of the prompt.

    They are drawn with a seed, and are the same for all budgets. None lies within the first entries and the band after
    them, where a query attends to everything whatever is chosen. A short prompt has fewer than 32.
    """
    policy = line_policy(config)
    begin = min(config.window + policy.first, prompt_tokens - 1)
    parts = min(PROMPT_QUERIES, prompt_tokens - begin)
    ends = [begin + part * (prompt_tokens - begin) // parts for part in range(parts + 1)]
    shares = draw_uniform(1, parts, policy.seed, sample, _NO_LAYER)[0].tolist()
    return tuple(low + int(share * (high - low)) for low, high, share in zip(ends, ends[1:], shares, strict=False))


def remembered_positions(configs: Iterable[ResolvedConfig], prompt_tokens: int, sample: str) -> set[Positions]:
    """Return the sets of query positions, as tuples, that the full prefill must store for sparse prefills."""
    positions: set[Positions] = set()
    for config in configs:
        if config.has_sparse_prefill:
            positions.add(last_positions(line_policy(config).last, prompt_tokens))
            positions.add(measured_positions(config, prompt_tokens, sample))
    return positions


def line_policy(config: ResolvedConfig) -> VerticalSlash:
    """Return the policy object of a configuration with a sparse prefill."""
    return cast("VerticalSlash", config.system)


LastQueriesOfConfig = Callable[[ResolvedConfig], LastQueries]
"""Function from a configuration to one layer's last queries."""


@dataclass(frozen=True, eq=False)
class SparsePrefillGroup:
    """Configurations with a sparse prefill, equally many kept sets, and the same measured queries.

    The entries that the prompt's last query attends to are stored as their kept sets.

    Attributes:
        config_indices: indices of the configurations in the run.
        kept_heads: number of kept sets of each configuration.
        chosen: lines of each configuration.
        measured_positions: positions of the queries at which isolated quantities are measured.
        window: w, at most the prompt's length.
    """

    config_indices: tuple[int, ...]
    kept_heads: int
    chosen: tuple[ChosenLines, ...]
    measured_positions: Positions
    window: int

    def attention_masks(self, positions: Int[Tensor, " query"]) -> KeptSets:
        """Return masks (config, kept_head, query, key) of the entries attended to by queries at these positions."""
        return KeptSets(
            torch.stack([each.lines.attention_mask(positions) for each in self.chosen]),
            torch.stack([each.stage1.attention_mask(positions) for each in self.chosen]),
        )

    def kept_sets(self, rows: Rows = slice(None)) -> KeptSets:
        """Return the entries attended to by the last query, for the configurations in the slice `rows`."""
        slashes = self.chosen[0].lines.slash
        last = torch.full((1,), slashes.shape[1] - 1, device=slashes.device)
        masks = self.attention_masks(last)
        return KeptSets(masks.kept[rows].squeeze(2), masks.stage1[rows].squeeze(2))

    def decoding_mask(self, heads: int) -> Bool[Tensor, "config head key"]:
        """Return an all-true mask: decoding attends to every entry."""
        slashes = self.chosen[0].lines.slash
        return slashes.new_ones(len(self.config_indices), heads, slashes.shape[1])

    @property
    def budgets(self) -> EntryCounts:
        """Numbers of entries in the kept sets, and in stage 1 without the window."""
        sets = self.kept_sets()
        return EntryCounts(sets.kept.sum(dim=-1), sets.stage1.sum(dim=-1) - self.window)


def sparse_prefill_groups(
    configs: Sequence[ResolvedConfig], layer: LastQueriesOfConfig, prompt_tokens: int, sample: str
) -> list[SparsePrefillGroup]:
    """Return one layer's groups of the sparse-prefill configurations; `layer` is called per configuration."""
    groups: dict[tuple[int, int, Positions], dict[int, ChosenLines]] = {}
    for index, config in enumerate(configs):
        if config.has_sparse_prefill:
            chosen = lines_for_budget(config, layer(config), prompt_tokens)
            key = (len(chosen.lines.slash), config.window, measured_positions(config, prompt_tokens, sample))
            groups.setdefault(key, {})[index] = chosen
    return [
        SparsePrefillGroup(tuple(chosen), heads, tuple(chosen.values()), positions, min(window, prompt_tokens))
        for (heads, window, positions), chosen in groups.items()
    ]


def lines_for_budget(config: ResolvedConfig, queries: LastQueries, prompt_tokens: int) -> ChosenLines:
    """Return a configuration's chosen lines; all lines for a budget that covers the prompt."""
    covered = config.kept_entries(prompt_tokens) >= prompt_tokens
    return all_lines(config, queries) if covered else choose_lines(config, queries)
