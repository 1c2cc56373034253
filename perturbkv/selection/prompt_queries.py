"""Which of a prompt's queries a prefill along lines is looked at by: the last ones, and those that are measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.lines import ASKED
from perturbkv.scoring.window_attention import seeded
from perturbkv.selection.policies import registry
from perturbkv.selection.policies.vertical_slash import VerticalSlash

Positions = tuple[int, ...]
"""Places of a prompt, ascending."""
_NO_LAYER = -1
"""In a seed's place of the layer: all layers are asked at the same positions."""


def last(config: EvictionConfig, prompt_tokens: int) -> Positions:
    """The queries whose attention says which lines."""
    return tuple(range(max(0, prompt_tokens - _policy(config).last), prompt_tokens))


def measured(config: EvictionConfig, prompt_tokens: int, sample: str) -> Positions:
    """The queries at which isolated quantities are measured: one of each of 32 equal parts of the prompt, seeded.

    None stands within the first entries and the band behind them, where a query looks at everything whatever is chosen;
    the budget has no say, so that all budgets are asked at the same ones. Fewer where there are fewer.
    """
    policy = _policy(config)
    begin = min(config.window + policy.first, prompt_tokens - 1)
    parts = min(ASKED, prompt_tokens - begin)
    ends = [begin + part * (prompt_tokens - begin) // parts for part in range(parts + 1)]
    drawn = seeded(1, parts, policy.seed, sample, _NO_LAYER)[0].tolist()
    return tuple(low + int(share * (high - low)) for low, high, share in zip(ends, ends[1:], drawn, strict=False))


def wanted(configs: Iterable[EvictionConfig], prompt_tokens: int, sample: str) -> set[Positions]:
    """Everything that the full prefill has to remember queries of; nothing where no configuration has lines."""
    lined = [config for config in configs if config.lined]
    return {one for config in lined for one in (last(config, prompt_tokens), measured(config, prompt_tokens, sample))}


def _policy(config: EvictionConfig) -> VerticalSlash:
    return cast("VerticalSlash", registry.build(config.policy))
