"""AdaKV (Feng et al., 2024, https://arxiv.org/abs/2407.11550): a layer's heads compete for its budget.

The pooled scores of all the layer's heads are flattened, and a head's count among the H · (b − w) largest says how much
it keeps. Two safeguards see to it that none is left with nothing; `floor` = 0.2 as in their paper and both codes.

- `mixture` (their Algorithm 1 and FFY0/AdaKV): a head keeps (1 − `floor`) of its count and `floor` of the uniform
  share. The released code rounds each head's number by itself; here they are rounded by largest remainder, so that the
  layer keeps H · b entries, to the entry.
- `guaranteed` (kvpress and FFY0/DefensiveKV): every head's own ⌊`floor` · b⌋ best, the window inside, come first; what
  is left goes to the layer's largest. A second stage does not displace the guaranteed ones.

Equal scores of different heads go to the earlier position, then to the earlier head. Entries that are protected stay in
every head and do not compete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from perturbkv.configs.entry_counts import entry_count
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import option
from perturbkv.selection.layer_budget import LayerBudget, allocate_above_minimum, count_rows
from perturbkv.selection.policies.base import Pooled, apportion


@dataclass(frozen=True)
class AdaKV(Pooled):
    """SnapKV's score, or the one of `by`, with budgets by head."""

    name: ClassVar[str] = "adakv"
    summary: ClassVar[str] = "snapkv's score; a layer's heads compete for its budget"
    paper: ClassVar[str] = "https://arxiv.org/abs/2407.11550"
    budgets: ClassVar[str] = "by head"
    competes: ClassVar[bool] = True
    floor: float = option(0.2, "share that every head keeps: of b − w, or of b where it is guaranteed", high=1)
    safeguard: str = option("mixture", "mixture of uniform and competing budgets, or guaranteed: own best first",
                            known=("mixture", "guaranteed"))  # fmt: skip

    @property
    def mixes(self) -> bool:
        """True with the safeguard `mixture`, which mixes scores."""
        return self.safeguard == "mixture"

    def least_stage1(self, config: EvictionConfig, kept: int, always: int) -> int:
        """Return ⌊floor · `kept`⌋ − `always`, at least 0, with the safeguard `guaranteed`; else 0."""
        return max(0, entry_count(self.floor, kept) - always) if self.safeguard == "guaranteed" else 0

    def allocate(self, config: EvictionConfig, available: LayerBudget) -> Int[Tensor, " kept_head"]:
        """Return each kept set's number of entries among the layer's highest scores, adjusted by the safeguard."""
        heads, mean, order = available.kept_heads, available.free, available.heads_by_score()
        if self.safeguard == "guaranteed":
            least = self.least_stage1(config, available.kept, available.always)
            return allocate_above_minimum(order, heads, mean, least)
        counts = count_rows(order[: heads * mean], heads)
        return apportion((1 - self.floor) * counts + self.floor * mean, heads * mean)
