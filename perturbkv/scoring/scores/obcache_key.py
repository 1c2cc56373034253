"""OBCache, keys (Gu et al., 2025, https://arxiv.org/abs/2510.07651): what the output loses with a key.

s_j = Σ over the window's queries i of (a_ij z_ij)² · ‖v_j − o_i‖₂², z the logit with its scale: to first order, how far
o_i moves if k_j becomes 0, and z_ij with it. The window's queries vote, as where the paper takes SnapKV's; a row per
query head, no pooling, no sinks. Distances as in `dropkv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score


@dataclass(frozen=True)
class OBCacheKey(Score):
    """Squared attention times logit times the value's distance from the output."""

    name: ClassVar[str] = "obcache-key"
    summary: ClassVar[str] = "what the window's outputs lose with this key"
    paper: ClassVar[str] = "https://arxiv.org/abs/2510.07651"
    needs: ClassVar[tuple[str, ...]] = ("attention", "logits", "distances")
    holds_norms: ClassVar[bool] = True
    plain_logits: ClassVar[str] = "it takes a logit for the product of a query and a key"

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the key score Σ (a z)² ‖v − o‖² over the window's queries, per head; z: logit, o: output."""
        attention, logits, distances = (
            shown[..., : layer.prefix] for shown in (layer.attention, layer.logits, layer.distances)
        )
        return (attention * logits).square_().mul_(distances).sum(dim=-2)
