"""What an eviction system decides: how many prefix entries each head may keep, and which selections it takes."""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.config import EvictionConfig


class Policy(Protocol):
    """One eviction system. Which entries fill the budgets is the selection's part."""

    def allocate(
        self, config: EvictionConfig, scores: Float[Tensor, "kept_head prefix"], kept: int, window: int
    ) -> Int[Tensor, " kept_head"]:
        """Prefix entries per kept set of one layer.

        `scores` are the pooled scores, `kept` the entries per head with the window of `window` entries included.
        """


def uniform(scores: Float[Tensor, "kept_head prefix"], kept: int, window: int) -> Int[Tensor, " kept_head"]:
    """The same number of prefix entries for every kept set."""
    return torch.full((scores.shape[0],), kept - window, dtype=torch.int64, device=scores.device)
