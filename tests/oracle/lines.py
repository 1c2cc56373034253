"""Naive reference of a prefill along lines: one head, one query and one entry at a time, from METHOD's sentences."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tests.oracle.decoder import Along, Decoder
from tests.oracle.selection import top
from tests.oracle.theory import Array, projected_value_norms, softmax


class Lines(NamedTuple):
    """Entries and offsets of one head."""

    vertical: list[int]
    slash: list[int]

    def seen(self, position: int) -> list[int]:
        """What the query at a position looks at."""
        upright = {entry for entry in self.vertical if entry <= position}
        return sorted(upright | {position - offset for offset in self.slash if offset <= position})


def rows(queries: list[Array], keys: list[Array], scale: float) -> list[list[float]]:
    """Of the last queries of a head, each one's softmax over its own entry and those before."""
    n, found = len(keys), []
    for row, query in enumerate(queries):
        position = n - len(queries) + row
        found.append(softmax([scale * math.fsum(query * keys[i]) for i in range(position + 1)]))
    return found


def sums(weights: list[list[float]], n: int) -> tuple[dict[int, float], dict[int, float]]:
    """Of every entry, and of every offset, what the last queries give it."""
    upright = {entry: 0.0 for entry in range(n)}
    slash = {offset: 0.0 for offset in range(n)}
    for row in weights:
        for entry, weight in enumerate(row):
            upright[entry] += weight
            slash[len(row) - 1 - entry] += weight
    return upright, slash


def choose(
    config: Any, queries: list[list[Array]], keys: list[list[Array]], norms: Array, scale: float
) -> list[tuple[Lines, Lines]]:
    """Per query head all lines and those of stage 1; `queries` and `norms` per query head, `keys` per group of them."""
    heads, n = len(queries), len(keys[0])
    sharing = heads // len(keys)
    budget = min(config.budget.tokens(n), n)
    if budget == n:
        return [(Lines(list(range(n)), list(range(n))),) * 2] * heads  # type: ignore[list-item]
    free = budget - config.window - config.first
    upright = math.floor(config.vertical * free + 1e-9)
    own = [rows(queries[head][-min(config.last, n) :], keys[head // sharing], scale) for head in range(heads)]
    if config.sums == "free":
        own = [[_free(config, row) for row in head] for head in own]
    group, found = sharing if config.granularity == "kv" else 1, []
    for begin in range(0, heads, group):
        members = range(begin, begin + group)
        first, second = _weights(config, [own[head] for head in members], [norms[head] for head in members])
        pair = list(zip(sums(first, n), sums(second, n), strict=True))
        ends = ((upright, config.first, n - config.window), (free - upright, config.window, n - config.first))
        chosen = [_kind(*scores, config.alpha, *end) for scores, end in zip(pair, ends, strict=True)]
        lines = tuple(Lines(chosen[0][stage], chosen[1][stage]) for stage in (0, 1))
        found += [lines] * group
    return found  # type: ignore[return-value]


def _free(config: Any, row: list[float]) -> list[float]:
    """A query's weights of what it does not look at anyway; the query's own entry is the last."""
    position = len(row) - 1
    taken = [entry < config.first or position - entry < config.window for entry in range(len(row))]
    return [0.0 if gone else weight for weight, gone in zip(row, taken, strict=True)]


def _weights(config: Any, own: list[list[list[float]]], norms: list[Array]) -> tuple[list[list[float]], ...]:
    """Of a group: A, and what stage 2, if there is one, sums."""
    first, second = [], []
    for row in range(len(own[0])):
        weights, products = [], []
        for entry in range(len(own[0][row])):
            each = [head[row][entry] for head in own]
            weights.append(max(each) if config.reduce == "max" else math.fsum(each) / len(each))
            nu = [float(one[entry]) for one in norms]
            mean = weights[-1] * math.fsum(nu) / len(nu)
            of_products = math.fsum(a * v for a, v in zip(each, nu, strict=True)) / len(nu)
            products.append(mean if config.product == "product-of-means" else of_products)
        first.append(weights)
        second.append(products if config.selection == "two-stage" else weights)
    return first, second


def _kind(
    first: dict[int, float], second: dict[int, float], alpha: float, count: int, always: int, end: int
) -> tuple[list[int], list[int]]:
    """All lines of one kind, and those of stage 1."""
    among = range(always, end)
    stage1 = top({place: first[place] for place in among}, math.floor(alpha * count + 1e-9))
    rest = top({place: second[place] for place in among if place not in stage1}, count - len(stage1))
    return [*range(always), *stage1, *rest], [*range(always), *stage1]


def along(config: Any, decoder: Decoder) -> Along:
    """What a prefill of its own sees, from its own queries, keys and values."""

    def seen(layer: int, queries: list[Array], keys: list[list[Array]], values: list[list[Array]]) -> list[list[Any]]:
        w_o = decoder.w_o(layer)
        norms = projected_value_norms(np.array(values), w_o, decoder.heads, euclidean=config.norm == "l2")
        own = [[query[head] for query in queries] for head in range(decoder.heads)]
        return [
            [lines.seen(position) for position in range(len(queries))]
            for lines, _ in choose(config, own, keys, norms, decoder.scale)
        ]

    return seen
