"""Numbers of entries that stay per configuration and kept set: at both ends, in stage 1, in all (METHOD: Allocate).

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
from perturbkv.devices import copy_to_device, to_device
from perturbkv.selection.layer_budget import LayerBudget
from perturbkv.selection.layer_statistics import is_at_ends
from perturbkv.selection.policies import checked
from perturbkv.selection.ranking import Scores
from perturbkv.selection.resolved_config import PrefixCounts, ResolvedConfig
from perturbkv.theory import WORK

Rows = Int[Tensor, " row"] | slice
"""Some of a group's configurations, by index."""


@dataclass(frozen=True, eq=False)
class Budgets:
    """Numbers of blocks of the prefix that stay, per configuration and kept set.

    A block is one entry unless the granularity has larger blocks. The tail of the prompt, which contains the window,
    always stays and is not counted.

    Attributes:
        kept: all blocks that stay.
        stage1: those of them that stage 1 takes or that always stay.
        first, recent: the first and the most recent blocks, which stay whatever their scores.
        blocks: the split of the prompt into blocks and the tail.
        window: number of entries of the window.
    """

    kept: Int[Tensor, "config kept_head"]
    stage1: Int[Tensor, "config kept_head"]
    first: Int[Tensor, "config kept_head"]
    recent: Int[Tensor, "config kept_head"]
    blocks: Blocks
    window: int

    @property
    def kept_entries(self) -> Int[Tensor, "config kept_head"]:
        """Numbers of kept entries, the tail included."""
        return self.kept * self.blocks.size + self.blocks.tail

    @property
    def stage1_entries(self) -> Int[Tensor, "config kept_head"]:
        """Numbers of entries before the window that are in stage 1 or always kept."""
        return self.stage1 * self.blocks.size + self.blocks.tail - self.window

    def is_always_kept(
        self, index: Int[Tensor, "kept_head prefix"], begin: Int[Tensor, " #kept_head"], rows: Rows
    ) -> Bool[Tensor, "config kept_head prefix"]:
        """Return a mask over block indices, True for always-kept blocks of the prefix; `rows` selects configurations.

        `begin` is the index of each kept set's first block.
        """
        first, recent = self.first[rows].unsqueeze(-1), self.recent[rows].unsqueeze(-1)
        return is_at_ends(index, begin.unsqueeze(-1), index.shape[-1], first, recent)


def compute_budgets(configs: Sequence[ResolvedConfig], scores: Scores, prompt_tokens: int) -> Budgets:
    """Return the budgets of configurations with a common ranking, capped at the number of blocks of a kept set."""
    device, window = scores.statistics.norms.device, min(configs[0].window, prompt_tokens)
    blocks = configs[0].blocks(prompt_tokens)
    prefix_counts = [config.prefix_counts(prompt_tokens) for config in configs]
    allocated = [_allocate_blocks(*each, scores, blocks) for each in zip(configs, prefix_counts, strict=True)]
    kept = torch.stack([copy_to_device(counts, device) for counts in allocated])
    if scores.statistics.valid is not None:  # kept sets of several lengths, which are compressed again
        kept = torch.minimum(kept, blocks.full - scores.statistics.begin // blocks.size)
    protected = to_device([(each.first, each.recent) for each in prefix_counts], device).unsqueeze(1)
    recent = torch.minimum(kept, protected[..., 1])
    first = torch.minimum(kept - recent, protected[..., 0])  # where not all fit, the recent ones come first
    always = first + recent
    if configs[0].has_own_stages:
        pairs = zip(configs, prefix_counts, strict=True)
        stage1 = torch.stack([scores.stage1_counts(config, each) for config, each in pairs])
    else:
        least = to_device([[config.least_stage1_blocks(prompt_tokens)] for config in configs], device)
        alphas = [config.alphas(scores.statistics.layer, scores.kept_heads(config)) for config in configs]
        shares = to_device(alphas, device, WORK)
        stage1 = _stage1_blocks(shares, configs, kept - always, always + blocks.tail_blocks)
        stage1 = torch.maximum(stage1, least)
    return Budgets(kept, torch.minimum(always + stage1, kept), first, recent, blocks, window)


def _allocate_blocks(
    config: ResolvedConfig, counts: PrefixCounts, scores: Scores, blocks: Blocks
) -> Int[Tensor, " kept_head"]:
    """Return each kept set's number of prefix blocks: always-kept ones plus those allocated by the policy."""
    statistics, head_scores = scores.statistics, None
    if statistics.head_scores:
        by_head = torch.tensor(statistics.head_scores, dtype=WORK)
        head_scores = by_head.view(statistics.layers, scores.kept_heads(config), -1).mean(dim=-1)
    available = LayerBudget(
        kept_heads=scores.kept_heads(config),
        kept=blocks.tail_blocks + counts.always + counts.free,
        always=blocks.tail_blocks + counts.always,
        layer=statistics.layer,
        layers=statistics.layers,
        prefix=sys.maxsize if statistics.valid is not None else blocks.full - counts.always,
        heads_by_score=lambda: scores.heads_by_score(config, counts),
        head_scores=head_scores,
        model_wide=statistics.model_wide and functools.partial(statistics.model_wide, config, counts),
        window=blocks.tail_blocks,
    )
    return checked.allocate(config.system, config, available) + counts.always


def _stage1_blocks(
    alpha: Float[Tensor, "config kept_head"],
    configs: Sequence[ResolvedConfig],
    free: Int[Tensor, "config kept_head"],
    always: Int[Tensor, "config kept_head"],
) -> Int[Tensor, "config kept_head"]:
    """Return the number of blocks that stage 1 takes by α, per configuration and kept set (METHOD: Select).

    `free` are the numbers of blocks that stay by their scores, `always` those that stay whatever their scores, the tail
    among them.
    """
    total = to_device([[config.selection["split"] == "total"] for config in configs], free.device)
    of_prefix = round_down_entries(alpha * free)
    of_total = (round_down_entries(alpha * (free + always)) - always).clamp(min=0)
    return torch.where(total, of_total, of_prefix).to(torch.int64)
