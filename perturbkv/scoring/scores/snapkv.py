"""SnapKV (Li et al., 2024, https://arxiv.org/abs/2404.14469): the window votes, neighbours are pooled.

s_j = mean over the window's queries i of a_ij (paper, Algorithm 2, line 3), then max-pooled, 7 wide (section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.option import option
from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score


@dataclass(frozen=True)
class SnapKV(Score):
    """Mean attention of the window's queries."""

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "mean attention of the window's queries, pooled"
    paper: ClassVar[str] = "https://arxiv.org/abs/2404.14469"
    own_defaults: ClassVar[tuple[str, ...]] = ()
    pool: str = option("max", "pooling of the score over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the mean attention (Ā) of the window's queries on the entry, per query head."""
        return layer.attention[..., : layer.prefix].mean(dim=-2)
