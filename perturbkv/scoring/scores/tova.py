"""TOVA (Oren et al., 2024, https://arxiv.org/abs/2401.06104): the last query's attention, one choice for all heads.

The weights that the last query gives are averaged over the layer's heads, so that all heads keep the same entries. No
window beside the last entry (`window` = 1), no pooling, uniform budgets. TOVA drops one entry per step while it reads;
here, as for every score, the whole prompt is read first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score


@dataclass(frozen=True)
class TOVA(Score):
    """Attention of the last query, averaged over the layer's heads."""

    name: ClassVar[str] = "tova"
    summary: ClassVar[str] = "the last query's attention, averaged over heads"
    paper: ClassVar[str] = "https://arxiv.org/abs/2401.06104"
    own_window: ClassVar[int | None] = 1
    whole_layer: ClassVar[bool] = True

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the last query's attention on the entry, averaged over heads and repeated for every query head."""
        return layer.attention[:, -1, : layer.prefix].mean(dim=0, keepdim=True).expand(layer.heads, -1)
