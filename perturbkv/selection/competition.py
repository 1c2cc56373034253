"""How entries of several kept sets compete for one budget: by their scores, all in one order.

A row is a kept set: of one layer, or of all layers, one below the other. Equal scores go to the earlier position, then
to the earlier row.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv import theory


def in_order(scores: Float[Tensor, "row place"]) -> Int[Tensor, " entry"]:
    """The row of every entry, by descending score."""
    return scores.T.flatten().sort(descending=True, stable=True).indices % len(scores)


def in_order_of_all(layers: Iterable[Float[Tensor, "row place"]]) -> Int[Tensor, " entry"]:
    """The same with all layers' rows, one below the other."""
    return in_order(torch.cat(list(layers)))


def counted(order: Int[Tensor, " entry"], rows: int) -> Float[Tensor, " row"]:
    """How often each row is named."""
    counts = torch.zeros(rows, dtype=theory.WORK, device=order.device)
    return counts.scatter_add_(0, order, torch.ones_like(order, dtype=theory.WORK))


def beyond(order: Int[Tensor, " entry"], rows: int, mean: int, least: int) -> Int[Tensor, " row"]:
    """Entries per row: its own `least` best, and the largest of the others up to `rows` · `mean` in all.

    `order` names each row as often as the others.
    """
    by_row = order.argsort(stable=True)
    place = torch.arange(len(order), device=order.device)
    nth = torch.empty_like(order).scatter_(0, by_row, place % max(1, len(order) // rows))  # of its own row's
    free = nth >= least
    taken = free & (free.cumsum(dim=0) <= rows * (mean - least))
    return least + torch.zeros(rows, dtype=torch.int64, device=order.device).scatter_add_(0, order, taken.long())
