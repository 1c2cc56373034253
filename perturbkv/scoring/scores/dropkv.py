"""DropKV (https://openreview.net/forum?id=MqfNzH3TVH): squared moves of the window's outputs if one entry alone goes.

s_j = Σ over the window's queries i of (a_ij / (1 − a_ij))² ‖v_j − o_i‖₂², o_i before W_O, a row per query head; means
over a group, then average pooling, 7 wide, as the author's press has it (NVIDIA/kvpress pull request 285). That press
pools over the window's entries too, and adds 1e-6 to 1 − a_ij, since it needs 1 − a_ij > 0. Here the heaviest entry of
each query is a_ij² ‖μ − v_j‖², μ the mean of the others' values, which is the same and has a limit at a = 1.

Distances come from one matrix product: of an entry whose value is within 1e-8 · ‖v_j‖ of an output, without being the
heaviest, rounding is all that is left.
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
class DropKV(Score):
    """Squared error of each window query's output without the entry."""

    name: ClassVar[str] = "dropkv"
    summary: ClassVar[str] = "squared moves of the window's outputs if this entry alone goes, pooled"
    paper: ClassVar[str] = "https://openreview.net/forum?id=MqfNzH3TVH"
    needs: ClassVar[tuple[str, ...]] = ("attention", "distances", "left_out")
    own_defaults: ClassVar[tuple[str, ...]] = ("pool", "kernel")
    holds_norms: ClassVar[bool] = True
    pool: str = option("average", "pooling of the score over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the squared output error without the entry, summed over the window: Σ (a / (1 − a))² ‖v − o‖²."""
        moved = (1 - layer.attention).reciprocal_().mul_(layer.attention).square_().mul_(layer.distances)
        left = layer.left_out
        moved.scatter_(-1, left.index.unsqueeze(-1), (left.weight.square() * left.squared_distance).unsqueeze(-1))
        return moved.sum(dim=-2)[:, : layer.prefix]
