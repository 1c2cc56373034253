"""OBCache, keys and values (Gu et al., 2025, https://arxiv.org/abs/2510.07651): what the output loses with both.

s_j = `obcache-value` + `obcache-key` + 2 Σ over the window's queries i of a_ij² z_ij (‖v_j‖² − v_j·o_i), which is
Σ_i a_ij² ‖v_j + z_ij (v_j − o_i)‖₂²: never below 0, and computed so, with v_j·o_i out of ‖v_j − o_i‖². The window's
queries vote, as where the paper takes SnapKV's; a row per query head, no pooling, no sinks. Where the two parts cancel
to less than 1e-8 of their lengths, rounding is all that is left.
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
class OBCacheJoint(Score):
    """Squared attention times the value moved by its logit."""

    name: ClassVar[str] = "obcache-joint"
    summary: ClassVar[str] = "what the window's outputs lose with this key and value"
    paper: ClassVar[str] = "https://arxiv.org/abs/2510.07651"
    needs: ClassVar[tuple[str, ...]] = ("attention", "logits", "distances", "outputs", "values")
    holds_norms: ClassVar[bool] = True
    plain_logits: ClassVar[str] = "it takes a logit for the product of a query and a key"

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the joint key-value score Σ a² ((1 + z) (‖v‖² + z ‖v − o‖²) − z ‖o‖²); z: logit, o: output."""
        attention, logits, distances = (
            shown[..., : layer.prefix] for shown in (layer.attention, layer.logits, layer.distances)
        )
        lengths = layer.per_head(layer.values[:, : layer.prefix].to(WORK).square().sum(dim=-1))
        both = (logits * distances).add_(lengths.unsqueeze(-2)).mul_(logits + 1)
        both.addcmul_(logits, layer.outputs.square().sum(dim=-1, keepdim=True), value=-1)
        return both.clamp_(min=0).mul_(attention).mul_(attention).sum(dim=-2)
