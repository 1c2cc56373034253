"""PyramidKV (Cai et al., 2024, https://arxiv.org/abs/2406.02069): lower layers keep more, upper layers less.

With p = b − w prefix entries per head on the average, the last layer keeps p / β of them, the first 2p − p / β, and the
layers between lie on a line (their section 4.2). `pyramid_beta` = 20 as in their released code. Where the prompt has
fewer entries than the first layer's share, that layer keeps all and the line is laid so that the mean stays p.

The released code rounds the slope down and so spends other than L · p entries; here the shares are rounded by largest
remainder and the total is the uniform one, to the entry.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from perturbkv import theory
from perturbkv.eviction import EvictionConfig
from perturbkv.policies.base import Policy, Room, apportion


class PyramidKV(Policy):
    """Window votes, budgets by layer."""

    def allocate(self, config: EvictionConfig, room: Room) -> Int[Tensor, " kept_head"]:
        """The layer's place on the line, for every kept set."""
        mean = room.kept - room.window
        return layer_budgets(mean, room.prefix, room.layers, config.pyramid_beta)[room.layer].expand(room.kept_heads)


def layer_budgets(mean: int, prefix: int, layers: int, beta: float) -> Int[Tensor, " layer"]:
    """Prefix entries per head of each layer: their sum is `layers` · `mean`, none above `prefix`."""
    if layers == 1:
        return torch.tensor([mean])
    first = min(2 * mean - mean / beta, prefix)
    step = 2 * (first - mean) / (layers - 1)
    line = first - step * torch.arange(layers, dtype=theory.WORK)
    return apportion(line, layers * mean, prefix)
