"""CAOTE (Goel et al., 2025, https://arxiv.org/abs/2504.14051): how far the output moves if one entry alone goes.

s_j = a_j / (1 − a_j) · ‖o − v_j‖₂ (Theorem 3.2), o = Σ_j a_j v_j before W_O. On top of another method's scores h, a = h
scaled to add up to 1, and o = Σ_j a_j v_j is made of the same weights (its use as a meta-heuristic): here the
window's mean attention, as of SnapKV, whose rows add up to 1 already. So o is the mean of the window's outputs, not the
last query's. One query (`window` = 1) is the paper's own attention score, as of TOVA. A row per query head.

It is computed as a_j · ‖μ − v_j‖, μ the mean of the other entries' values, for the heaviest entry, so that a = 1 gives
its limit; distances of the others are sums of squared differences, without cancellation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.scoring.layer_view import LayerView, leave_out_heaviest
from perturbkv.scoring.score import Score
from perturbkv.theory import WORK


@dataclass(frozen=True)
class CAOTE(Score):
    """Error of the output of the window's mean attention without the entry."""

    name: ClassVar[str] = "caote"
    summary: ClassVar[str] = "how far the window's mean output moves if this entry alone goes"
    paper: ClassVar[str] = "https://arxiv.org/abs/2504.14051"
    needs: ClassVar[tuple[str, ...]] = ("attention", "logits", "values")
    holds_norms: ClassVar[bool] = True

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the distance a ‖o − v‖ / (1 − a) by which removing the entry moves the mean output, per query head."""
        mean, values = layer.attention.mean(dim=-2), layer.values.to(WORK)
        sink, log_totals = layer.sink_attention.mean(dim=-1, keepdim=True), layer.log_totals
        sinks = layer.softmax.sinks
        left = leave_out_heaviest(
            mean.unsqueeze(-2),
            values,
            lambda: (layer.logits - log_totals.unsqueeze(-1)).logsumexp(dim=-2, keepdim=True),
            sink,
            None if sinks is None else (sinks.to(WORK).unsqueeze(-1) - log_totals).logsumexp(dim=-1),
        )
        outputs = left.output.view(layer.kv_heads, layer.group, -1)
        distances = torch.cdist(outputs, values, compute_mode="donot_use_mm_for_euclid_dist").flatten(0, 1)
        moved = mean / (1 - mean) * distances
        return moved.scatter_(-1, left.index, left.weight * left.squared_distance.sqrt())[:, : layer.prefix]
