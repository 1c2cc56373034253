"""What configurations look at in one layer that evict nothing and read the prompt along lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.selection.budgets import Rows
from perturbkv.selection.kept_sets import KeptSets
from perturbkv.selection.prompt_queries import Positions, measured
from perturbkv.selection.sparse_lines import Chosen, LastQueries, choose, everything

Layer = Callable[[EvictionConfig], LastQueries]
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


def lined_groups(configs: Sequence[EvictionConfig], layer: Layer, prompt_tokens: int, sample: str) -> list[LinedGroup]:
    """Those of the configurations that look along lines, by the order in which they come."""
    alike: dict[tuple[int, int, Positions], dict[int, Chosen]] = {}
    for place, config in enumerate(configs):
        if config.lined:
            chosen = of_budget(config, layer(config), prompt_tokens)
            key = (len(chosen.lines.slash), config.window, measured(config, prompt_tokens, sample))
            alike.setdefault(key, {})[place] = chosen
    return [
        LinedGroup(tuple(found), heads, tuple(found.values()), asked, min(window, prompt_tokens))
        for (heads, window, asked), found in alike.items()
    ]


def of_budget(config: EvictionConfig, given: LastQueries, prompt_tokens: int) -> Chosen:
    """The lines of a configuration, all where its budget covers the prompt."""
    return choose(config, given) if config.kept_entries(prompt_tokens) < prompt_tokens else everything(config, given)
