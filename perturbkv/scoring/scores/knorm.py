"""KNorm (Devoto et al., 2024, https://arxiv.org/abs/2406.11430): keys of small norm are those that get attention.

s_j = −‖k_j‖₂, of the cached (rotated) key; a row per key/value head, nothing of queries or values. The paper leaves the
first two layers whole; NVIDIA/kvpress scores every layer, as here. Both may drop recent entries; here the window
stays, as for every score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score
from perturbkv.theory import WORK


@dataclass(frozen=True)
class KNorm(Score):
    """Negative norm of an entry's key."""

    name: ClassVar[str] = "knorm"
    summary: ClassVar[str] = "keys of small norm stay; no attention is looked at"
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.11430"
    needs: ClassVar[tuple[str, ...]] = ("keys",)
    signed: ClassVar[bool] = True

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the negative key norm −‖k‖₂, per key/value head."""
        norms: Tensor = torch.linalg.vector_norm(layer.keys[:, : layer.prefix], dim=-1, dtype=WORK)
        return -norms
