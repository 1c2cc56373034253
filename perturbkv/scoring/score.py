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
from perturbkv.scoring.layer_view import NEEDS, PROMPT_ALONE, LayerView
from perturbkv.scoring.replay_view import Replay, ReplayView


@dataclass(frozen=True)
class Asked:
    """A score without its pooling, and the window before which entries are scored: computed once per layer."""

    score: Score
    window: int


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
        reduces: how a group's query heads become one kept set's, pooled each by itself: `mean` or `max`; empty: as the
            granularity says, before they are pooled.
        pools_inside: whether `pool` and `kernel` are for `score` itself, which gives what is not to be pooled again.
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
    reduces: ClassVar[str] = ""
    pools_inside: ClassVar[bool] = False
    pool: str = option("none", "pooling of the score over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip
    kernel: int = option(7, "odd width of the pooling", low=1, high=65_535, odd=True)

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """The entries before the window, unpooled: a row per query head shown, or one per key/value head."""
        raise NotImplementedError

    @property
    def called(self) -> str:
        """Its name; of a user's file, which needs none, the class's."""
        return getattr(self, "name", type(self).__name__)

    @property
    def replay(self) -> Replay | None:
        """How the context is to be run again, of a score that needs `replay`; its entries are scored by `replayed`."""
        return None

    def replayed(self, seen: ReplayView) -> Float[Tensor, "head chunk"]:
        """The entries of the part of the context that one pass of the replay repeats, unpooled."""
        raise NotImplementedError

    @property
    def first_entries(self) -> int:
        """First entries that always stay."""
        return 0

    @classmethod
    def flaw(cls) -> str:
        """What is wrong with the class; empty where nothing is."""
        if isinstance(cls.needs, str) or not set(cls.needs) <= set(NEEDS):
            return f"expected needs to name some of {', '.join(NEEDS)}, got {cls.needs!r}"
        return "" if cls.score is not Score.score else "expected a method score(self, layer), got none"

    @classmethod
    def carries_history(cls) -> bool:
        """Whether it looks at what decoding forgets, so that a cache cannot be compressed again by it."""
        return not set(cls.needs).isdisjoint(PROMPT_ALONE)

    def pooling(self, pooled: bool = True) -> tuple[str, int]:
        """Kind and width of the pooling, of a score that is to be `pooled`; no pooling has no width."""
        outside = pooled and self.pool != "none" and not self.pools_inside
        return (self.pool, self.kernel) if outside else ("none", 1)

    def unpooled(self) -> Self:
        """What is computed: scores that differ in pooling alone share it."""
        return self if self.pools_inside else dataclasses.replace(self, pool="none", kernel=1)
