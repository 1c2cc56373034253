"""StreamingLLM (Xiao et al., 2023, https://arxiv.org/abs/2309.17453): the first entries and the most recent ones.

`sinks` = 4 first entries (their section 3.2); the other b − sinks are the most recent, of which the last `window`
always stay. No score is looked at: the only selection is `position`.

The paper gives positions "within the cache" (section 3.2), as `streaming-llm(positions=in-cache)` does; without it
entries stay at their positions of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perturbkv.configs.option import option
from perturbkv.selection.policies.base import Policy, PositionScore


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Uniform budgets that are filled by position."""

    name: ClassVar[str] = "streaming-llm"
    summary: ClassVar[str] = "the first entries and the most recent ones, whatever they hold"
    paper: ClassVar[str] = "https://arxiv.org/abs/2309.17453"
    selections: ClassVar[tuple[str, ...]] = ("position",)
    sinks: int = option(4, "first entries that stay")

    def position_score(self) -> PositionScore:
        """Return the score by position that ranks the sinks first, then the most recent entries."""
        return PositionScore(self.sinks)
