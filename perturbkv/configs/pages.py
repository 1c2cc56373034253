"""Policies that evict nothing: at every step each head looks at the pages of the prompt that it chooses then.

Pages lie as blocks do (`configs.blocks`), and a budget buys as many: b are the entries that a head *reads* at a step,
those of the tail included. The cache holds all of them, and of every page what it is chosen by.
"""

from __future__ import annotations

from perturbkv.configs.blocks import Blocks
from perturbkv.configs.choice import Choice
from perturbkv.configs.precision import FULL_BITS
from perturbkv.errors import ConfigError

READERS = ("quest",)
"""Their names."""
PAGE = 16
"""Entries of a page (Quest, https://arxiv.org/abs/2406.10774, section 4.1)."""


def reads(policy: Choice) -> bool:
    """Whether a policy is one of these."""
    return policy.name in READERS


def page_of(policy: Choice) -> int:
    """Entries of one of its pages. Raises ConfigError for anything but a whole number from 1."""
    size = policy.options.get("page", PAGE)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        msg = f"page of policy '{policy.name}' must be a whole number of at least 1, got {size}"
        raise ConfigError(msg)
    return size


def held_bits(blocks: Blocks, prompt_tokens: int, kv_heads: int, d_head: int, chooses: bool) -> int:
    """Bits of one layer: keys and values of every entry, and smallest and largest key of each page that is chosen."""
    bounds = blocks.before if chooses else 0
    return 2 * FULL_BITS * d_head * kv_heads * (prompt_tokens + bounds)
