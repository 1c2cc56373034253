"""From attention to a score per entry: accumulate, then pool (METHOD: A configuration).

How attention is accumulated is the eviction system's choice (`policies`); most take the window's mean, which is here.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from perturbkv.theory import WORK


def causal_rows(
    query: Float[Tensor, "group query d_head"], key: Float[Tensor, "key d_head"], scale: float, first: int
) -> Float[Tensor, "group query key"]:
    """Softmax rows of one key/value head's queries, which stand at `first`, `first` + 1, …; in the query's dtype."""
    position = torch.arange(first, first + query.shape[1], device=key.device)
    future = torch.arange(key.shape[0], device=key.device) > position.unsqueeze(-1)
    return (query @ key.T * scale).masked_fill_(future, -torch.inf).softmax(dim=-1)


def window_attention(
    query: Float[Tensor, "head query d_head"], key: Float[Tensor, "kv_head key d_head"], scale: float
) -> Float[Tensor, "head prefix"]:
    """Ā: mean over the window's softmax rows, causal inside the window, for the entries before it.

    `query` holds the window's w queries, `key` all n entries of the prompt; prefix = n − w (paper, Algorithm 2,
    line 3).
    """
    heads, window, d_head = query.shape
    kv_heads, keys, _ = key.shape
    accumulated = []
    for kv_head, queries in enumerate(query.view(kv_heads, heads // kv_heads, window, d_head)):
        rows = causal_rows(queries.to(WORK), key[kv_head].to(WORK), scale, keys - window)
        accumulated.append(rows[..., : keys - window].mean(dim=-2))
    return torch.cat(accumulated)


def pool(score: Float[Tensor, "head prefix"], kind: str, kernel: int) -> Float[Tensor, "head prefix"]:
    """Ā': scores pooled over neighbouring positions, same length. `average` counts the padding's zeros."""
    if kind == "none" or score.shape[-1] == 0:
        return score
    pooling = F.max_pool1d if kind == "max" else F.avg_pool1d
    return pooling(score.unsqueeze(0), kernel, stride=1, padding=kernel // 2).squeeze(0)


def reduce_group(
    score: Float[Tensor, "head prefix"], kept_heads: int, how: str = "mean"
) -> Float[Tensor, "kept_head prefix"]:
    """Scores per kept set: unchanged per query head, mean or max over a key/value head's group."""
    if kept_heads == score.shape[0]:
        return score
    grouped = score.view(kept_heads, score.shape[0] // kept_heads, score.shape[-1])
    return grouped.mean(dim=1) if how == "mean" else grouped.amax(dim=1)


def seeded(heads: int, prefix: int, seed: int, sample: str, layer: int) -> Float[Tensor, "head prefix"]:
    """Uniform numbers that depend on seed, sample and layer alone, not on the device; on the CPU."""
    digest = hashlib.sha256(f"{seed}/{sample}/{layer}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.rand((heads, prefix), generator=generator, dtype=WORK)
