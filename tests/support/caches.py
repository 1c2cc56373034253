"""Entries of a full cache chosen by hand."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from perturbkv.cache.entries import KeptEntries


def gather(key: Tensor, value: Tensor, positions: Sequence[Tensor]) -> KeptEntries:
    """One (kept,) of positions per kept set, out of (kv_head, key, d_head)."""
    sharing = len(positions) // len(key)
    keys = [key[head // sharing, kept] for head, kept in enumerate(positions)]
    return KeptEntries.of(keys, [value[head // sharing, kept] for head, kept in enumerate(positions)])
