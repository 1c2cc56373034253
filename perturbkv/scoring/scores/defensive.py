"""DefensiveKV's score (Feng et al., 2025, https://arxiv.org/abs/2510.13334; code: FFY0/DefensiveKV).

Per query i of the window and query head: p_ij = a_ij pooled over positions (average, 5 wide), scaled so that the head's
entries before the window keep their mass, Σ_j p_ij = Σ_j a_ij. Then, per key/value head,

    m_j = max over the window's queries and the group of p_ij,
    s_j = max(m_j, mean_k m_k) · ν_hj / Σ_h ν_hj,

ν the mean of the group's projected value norms and the sum over the layer's key/value heads. Defence is the maximum in
place of a mean, and the floor under it. The group votes as one, so that query heads with kept sets of their own have
their group's score. Pooling is inside, per query, before any maximum is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.option import option
from perturbkv.configs.resources import CHUNK_BYTES
from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score
from perturbkv.scoring.window_attention import pool
from perturbkv.theory import WORK


@dataclass(frozen=True)
class Defensive(Score):
    """Largest weight that any query gives an entry, at least the mean of these, times a share of value norms."""

    name: ClassVar[str] = "defensive"
    summary: ClassVar[str] = "the most that any query of the window and the group gave, times shares of value norms"
    paper: ClassVar[str] = "https://arxiv.org/abs/2510.13334"
    needs: ClassVar[tuple[str, ...]] = ("attention", "norms")
    own_window: ClassVar[int | None] = 32
    own_defaults: ClassVar[tuple[str, ...]] = ("pool", "kernel")
    holds_norms: ClassVar[bool] = True
    whole_layer: ClassVar[bool] = True
    reduces: ClassVar[str] = "max"
    pools_inside: ClassVar[bool] = True
    pool: str = option("average", "pooling of each query's attention over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip
    kernel: int = option(5, "odd width of the pooling", low=1, high=65_535, odd=True)

    @property
    def needs_prompt(self) -> bool:
        """True, as norms are normalised over heads at equal position, where evicted kept sets differ."""
        return True

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the largest attention weight over queries, at least its mean, times a value-norm share, per head."""
        if not layer.prefix:
            return layer.norms.new_zeros(layer.kv_heads, 0, dtype=WORK)
        shown = layer.parts(CHUNK_BYTES)  # rows of attention in bounded memory; only the norms' sum needs all heads
        rows = [self._largest(part.attention[head, :, : layer.prefix]) for part in shown for head in range(part.heads)]
        largest = torch.stack(rows).view(layer.kv_heads, layer.group, -1).amax(dim=1)
        norms = layer.norms[:, : layer.prefix].to(WORK).view(layer.kv_heads, layer.group, -1).mean(dim=1)
        floored = largest.clamp(min=largest.mean(dim=-1, keepdim=True))
        return floored * norms / norms.sum(dim=0).clamp(min=torch.finfo(WORK).tiny)

    def _largest(self, rows: Float[Tensor, "query prefix"]) -> Float[Tensor, " prefix"]:
        """Return each entry's largest weight over the queries of one head, rows pooled and rescaled to their mass."""
        pooled = pool(rows, self.pool, self.kernel)
        scale = rows.sum(dim=-1) / pooled.sum(dim=-1).clamp(min=torch.finfo(WORK).tiny)
        return (pooled * scale.unsqueeze(-1)).amax(dim=0)
