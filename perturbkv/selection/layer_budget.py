"""What a policy shares out in one layer, and what it may look at to do so.

How entries of several kept sets compete for one budget: by their scores, all in one order.

A row is a kept set: of one layer, or of all layers, one below the other. Equal scores go to the earlier position, then
to the earlier row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv import theory
from perturbkv.errors import ConfigError


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


_Made = TypeVar("_Made")


@dataclass(frozen=True)
class LayerBudget:
    """What budgets may look at in one layer; of whole blocks every entry here is a block (`configs.blocks`).

    Attributes:
        kept_heads: kept sets of the layer.
        kept: entries per kept set on the average, all that stays.
        always: those of them that stay in every kept set: the window and what is protected.
        layer, layers: which of how many.
        prefix: entries beside those that always stay, alike in all layers; where a cache that has grown uneven is
            compressed again, more than any budget, and the selection keeps what there is.
        heads_in_order: the kept set of every entry before the window, by descending pooled score; entries that always
            stay, and those that a kept set lacks, come last.
        head_scores: given scores of all heads, for headkv.
        of_model: makes something of all layers' scores (kept_head, place), in their order, once for each hashable key;
            what always stays is not among them. None where a cache is compressed again, layer by layer.
        window: of what always stays that which the window takes.
    """

    kept_heads: int
    kept: int
    always: int
    layer: int
    layers: int
    prefix: int
    heads_in_order: Callable[[], Int[Tensor, " entry"]]
    head_scores: Float[Tensor, "layer kept_head"] | None = None
    of_model: Callable[[Any, Callable[[Iterable[Tensor]], Any]], Any] | None = None
    window: int = 0

    @property
    def free(self) -> int:
        """Entries per kept set, on the average, beside those that always stay: what is shared out."""
        return self.kept - self.always

    def all_layers(self, key: Any, make: Callable[[Iterable[Tensor]], _Made]) -> _Made:
        """What `make` gives of all layers' scores, made once. Raises ConfigError where they are not there."""
        if self.of_model is None:
            msg = "budgets that look at all layers need a whole prompt; choose another policy"
            raise ConfigError(msg)
        made: _Made = self.of_model(key, make)
        return made

    def of_the_layers_largest(self) -> Int[Tensor, " kept_head"]:
        """How many of the layer's largest scores each of its kept sets has."""
        order = self.heads_in_order()[: self.kept_heads * self.free]
        return counted(order, self.kept_heads).to(torch.int64)

    def of_the_models_largest(self) -> Int[Tensor, " kept_head"]:
        """How many of the largest scores of all layers each of this layer's kept sets has."""
        rows, total = self.layers * self.kept_heads, self.layers * self.kept_heads * self.free
        order = self.all_layers("order", in_order_of_all)
        counts = self.all_layers(("counts", self.free), lambda _: counted(order[:total], rows).to(torch.int64))
        return counts.view(self.layers, -1)[self.layer]

    def uniform(self, entries: int) -> Int[Tensor, " kept_head"]:
        """The same number of entries for every kept set."""
        return torch.full((self.kept_heads,), entries, dtype=torch.int64)
