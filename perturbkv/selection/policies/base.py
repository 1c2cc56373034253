"""The base class of eviction systems: the score that ranks entries, entries that always stay, and every head's budget.

The selection decides which entries fill the budgets. A system is a subclass of `Policy` in a file of its own, with the
file's name, that adds its options and overrides what differs; every score is a policy too, with equal budgets.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.configs.choice import Choice
from perturbkv.configs.entry_counts import round_down_entries
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import Option, WithOptions, field_name, option
from perturbkv.configs.plugins import instantiate
from perturbkv.configs.precision import FULL, NONE
from perturbkv.configs.selections import GIVEN, PROMPT, SELECTIONS, UNION, reduction, shares_heads, shares_layers
from perturbkv.errors import ConfigError
from perturbkv.scoring import score_registry as scores
from perturbkv.scoring.score import Score, window_queries_option
from perturbkv.scoring.scores.snapkv import SnapKV
from perturbkv.selection.layer_budget import LayerBudget


@dataclass(frozen=True)
class PositionScore:
    """A score by position alone: the first `sinks` entries, the earliest of them highest, then the most recent ones."""

    sinks: int = 0

    def __call__(self, positions: Int[Tensor, " position"]) -> Int[Tensor, " position"]:
        """Return the score of each position of the prefix, 0 to n − w − 1."""
        return torch.where(positions < self.sinks, 2 * len(positions) - positions, positions)


BY_SCORE = tuple(name for name in SELECTIONS if name not in ("position", GIVEN))
"""Selections that rank by scores."""


@dataclass(frozen=True)
class Policy(WithOptions):
    """An eviction system; its fields are its options, and a subclass overrides what differs from equal budgets.

    Attributes:
        name, summary, paper: its name, a description and its source; empty where no paper is its source.
        selections: names of the selections that it combines with.
        budgets: how budgets are allocated: `uniform`, `by layer`, or `by head`, which needs a ragged cache.
        own_window, own_granularity: its default window and granularity; None: the preset's.
        own_defaults: options whose default is independent of the preset.
        competes: whether budgets depend on the layer's pooled scores.
        whole_model: whether budgets of one layer depend on the scores of all layers.
        score_options: options that have an effect only where scores are used.
        needs_scores: whether it needs head scores from the user.
        ranks: whether it ranks a prompt's entries by its score, which a prefill then computes.
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
    ranks: ClassVar[bool] = True
    positions: str = option("kept", "in decoding: kept, keys at their places of the prompt; in-cache, at 0 … b − 1",
                            known=("kept", "in-cache"), omitted=True)  # fmt: skip
    keep: str = option("best", "while decoding: best, all entries compete; prompt, its entries stay",
                       known=("best", PROMPT), omitted=True)  # fmt: skip

    @classmethod
    def flaw(cls) -> str:
        """Return what is wrong with the class definition, for a message; empty if it is valid."""
        missing = f'expected a name in its class, name = "{cls.__name__.lower()}", got none'
        return "" if getattr(cls, "name", "") else missing

    @classmethod
    def check(cls, config: EvictionConfig) -> None:
        """Raise ConfigError for a configuration that is incompatible with this policy."""

    @classmethod
    def caches(cls) -> tuple[str, ...]:
        """Return the names of the cache layouts that can store the policy's kept sets."""
        return ("ragged",) if cls.budgets == "by head" else ("ragged", "rectangular")

    @classmethod
    def check_model(cls, model_config: Any, name: str) -> None:
        """Raise ModelError where the policy cannot run on the model `name`."""

    @classmethod
    def provenance(cls) -> dict[str, str]:
        """Return the attributes that a trace of the policy has beside those of all, such as a library's version."""
        return {}

    @property
    def mixes(self) -> bool:
        """True if the policy multiplies or mixes scores, so that negative scores are refused."""
        return False

    @property
    def score(self) -> Score:
        """Score by which entries are ranked."""
        return SnapKV(pool="none")

    @property
    def ranks_by_another(self) -> bool:
        """True if the user replaced the policy's own score."""
        return False

    @property
    def first_stage(self) -> Score | None:
        """Score of the policy's own stage 1, which precedes budgets and the selection `attention`; None without one."""
        return None

    def stage1_counts(
        self, config: EvictionConfig, scores: Float[Tensor, "kept_head prefix"], competing: slice
    ) -> Int[Tensor, " kept_head"]:
        """Return each kept set's number of entries in the policy's own stage 1, by the scores of `first_stage`.

        `competing` is the slice of the entries that do not always stay.
        """
        raise NotImplementedError

    def position_score(self) -> PositionScore:
        """Return the score by position alone that the selection `position` uses."""
        return PositionScore()

    def first_entries(self, config: EvictionConfig, kept: int) -> int:
        """Return the number of first entries that are always kept, of `kept` in all."""
        return max(config.protected_counts(kept)[0], self.score.first_entries)

    def recent_entries(self, config: EvictionConfig, kept: int) -> int:
        """Return the number of most recent entries that are always kept, window included, of `kept` in all."""
        return config.protected_counts(kept)[1]

    def least_stage1(self, config: EvictionConfig, kept: int, always: int) -> int:
        """Return the smallest number of entries in stage 1 of every kept set, besides the `always` kept ones.

        `kept` is the number of all entries that stay. With a granularity of blocks, every entry here is a block, as in
        `LayerBudget`.
        """
        return 0

    def allocate(self, config: EvictionConfig, available: LayerBudget) -> Int[Tensor, " kept_head"]:
        """Return the number of entries per kept set of one layer, without the always-kept entries.

        The result is on the CPU where no score was used.
        """
        return available.equal_counts(available.free)


@dataclass(frozen=True)
class Pooled(Policy):
    """A system that ranks by SnapKV's pooled score (section 4.2: maximum over 7), or by the score that `by` names."""

    score_options: ClassVar[tuple[str, ...]] = ("by", "pool", "kernel", "window_queries")
    by: str | Choice = option(scores.OWN, "another score to rank by, such as caote(pool=max)", call=True)
    pool: str = option("max", "pooling of attention over positions: max, average or none",
                       known=("max", "average", "none"))  # fmt: skip
    kernel: int = option(7, "odd width of the pooling", low=1, high=65_535, odd=True)
    window_queries: str = window_queries_option()

    @functools.cached_property
    def score(self) -> Score:  # a name is looked up once
        """Score that ranks entries: the policy's own, or the one given as `by`."""
        return scores.build(self.by) if self.ranks_by_another else self.own_score

    @property
    def own_score(self) -> Score:
        """SnapKV's score, the default of `by`."""
        return SnapKV(pool=self.pool, kernel=self.kernel, window_queries=self.window_queries)

    @property
    def ranks_by_another(self) -> bool:
        """True if `by` replaces the policy's own score."""
        return self.by != scores.OWN


class ByScore(Policy):
    """A policy that ranks by one score, with equal budgets and the score's options."""

    scored: ClassVar[type[Score]]

    @functools.cached_property
    def score(self) -> Score:
        """Score of the policy's name, with the policy's options."""
        options = {name: getattr(self, field_name(name)) for name in self.scored.options()}
        return instantiate(self.scored, options, f"score '{self.name}'")

    @staticmethod
    def subclass_for(scored: type[Score], name: str) -> type[Policy]:
        """Return a policy class, called `name`, that ranks by the score class `scored`."""
        fields = {field.name: field for field in dataclasses.fields(scored)}
        options = [fields[field_name(option)] for option in scored.options()]
        attributes = {
            "name": name,
            "scored": scored,
            "score_options": tuple(option for option in scored.options() if option not in scored.by_place),
            "summary": scored.summary_line(),
            **{name: getattr(scored, name) for name in ("paper", "own_window", "own_defaults")},
        }
        copies = [
            (field.name, field.type, dataclasses.field(default=field.default, metadata=field.metadata))
            for field in options
        ]
        policy = dataclasses.make_dataclass(
            scored.__name__, copies, bases=(ByScore,), namespace=attributes, frozen=True
        )
        policy.__module__ = scored.__module__  # whose code it is
        return policy


@dataclass(frozen=True)
class NonEvicting(Policy):
    """A policy that evicts nothing, so that no kept key can move.

    Class attributes:
        chooses: what a head chooses.
        instead: what the policy does instead of evicting.
    """

    chooses: ClassVar[str]
    instead: ClassVar[str]

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return name -> option of the class, without that of moving keys."""
        return {name: known for name, known in super().options().items() if name not in ("positions", "keep")}

    @classmethod
    def check(cls, config: EvictionConfig) -> None:
        """Raise ConfigError for unsupported options: shared sets, `union`, protection, quantisation, correction."""
        if shares_heads(config.granularity) or shares_layers(config.granularity):
            raise ConfigError(
                f"policy '{cls.name}' chooses {cls.chooses} by head; granularity '{config.granularity.name}' has one "
                "set for several heads: choose query or kv"
            )
        if reduction(config.granularity) == UNION:
            raise ConfigError(
                f"policy '{cls.name}' chooses {cls.chooses} by score: expected reduce mean or max, got {UNION}"
            )
        for what, got, usual in (
            ("protect_first", config.protect_first, 0),
            ("protect_recent", config.protect_recent, 0),
            ("precision", str(config.precision), FULL),
            ("correction", str(config.correction), NONE),
        ):
            if got != usual:
                raise ConfigError(
                    f"policy '{cls.name}' evicts nothing and {cls.instead}: expected {what} {usual}, got {got}; leave "
                    "it out"
                )


def apportion(shares: Float[Tensor, " item"], total: int, most: int | None = None) -> Int[Tensor, " item"]:
    """Return the shares rounded to whole numbers, none above `most`, that add up to min(total, most · len).

    Largest remainder: every item gets its share's floor, what is left goes to the largest fractions, the earlier item
    first; what exceeds `most` goes to the next items in the same order. Without `most` nothing waits for the device,
    and the shares add up to `total`.
    """
    counts: Tensor = round_down_entries(shares)
    fractions = (shares - counts).clamp(min=0).round(decimals=9)
    order = fractions.sort(descending=True, stable=True).indices
    counts = counts.to(torch.int64)
    if most is None:
        incremented = torch.arange(len(order), device=order.device) < total - counts.sum()
        return counts.scatter_add(0, order, incremented.to(torch.int64))
    counts, wanted = counts.clamp(max=most), min(total, most * len(shares))
    while (left := wanted - int(counts.sum())) > 0:
        not_full = order[counts[order] < most]
        counts[not_full[:left]] += 1
    return counts
