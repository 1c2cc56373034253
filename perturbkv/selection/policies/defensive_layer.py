"""Layer-DefensiveKV (Feng et al., 2025, https://arxiv.org/abs/2510.13334; code: FFY0/DefensiveKV): layers compete too.

As `defensive`, whose file describes score and stage 1, with the budget of all layers shared out among the entries of
all layers. As in the released code an entry of stage 1 competes with the largest score of *its own layer*, so that in a
layer of small scores stage 1 may be cut, its best by mean attention staying. The released window competes so too; here
it always stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.selection.layer_budget import LayerBudget
from perturbkv.selection.policies.defensive import DefensiveKV


@dataclass(frozen=True)
class LayerDefensiveKV(DefensiveKV):
    """Mean attention up to a mass, then the largest scores of the model."""

    name: ClassVar[str] = "defensive-layer"
    summary: ClassVar[str] = "mean attention up to a mass, then worst cases; all layers' heads compete"
    whole_model: ClassVar[bool] = True

    def allocate(self, config: EvictionConfig, available: LayerBudget) -> Int[Tensor, " kept_head"]:
        """Return each kept set's number of entries among the model's highest competing scores."""
        return available.counts_among_model_top()
