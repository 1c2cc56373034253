"""Scores of whole blocks, and the entries of the blocks that stay. `configs.blocks` says how entries lie in blocks."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from perturbkv.configs.blocks import Blocks
from perturbkv.configs.eviction import EvictionConfig


def scoring(config: EvictionConfig) -> tuple[int, str]:
    """Entries of a block, and how their scores become one.

    By position a block is as good as its best place: the one that holds a sink comes first.
    """
    how = "max" if config.selection.name == "position" else config.granularity.options.get("block_score", "sum")
    return config.block, "sum" if config.block == 1 else how


def scores(score: Float[Tensor, "kept_head prefix"], size: int, how: str) -> Float[Tensor, "kept_head block"]:
    """Sum or maximum of each full block's entries before the window; those behind the last full one always stay."""
    if size == 1:
        return score
    heads, prefix = score.shape
    count = prefix // size
    blocks = score[:, : count * size].reshape(heads, count, size)
    return blocks.sum(dim=-1) if how == "sum" else blocks.amax(dim=-1)


def entries(kept: Bool[Tensor, "config kept_head block"], blocks: Blocks) -> Bool[Tensor, "config kept_head key"]:
    """Every entry of the blocks that stay, and the tail."""
    each = kept if blocks.size == 1 else kept.repeat_interleave(blocks.size, dim=-1)
    tail = each.new_ones(*each.shape[:-1], blocks.tail)
    return torch.cat([each, tail], dim=-1)
