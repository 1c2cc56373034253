"""R-KV (Cai et al., 2025, https://arxiv.org/abs/2505.24133; code: Zefan-Cai/R-KV): importance less redundancy.

Made for a cache that is compressed again and again while a model reasons. A row per key/value head, over the n entries
of the cache, the window's among them:

    s_j = λ · I_j − (1 − λ) · R_j,
    I_j = pool(mean over the window's queries i of softmax_j(max over the group's heads of z_ij)),
    R_j = softmax_j(1/n · Σ_i c_ij), c_ij = cos(k_i, k_j) and c_ii = 0.

Importance I: the softmax runs over the entries before the window alone, and is max-pooled, 7 wide. Redundancy R: of
every key i the `spared` = 1 latest keys (the paper's β) whose cosine is above `threshold` = 0.5 count 0 in its sum, so
that the last of a row of similar keys stays. As in the released code a key that has fewer such keys spares entry 0 in
their place. `lambda` = 0.07 and a window of 8 are the released code's defaults; the paper has λ = 0.1.

Keys are rotated, as they are cached. A score may be below 0. All cosines of a layer, n² for each key/value head, are
made in blocks; none is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.option import option
from perturbkv.configs.resources import CHUNK_BYTES
from perturbkv.devices import working_bytes
from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score
from perturbkv.scoring.window_attention import pool
from perturbkv.theory import WORK


@dataclass(frozen=True)
class RKV(Score):
    """Importance by the window's attention, less redundancy by the keys' cosines."""

    name: ClassVar[str] = "r-kv"
    summary: ClassVar[str] = "the window's attention, pooled, less how much an entry's key is like others"
    paper: ClassVar[str] = "https://arxiv.org/abs/2505.24133"
    needs: ClassVar[tuple[str, ...]] = ("logits", "keys")
    own_window: ClassVar[int | None] = 8
    own_defaults: ClassVar[tuple[str, ...]] = ("pool", "kernel")
    signed: ClassVar[bool] = True
    pools_inside: ClassVar[bool] = True
    lambda_: float = option(0.07, "weight of importance; 1 − lambda is that of redundancy", high=1)
    threshold: float = option(0.5, "cosine above which two keys are similar", high=1)
    spared: int = option(1, "latest similar keys of each key that it does not make redundant")
    pool: str = option("max", "pooling of importance over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return λ · importance − (1 − λ) · redundancy, per key/value head."""
        logits = layer.logits[..., : layer.prefix]
        largest = logits.view(layer.kv_heads, layer.group, *logits.shape[1:]).amax(dim=1)
        importance = pool(largest.softmax(dim=-1).mean(dim=-2), self.pool, self.kernel)
        redundancy = self._mean_cosines(layer.keys).softmax(dim=-1)[:, : layer.prefix]
        return self.lambda_ * importance - (1 - self.lambda_) * redundancy

    def _mean_cosines(self, keys: Float[Tensor, "kv_head key d_key"]) -> Float[Tensor, "kv_head key"]:
        """Return each key's mean cosine with the other keys, 0 with those that spare it; sums are in float64."""
        heads, count, _ = keys.shape
        dtype = torch.promote_types(keys.dtype, torch.float32)
        unit = keys.to(dtype)
        unit = unit / (torch.linalg.vector_norm(unit, dim=-1, keepdim=True) + 1e-8)
        places = torch.arange(count, device=keys.device)
        total = torch.zeros(heads, count, dtype=WORK, device=keys.device)
        rows = max(1, working_bytes(keys.device, CHUNK_BYTES) // ((dtype.itemsize + places.itemsize) * heads * count))
        for begin in range(0, count, rows):
            own = slice(begin, begin + rows)
            cosines = unit[:, own] @ unit.mT
            cosines.masked_fill_(places == places[own].unsqueeze(-1), 0)
            similar = torch.where(cosines > self.threshold, places, 0)
            latest = similar.topk(min(self.spared, count), dim=-1).values
            total += cosines.scatter_(-1, latest, 0).sum(dim=1, dtype=WORK)
        return total / count
