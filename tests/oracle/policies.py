"""Naive reference of every eviction system: what it accumulates, how it shares budgets out, what always stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tests.oracle.theory import Array, capped, softmax
from tests.support.configs import flat


def rows(
    query: Array, key: Array, scale: float, first: int, sinks: Array | None = None, cap: float | None = None
) -> Array:
    """(head, query, key): causal softmax rows of the queries from `first` on, zero where they see nothing.

    A sink is one more entry that every query of its head sees; its weight is left out.
    """
    heads, n, _ = query.shape
    weights = np.zeros((heads, n - first, n))
    for head in range(heads):
        keys = key[head // (heads // len(key))]
        for place in range(first, n):
            seen = [capped(scale * math.fsum(query[head, place] * keys[entry]), cap) for entry in range(place + 1)]
            beside = [] if sinks is None else [float(sinks[head])]
            weights[head, place - first, : place + 1] = softmax(seen + beside)[: place + 1]
    return weights


def accumulate(
    config: Any,
    query: Array,
    key: Array,
    scale: float,
    sinks: Array | None = None,
    template: range = range(0),
    cap: float | None = None,
) -> Array:
    """(head, n − w) of one layer, from all n queries; where the text's alone vote, those of `template` are silent."""
    config = flat(config)
    silent = template if config.window_queries == "text" else range(0)
    heads, n, _ = query.shape
    prefix = max(0, n - config.window)
    result = np.zeros((heads, prefix))
    if config.policy == "tova":
        voting = max(place for place in range(n) if place not in silent)
        last = rows(query, key, scale, voting, sinks, cap)[:, 0]
        for entry in range(prefix):
            result[:, entry] = math.fsum(last[:, entry]) / heads
        return result
    if config.policy == "h2o":
        first = 0
    elif config.policy == "scissorhands":
        first = max(0, n - config.history)
    else:
        first = max(0, n - config.window)
    weights = rows(query, key, scale, first, sinks, cap)
    for head in range(heads):
        for entry in range(prefix):
            column = [weights[head, place, entry] for place in range(n - first) if first + place not in silent]
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
    config: Any,
    pooled: Sequence[Sequence[float]],
    n: int,
    layer: int,
    layers: int,
    head_scores: Sequence[Sequence[Fraction]] | None,
) -> list[int]:
    """Prefix entries of each kept set of a layer; `head_scores` per kept set of every layer."""
    prefix, sets, kept = n - min(config.window, n), len(pooled), min(config.budget.tokens(n), n)
    stays = set(always(config, n))
    forced = len([position for position in stays if position < prefix])
    competing = [position for position in range(prefix) if position not in stays]
    mean, room = kept - len(stays), len(competing)
    if config.policy == "pyramidkv" and config.line == "total":
        return [_kvpress_line(config, n, kept, len(stays), layers)[layer] - n + prefix] * sets
    if config.policy == "pyramidkv" and layers > 1:
        first = min(2 * mean - mean / Fraction(config.beta), Fraction(room))
        last = 2 * mean - first
        line = [first + (last - first) * Fraction(place, layers - 1) for place in range(layers)]
        return [forced + whole(line, layers * mean, room)[layer]] * sets
    if config.policy == "adakv":
        entries = sorted((-pooled[head][place], place, head) for head in range(sets) for place in competing)
        if config.safeguard == "guaranteed":
            return [forced + count for count in _own_first(entries, sets, guaranteed(config, kept) - len(stays), mean)]
        chosen = [head for _, _, head in entries[: sets * mean]]
        floor = Fraction(str(config.floor))
        shares = [(1 - floor) * chosen.count(head) + floor * mean for head in range(sets)]
        return [forced + count for count in whole(shares, sets * mean, room)]
    if config.policy == "headkv":
        assert head_scores is not None
        flat = [score for row in head_scores for score in row]
        sure = mean * (1 - 1 / Fraction(str(config.beta)))
        pool = len(flat) * mean / Fraction(str(config.beta))
        counts = whole([sure + pool * score / sum(flat) for score in flat], len(flat) * mean, room)
        return [forced + count for count in counts[layer * sets : (layer + 1) * sets]]
    return [forced + mean] * sets


def _own_first(entries: Sequence[tuple[float, int, int]], sets: int, least: int, mean: int) -> list[int]:
    """Every head takes its own `least` best of the sorted entries, then the layer's largest fill what is left."""
    counts, left = [0] * sets, []
    for _, _, head in entries:
        if counts[head] < least:
            counts[head] += 1
        else:
            left.append(head)
    for head in left[: sets * mean - sum(counts)]:
        counts[head] += 1
    return counts


def _kvpress_line(config: Any, n: int, kept: int, least: int, layers: int) -> list[int]:
    """Whole budgets, window inside, as kvpress lays them out."""
    first = min(2 * kept - kept / Fraction(config.beta), Fraction(n - min(config.window, n)))
    last = 2 * kept - first
    if layers == 1 or last > first or last < least:
        return [kept] * layers
    return [round(first + (last - first) * Fraction(place, layers - 1)) for place in range(layers)]


def guaranteed(config: Any, kept: int) -> int:
    """Entries that AdaKV's second safeguard promises every head, the window inside."""
    if config.policy != "adakv" or config.safeguard != "guaranteed":
        return 0
    return math.floor(Fraction(str(config.floor)) * kept)


def always(config: Any, n: int) -> list[int]:
    """Positions that stay in every head: the first ones, the most recent ones, and the window among these."""
    first, recent = ends(config, n)
    return [position for position in range(n) if position < first or position >= n - recent]


def ends(config: Any, n: int) -> tuple[int, int]:
    """How many of the first and of the most recent entries those are."""
    kept = min(config.budget.tokens(n), n)
    first, recent = (
        asked if isinstance(asked, int) else math.floor(Fraction(str(asked)) * kept)
        for asked in (config.protect_first, config.protect_recent)
    )
    recent = max(recent, config.window)
    if config.policy == "h2o":
        recent = max(recent, math.floor(Fraction(str(config.recent)) * kept))
    first = min(first, kept - min(config.window, n))
    return first, min(recent, kept - first)
