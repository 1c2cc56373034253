"""What a score is: one number per entry before the window, larger is better, from what a layer shows.

A score is a subclass of `Score` in a file of its own in `perturbkv/scoring/scores/`, or of somebody else
(docs/extending.md). How many entries each head keeps, and how they are taken from the scores, is not its question:
every budget rule and every selection works on any score.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.option import WithOptions, option
from perturbkv.scoring.layer_view import PROMPT_ALONE, LayerView


@dataclass(frozen=True)
class Score(WithOptions):
    """A way to score entries; its fields are its options. Equal ones are computed once per prompt.

    Attributes:
        name, summary, paper: what it is and its source; empty where no paper is its source.
        needs: what it looks at of a layer, keys of `layer_view.NEEDS`; anything else is refused.
        own_window: its window where nobody says otherwise; None: the preset's.
        own_defaults: options whose default stands whatever the preset.
        by_place: options that say what stays because of its place; they matter where no score is looked at too.
        signed: whether it may be below 0, so that it cannot be multiplied or mixed.
        holds_norms: whether value norms are in it already.
        whole_layer: whether it looks across key/value heads, and so has to see all of them at once.
        pool, kernel: pooling over positions of what `score` gives.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ("attention",)
    own_window: ClassVar[int | None] = None
    own_defaults: ClassVar[tuple[str, ...]] = ("pool",)
    by_place: ClassVar[tuple[str, ...]] = ()
    signed: ClassVar[bool] = False
    holds_norms: ClassVar[bool] = False
    whole_layer: ClassVar[bool] = False
    pool: str = option("none", "pooling of the score over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip
    kernel: int = option(7, "odd width of the pooling", low=1, odd=True)

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """The entries before the window, unpooled: a row per query head shown, or one per key/value head."""
        raise NotImplementedError

    @property
    def first_entries(self) -> int:
        """First entries that always stay."""
        return 0

    @classmethod
    def carries_history(cls) -> bool:
        """Whether it looks at what decoding forgets, so that a cache cannot be compressed again by it."""
        return not set(cls.needs).isdisjoint(PROMPT_ALONE)

    def pooling(self, pooled: bool = True) -> tuple[str, int]:
        """Kind and width of the pooling, of a score that is to be `pooled`; no pooling has no width."""
        return (self.pool, self.kernel) if pooled and self.pool != "none" else ("none", 1)

    def unpooled(self) -> Self:
        """What is computed: scores that differ in pooling alone share it."""
        return dataclasses.replace(self, pool="none", kernel=1)
