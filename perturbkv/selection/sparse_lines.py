"""Along which lines the heads of a layer look at a prompt: vertical ones, which are entries, and slashes, offsets.

Lines are chosen from the attention of the prompt's last queries, or from that × ν (METHOD: Lines that a prefill looks
along). The first entries are verticals and the local band slashes in every choice.

Which of a prompt's queries a prefill along lines is looked at by: the last ones, and those that are measured.

What configurations look at in one layer that evict nothing and read the prompt along lines.
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
from perturbkv.scoring.window_attention import reduce_group, seeded
from perturbkv.selection.budgets import Rows
from perturbkv.selection.kept_sets import KeptSets
from perturbkv.selection.policies.vertical_slash import VerticalSlash
from perturbkv.selection.ranking import rank
from perturbkv.selection.resolved_config import ResolvedConfig
from perturbkv.theory import WORK


@dataclass(frozen=True, eq=False)
class Lines:
    """Which lines each kept head of a layer looks along.

    Attributes:
        vertical: entries that every query from there on looks at.
        slash: offsets d: the query at position p looks at p − d.
    """

    vertical: Bool[Tensor, "kept_head key"]
    slash: Bool[Tensor, "kept_head key"]

    def seen(self, positions: Int[Tensor, " query"]) -> Bool[Tensor, "kept_head query key"]:
        """True where the query at a position looks at an entry: none that comes later."""
        n = self.slash.shape[1]
        offsets = F.pad(self.slash.flip(-1), (0, n - 1))  # from n − 1 down to 0, then those of later entries
        along = offsets.unfold(-1, n, 1)[:, n - 1 - positions]
        earlier = torch.arange(n, device=positions.device) <= positions.unsqueeze(-1)
        return along | (self.vertical.unsqueeze(1) & earlier)


@dataclass(frozen=True, eq=False)
class LastQueries:
    """What lines are chosen from in one layer.

    Attributes:
        attention: of the prompt's last queries, 0 on later entries.
        norms: ν of each entry, in the norm that the selection looks at.
        kv_heads: of the model.
        layer: which of the measured ones.
        sample: the sample's id, for the seed of `random`.
    """

    attention: Float[Tensor, "head query key"]
    norms: Float[Tensor, "head key"]
    kv_heads: int
    layer: int
    sample: str


@dataclass(frozen=True, eq=False)
class Chosen:
    """All lines, and those of stage 1 with what is always in: a subset."""

    lines: Lines
    stage1: Lines


def choose(config: ResolvedConfig, given: LastQueries) -> Chosen:
    """The lines of a budget that does not cover the prompt."""
    policy = _policy(config)
    kept_heads, n = _kept_heads(config, given), given.attention.shape[-1]
    free = config.kept_entries(n) - config.window - policy.first
    upright = int(round_down_entries(policy.vertical * free))
    first, second = _weights(config, given)
    alphas = to_device(config.alphas(given.layer, kept_heads), given.attention.device, WORK)
    drawn = _drawn(config, given, kept_heads, n) if config.selection.name == "random" else None
    found = []
    for kind, (sums, count, always, last) in enumerate((
        (_columns, upright, policy.first, n - config.window),
        (diagonals, free - upright, config.window, n - policy.first),
    )):  # fmt: skip
        scores = (drawn[kind], None) if drawn else (sums(first), None if second is None else sums(second))
        found.append(_of_kind(*scores, count, alphas, always, last))
    (vertical, upright1), (slash, slash1) = found
    return Chosen(Lines(vertical, slash), Lines(upright1, slash1))


def everything(config: ResolvedConfig, given: LastQueries) -> Chosen:
    """All lines."""
    every = torch.ones(_kept_heads(config, given), given.norms.shape[1], dtype=torch.bool, device=given.norms.device)
    return Chosen(Lines(every, every), Lines(every, every))


def diagonals(weights: Float[Tensor, "head query key"]) -> Float[Tensor, "head key"]:
    """Σ over the last queries of what each gives the entry at an offset d before it, for d = 0 … n − 1."""
    heads, queries, n = weights.shape
    sums = weights.new_zeros(heads, n)
    for row in range(queries):
        own = n - queries + row  # the query's own entry, at offset 0
        sums[:, : own + 1] += weights[:, row, : own + 1].flip(-1)
    return sums


def _columns(weights: Float[Tensor, "head query key"]) -> Float[Tensor, "head key"]:
    return weights.sum(dim=1)


def _weights(config: ResolvedConfig, given: LastQueries) -> tuple[Tensor, Tensor | None]:
    """A of each kept head, and A ν where there is a stage 2: what is summed along lines."""
    options, attention = config.granularity.options, _counted(config, given.attention.to(WORK))
    kept = _kept_heads(config, given)
    shared = _reduced(attention, kept, options.get("reduce", "mean"))
    if config.selector.second is None:
        return shared, None
    norms = given.norms.to(WORK)
    if options.get("product") == "mean-of-products":
        return shared, _reduced(attention * norms.unsqueeze(1), kept, "mean")
    return shared, shared * reduce_group(norms, kept).unsqueeze(1)


def _counted(config: ResolvedConfig, attention: Float[Tensor, "head query key"]) -> Float[Tensor, "head query key"]:
    """The attention that sums are of: all, or without first entries and band, which every query looks at anyway."""
    policy = _policy(config)
    if policy.sums == "all":
        return attention
    queries, n = attention.shape[1:]
    entry = torch.arange(n, device=attention.device)
    offset = entry[n - queries :].unsqueeze(-1) - entry
    return attention.masked_fill((entry < policy.first) | (offset < config.window), 0.0)


def _kept_heads(config: ResolvedConfig, given: LastQueries) -> int:
    return len(given.norms) if config.granularity.name == "query" else given.kv_heads


def _reduced(weights: Float[Tensor, "head query key"], kept_heads: int, how: str) -> Float[Tensor, "kept query key"]:
    return reduce_group(weights.flatten(1), kept_heads, how).view(kept_heads, *weights.shape[1:])


def _drawn(config: ResolvedConfig, given: LastQueries, kept_heads: int, n: int) -> tuple[Tensor, Tensor]:
    """Seeded numbers for entries and for offsets."""
    made = seeded(2 * kept_heads, n, config.selection["seed"], given.sample, given.layer)
    found = made.to(given.attention.device)
    return found[:kept_heads], found[kept_heads:]


def _of_kind(
    first: Float[Tensor, "kept_head key"],
    second: Float[Tensor, "kept_head key"] | None,
    count: int,
    alphas: Float[Tensor, " kept_head"],
    always: int,
    end: int,
) -> tuple[Bool[Tensor, "kept_head key"], Bool[Tensor, "kept_head key"]]:
    """`count` lines of one kind among `always` … `end` − 1, and those of stage 1; the first `always` ones in both.

    Of equal sums the smaller place comes first.
    """
    place = torch.arange(first.shape[1], device=first.device)
    outside, within = (place < always) | (place >= end), (place < always).expand_as(first)
    early = round_down_entries(alphas * count).unsqueeze(-1)
    stage1 = rank(first.masked_fill(outside, -torch.inf)).ranks < early
    rest = (first if second is None else second).masked_fill(outside | stage1, -torch.inf)
    return within | stage1 | (rank(rest).ranks < count - early), within | stage1


Positions = tuple[int, ...]
"""Places of a prompt, ascending."""
_NO_LAYER = -1
"""In a seed's place of the layer: all layers are asked at the same positions."""


def last(config: ResolvedConfig, prompt_tokens: int) -> Positions:
    """The queries whose attention says which lines."""
    return tuple(range(max(0, prompt_tokens - _policy(config).last), prompt_tokens))


def measured(config: ResolvedConfig, prompt_tokens: int, sample: str) -> Positions:
    """The queries at which isolated quantities are measured: one of each of 32 equal parts of the prompt, seeded.

    None stands within the first entries and the band behind them, where a query looks at everything whatever is chosen;
    the budget has no say, so that all budgets are asked at the same ones. Fewer where there are fewer.
    """
    policy = _policy(config)
    begin = min(config.window + policy.first, prompt_tokens - 1)
    parts = min(PROMPT_QUERIES, prompt_tokens - begin)
    ends = [begin + part * (prompt_tokens - begin) // parts for part in range(parts + 1)]
    drawn = seeded(1, parts, policy.seed, sample, _NO_LAYER)[0].tolist()
    return tuple(low + int(share * (high - low)) for low, high, share in zip(ends, ends[1:], drawn, strict=False))


def wanted(configs: Iterable[ResolvedConfig], prompt_tokens: int, sample: str) -> set[Positions]:
    """Everything that the full prefill has to remember queries of; nothing where no configuration has lines."""
    lined = [config for config in configs if config.has_sparse_prefill]
    return {one for config in lined for one in (last(config, prompt_tokens), measured(config, prompt_tokens, sample))}


def _policy(config: ResolvedConfig) -> VerticalSlash:
    return cast("VerticalSlash", config.system)


Layer = Callable[[ResolvedConfig], LastQueries]
"""One layer's last queries for a configuration."""


@dataclass(frozen=True, eq=False)
class LinedBudgets:
    """Entries of each configuration and kept set that the prompt's last query looks at."""

    kept_entries: Int[Tensor, "config kept_head"]
    stage1_entries: Int[Tensor, "config kept_head"]


@dataclass(frozen=True, eq=False)
class LinedGroup:
    """Configurations with as many kept sets that are measured at the same queries of a prompt.

    What is stored as their kept sets is what the prompt's last query looks at.

    Attributes:
        places: which of the run's configurations they are.
        kept_heads: kept sets of each.
        chosen: the lines of each.
        measured: positions of the queries at which isolated quantities are measured.
        window: w, the entries of it that are there.
    """

    places: tuple[int, ...]
    kept_heads: int
    chosen: tuple[Chosen, ...]
    measured: Positions
    window: int

    def seen(self, positions: Int[Tensor, " query"]) -> KeptSets:
        """What queries look at: masks (config, kept_head, query, key)."""
        return KeptSets(
            torch.stack([one.lines.seen(positions) for one in self.chosen]),
            torch.stack([one.stage1.seen(positions) for one in self.chosen]),
        )

    def kept_sets(self, rows: Rows = slice(None)) -> KeptSets:
        """What the prompt's last query looks at, of some of the group's configurations, by their place in it."""
        slashes = self.chosen[0].lines.slash
        found = self.seen(torch.tensor([slashes.shape[1] - 1], device=slashes.device))
        return KeptSets(found.kept[rows].squeeze(2), found.stage1[rows].squeeze(2))

    def whole(self, heads: int) -> Bool[Tensor, "config head key"]:
        """What decoding looks at: everything."""
        slashes = self.chosen[0].lines.slash
        return slashes.new_ones(len(self.places), heads, slashes.shape[1])

    @property
    def budgets(self) -> LinedBudgets:
        """How many entries that is, and those before the window that stage 1 took or that are always in."""
        found = self.kept_sets()
        return LinedBudgets(found.kept.sum(dim=-1), found.stage1.sum(dim=-1) - self.window)


def lined_groups(configs: Sequence[ResolvedConfig], layer: Layer, prompt_tokens: int, sample: str) -> list[LinedGroup]:
    """Those of the configurations that look along lines, by the order in which they come."""
    alike: dict[tuple[int, int, Positions], dict[int, Chosen]] = {}
    for place, config in enumerate(configs):
        if config.has_sparse_prefill:
            chosen = of_budget(config, layer(config), prompt_tokens)
            key = (len(chosen.lines.slash), config.window, measured(config, prompt_tokens, sample))
            alike.setdefault(key, {})[place] = chosen
    return [
        LinedGroup(tuple(found), heads, tuple(found.values()), asked, min(window, prompt_tokens))
        for (heads, window, asked), found in alike.items()
    ]


def of_budget(config: ResolvedConfig, given: LastQueries, prompt_tokens: int) -> Chosen:
    """The lines of a configuration, all where its budget covers the prompt."""
    return choose(config, given) if config.kept_entries(prompt_tokens) < prompt_tokens else everything(config, given)
