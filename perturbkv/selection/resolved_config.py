"""Configurations with their policy, score and selection as objects, resolved once per run.

After planning no name is looked up, and a number that follows from a configuration and a prompt's length is computed
once, not per layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from perturbkv.configs import selections
from perturbkv.configs.cache_contents import CacheContents
from perturbkv.configs.choice import Choice
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.configs.selections import GIVEN, PROMPT, Blocks
from perturbkv.errors import ConfigError
from perturbkv.selection.policies import checked, registry

if TYPE_CHECKING:
    from perturbkv.scoring.score import Score
    from perturbkv.selection.policies.base import Policy

Rule = Callable[[Any, "ResolvedConfig"], Any]
"""Function from the `Scores` of a layer (`ranking`, which imports this module) to the one that ranks its entries."""


@dataclass(frozen=True)
class Selector:
    """The ranking scores of a selection, as functions.

    Attributes:
        first: score of the whole set, or of stage 1.
        second: score of stage 2; None where there are no stages.
    """

    first: Rule
    second: Rule | None = None


def _refuse_ranking(scores: object, config: EvictionConfig) -> NoReturn:
    """Raise ConfigError for a configuration with external kept sets, which have no ranking."""
    raise ConfigError(f"policy '{config.policy}' keeps what it was given; nothing ranks its entries")


_SELECTORS = {
    "attention": Selector(lambda scores, config: scores.attention(config)),
    "attention-unpooled": Selector(lambda scores, config: scores.attention(config, pooled=False)),
    "two-stage": Selector(
        lambda scores, config: scores.attention(config),
        lambda scores, config: scores.second_stage(config, uniform=False),
    ),
    "two-stage-uniform": Selector(
        lambda scores, config: scores.attention(config),
        lambda scores, config: scores.second_stage(config, uniform=True),
    ),
    "value": Selector(lambda scores, config: scores.value(config)),
    "random": Selector(lambda scores, config: scores.random(config)),
    "hindsight": Selector(lambda scores, config: scores.hindsight(config)),
    "hindsight-attention": Selector(lambda scores, config: scores.hindsight_attention(config)),
    "position": Selector(lambda scores, config: scores.position(config)),
    GIVEN: Selector(_refuse_ranking),
}


@dataclass(frozen=True)
class PrefixCounts:
    """The parts of a budget before the window, in entries or blocks: at both ends those that always stay, and the rest.

    Attributes:
        first, recent: numbers of the first and of the most recent ones, which always stay.
        free: mean number per kept set of those that are allocated by score.
    """

    first: int
    recent: int
    free: int

    @property
    def always(self) -> int:
        """Number of always-kept entries (or blocks) at both ends."""
        return self.first + self.recent

    def competing_slice(self, prefix: int) -> slice:
        """Return the slice between both ends of a prefix, whose entries compete by score."""
        return slice(self.first, prefix - self.recent)


@dataclass(frozen=True)
class ScoreRequest:
    """An unpooled score and the window before which entries are scored, as they are computed once per layer."""

    score: Score
    window: int


_Result = TypeVar("_Result")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class ResolvedConfig(EvictionConfig):
    """A configuration with its policy and selection as objects; equal to the configuration that it was built from.

    Attributes:
        system: the policy with its options.
        selector: the selection, as the functions that score entries.
        score: the score by which the policy ranks entries.
        first_stage: the score of the policy's own stage 1; None without one.
        pooling: kind and width of the pooling of `score` over positions.
        requests: the unpooled scores that a prefill computes for it: `score`, then `first_stage`; empty for a policy
            that ranks no entries.
        reduction: how the scores of the query heads that share a kept set are reduced.
        shares_heads, shares_layers: whether all heads of a layer, or all layers, share a kept set.
    """

    system: Policy = field(init=False)
    selector: Selector = field(init=False)
    score: Score = field(init=False)
    first_stage: Score | None = field(init=False)
    pooling: tuple[str, int] = field(init=False)
    requests: tuple[ScoreRequest, ...] = field(init=False)
    reduction: str = field(init=False)
    shares_heads: bool = field(init=False)
    shares_layers: bool = field(init=False)

    def __init__(self, *choices: Any, **named: Any) -> None:
        super().__init__(*choices, **named)
        system = registry.build(self.policy)
        score, first_stage = system.score, system.first_stage
        scores = [score] if first_stage is None else [score, first_stage]
        resolved = {
            "system": system,
            "selector": _SELECTORS[self.selection.name],
            "score": score,
            "first_stage": first_stage,
            "pooling": score.pooling(),
            "requests": tuple(ScoreRequest(each.unpooled(), self.window) for each in scores if system.ranks),
            "reduction": selections.reduction(self.granularity),
            "shares_heads": selections.shares_heads(self.granularity),
            "shares_layers": selections.shares_layers(self.granularity),
            "_hash": super().__hash__(),
            "_results": {},
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return cast("int", self._hash)  # type: ignore[attr-defined]

    def once(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """Return the result of `make`, computed once per key."""
        results: dict[Hashable, _Result] = self._results  # type: ignore[attr-defined]
        if key not in results:
            results[key] = make()
        return results[key]

    @functools.cached_property
    def cache_contents(self) -> CacheContents:
        """The contents of the configuration's cache."""
        return super().cache_contents

    @functools.cached_property
    def block(self) -> int:
        """Entries per block or page; 1 for single entries."""
        return super().block

    @property
    def accumulates(self) -> bool:
        """True if it ranks by a score that goes on while a cache is decoded from."""
        return bool(self.requests) and self.score.accumulates

    @property
    def has_own_stages(self) -> bool:
        """True if a stage 1 of the policy itself precedes the selection's ranking."""
        return self.first_stage is not None and self.selection.name == "attention"

    def blocks(self, prompt_tokens: int) -> Blocks:
        """Return the division of a prompt's entries into blocks."""
        return self.once(("blocks", prompt_tokens), lambda: super(ResolvedConfig, self).blocks(prompt_tokens))

    def allowed_entries(self, prompt_tokens: int) -> int:
        """Return the maximum number of kept entries per head. Raises BudgetError as `EvictionConfig` does."""
        return self.once(("allowed", prompt_tokens), lambda: super(ResolvedConfig, self).allowed_entries(prompt_tokens))

    def kept_entries(self, prompt_tokens: int) -> int:
        """Return the number of kept entries per head, in whole blocks. Raises BudgetError likewise."""
        return self.once(("kept", prompt_tokens), lambda: super(ResolvedConfig, self).kept_entries(prompt_tokens))

    def while_decoding(self, compressed: int, question: int) -> ResolvedConfig:
        """Return the configuration by which a cache is compressed again, its budget in entries.

        With `keep=prompt` the entries of the prompt's `compressed` tokens and of its `question` stay, and count in it.
        """
        budget, keeps = Budget(self.budget.tokens(compressed)), self.system.keep == PROMPT
        first = compressed + question if keeps else self.protect_first
        policy = self.policy
        if keeps and "prompt" in self.score.by_place:  # an option of a score that draws from what lies behind
            policy = Choice(policy.name, {**policy.options, "prompt": first})
        return dataclasses.replace(self, policy=policy, budget=budget, protect_first=first)

    def prefix_counts(self, prompt_tokens: int) -> PrefixCounts:
        """Return the numbers of blocks before the tail that always stay, at both ends, and that scores allocate.

        Blocks that always stay are no more than the budget pays for. Raises BudgetError where the budget is no larger
        than the window.
        """
        return self.once(("prefix", prompt_tokens), lambda: self._count_prefix(prompt_tokens))

    def _count_prefix(self, prompt_tokens: int) -> PrefixCounts:
        """Compute what `prefix_counts` returns."""
        allowed, window = self.allowed_entries(prompt_tokens), min(self.window, prompt_tokens)
        blocks = self.blocks(prompt_tokens)
        affordable = blocks.affordable_blocks(allowed)
        first = min(checked.count(self.system, "first_entries", self, allowed), allowed - window)
        recent = min(checked.count(self.system, "recent_entries", self, allowed), allowed - first)
        first_blocks = min(blocks.first_blocks(first), affordable)
        recent_blocks = min(blocks.recent_blocks(recent), affordable - first_blocks)
        return PrefixCounts(first_blocks, recent_blocks, affordable - first_blocks - recent_blocks)

    def least_stage1_blocks(self, prompt_tokens: int) -> int:
        """Return the policy's smallest number of blocks in stage 1, besides those that always stay."""

        def ask_policy() -> int:
            counts = self.prefix_counts(prompt_tokens)
            always = self.blocks(prompt_tokens).tail_blocks + counts.always
            return checked.count(self.system, "least_stage1", self, always + counts.free, always)

        return self.once(("least_stage1", prompt_tokens), ask_policy)


def resolve(config: EvictionConfig) -> ResolvedConfig:
    """Return the configuration with its policy and selection as objects. Raises UnknownNameError and PluginError."""
    if isinstance(config, ResolvedConfig):
        return config
    return ResolvedConfig(**{each.name: getattr(config, each.name) for each in dataclasses.fields(config)})


@dataclass(frozen=True)
class ResolvedRun(RunConfig):
    """A run of resolved configurations."""

    configs: tuple[ResolvedConfig, ...]

    @classmethod
    def from_run(cls, run: RunConfig, configs: Sequence[EvictionConfig] = ()) -> ResolvedRun:
        """Return the run with the resolved `configs`, by default the run's own. Raises as `resolve`."""
        fields = {each.name: getattr(run, each.name) for each in dataclasses.fields(run)}
        return cls(**{**fields, "configs": tuple(map(resolve, configs or run.configs))})

    def select_configs(self, configs: Iterable[EvictionConfig]) -> ResolvedRun:
        """Return the run restricted to `configs`, each equal to one of the run's."""
        resolved: dict[EvictionConfig, ResolvedConfig] = {config: config for config in self.configs}
        return dataclasses.replace(self, configs=tuple(resolved[config] for config in configs))

    def at_prompt_end(self, prompt_tokens: int) -> ResolvedRun:
        """Return the run as a prompt is evicted at its end: one of at most `compress_over` entries stays whole."""
        if prompt_tokens > self.compress_over:
            return self
        configs = (  # each with a budget of its own, so that no two become one
            config if config.is_external else dataclasses.replace(config, budget=Budget(self.compress_over + place))
            for place, config in enumerate(self.configs)
        )
        return dataclasses.replace(self, configs=tuple(configs))
