"""From the window's attention to a score per entry: accumulate, then pool (METHOD: A configuration)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from perturbkv.theory import WORK


def window_attention(
    query: Float[Tensor, "head query d_head"], key: Float[Tensor, "kv_head key d_head"], scale: float
) -> Float[Tensor, "head prefix"]:
    """Ā: mean over the window's softmax rows, causal inside the window, for the entries before it.

    `query` holds the window's w queries, `key` all n entries of the prompt; prefix = n − w (paper, Algorithm 2,
    line 3).
    """
    heads, window, d_head = query.shape
    kv_heads, keys, _ = key.shape
    rows = torch.arange(window, device=key.device)
    future = torch.arange(keys, device=key.device) > keys - window + rows.unsqueeze(-1)
    accumulated = []
    for kv_head, queries in enumerate(query.view(kv_heads, heads // kv_heads, window, d_head)):
        logits = (queries.to(WORK) @ key[kv_head].to(WORK).T * scale).masked_fill_(future, -torch.inf)
        accumulated.append(logits.softmax(dim=-1)[..., : keys - window].mean(dim=-2))
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
