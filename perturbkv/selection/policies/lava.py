"""LAVa (Shen et al., 2025, https://arxiv.org/abs/2509.09754; code: MGDDestiny/Lava): budgets by layer, then by head.

Its score is `scoring/scores/lava.py`. A layer's share of the budget is the entropy of its scores: with p the scores of
all its kept sets' entries before the window, scaled to 1,

    e_l = −Σ p log p / log(number of entries),  B_l = L · (b − w) · e_l / Σ_l e_l entries per kept set,

so that layers whose scores are spread widely keep more. Within the layer its kept sets compete as AdaKV's do: a set's
count among the layer's H · B_l largest scores, (1 − `floor`) of it, and `floor` = 0.2 that every set gets. The released
code rounds each number by itself; here layers, and kept sets within them, are rounded by largest remainder, so that the
model keeps L · H · b entries, to the entry, and a layer that would get more than it has gives the rest to the others.

`floor_of`: what the floor is a share of. In the released code a misspelt name leaves it at the model's mean, ⌊0.2 · b⌋
in every layer, so that layers are less unlike than B_l; `model`, the default, does this with b − w. `layer` is what
their code means: a share of B_l.

The released code evicts layer by layer while it reads, from budgets that shrink with every layer that is added; a set
keeps the same at the end, but for rounding. Here all layers are read first. Entries that are protected stay in every
kept set and do not compete.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv import theory
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import option
from perturbkv.devices import move_to_first_device
from perturbkv.scoring.score import Score
from perturbkv.scoring.scores import lava
from perturbkv.selection.layer_budget import LayerBudget, count_rows
from perturbkv.selection.policies.base import Pooled, apportion


@dataclass(frozen=True)
class LAVa(Pooled):
    """Budgets by layer from entropies, by head from scores."""

    name: ClassVar[str] = "lava"
    summary: ClassVar[str] = "layers share by the entropy of their scores, a layer's heads compete"
    paper: ClassVar[str] = "https://arxiv.org/abs/2509.09754"
    budgets: ClassVar[str] = "by head"
    competes: ClassVar[bool] = True
    whole_model: ClassVar[bool] = True
    own_window: ClassVar[int | None] = 32
    own_defaults: ClassVar[tuple[str, ...]] = ("pool", "kernel", "floor")
    floor: float = option(0.2, "share that every head keeps", high=1)
    floor_of: str = option("model", "what floor is a share of: the model's mean (released code), or the layer's",
                           known=("model", "layer"))  # fmt: skip

    @property
    def own_score(self) -> Score:
        """LAVa's score."""
        return lava.LAVa(pool=self.pool, kernel=self.kernel, window_queries=self.window_queries)

    @property
    def mixes(self) -> bool:
        """True, as entropies and mixtures require nonnegative scores."""
        return True

    def allocate(self, config: EvictionConfig, available: LayerBudget) -> Int[Tensor, " kept_head"]:
        """Return each kept set's number of entries: the floor, plus its share of the layer's budget by scores."""
        mean, heads = available.free, available.kept_heads
        layers = layer_budgets(available.compute_model_wide("entropies", entropies), mean, available.prefix)
        floors = torch.full_like(layers, mean) if self.floor_of == "model" else layers
        totals = apportion(heads * ((1 - self.floor) * layers + self.floor * floors), heads * int(layers.sum()))
        layer_mean, least, total = (int(budgets[available.layer]) for budgets in (layers, floors, totals))
        counts = count_rows(available.heads_by_score()[: heads * layer_mean], heads)
        return apportion((1 - self.floor) * counts + self.floor * least, total)


def entropies(scores: Iterable[Float[Tensor, "kept_head position"]]) -> Float[Tensor, " layer"]:
    """Return the entropy of each layer's scores, on the CPU, for which the host waits."""
    return torch.stack(move_to_first_device(entropy(layer) for layer in scores)).cpu()


def layer_budgets(weights: Float[Tensor, " layer"], mean: int, most: int) -> Int[Tensor, " layer"]:
    """Return each layer's number of entries per kept set, in proportion to `weights`, the entropies of the layers.

    It is `mean` on average and at most `most`; equal where all entropies are 0.
    """
    total = float(weights.sum())
    shares = weights / total if total > 0 else torch.full_like(weights, 1 / len(weights))
    return apportion(len(weights) * mean * shares, len(weights) * mean, most)


def entropy(scores: Float[Tensor, "kept_head position"]) -> Float[Tensor, ""]:
    """Return the entropy of a layer's scores, normalised by the largest possible entropy; 0 for at most one entry."""
    flat = scores.to(theory.WORK).flatten()
    share = flat / flat.sum().clamp(min=torch.finfo(theory.WORK).tiny)
    return cast("Tensor", torch.special.entr(share).sum() / math.log(max(2, len(flat))))
