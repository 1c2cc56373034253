"""Naive reference of every selection: explicit sorting by (−score, position), one head at a time."""

from __future__ import annotations

import math

import numpy as np

from perturbkv.config import EvictionConfig
from tests.oracle.theory import Array, pool


def top(scores: dict[int, float], count: int) -> list[int]:
    """The positions of the largest scores; equal scores go to the earlier position."""
    return sorted(scores, key=lambda position: (-scores[position], position))[:count]


def select(
    config: EvictionConfig, attention: Array, norms: Array, realised: Array, n: int, kv_heads: int
) -> list[tuple[list[int], list[int]]]:
    """Per query head: (kept, stage 1) positions, the window in both, ascending."""
    heads = len(attention)
    group = heads // kv_heads
    window = min(config.window, n)
    prefix = n - window
    budget = min(config.budget.tokens(n), n)
    always = list(range(prefix, n))
    if config.split == "total":
        first_count = max(0, math.floor(config.alpha * budget + 1e-9) - config.window)
    else:
        first_count = math.floor(config.alpha * max(0, budget - config.window) + 1e-9)
    sets = []
    for head in range(heads):
        members = [head] if config.granularity == "query" else [h for h in range(heads) if h // group == head // group]
        first, second = _scores(config, members, attention, norms, realised, prefix)
        stage1 = top(first, first_count)
        if second is None:
            kept = top(first, budget - window)
        else:
            rest = {position: score for position, score in second.items() if position not in stage1}
            kept = stage1 + top(rest, budget - window - len(stage1))
        sets.append((sorted(kept + always), sorted(stage1 + always)))
    return sets


def _scores(
    config: EvictionConfig, members: list[int], attention: Array, norms: Array, realised: Array, prefix: int
) -> tuple[dict[int, float], dict[int, float] | None]:
    def mean(rows: Array) -> list[float]:
        return [math.fsum(rows[h][i] for h in members) / len(members) for i in range(prefix)]

    if config.group_score == "max":
        raw = [max(attention[h][i] for h in members) for i in range(prefix)]
    else:
        raw = mean(attention)
    pooled = pool(raw, config.pool, config.kernel) if prefix else []
    ones = np.ones_like(norms)
    place = range(prefix)
    simple = {
        "attention": pooled,
        "attention-unpooled": raw,
        "value": mean(norms),
        "hindsight": mean(realised[:, :prefix] * norms[:, :prefix]),
        "position": [2 * prefix - i if i < config.sinks else i for i in place],
    }
    if config.selection in simple:
        return dict(zip(place, map(float, simple[config.selection]), strict=True)), None
    used = ones if config.selection == "two-stage-uniform" else norms
    if config.group_product == "product-of-means":
        s2 = pooled if config.stage2_score == "pooled" else raw
        product = [(s + config.epsilon) * v for s, v in zip(s2, mean(used), strict=True)]
    else:
        per_head = {
            h: pool(list(attention[h]), config.pool, config.kernel)
            if config.stage2_score == "pooled" and prefix
            else list(attention[h])
            for h in members
        }
        product = [
            math.fsum((per_head[h][i] + config.epsilon) * used[h][i] for h in members) / len(members) for i in place
        ]
    return dict(zip(place, pooled, strict=True)), dict(zip(place, product, strict=True))
