"""Random: seeded random votes in place of attention, uniform budgets; what any method has to beat.

With the selection `attention` a random set is kept; `two-stage` shows what the projected value norms bring without
any attention. Scores depend on `seed`, sample and layer, not on the device. Neighbours are not pooled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.scoring.window_attention import seeded
from perturbkv.selection.policies.base import LayerAttention, Unpooled, Votes, option


@dataclass(frozen=True)
class RandomVotes:
    """Uniform numbers for the entries before the window."""

    window: int
    seed: int

    def __call__(self, seen: LayerAttention) -> Float[Tensor, "head prefix"]:
        """The same on every device."""
        prefix = max(0, seen.key.shape[1] - self.window)
        return seeded(seen.query.shape[0], prefix, self.seed, seen.sample, seen.layer).to(
            seen.key.device, non_blocking=True
        )


@dataclass(frozen=True)
class Random(Unpooled):
    """Seeded votes."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "seeded random votes: what any method has to beat"
    votes_alone: ClassVar[tuple[str, ...]] = ("seed", *Unpooled.votes_alone)
    seed: int = option(0, "of the random numbers")

    def votes(self, config: EvictionConfig) -> Votes:
        """By seed, sample and layer."""
        return RandomVotes(config.window, self.seed)
