"""Building blocks of scores: causal softmax rows, pooling over positions, reduction of groups, seeded numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from perturbkv.devices import block_bytes
from perturbkv.theory import WORK, Softmax


def causal_logits(
    queries: Float[Tensor, "_head _query d_key"], keys: Float[Tensor, "_kv_head _key d_key"], softmax: Softmax
) -> Float[Tensor, "_head _query _key"]:
    """Return the attention logits of queries that are the last tokens of the keys; −∞ on later keys."""
    heads, count, d_key = queries.shape
    logits = softmax.logits(queries.reshape(len(keys), -1, d_key), keys).view(heads, count, -1)
    key = torch.arange(keys.shape[1], device=keys.device)
    return logits.masked_fill_(key > key[key.shape[0] - count :].unsqueeze(-1), -torch.inf)


def causal_blocks(
    queries: Float[Tensor, "_head _query d_key"],
    keys: Float[Tensor, "_kv_head _key d_key"],
    softmax: Softmax,
    dtype: torch.dtype,
) -> Iterator[tuple[slice, slice, Float[Tensor, "_head _query _key"]]]:
    """Yield (slice of heads, slice of queries, their attention weights in `dtype`), block by block.

    The queries are the last tokens of the keys; a block has the keys up to its last query. A GPU takes all heads at
    once, a CPU those of a key/value head; both as many queries as `block_bytes` allows.
    """
    kv_heads, (heads, count) = len(keys), queries.shape[:2]
    group, first = heads // kv_heads, keys.shape[1] - count
    together = kv_heads if keys.is_cuda else 1
    rows = max(1, block_bytes(keys.device) // (dtype.itemsize * together * group * keys.shape[1]))
    for start in range(0, kv_heads, together):
        block = slice(start * group, (start + together) * group)
        for begin in range(0, count, rows):
            end = min(begin + rows, count)
            seen, part = keys[start : start + together, : first + end].to(dtype), queries[block, begin:end].to(dtype)
            yield block, slice(begin, end), softmax.of_heads(block).weights(causal_logits(part, seen, softmax))[0]


def pool(score: Float[Tensor, "head prefix"], kind: str, kernel: int) -> Float[Tensor, "head prefix"]:
    """Return the scores pooled over `kernel` neighbouring positions; `kind` is `max`, `average` or `none`.

    `average` pads both ends with zeros, `max` takes those neighbours that there are.
    """
    if kind == "none" or score.shape[-1] == 0:
        return score
    pooling = F.max_pool1d if kind == "max" else F.avg_pool1d
    return pooling(score.unsqueeze(0), kernel, stride=1, padding=kernel // 2).squeeze(0)


def pool_signed(
    score: Float[Tensor, "head prefix"], kind: str, kernel: int, valid: Bool[Tensor, "head prefix"]
) -> Float[Tensor, "head prefix"]:
    """Return pooled scores, as `pool` does; positions beyond the ends or not `valid` are ignored.

    Scores may be negative.

    The result has no meaning at positions that are not valid.
    """
    if kind != "average":
        return pool(score.masked_fill(~valid, -torch.inf), kind, kernel)
    counts = pool(valid.to(score.dtype), kind, kernel)
    return pool(score.masked_fill(~valid, 0.0), kind, kernel) / counts.clamp(min=torch.finfo(score.dtype).tiny)


def reduce_group(
    score: Float[Tensor, "rows prefix"], kept_heads: int, reduction: str = "mean"
) -> Float[Tensor, "kept_head prefix"]:
    """Return scores per kept set, reduced by `reduction` (`mean` or `max`) over the rows that share a kept set.

    Rows are repeated where there are fewer of them than kept sets.
    """
    if kept_heads >= score.shape[0]:
        return score.repeat_interleave(kept_heads // score.shape[0], dim=0) if kept_heads > score.shape[0] else score
    grouped = score.view(kept_heads, score.shape[0] // kept_heads, score.shape[-1])
    return grouped.mean(dim=1) if reduction == "mean" else grouped.amax(dim=1)


def draw_uniform(heads: int, prefix: int, seed: int, sample: str, layer: int) -> Float[Tensor, "head prefix"]:
    """Return random numbers from 0 to 1, on the CPU, determined by seed, the sample's id and the layer's index."""
    digest = hashlib.sha256(f"{seed}/{sample}/{layer}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.rand((heads, prefix), generator=generator, dtype=WORK)
