"""Naive reference of every selection: explicit sorting by (−score, position), one head at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tests.oracle import blocks, policies
from tests.oracle.theory import Array, pool
from tests.support.configs import flat


def top(scores: dict[int, float], count: int) -> list[int]:
    """The positions of the largest scores; equal scores go to the earlier position."""
    return sorted(scores, key=lambda position: (-scores[position], position))[:count]


def select(
    config: Any,
    attention: Array,
    norms: Array,
    realised: Array,
    n: int,
    kv_heads: int,
    layer: int = 0,
    layers: int = 1,
    head_scores: Sequence[Sequence[float]] = (),
    euclidean: Array | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Per query head: (kept, stage 1) positions, the window in both, ascending.

    `norms` are L1 norms of projected values, `euclidean` L2 norms for those that ask for these.
    """
    config = flat(config)
    if config.norm == "l2":
        assert euclidean is not None
        norms = euclidean
    heads = len(attention)
    members = groups(config, heads, kv_heads)
    group, prefix = len(members[0]), n - min(config.window, n)
    given = [[sum(Fraction(row[h]) for h in one) / group for one in members] for row in head_scores]
    pooled = [_pooled(config, one, attention, prefix) for one in members]
    scores = [_scores(config, one, attention, norms, realised, prefix) for one in members]
    alphas = [alpha(config, one, layer) for one in members]
    if config.block == 1:
        return [sets for sets in _sets(config, pooled, scores, n, layer, layers, given, alphas) for _ in range(group)]
    whole = [list(blocks.scored(config, dict(enumerate(one))).values()) for one in pooled]
    ranked = [tuple(one and blocks.scored(config, one) for one in both) for both in scores]
    found = _sets(*_of(*blocks.as_entries(config, n), whole, ranked), layer, layers, given, alphas)
    spread = [tuple(blocks.positions(config, n, one) for one in both) for both in found]
    return [sets for sets in spread for _ in range(group)]  # type: ignore[misc]


def groups(config: Any, heads: int, kv_heads: int) -> list[list[int]]:
    """Query heads of each kept set."""
    own = heads // kv_heads
    size = {"query": 1, "kv": own, "head": own, "layer": heads, "model": heads}[config.granularity]
    return [list(range(first, first + size)) for first in range(0, heads, size)]


def alpha(config: Any, members: list[int], layer: int) -> Fraction:
    """Of the heads that share a kept set, in this layer or in all, the mean of their shares of stage 1."""
    if isinstance(config.alpha, int | float):
        return Fraction(config.alpha)
    held = config.alpha.to_document()
    if held["by"] == "global":
        return Fraction(held["alpha"])
    rows = held["alpha"] if config.granularity in ("head", "model") else [held["alpha"][layer]]
    each = [row[h] if held["by"] == "head" else row for row in rows for h in members]
    return sum(map(Fraction, each), Fraction(0)) / len(each)


def _of(config: Any, n: int, pooled: Any, scores: Any) -> tuple[Any, Any, Any, int]:
    """Of scores what lies before the blocks of the window."""
    prefix = n - config.window
    kept = [
        tuple(one and {place: score for place, score in one.items() if place < prefix} for one in both)
        for both in scores
    ]
    return config, [one[:prefix] for one in pooled], kept, n


def _sets(
    config: Any,
    pooled: Sequence[Sequence[float]],
    scores: Sequence[tuple[dict[int, float], dict[int, float] | None]],
    n: int,
    layer: int,
    layers: int,
    given: Sequence[Sequence[Fraction]],
    alphas: Sequence[Fraction],
) -> list[tuple[list[int], list[int]]]:
    """(kept, stage 1) of every kept set."""
    prefix = n - min(config.window, n)
    always = policies.always(config, n)
    forced = [position for position in always if position < prefix]
    budgets = policies.budgets(config, pooled, n, layer, layers, given)
    sets = []
    for (first, second), budget, alpha in zip(scores, budgets, alphas, strict=True):
        free = {position: score for position, score in first.items() if position not in forced}
        most = min(config.budget.tokens(n), n)
        stage1 = top(free, _stage1_count(config, alpha, budget + n - prefix, len(always), most))
        if second is not None:
            free = {position: score for position, score in second.items() if position not in (*forced, *stage1)}
        left = budget - len(forced)
        kept = top(free, left) if second is None else stage1 + top(free, left - len(stage1))
        sets.append((sorted(kept + always), sorted(stage1 + always)))
    return sets


def _stage1_count(config: Any, alpha: Fraction, budget: int, always: int, kept: int) -> int:
    """Beside what always stays; the entries that AdaKV guarantees a head come first, whatever α says."""
    least = policies.guaranteed(config, kept) - always
    if config.split == "total":
        return max(0, least, math.floor(float(alpha) * budget + 1e-9) - always)
    return max(0, least, math.floor(float(alpha) * max(0, budget - always) + 1e-9))


def _reduced(config: Any, members: list[int], attention: Array, prefix: int) -> list[float]:
    if config.reduce == "max":
        return [max(attention[h][i] for h in members) for i in range(prefix)]
    return [math.fsum(attention[h][i] for h in members) / len(members) for i in range(prefix)]


def _pooled(config: Any, members: list[int], attention: Array, prefix: int) -> list[float]:
    return pool(_reduced(config, members, attention, prefix), config.pool, config.kernel) if prefix else []


def _scores(
    config: Any, members: list[int], attention: Array, norms: Array, realised: Array, prefix: int
) -> tuple[dict[int, float], dict[int, float] | None]:
    def mean(rows: Array) -> list[float]:
        return [math.fsum(rows[h][i] for h in members) / len(members) for i in range(prefix)]

    raw, pooled = _reduced(config, members, attention, prefix), _pooled(config, members, attention, prefix)
    ones = np.ones_like(norms)
    place = range(prefix)
    simple = {
        "attention": pooled,
        "attention-unpooled": raw,
        "value": mean(norms),
        "hindsight": mean(realised[:, :prefix] * norms[:, :prefix]),
        "hindsight-attention": mean(realised[:, :prefix]),
        "position": [2 * prefix - i if i < config.sinks else i for i in place],
    }
    if config.selection in simple:
        return dict(zip(place, map(float, simple[config.selection]), strict=True)), None
    used = ones if config.selection == "two-stage-uniform" else norms
    if config.product == "product-of-means":
        s2 = pooled if config.score == "pooled" else raw
        product = [(s + config.epsilon) * v for s, v in zip(s2, mean(used), strict=True)]
    else:
        per_head = {
            h: pool(list(attention[h]), config.pool, config.kernel)
            if config.score == "pooled" and prefix
            else list(attention[h])
            for h in members
        }
        product = [
            math.fsum((per_head[h][i] + config.epsilon) * used[h][i] for h in members) / len(members) for i in place
        ]
    return dict(zip(place, pooled, strict=True)), dict(zip(place, product, strict=True))
