"""StreamingLLM (Xiao et al., 2023, https://arxiv.org/abs/2309.17453): the first entries and the most recent ones.

`sinks` = 4 first entries (their section 3.2); the other b − sinks are the most recent, of which the last `window`
always stay. No score is looked at: the only selection is `position`.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.config import EvictionConfig
from perturbkv.policies.base import uniform


class StreamingLLM:
    """Uniform budgets, filled by position."""

    def allocate(
        self, config: EvictionConfig, scores: Float[Tensor, "kept_head prefix"], kept: int, window: int
    ) -> Int[Tensor, " kept_head"]:
        """B − w prefix entries for every kept set."""
        return uniform(scores, kept, window)
