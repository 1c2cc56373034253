"""TOVA (Oren et al., 2024, https://arxiv.org/abs/2401.06104): the last query's attention, one choice for all heads.

The weights that the last query gives are averaged over the layer's heads, so that all heads keep the same entries. No
window beside the last entry (`window` = 1), no pooling, uniform budgets. TOVA drops one entry per step while it reads;
here, as for every policy, the whole prompt is read first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.scoring.window_attention import window_attention
from perturbkv.selection.policies.base import LayerAttention, Unpooled, Votes


@dataclass(frozen=True)
class LastVote:
    """The last query's softmax row, averaged over heads, for the entries before the window."""

    window: int

    def __call__(self, seen: LayerAttention) -> Float[Tensor, "head prefix"]:
        """The same row for every head."""
        row = window_attention(seen.query[:, -1:], seen.key, seen.scale)
        mean = row.mean(dim=0, keepdim=True)
        return mean[:, : max(0, seen.key.shape[1] - self.window)].expand(seen.query.shape[0], -1)


@dataclass(frozen=True)
class TOVA(Unpooled):
    """The last query votes for all heads."""

    name: ClassVar[str] = "tova"
    summary: ClassVar[str] = "the last query's attention, averaged over heads"
    paper: ClassVar[str] = "https://arxiv.org/abs/2401.06104"
    own_window: ClassVar[int | None] = 1

    def votes(self, config: EvictionConfig) -> Votes:
        """The last query."""
        return LastVote(config.window)
