"""What an eviction system decides: which score ranks entries, which always stay, and every head's budget.

Which entries fill the budgets is the selection's part. A system is a subclass of `Policy` in a file of its own,
named as the file is, that brings its options and replaces what differs; every score is one too, with equal budgets.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.configs.choice import Choice
from perturbkv.configs.entry_counts import round_down_entries
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import WithOptions, option
from perturbkv.configs.precision import FULL, NONE
from perturbkv.configs.selections import GIVEN, SELECTIONS
from perturbkv.errors import ConfigError
from perturbkv.scoring import score_registry as scores
from perturbkv.scoring.score import Score
from perturbkv.scoring.scores.snapkv import SnapKV
from perturbkv.selection.layer_budget import LayerBudget


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


BY_SCORE = tuple(name for name in SELECTIONS if name not in ("position", GIVEN))
"""Selections that ask for scores."""


@dataclass(frozen=True)
class Policy(WithOptions):
    """One eviction system with its options, which are its fields; a subclass replaces what differs from equal budgets.

    Attributes:
        name, summary, paper: what it is and its source; empty where no paper is its source.
        selections: the selections it takes.
        budgets: what shares them out: `uniform`, `by layer`, or `by head`, which needs a ragged cache.
        own_window, own_granularity: its own where nobody says otherwise; None: the preset's.
        own_defaults: options whose default stands whatever the preset.
        competes: whether budgets depend on the layer's pooled scores.
        whole_model: whether budgets of one layer depend on the scores of all layers.
        score_options: options that matter only where scores are looked at.
        needs_scores: whether head scores have to be given.
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
    whole_model: ClassVar[bool] = False
    score_options: ClassVar[tuple[str, ...]] = ()
    needs_scores: ClassVar[bool] = False

    @classmethod
    def check(cls, config: EvictionConfig) -> None:
        """Raise ConfigError for a configuration that this policy cannot be."""

    @classmethod
    def caches(cls) -> tuple[str, ...]:
        """Cache layouts that can hold its budgets."""
        return ("ragged",) if cls.budgets == "by head" else ("ragged", "rectangular")

    @property
    def in_cache(self) -> bool:
        """Whether decoding sees its kept keys at 0 … b − 1, for which all kept sets have to be equally long."""
        return False

    @property
    def mixes(self) -> bool:
        """Whether it multiplies or mixes scores, so that they may not be below 0."""
        return False

    @property
    def score(self) -> Score:
        """What entries are ranked by."""
        return SnapKV(pool="none")

    @property
    def ranks_by_another(self) -> bool:
        """Whether it was given another score than its own."""
        return False

    @property
    def first_stage(self) -> Score | None:
        """What a stage 1 of its own ranks by, which comes first in budgets and in selection `attention`."""
        return None

    def first_counts(
        self, config: EvictionConfig, scores: Float[Tensor, "kept_head prefix"], places: slice
    ) -> Int[Tensor, " kept_head"]:
        """How many of `places`, which do not stay anyway, a stage 1 of its own takes: the best by `first_stage`."""
        raise NotImplementedError

    def places(self) -> Places:
        """What the selection `position` ranks by."""
        return LatestFirst()

    def first_entries(self, config: EvictionConfig, kept: int) -> int:
        """First entries that always stay, of `kept` in all."""
        return max(config.protected_counts(kept)[0], self.score.first_entries)

    def recent_entries(self, config: EvictionConfig, kept: int) -> int:
        """Most recent entries that always stay, at least the window, of `kept` in all."""
        return config.protected_counts(kept)[1]

    def guaranteed(self, config: EvictionConfig, kept: int, always: int) -> int:
        """Entries beside the `always` kept ones that stage 1 takes at least in every kept set, of `kept` in all."""
        return 0

    def allocate(self, config: EvictionConfig, available: LayerBudget) -> Int[Tensor, " kept_head"]:
        """Entries per kept set of one layer beside those that always stay; on the CPU where no score was looked at."""
        return available.uniform(available.free)


@dataclass(frozen=True)
class Pooled(Policy):
    """A system that ranks by SnapKV's score, pooled over positions (paper, section 4.2: max, 7), or `by` another."""

    score_options: ClassVar[tuple[str, ...]] = ("by", "pool", "kernel")
    by: str | Choice = option(scores.OWN, "another score to rank by, such as caote(pool=max)", call=True)
    pool: str = option("max", "pooling of attention over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip
    kernel: int = option(7, "odd width of the pooling", low=1, high=65_535, odd=True)

    @functools.cached_property
    def score(self) -> Score:  # a name is looked up once
        """Its own, or the one that `by` names."""
        return scores.build(self.by) if self.ranks_by_another else self.own_score

    @property
    def own_score(self) -> Score:
        """SnapKV's."""
        return SnapKV(pool=self.pool, kernel=self.kernel)

    @property
    def ranks_by_another(self) -> bool:
        """Whether `by` names one."""
        return self.by != scores.OWN


class ByScore(Policy):
    """A score as a system: equal budgets. `of` makes one of each score, whose options are the score's."""

    scored: ClassVar[type[Score]]

    @property
    def score(self) -> Score:
        """The score with this policy's options."""
        return self.scored(**{name: getattr(self, name) for name in self.options()})

    @staticmethod
    def of(scored: type[Score], name: str) -> type[Policy]:
        """The policy that a score is, under this name."""
        fields = {field.name: field for field in dataclasses.fields(scored)}
        options = [fields[option] for option in scored.options()]
        told = {
            "name": name,
            "scored": scored,
            "score_options": tuple(one.name for one in options if one.name not in scored.by_place),
            "summary": scored.summary_line(),
            **{kept: getattr(scored, kept) for kept in ("paper", "own_window", "own_defaults")},
        }
        made = [(one.name, one.type, dataclasses.field(default=one.default, metadata=one.metadata)) for one in options]
        return dataclasses.make_dataclass(scored.__name__, made, bases=(ByScore,), namespace=told, frozen=True)


def check_whole(config: EvictionConfig, chosen: str, does: str) -> None:
    """Raise ConfigError for one set for all heads, protected ends, few bits and corrections: nothing is evicted.

    `chosen` is what a head chooses, and `does` what its policy does instead of evicting.
    """
    name = config.policy.name
    if config.granularity.name == "layer":
        msg = f"policy '{name}' chooses {chosen} by head; granularity 'layer' has one set for all: choose query or kv"
        raise ConfigError(msg)
    for what, got, usual in (
        ("protect_first", config.protect_first, 0),
        ("protect_recent", config.protect_recent, 0),
        ("precision", str(config.precision), FULL),
        ("correction", str(config.correction), NONE),
    ):
        if got != usual:
            msg = f"policy '{name}' evicts nothing and {does}: expected {what} {usual}, got {got}; leave it out"
            raise ConfigError(msg)


def apportion(shares: Float[Tensor, " place"], total: int, most: int | None = None) -> Int[Tensor, " place"]:
    """Whole numbers that add up to min(total, most · len), each near its share and none above `most`.

    Largest remainder: every place gets its share's floor, what is left goes to the largest fractions, the earlier place
    first; what a full place cannot take goes on in the same order. Without `most` nothing waits for the device, and
    the shares add up to `total`.
    """
    counts: Tensor = round_down_entries(shares)
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
