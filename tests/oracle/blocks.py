"""Naive reference of whole blocks: positions in lists of lists, and a selection among blocks as if each were an entry.

A block that holds an entry which always stays is held whole; blocks are added while all that is held is at most b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from perturbkv.configs.entry_counts import Budget
from tests.oracle import policies


def tables(n: int, size: int) -> list[list[int]]:
    """The positions of each block; the last one may be short."""
    return [[position for position in range(n) if position // size == block] for block in range(math.ceil(n / size))]


def as_entries(config: Any, n: int) -> tuple[Any, int]:
    """A configuration that keeps blocks as if they were the entries of a shorter prompt, and its length."""
    table, window = tables(n, config.block), range(n - min(config.window, n), n)
    tail = [block for block in table if set(block) & set(window)]
    others = table[: len(table) - len(tail)]
    allowed, bought = min(config.budget.tokens(n), n), 0
    while sum(map(len, tail)) + sum(map(len, others[: bought + 1])) <= allowed and bought < len(others):
        bought += 1
    first, recent = policies.ends(config, n)
    front = sum(block[0] < first for block in others)
    back = sum(block[-1] >= n - recent for block in others)
    front = min(front, bought)
    back = min(back, bought - front)
    told = {
        "budget": Budget(max(1, bought + len(tail))),
        "window": len(tail),
        "protect_first": front,
        "protect_recent": back + len(tail),
        "recent": 0.0,
    }
    return SimpleNamespace(**{**vars(config), **told}), len(table)


def scored(config: Any, scores: Mapping[int, float]) -> dict[int, float]:
    """Each full block's score from those of its entries; by position a block is as good as its best place."""
    found: dict[int, list[float]] = {}
    for position, score in scores.items():
        found.setdefault(position // config.block, []).append(score)
    best = config.block_score == "max" or config.selection == "position"
    whole = {block: each for block, each in found.items() if len(each) == config.block}
    return {block: max(each) if best else math.fsum(each) for block, each in whole.items()}


def positions(config: Any, n: int, kept: list[int]) -> list[int]:
    """The positions of the blocks that are kept."""
    return [position for block in sorted(kept) for position in tables(n, config.block)[block]]
