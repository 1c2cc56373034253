"""The budget of one layer as a policy sees it, and the competition of several kept sets for one budget.

Kept sets compete by their scores, all in one order. A row is a kept set of one layer, or of all layers concatenated.
Equal scores go to the earlier position, then to the earlier row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv import theory
from perturbkv.devices import move_to_first_device
from perturbkv.errors import ConfigError


def rows_by_score(scores: Float[Tensor, "row position"]) -> Int[Tensor, " entry"]:
    """Return the row index of every entry of the score matrix, sorted by descending score."""
    return scores.T.flatten().sort(descending=True, stable=True).indices % len(scores)


def count_rows(order: Int[Tensor, " entry"], rows: int) -> Float[Tensor, " row"]:
    """Return the number of occurrences of each row index 0 … `rows` − 1 in `order`."""
    counts = torch.zeros(rows, dtype=theory.WORK, device=order.device)
    return counts.scatter_add_(0, order, torch.ones_like(order, dtype=theory.WORK))


def allocate_above_minimum(order: Int[Tensor, " entry"], rows: int, mean: int, least: int) -> Int[Tensor, " row"]:
    """Return the number of entries per row: at least `least`, the rest by global score order, `rows` · `mean` in total.

    `order` are the entries' rows by descending score; every row occurs equally often.
    """
    by_row = order.argsort(stable=True)  # the entries of row 0 by score, then those of row 1, …
    index = torch.arange(len(order), device=order.device)
    rank_in_row = torch.empty_like(order).scatter_(0, by_row, index % max(1, len(order) // rows))
    free = rank_in_row >= least
    taken = free & (free.cumsum(dim=0) <= rows * (mean - least))
    return least + torch.zeros(rows, dtype=torch.int64, device=order.device).scatter_add_(0, order, taken.long())


_Result = TypeVar("_Result")


@dataclass(frozen=True)
class LayerBudget:
    """The budget of one layer, with the data that a policy may use to allocate it to kept sets.

    With a granularity of blocks, every entry here is a block (`configs.selections.Blocks`).

    Attributes:
        kept_heads: number of kept sets of the layer.
        kept: mean number of entries that stay per kept set.
        always: number of entries that stay in every kept set whatever their scores: the window and protected ones.
        layer, layers: index of the layer, and number of layers.
        prefix: number of entries besides those that always stay, the same in all layers; above any budget where a cache
            with kept sets of different lengths is compressed again, and the selection keeps all that exist.
        heads_by_score: returns the kept set of every entry before the window, by descending pooled score; entries that
            always stay, and those that a kept set lacks, come last.
        head_scores: the user's scores of all heads, for headkv.
        model_wide: function of a hashable key and of a function of all layers' scores (kept_head, position), without
            the entries that always stay; returns that function's result, computed once per key. None where a cache is
            compressed again, layer by layer.
        window: number of entries that always stay because of the window.
    """

    kept_heads: int
    kept: int
    always: int
    layer: int
    layers: int
    prefix: int
    heads_by_score: Callable[[], Int[Tensor, " entry"]]
    head_scores: Float[Tensor, "layer kept_head"] | None = None
    model_wide: Callable[[Any, Callable[[Iterable[Tensor]], Any]], Any] | None = None
    window: int = 0

    @property
    def free(self) -> int:
        """Mean number of entries per kept set to allocate by score: `kept` − `always`."""
        return self.kept - self.always

    def compute_model_wide(self, key: Any, make: Callable[[Iterable[Tensor]], _Result]) -> _Result:
        """Return `make` applied to all layers' scores (kept_head, position), computed once per key.

        Raises ConfigError where these scores are not available.
        """
        if self.model_wide is None:
            raise ConfigError("budgets that look at all layers need a whole prompt; choose another policy")
        return cast("_Result", self.model_wide(key, make))

    def counts_among_layer_top(self) -> Int[Tensor, " kept_head"]:
        """Return each kept set's number of entries among the layer's k highest scores, k the budget of the layer."""
        return count_rows(self.heads_by_score()[: self.kept_heads * self.free], self.kept_heads).to(torch.int64)

    def counts_among_model_top(self) -> Int[Tensor, " kept_head"]:
        """Return each kept set's number of entries among the model's k highest scores, k the budget of the model."""
        rows, total = self.layers * self.kept_heads, self.layers * self.kept_heads * self.free
        order = self.compute_model_wide("order", lambda layers: rows_by_score(torch.cat(move_to_first_device(layers))))
        counts = self.compute_model_wide(
            ("counts", self.free), lambda _: count_rows(order[:total], rows).to(torch.int64)
        )
        return counts.view(self.layers, -1)[self.layer]

    def equal_counts(self, entries: int) -> Int[Tensor, " kept_head"]:
        """Return the same number of entries, `entries`, for all kept sets."""
        return torch.full((self.kept_heads,), entries, dtype=torch.int64)
