"""Random: seeded random votes in place of attention, uniform budgets; what any method has to beat.

With the selection `attention` a random set is kept; `two-stage` shows what the projected value norms bring without
any attention. Scores depend on `seed`, sample and layer, not on the device. Neighbours are not pooled.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.scoring.window_attention import seeded
from perturbkv.selection.policies.base import LayerAttention, Policy, Votes


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


class Random(Policy):
    """Seeded votes."""

    def votes(self, config: EvictionConfig) -> Votes:
        """By seed, sample and layer."""
        return RandomVotes(config.window, config.seed)
