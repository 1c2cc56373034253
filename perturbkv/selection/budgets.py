"""How many entries stay, per configuration and kept set: at both ends, in stage 1, in all (METHOD: Allocate).

Nothing here waits for the device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv.configs.entry_counts import round_down_entries
from perturbkv.configs.selections import Blocks
from perturbkv.devices import to_device
from perturbkv.selection.layer_budget import LayerBudget
from perturbkv.selection.layer_statistics import at_ends
from perturbkv.selection.ranking import Scores
from perturbkv.selection.resolved_config import ResolvedConfig
from perturbkv.theory import WORK

Rows = Int[Tensor, " row"] | slice
"""Some of the configurations, by their place."""


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
        self, place: Int[Tensor, "kept_head prefix"], begin: Int[Tensor, " #kept_head"], rows: Rows
    ) -> Bool[Tensor, "config kept_head prefix"]:
        """Whether the blocks at these places of the prefix are among the first or the recent ones."""
        first, recent = self.first[rows].unsqueeze(-1), self.recent[rows].unsqueeze(-1)
        return at_ends(place, begin.unsqueeze(-1), place.shape[-1], first, recent)


def budgets_of(configs: Sequence[ResolvedConfig], scores: Scores, prompt_tokens: int) -> Budgets:
    """Every configuration's, inside what its kept sets hold; they rank alike, so that their blocks are the same."""
    device, window = scores.statistics.norms.device, min(configs[0].window, prompt_tokens)
    blocks = configs[0].blocks(prompt_tokens)
    ends = [config.ends(prompt_tokens) for config in configs]
    shared = [_allocate(config, scores, prompt_tokens) for config in configs]
    kept = torch.stack([counts.to(device, non_blocking=True) for counts in shared])
    if scores.statistics.valid is not None:
        kept = torch.minimum(kept, blocks.full - scores.statistics.begin // blocks.size)
    both = [(each.first, each.recent) for each in ends]
    asked_first, asked_recent = to_device(both, device).unsqueeze(1).unbind(dim=-1)
    recent = torch.minimum(kept, asked_recent)
    first = torch.minimum(kept - recent, asked_first)
    always = first + recent
    if configs[0].has_own_stages:
        stage1 = torch.stack([scores.first_counts(config, own) for config, own in zip(configs, ends, strict=True)])
    else:
        least = to_device([[config.guaranteed(prompt_tokens)] for config in configs], device)
        shares = _alphas(configs, scores)
        stage1 = torch.maximum(_stage1(shares, configs, kept - always, always + blocks.tail_blocks), least)
    return Budgets(kept, torch.minimum(always + stage1, kept), first, recent, blocks, window)


def _allocate(config: ResolvedConfig, scores: Scores, prompt_tokens: int) -> Int[Tensor, " kept_head"]:
    """Blocks of each kept set's prefix: those that always stay, and its part of the others as the policy shares out."""
    statistics, blocks = scores.statistics, config.blocks(prompt_tokens)
    ends, given = config.ends(prompt_tokens), None
    if statistics.head_scores:
        by_head = torch.tensor(statistics.head_scores, dtype=WORK)
        given = by_head.view(statistics.layers, scores.kept_heads(config), -1).mean(dim=-1)
    available = LayerBudget(
        kept_heads=scores.kept_heads(config),
        kept=blocks.tail_blocks + ends.always + ends.free,
        always=blocks.tail_blocks + ends.always,
        layer=statistics.layer,
        layers=statistics.layers,
        prefix=sys.maxsize if statistics.valid is not None else blocks.full - ends.always,
        heads_in_order=lambda: scores.heads_in_order(config, ends),
        head_scores=given,
        of_model=statistics.of_model and functools.partial(statistics.of_model, config, ends),
        window=blocks.tail_blocks,
    )
    return config.system.allocate(config, available) + ends.always


def _alphas(configs: Sequence[ResolvedConfig], scores: Scores) -> Float[Tensor, "config kept_head"]:
    """Each kept set's share of stage 1."""
    layer, device = scores.statistics.layer, scores.statistics.norms.device
    return to_device([config.alphas(layer, scores.kept_heads(config)) for config in configs], device, WORK)


def _stage1(
    alpha: Float[Tensor, "config kept_head"],
    configs: Sequence[ResolvedConfig],
    free: Int[Tensor, "config kept_head"],
    always: Int[Tensor, "config kept_head"],
) -> Int[Tensor, "config kept_head"]:
    """Blocks that stage 1 takes of `free` ones beside those that `always` stay (METHOD: Select)."""
    total = to_device([[config.selection["split"] == "total"] for config in configs], free.device)
    of_prefix = round_down_entries(alpha * free)
    of_total = (round_down_entries(alpha * (free + always)) - always).clamp(min=0)
    return torch.where(total, of_total, of_prefix).to(torch.int64)
