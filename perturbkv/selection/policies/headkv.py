"""HeadKV (Fu et al., 2024, https://arxiv.org/abs/2410.19258): given scores say how much each head of the model keeps.

Every head keeps (b − w)(1 − 1/β) prefix entries; the rest of the model's entries form a pool that is shared out in
proportion to the scores (their section 3.2). They try β from 1.005 to 10; `beta` = 1.01 is the default of
KVCache-Factory's port. Scores come from a JSON file `{"layer-head": score}`, as their code reads it, or from
`perturbkv trace --head-scores`. A kept set of several query heads takes the mean of their scores.

A head whose share exceeds the prompt keeps all of it, and what it cannot take goes to the others, so that the model
keeps L · H · b entries, to the entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import option
from perturbkv.errors import ConfigError
from perturbkv.selection.layer_budget import LayerBudget
from perturbkv.selection.policies.base import Pooled, apportion


@dataclass(frozen=True)
class HeadKV(Pooled):
    """SnapKV's score, or the one of `by`, with budgets by given head scores."""

    name: ClassVar[str] = "headkv"
    summary: ClassVar[str] = "snapkv's score; budgets by given head scores (--head-scores)"
    paper: ClassVar[str] = "https://arxiv.org/abs/2410.19258"
    budgets: ClassVar[str] = "by head"
    needs_scores: ClassVar[bool] = True
    beta: float = option(1.01, "one beta-th of b − w is shared out by head scores", low=1)

    def allocate(self, config: EvictionConfig, available: LayerBudget) -> Int[Tensor, " kept_head"]:
        """Return each kept set's share of the model's budget by head scores. Raises ConfigError without head scores."""
        if available.head_scores is None:
            raise ConfigError(
                "headkv needs head scores; give --head-scores FILE, which `perturbkv trace --head-scores` writes"
            )
        return head_budgets(available.head_scores, available.free, available.prefix, self.beta)[available.layer]


def head_budgets(scores: Tensor, mean: int, prefix: int, beta: float) -> Int[Tensor, "layer kept_head"]:
    """Return the budgets of all the model's kept sets, in prefix entries, with mean `mean` and none above `prefix`."""
    share = scores.double() / scores.double().sum()
    budgets = mean * (1 - 1 / beta) + share * scores.numel() * mean / beta
    return apportion(budgets.flatten(), scores.numel() * mean, prefix).view(scores.shape)
