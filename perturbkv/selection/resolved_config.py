"""Configurations whose names are objects: what everything behind a plan takes, so that no name is looked up again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.configs.selections import GIVEN
from perturbkv.errors import ConfigError
from perturbkv.selection.policies import registry

if TYPE_CHECKING:
    from perturbkv.selection.policies.base import Policy


@runtime_checkable
class LayerScores(Protocol):
    """The scores of one layer that selections rank by: of its entries, or of its pages for one query."""

    def attention(self, config: Any, pooled: bool = True) -> Any:
        """Return the policy's own score."""

    def second_stage(self, config: Any, uniform: bool) -> Any:
        """Return the score of stage 2; `uniform` replaces ν by 1."""

    def value(self, config: Any) -> Any:
        """Return ν alone."""

    def random(self, config: Any) -> Any:
        """Return seeded numbers."""

    def hindsight(self, config: Any) -> Any:
        """Return the realised A·ν."""

    def hindsight_attention(self, config: Any) -> Any:
        """Return the realised A alone."""

    def position(self, config: Any) -> Any:
        """Return a score by position."""


Rule = Callable[[LayerScores, EvictionConfig], Any]
"""From the scores of a layer to the one that ranks a configuration's entries."""


@dataclass(frozen=True)
class Selector:
    """A selection as functions: by which scores entries are ranked.

    Attributes:
        first: of the whole set, or of stage 1.
        second: of stage 2; None where there are no stages.
    """

    first: Rule
    second: Rule | None = None


def _attention(scores: LayerScores, config: EvictionConfig) -> Any:
    return scores.attention(config)


def _unranked(scores: LayerScores, config: EvictionConfig) -> Any:
    msg = f"policy '{config.policy}' keeps what it was given; nothing ranks its entries"
    raise ConfigError(msg)


_SELECTORS = {
    "attention": Selector(_attention),
    "attention-unpooled": Selector(lambda scores, config: scores.attention(config, pooled=False)),
    "two-stage": Selector(_attention, lambda scores, config: scores.second_stage(config, uniform=False)),
    "two-stage-uniform": Selector(_attention, lambda scores, config: scores.second_stage(config, uniform=True)),
    "value": Selector(lambda scores, config: scores.value(config)),
    "random": Selector(lambda scores, config: scores.random(config)),
    "hindsight": Selector(lambda scores, config: scores.hindsight(config)),
    "hindsight-attention": Selector(lambda scores, config: scores.hindsight_attention(config)),
    "position": Selector(lambda scores, config: scores.position(config)),
    GIVEN: Selector(_unranked),
}


@dataclass(frozen=True)
class Ends:
    """The part of a budget that is settled before any score is looked at, in entries or blocks.

    Attributes:
        first, recent: those before the window that always stay.
        free: those per kept set, on the average, that are shared out by score.
    """

    first: int
    recent: int
    free: int

    @property
    def always(self) -> int:
        """The number at both ends."""
        return self.first + self.recent

    def competing(self, prefix: int) -> slice:
        """Return the indices between both ends."""
        return slice(self.first, prefix - self.recent)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class ResolvedConfig(EvictionConfig):
    """A configuration with the objects that its names stand for; equal to the configuration that it was made of.

    Attributes:
        system: the policy with its options.
        selector: the selection.
    """

    system: Policy = field(init=False)
    selector: Selector = field(init=False)

    def __init__(self, *choices: Any, **named: Any) -> None:
        super().__init__(*choices, **named)
        object.__setattr__(self, "system", registry.build(self.policy))
        object.__setattr__(self, "selector", _SELECTORS[self.selection.name])

    @property
    def in_cache(self) -> bool:
        """Whether decoding sees its kept keys at 0 … b − 1."""
        return self.system.in_cache

    @property
    def has_own_stages(self) -> bool:
        """Whether the policy's own stage 1 comes before what the selection ranks by."""
        return self.selection.name == "attention" and self.system.first_stage is not None

    def ends(self, prompt_tokens: int) -> Ends:
        """Return the blocks before the tail that always stay, and those that the budget buys beside them.

        Those that stay for entries at both ends are no more than the budget buys. Raises BudgetError where the budget
        leaves nothing beside what always stays.
        """
        allowed, window = self.allowed_entries(prompt_tokens), min(self.window, prompt_tokens)
        blocks = self.blocks(prompt_tokens)
        bought = blocks.affordable(allowed)
        first = min(self.system.first_entries(self, allowed), allowed - window)
        recent = min(self.system.recent_entries(self, allowed), allowed - first)
        first_blocks = min(blocks.first_blocks(first), bought)
        recent_blocks = min(blocks.recent_blocks(recent), bought - first_blocks)
        return Ends(first_blocks, recent_blocks, bought - first_blocks - recent_blocks)

    def guaranteed(self, prompt_tokens: int) -> int:
        """Return the blocks beside those that always stay that stage 1 takes at least."""
        tail, ends = self.blocks(prompt_tokens).tail_blocks, self.ends(prompt_tokens)
        return self.system.guaranteed(self, tail + ends.always + ends.free, tail + ends.always)


def resolve(config: EvictionConfig) -> ResolvedConfig:
    """Return the configuration with its policy and selection. Raises UnknownNameError and PluginError."""
    if isinstance(config, ResolvedConfig):
        return config
    return ResolvedConfig(**{one.name: getattr(config, one.name) for one in dataclasses.fields(config)})


@dataclass(frozen=True)
class ResolvedRun(RunConfig):
    """A run of resolved configurations."""

    configs: tuple[ResolvedConfig, ...]

    @classmethod
    def of(cls, run: RunConfig, configs: Sequence[EvictionConfig] = ()) -> ResolvedRun:
        """Return the run with its configurations resolved, or with these. Raises as `resolve`."""
        fields = {one.name: getattr(run, one.name) for one in dataclasses.fields(run)}
        return cls(**{**fields, "configs": tuple(map(resolve, configs or run.configs))})

    def narrowed(self, configs: Iterable[EvictionConfig]) -> ResolvedRun:
        """Return the run of some of its configurations."""
        known: dict[EvictionConfig, ResolvedConfig] = {config: config for config in self.configs}
        return dataclasses.replace(self, configs=tuple(known[config] for config in configs))
