"""Projected value norms ν = ‖V_i W_O^h‖₁ without ever holding V W_O (METHOD: Notation)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

DEFAULT_CHUNK_BYTES = 256 * 2**20
_CACHE_BYTES = 2 * 2**20
"""On a CPU a tile that stays in the cache is reduced where it was made: fastest well below any memory bound."""


def projected_value_norms(
    value: Float[Tensor, "kv_head key d_head"],
    w_o: Float[Tensor, "d_model head_d_head"],
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Float[Tensor, "head key"]:
    """ν_{h,i} = ‖V_i W_O^h‖₁ in float32 (float64 for a float64 model), tile by tile.

    `w_o` is `o_proj.weight`. The working memory beside inputs and result stays under `chunk_bytes`, or under one
    entry's projections where those are larger. One product serves all query heads of a key/value head.
    """
    kv_heads, keys, d_head = value.shape
    dtype = torch.promote_types(value.dtype, torch.float32)
    group = w_o.shape[1] // (kv_heads * d_head)
    norms = torch.empty(kv_heads, group, keys, dtype=dtype, device=value.device)
    tile = _tile_entries(group * w_o.shape[0] * dtype.itemsize, keys, value.device, chunk_bytes)
    for kv_head in range(kv_heads):
        columns = w_o[:, kv_head * group * d_head : (kv_head + 1) * group * d_head].to(dtype)
        per_head = columns.view(-1, group, d_head).permute(2, 1, 0).reshape(d_head, -1)
        for start in range(0, keys, tile):
            rows = value[kv_head, start : start + tile].to(dtype)
            projected = (rows @ per_head).view(len(rows), group, -1)
            norms[kv_head, :, start : start + tile] = torch.linalg.vector_norm(projected, ord=1, dim=-1).T
    return norms.flatten(0, 1)


def _tile_entries(entry_bytes: int, keys: int, device: torch.device, chunk_bytes: int) -> int:
    """Entries whose projections fit the bound."""
    bound = min(chunk_bytes, _CACHE_BYTES) if device.type == "cpu" else chunk_bytes
    return max(1, min(keys, bound // entry_bytes))
