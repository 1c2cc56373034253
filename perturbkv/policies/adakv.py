"""AdaKV (Feng et al., 2024, https://arxiv.org/abs/2407.11550): a layer's heads compete for its budget.

The pooled scores of all the layer's heads are flattened and the H · (b − w) largest counted per head; a head keeps
(1 − `floor`) of its count and `floor` of the uniform share (their Algorithm 1 with the safeguard). `floor` = 0.2 as in
their paper and released code, where it is a share of b − w too, the window counting apart.

The released code rounds each head's number by itself; here they are rounded by largest remainder, so that the layer
keeps H · b entries, to the entry. Equal scores of different heads go to the earlier position, then to the earlier head.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from perturbkv import theory
from perturbkv.eviction import EvictionConfig
from perturbkv.policies.base import Policy, Room, apportion


class AdaKV(Policy):
    """Window votes, budgets by head."""

    def allocate(self, config: EvictionConfig, room: Room) -> Int[Tensor, " kept_head"]:
        """The mixture of a head's count among the layer's largest scores and the uniform share."""
        heads, mean = room.kept_heads, room.kept - room.window
        largest = room.heads_in_order()[: heads * mean]
        counts = torch.zeros(heads, dtype=theory.WORK, device=largest.device)
        counts.scatter_add_(0, largest, torch.ones_like(largest, dtype=theory.WORK))
        return apportion((1 - config.floor) * counts + config.floor * mean, heads * mean)
