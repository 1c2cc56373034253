"""What an eviction system decides: which attention votes, which recent entries always stay, and every head's budget.

Which entries fill the budgets is the selection's part. A system is a subclass of `Policy` in a file of its own,
named as the file is, that brings its options and replaces what differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.configs.budget import whole_entries
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import Option, completed
from perturbkv.configs.selections import GIVEN, SELECTIONS
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


@runtime_checkable
class Places(Protocol):
    """A way to rank places whatever they hold; equal ones are ranked once, so they are hashable."""

    def __call__(self, place: Int[Tensor, " place"]) -> Int[Tensor, " place"]:
        """A score for each place of the prefix, 0 to n − w − 1."""


@dataclass(frozen=True)
class LatestFirst:
    """The most recent places first."""

    def __call__(self, place: Int[Tensor, " place"]) -> Int[Tensor, " place"]:
        """The place itself."""
        return place


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


BY_SCORE = tuple(name for name in SELECTIONS if name not in ("position", GIVEN))
"""Selections that ask for scores."""


def option(default: Any, about: str, **limits: Any) -> Any:
    """A field of a policy that is an option of its own; `limits` are further fields of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(default, about, **limits)})


@dataclass(frozen=True)
class Policy:
    """One eviction system with its options, which are its fields; a subclass replaces what differs from equal budgets.

    Attributes:
        name, summary, paper: what it is and its source; empty where no paper is its source.
        selections: the selections it takes.
        budgets: what shares them out: `uniform`, `by layer`, or `by head`, which needs a ragged cache.
        own_window, own_granularity: its own where nobody says otherwise; None: the preset's.
        own_defaults: options whose default stands whatever the preset.
        competes: whether budgets depend on the layer's pooled attention.
        votes_alone: options that matter only where attention is looked at.
        needs_scores: whether head scores have to be given.
        carries_history: whether its score counts queries from before the last compression, which decoding forgets.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str] = ""
    selections: ClassVar[tuple[str, ...]] = BY_SCORE
    budgets: ClassVar[str] = "uniform"
    own_window: ClassVar[int | None] = None
    own_granularity: ClassVar[str | None] = None
    own_defaults: ClassVar[tuple[str, ...]] = ()
    competes: ClassVar[bool] = False
    votes_alone: ClassVar[tuple[str, ...]] = ()
    needs_scores: ClassVar[bool] = False
    carries_history: ClassVar[bool] = False

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Its own options by name, those of its own class first."""
        own = cls.__dict__.get("__annotations__", {})
        ordered = sorted(dataclasses.fields(cls), key=lambda field: field.name not in own)
        return {field.name: field.metadata["option"] for field in ordered}

    @classmethod
    def check(cls, config: EvictionConfig) -> None:
        """Raise ConfigError for a configuration that this policy cannot be; `completed` looks at its options."""

    @classmethod
    def completed(cls, choice: Choice) -> Choice:
        """The choice with all of its options. Raises ConfigError or UnknownNameError for one that is not right."""
        return completed(choice, f"policy '{choice.name}'", cls.options())

    @classmethod
    def made(cls, choice: Choice) -> Policy:
        """The policy with the options of a completed choice."""
        return cls(**choice.options)

    @classmethod
    def caches(cls) -> tuple[str, ...]:
        """Cache layouts that can hold its budgets."""
        return ("ragged",) if cls.budgets == "by head" else ("ragged", "rectangular")

    @property
    def in_cache(self) -> bool:
        """Whether decoding sees its kept keys at 0 … b − 1, for which all kept sets have to be equally long."""
        return False

    def pooling(self, pooled: bool) -> tuple[str, int]:
        """Kind and width of the pooling over positions, of a score that is to be `pooled`."""
        return "none", 1

    def places(self) -> Places:
        """What the selection `position` ranks by."""
        return LatestFirst()

    def votes(self, config: EvictionConfig) -> Votes:
        """How attention is accumulated."""
        return WindowVotes(config.window)

    def recent_entries(self, config: EvictionConfig, kept: int) -> int:
        """Most recent entries that always stay, at least the window, of `kept` in all."""
        return config.protected(kept)[1]

    def guaranteed(self, config: EvictionConfig, kept: int, always: int) -> int:
        """Entries beside the `always` kept ones that stage 1 takes at least in every kept set, of `kept` in all."""
        return 0

    def allocate(self, config: EvictionConfig, available: LayerBudget) -> Int[Tensor, " kept_head"]:
        """Entries per kept set of one layer beside those that always stay; on the CPU where no score was looked at."""
        return available.uniform(available.free)


@dataclass(frozen=True)
class Pooled(Policy):
    """A system whose votes are pooled over positions (paper, section 4.2: max, 7)."""

    votes_alone: ClassVar[tuple[str, ...]] = ("pool", "kernel")
    pool: str = option("max", "pooling of attention over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip
    kernel: int = option(7, "odd width of the pooling", low=1, odd=True)

    def pooling(self, pooled: bool) -> tuple[str, int]:
        """Its own; a score that is not pooled is one whatever the kernel."""
        return (self.pool, self.kernel) if pooled and self.pool != "none" else ("none", 1)


@dataclass(frozen=True)
class Unpooled(Pooled):
    """A system whose votes are not pooled unless somebody asks for it, whatever the preset."""

    own_defaults: ClassVar[tuple[str, ...]] = ("pool",)
    pool: str = option("none", "pooling of attention over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip


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
