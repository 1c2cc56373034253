"""OBCache, values (Gu et al., 2025, https://arxiv.org/abs/2510.07651): what the output loses with a value.

s_j = (Σ over the window's queries i of a_ij²) · ‖v_j‖₂²: optimal brain damage of setting v_j to 0, the other weights
as they are. The window's queries vote, as where the paper takes SnapKV's; a row per query head, no pooling, no sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score
from perturbkv.theory import WORK


@dataclass(frozen=True)
class OBCacheValue(Score):
    """Squared attention times the value's squared norm."""

    name: ClassVar[str] = "obcache-value"
    summary: ClassVar[str] = "what the window's outputs lose with this value"
    paper: ClassVar[str] = "https://arxiv.org/abs/2510.07651"
    needs: ClassVar[tuple[str, ...]] = ("attention", "values")
    holds_norms: ClassVar[bool] = True

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the value score Σ a² ‖v‖² over the window's queries, a the attention weight, per query head."""
        lengths = layer.values[:, : layer.prefix].to(WORK).square().sum(dim=-1)
        return layer.attention[..., : layer.prefix].square().sum(dim=-2) * layer.per_head(lengths)
