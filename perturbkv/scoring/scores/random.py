"""Random: seeded numbers in place of attention; what any score has to beat (no paper: a control).

With the selection `attention` a random set is kept; `two-stage` shows what the projected value norms bring without
any attention. Scores depend on `seed`, sample and layer, not on the device. Neighbours are not pooled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.option import option
from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score
from perturbkv.scoring.window_attention import draw_uniform


@dataclass(frozen=True)
class Random(Score):
    """Uniform random numbers."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "seeded random numbers: what any score has to beat"
    needs: ClassVar[tuple[str, ...]] = ()
    whole_layer: ClassVar[bool] = True
    seed: int = option(0, "of the random numbers")

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return uniform random numbers per query head, the same on every device."""
        return draw_uniform(layer.heads, layer.prefix, self.seed, layer.sample, layer.layer)
