"""The base class of scores: one number per entry before the window, larger is better, computed from a layer's data.

A score is a subclass of `Score` in a file of its own in `perturbkv/scoring/scores/`, or external (how-to/extending.md).
It decides neither how many entries each head keeps nor how they are selected: every budget rule and every selection
works on any score.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.option import Option, WithOptions, option
from perturbkv.configs.plugins import instantiate
from perturbkv.configs.selections import ALL_QUERIES, TEXT_QUERIES, WINDOW_QUERIES
from perturbkv.scoring.layer_view import NEEDS, OF_WINDOW, PROMPT_ALONE, LayerView
from perturbkv.scoring.replay_view import Replay, ReplayView


def window_queries_option() -> Any:
    """Return a dataclass field that declares the option `window_queries` of a score or policy."""
    about = "queries of the window that vote: all, or those of the text, without the chat template's behind it"
    return option(ALL_QUERIES, about, known=(ALL_QUERIES, TEXT_QUERIES), omitted=True)


@dataclass(frozen=True)
class Score(WithOptions):
    """A way to score entries; its fields are its options. Equal scores are computed once per prompt.

    Attributes:
        name, summary, paper: its name, a description and its source; empty where no paper is its source.
        needs: the layer's data that it uses, keys of `layer_view.NEEDS`; access to anything else is refused.
        own_window: its default window; None: the preset's.
        own_defaults: options whose default is independent of the preset.
        by_place: options that decide by position which entries stay; they have an effect even without a score.
        signed: whether it may be below 0, so that it cannot be multiplied or mixed.
        holds_norms: whether it includes value norms already.
        plain_logits: why it needs logits without a soft cap, as a clause of a message; empty where it does not.
        whole_layer: whether it depends on several key/value heads, and so needs all of them at once.
        accumulates: whether it is a mean over all queries that were read, which goes on while a cache decodes.
        reduces: reduction over a group's query heads for a shared kept set, after pooling: `mean` or `max`; empty: the
            granularity's reduction, before pooling.
        pools_inside: whether `score` applies `pool` and `kernel` itself, so that its result is not pooled again.
        pool, kernel: pooling over positions of the result of `score`.
        window_queries: `all`, or `text`, which hides the rows of the chat template's tokens from `score`; an option
            of scores that use the window's attention.
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
    plain_logits: ClassVar[str] = ""
    whole_layer: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    reduces: ClassVar[str] = ""
    pools_inside: ClassVar[bool] = False
    pool: str = option("none", "pooling of the score over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip
    kernel: int = option(7, "odd width of the pooling", low=1, high=65_535, odd=True)
    window_queries: str = window_queries_option()

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return name -> option, without `window_queries` for a score that does not use the window's attention."""
        hidden = {WINDOW_QUERIES} if OF_WINDOW.isdisjoint(cls.needs) else set()
        return {name: found for name, found in super().options().items() if name not in hidden}

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the unpooled scores of the entries before the window, one row per query head or key/value head."""
        raise NotImplementedError

    @property
    def display_name(self) -> str:
        """Name of the score; the class name for a class in a user's file."""
        return getattr(self, "name", type(self).__name__)

    @property
    def replay(self) -> Replay | None:
        """Replay options for `score_replay`; None for a score without a replay."""
        return None

    def score_replay(self, view: ReplayView) -> Float[Tensor, "head chunk"]:
        """Return the unpooled scores of the context entries repeated in one pass of the replay."""
        raise NotImplementedError

    @property
    def first_entries(self) -> int:
        """Number of first entries that are always kept."""
        return 0

    @classmethod
    def flaw(cls) -> str:
        """Return what is wrong with the class definition, for a message; empty if it is valid."""
        if isinstance(cls.needs, str) or not set(cls.needs) <= set(NEEDS):
            return f"expected needs to name some of {', '.join(NEEDS)}, got {cls.needs!r}"
        return "" if cls.score is not Score.score else "expected a method score(self, layer), got none"

    @property
    def needs_prompt(self) -> bool:
        """True if the score uses data of the prefill alone, and so cannot compress a cache again while it decodes."""
        return not self.accumulates and not set(self.needs).isdisjoint(PROMPT_ALONE)

    def pooling(self, pooled: bool = True) -> tuple[str, int]:
        """Return (kind, width) of the pooling after `score`; ("none", 1) without pooling or unless `pooled`."""
        outside = pooled and self.pool != "none" and not self.pools_inside
        return (self.pool, self.kernel) if outside else ("none", 1)

    def unpooled(self) -> Self:
        """Return the score without the pooling after `score`, so that scores differing only in pooling become equal."""
        if self.pools_inside:
            return self
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return instantiate(type(self), {**fields, "pool": "none", "kernel": 1}, f"score '{self.display_name}'")
