"""What an eviction system decides: which attention votes, which recent entries always stay, and every head's budget.

Which entries fill the budgets is the selection's part. A system is a subclass of `Policy` that replaces what differs
from SnapKV.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.configs.budget import whole_entries
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.scoring.window_attention import window_attention


@dataclass(frozen=True)
class LayerAttention:
    """What a layer's attention shows while a prompt is prefilled.

    Attributes:
        query: of the last positions that are there, all of them in a prefill.
        key: of all n entries.
        scale: factor on the logits.
        layer, sample: where we are, for seeds.
    """

    query: Float[Tensor, "head query d_head"]
    key: Float[Tensor, "kv_head key d_head"]
    scale: float
    layer: int
    sample: str


@runtime_checkable
class Votes(Protocol):
    """A way to accumulate attention. Equal ones are computed once per prompt, so they are hashable."""

    def __call__(self, seen: LayerAttention) -> Float[Tensor, "head prefix"]:
        """Ā for the entries before the window: (head, n − w)."""


@dataclass(frozen=True)
class WindowVotes:
    """Mean over the last `window` queries' softmax rows (SnapKV; paper, Algorithm 2, line 3)."""

    window: int

    def __call__(self, seen: LayerAttention) -> Float[Tensor, "head prefix"]:
        """Ā of the window."""
        return window_attention(seen.query[:, -min(self.window, seen.key.shape[1]) :], seen.key, seen.scale)


@dataclass(frozen=True)
class LayerBudget:
    """What budgets may look at in one layer.

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
    """

    kept_heads: int
    kept: int
    always: int
    layer: int
    layers: int
    prefix: int
    heads_in_order: Callable[[], Int[Tensor, " entry"]]
    head_scores: Float[Tensor, "layer kept_head"] | None = None

    @property
    def free(self) -> int:
        """Entries per kept set, on the average, beside those that always stay: what is shared out."""
        return self.kept - self.always

    def uniform(self, entries: int) -> Int[Tensor, " kept_head"]:
        """The same number of entries for every kept set."""
        return torch.full((self.kept_heads,), entries, dtype=torch.int64)


class Policy:
    """One eviction system; this one is SnapKV's."""

    def votes(self, config: EvictionConfig) -> Votes:
        """How attention is accumulated."""
        return WindowVotes(config.window)

    def recent(self, config: EvictionConfig, kept: int) -> int:
        """Most recent entries that always stay, at least the window, of `kept` in all."""
        return config.protected(kept)[1]

    def guaranteed(self, config: EvictionConfig, kept: int, always: int) -> int:
        """Entries beside the `always` kept ones that stage 1 takes at least in every kept set, of `kept` in all."""
        return 0

    def allocate(self, config: EvictionConfig, available: LayerBudget) -> Int[Tensor, " kept_head"]:
        """Entries per kept set of one layer beside those that always stay; on the CPU where no score was looked at."""
        return available.uniform(available.free)


def apportion(shares: Float[Tensor, " place"], total: int, most: int | None = None) -> Int[Tensor, " place"]:
    """Whole numbers that add up to min(total, most · len), each near its share and none above `most`.

    Largest remainder: every place gets its share's floor, what is left goes to the largest fractions, the earlier place
    first; what a full place cannot take goes on in the same order. Without `most` nothing waits for the device, and
    the shares add up to `total`.
    """
    counts: Tensor = whole_entries(shares)
    fractions = (shares - counts).clamp(min=0).round(decimals=9)
    order = fractions.sort(descending=True, stable=True).indices
    counts = counts.to(torch.int64)
    if most is None:
        return counts.scatter_add(0, order, _ones(total - counts.sum(), order))
    counts, wanted = counts.clamp(max=most), min(total, most * len(shares))
    while (left := wanted - int(counts.sum())) > 0:
        open_places = order[counts[order] < most]
        counts[open_places[:left]] += 1
    return counts


def _ones(left: Int[Tensor, ""], order: Int[Tensor, " place"]) -> Int[Tensor, " place"]:
    """1 for the first `left` places, 0 for the others."""
    return (torch.arange(len(order), device=order.device) < left).to(torch.int64)
