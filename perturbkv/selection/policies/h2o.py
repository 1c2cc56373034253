"""H2O (Zhang et al., 2023, https://arxiv.org/abs/2306.14048): heavy hitters of all queries, and recent entries.

Its score is the attention of every query of the prompt. Half of the budget is the most recent entries
(`recent` = 0.5, as in their experiments; never fewer than the window).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perturbkv.configs.entry_counts import round_down_entries
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import option
from perturbkv.scoring.score import Score
from perturbkv.scoring.scores import h2o
from perturbkv.selection.policies.base import Policy


@dataclass(frozen=True)
class H2O(Policy):
    """Attention of all queries, with uniform budgets and a share of recent entries."""

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "all queries vote; half of the budget is recent entries"
    paper: ClassVar[str] = "https://arxiv.org/abs/2306.14048"
    own_defaults: ClassVar[tuple[str, ...]] = ("pool",)
    score_options: ClassVar[tuple[str, ...]] = ("pool", "kernel")
    recent: float = option(0.5, "share of b that is most recent entries", high=1)
    pool: str = option("none", "pooling of attention over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip
    kernel: int = option(7, "odd width of the pooling", low=1, high=65_535, odd=True)

    @property
    def score(self) -> Score:
        """Score that ranks entries: the mean attention of all queries."""
        return h2o.H2O(pool=self.pool, kernel=self.kernel)

    def recent_entries(self, config: EvictionConfig, kept: int) -> int:
        """Return the number of recent entries that are always kept: ⌊recent · b⌋, at least the window's."""
        return max(super().recent_entries(config, kept), int(round_down_entries(self.recent * kept)))
