"""How many bits a configuration stores of one layer: the entries that it keeps, and what stands in for the others."""

from __future__ import annotations

from collections.abc import Sequence

from perturbkv.configs import pages
from perturbkv.configs.correction import correction_bits
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import stored_bits


def held_bits(
    config: EvictionConfig, kept: Sequence[int], prompt_tokens: int, heads: int, kv_heads: int, d_head: int
) -> int:
    """Of kept sets of `kept` entries each, which all of a layer's query heads share evenly.

    Of one that reads pages every entry, and what these are chosen by; of one with a prefill of its own every entry.
    """
    if config.lined:
        return stored_bits(config.precision, prompt_tokens, config.window, d_head) * kv_heads
    if config.reads:
        chooses = config.kept_entries(prompt_tokens) < prompt_tokens
        return pages.held_bits(config.blocks(prompt_tokens), prompt_tokens, kv_heads, d_head, chooses)
    sharing = heads // len(kept)
    return sum(
        stored_bits(config.precision, count, config.window, d_head)
        + correction_bits(config.correction, prompt_tokens - count, sharing, d_head)
        for count in kept
    )
