"""Naive reference of every eviction system: what it accumulates, how it shares budgets out, what always stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from perturbkv.config import EvictionConfig
from tests.oracle.theory import Array, softmax


def rows(query: Array, key: Array, scale: float, first: int) -> Array:
    """(head, query, key): causal softmax rows of the queries from `first` on, zero where they see nothing."""
    heads, n, _ = query.shape
    weights = np.zeros((heads, n - first, n))
    for head in range(heads):
        keys = key[head // (heads // len(key))]
        for place in range(first, n):
            seen = [scale * math.fsum(query[head, place] * keys[entry]) for entry in range(place + 1)]
            weights[head, place - first, : place + 1] = softmax(seen)
    return weights


def accumulate(config: EvictionConfig, query: Array, key: Array, scale: float) -> Array:
    """(head, n − w) of one layer, from all n queries."""
    heads, n, _ = query.shape
    prefix = max(0, n - config.window)
    result = np.zeros((heads, prefix))
    if config.policy == "tova":
        last = rows(query, key, scale, n - 1)[:, 0]
        for entry in range(prefix):
            result[:, entry] = math.fsum(last[:, entry]) / heads
        return result
    if config.policy == "h2o":
        first = 0
    elif config.policy == "scissorhands":
        first = max(0, n - config.history)
    else:
        first = max(0, n - config.window)
    weights = rows(query, key, scale, first)
    for head in range(heads):
        for entry in range(prefix):
            column = [weights[head, place, entry] for place in range(n - first)]
            if config.policy == "scissorhands":
                column = [float(weight > 1 / (first + place + 1)) for place, weight in enumerate(column)]
            result[head, entry] = math.fsum(column) / len(column)
    return result


def whole(shares: Sequence[Fraction], total: int, most: int) -> list[int]:
    """Largest remainder by trying one entry after the other."""
    counts = [min(most, math.floor(share)) for share in shares]
    order = sorted(range(len(shares)), key=lambda place: (math.floor(shares[place]) - shares[place], place))
    while sum(counts) < total and min(counts) < most:
        for place in order:
            if sum(counts) < total and counts[place] < most:
                counts[place] += 1
    return counts


def budgets(
    config: EvictionConfig,
    pooled: Sequence[Sequence[float]],
    n: int,
    layer: int,
    layers: int,
    head_scores: Sequence[Sequence[Fraction]] | None,
) -> list[int]:
    """Prefix entries of each kept set of a layer; `head_scores` per kept set of every layer."""
    window = min(config.window, n)
    prefix, mean, sets = n - window, min(config.budget.tokens(n), n) - window, len(pooled)
    if config.policy == "pyramidkv" and layers > 1:
        first = min(2 * mean - mean / Fraction(config.pyramid_beta), Fraction(prefix))
        last = 2 * mean - first
        line = [first + (last - first) * Fraction(place, layers - 1) for place in range(layers)]
        return [whole(line, layers * mean, prefix)[layer]] * sets
    if config.policy == "adakv":
        entries = [(-pooled[head][place], place, head) for head in range(sets) for place in range(prefix)]
        chosen = [head for _, _, head in sorted(entries)[: sets * mean]]
        floor = Fraction(str(config.floor))
        shares = [(1 - floor) * chosen.count(head) + floor * mean for head in range(sets)]
        return whole(shares, sets * mean, prefix)
    if config.policy == "headkv":
        assert head_scores is not None
        flat = [score for row in head_scores for score in row]
        guaranteed = mean * (1 - 1 / Fraction(str(config.head_beta)))
        pool = len(flat) * mean / Fraction(str(config.head_beta))
        counts = whole([guaranteed + pool * score / sum(flat) for score in flat], len(flat) * mean, prefix)
        return counts[layer * sets : (layer + 1) * sets]
    return [mean] * sets


def recent(config: EvictionConfig, n: int) -> int:
    """Prefix entries that stay because they are recent, before the window."""
    kept = min(config.budget.tokens(n), n)
    if config.policy != "h2o":
        return 0
    return max(0, min(kept, math.floor(Fraction(str(config.recent)) * kept)) - min(config.window, n))
