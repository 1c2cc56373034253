"""PyramidKV (Cai et al., 2024, https://arxiv.org/abs/2406.02069): lower layers keep more, upper layers less.

With p = b − w prefix entries per head on the average, the last layer keeps p / β of them, the first 2p − p / β, and the
layers between lie on a line (their section 4.2). `beta` = 20 as in their released code. Where the prompt has
fewer entries than the first layer's share, that layer keeps all and the line is laid so that the mean stays p.

The released code rounds the slope down and so spends other than L · p entries; here the shares are rounded by largest
remainder and the total is the uniform one, to the entry.

`line` = `total` is kvpress' line, which differs in four ways: b itself lies on it, the window inside; the first
layer keeps at most n − w; each layer is rounded by itself, halves to even, which adds up to L · b as the line is
symmetric; and where the last layer would get fewer entries than the window, every layer keeps b. (With β = 20 and
w = 64 that is wherever b < 1280, but for prompts so short that the first layer's bound lifts the last one's share.)

Protected entries stay in every layer: beside p on the paper's line, inside b, as the window is, on kvpress'.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from perturbkv import theory
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import option
from perturbkv.selection.layer_budget import LayerBudget
from perturbkv.selection.policies.base import Pooled, apportion


@dataclass(frozen=True)
class PyramidKV(Pooled):
    """SnapKV's score, or the one of `by`, with budgets by layer."""

    name: ClassVar[str] = "pyramidkv"
    summary: ClassVar[str] = "snapkv's score; lower layers keep more than upper ones"
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.02069"
    budgets: ClassVar[str] = "by layer"
    beta: float = option(20.0, "the last layer keeps (b − w) / beta entries of the prefix", low=1)
    line: str = option("prefix", "what lies on the line between layers: prefix (b − w), or total (b, window inside)",
                       known=("prefix", "total"))  # fmt: skip

    def allocate(self, config: EvictionConfig, available: LayerBudget) -> Int[Tensor, " kept_head"]:
        """Return the layer's budget, the same for every kept set; budgets decrease linearly over the layers."""
        if self.line == "total":
            most = available.prefix + available.always - available.window
            budgets = (
                total_budgets(available.kept, most, available.always, available.layers, self.beta) - available.always
            )
        else:
            budgets = layer_budgets(available.free, available.prefix, available.layers, self.beta)
        return budgets[available.layer].expand(available.kept_heads)


def layer_budgets(mean: int, prefix: int, layers: int, beta: float) -> Int[Tensor, " layer"]:
    """Return the number of prefix entries per head of every layer; the mean is `mean`, none exceeds `prefix`."""
    if layers == 1:
        return torch.tensor([mean])
    first = min(2 * mean - mean / beta, prefix)
    step = 2 * (first - mean) / (layers - 1)
    line = first - step * torch.arange(layers, dtype=theory.WORK)
    return apportion(line, layers * mean, prefix)


def total_budgets(kept: int, most: int, least: int, layers: int, beta: float) -> Int[Tensor, " layer"]:
    """Return the total number of entries per head of every layer (kvpress), with mean `kept` and none above `most`.

    All layers get `kept` where one would get fewer than `least`.
    """
    first = min(2 * kept - kept / Fraction(beta), Fraction(most))  # exact: a half is rounded to even, not by its float
    last = 2 * kept - first
    if layers == 1 or not first >= last >= least:
        return torch.full((layers,), kept)
    step = (first - last) / (layers - 1)
    return torch.tensor([round(first - layer * step) for layer in range(layers)])
