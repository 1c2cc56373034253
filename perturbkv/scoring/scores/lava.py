"""LAVa's score (Shen et al., 2025, https://arxiv.org/abs/2509.09754; code: MGDDestiny/Lava).

s_j = pool(mean over the window's queries of a_ij) · max_k ‖v_k‖₁ of the query head, max-pooled, 7 wide; a kept set of
several query heads takes the largest of theirs. The factor is one number per head: it bounds what the loss of any entry
of the head can do, and makes heads comparable. As in the released code the maximum goes over the entries before the
window, and every head is pooled before its group's maximum is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.option import option
from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score
from perturbkv.theory import WORK


@dataclass(frozen=True)
class LAVa(Score):
    """Mean attention times the head's largest value norm."""

    name: ClassVar[str] = "lava"
    summary: ClassVar[str] = "mean attention times the head's largest value norm, pooled; largest of a group"
    paper: ClassVar[str] = "https://arxiv.org/abs/2509.09754"
    needs: ClassVar[tuple[str, ...]] = ("attention", "values")
    own_window: ClassVar[int | None] = 32
    own_defaults: ClassVar[tuple[str, ...]] = ("pool", "kernel")
    reduces: ClassVar[str] = "max"
    pool: str = option("max", "pooling of the score over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the window's mean attention on the entry times the head's largest ‖v‖₁, per query head."""
        mean = layer.attention[..., : layer.prefix].mean(dim=-2)
        if not layer.prefix:
            return mean
        largest = layer.values[:, : layer.prefix].to(WORK).abs().sum(dim=-1).amax(dim=-1)
        return mean * layer.per_head(largest).unsqueeze(-1)
