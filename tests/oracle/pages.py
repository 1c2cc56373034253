"""Naive reference of pages that are read: one head, one page and one entry at a time, from the formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.oracle.selection import top
from tests.oracle.theory import Array, softmax


def page_table(config: Any, n: int) -> list[list[int]]:
    """The positions of each page: the full ones before the window."""
    count = (n - min(config.window, n)) // config.page
    return [list(range(page * config.page, (page + 1) * config.page)) for page in range(count)]


def bound(query: Array, keys: list[Array], scale: float) -> float:
    """Σ_c max(q_c min_c, q_c max_c), scaled."""
    found = 0.0
    for channel, asked in enumerate(query):
        numbers = [float(key[channel]) for key in keys]
        found += max(asked * min(numbers), asked * max(numbers))
    return scale * found


def choose(
    config: Any, query: Array, keys: list[list[Array]], norms: Array, n: int, scale: float
) -> list[tuple[list[int], list[int]]]:
    """Per query head what is read, and stage 1 of it; `keys` per key/value head, `norms` (head, n)."""
    heads, pages = len(query), page_table(config, n)
    sharing = heads // len(keys)
    tail = list(range(len(pages) * config.page, n))
    allowed = min(config.budget.tokens(n), n)
    bought = len([page for page in range(1, len(pages) + 1) if len(tail) + page * config.page <= allowed])
    group = sharing if config.granularity == "kv" else 1
    found: list[tuple[list[int], list[int]]] = []
    for first in range(0, heads, group):
        members = range(first, first + group)
        held = {head: keys[head // sharing] for head in members}
        by_bound, refined = scores(config, members, query, held, norms, pages, n, scale)
        stage1 = top(by_bound, math.floor(config.alpha * bought + 1e-9))
        if refined is None:
            chosen = top(by_bound, bought)
        else:
            left = {page: score for page, score in refined.items() if page not in stage1}
            chosen = stage1 + top(left, bought - len(stage1))
        sets = tuple(sorted([i for page in some for i in pages[page]] + tail) for some in (chosen, stage1))
        found += [sets] * group  # type: ignore[list-item]
    return found


def scores(
    config: Any, members: range, query: Array, held: dict[int, list[Array]], norms: Array, pages: list[list[int]],
    n: int, scale: float,
) -> tuple[dict[int, float], dict[int, float] | None]:  # fmt: skip
    """Of each page what stage 1, or everything, is chosen by, and stage 2."""
    weight, largest, given = {}, {}, {}
    for head in members:
        keys = held[head]
        weight[head] = softmax([bound(query[head], [keys[i] for i in page], scale) for page in pages])
        largest[head] = [max(float(norms[head][i]) for i in page) for page in pages]
        own = softmax([scale * float(query[head] @ key) for key in keys[:n]])
        by = norms[head] if config.selection == "hindsight" else np.ones(n)
        given[head] = [math.fsum(own[i] * float(by[i]) for i in page) for page in pages]

    def mean(rows: dict[int, list[float]]) -> dict[int, float]:
        return {page: math.fsum(rows[head][page] for head in members) / len(members) for page in range(len(pages))}

    expected = mean(weight)
    if config.reduce == "max":
        expected = {page: max(weight[head][page] for head in members) for page in range(len(pages))}
    if config.selection == "value":
        return mean(largest), None
    if config.selection.startswith("hindsight"):
        return mean(given), None
    if config.selection == "attention":
        return expected, None
    products = {head: [a * v for a, v in zip(weight[head], largest[head], strict=True)] for head in members}
    by_norm, of_means = mean(products), mean(largest)
    if config.product == "product-of-means":
        by_norm = {page: expected[page] * of_means[page] for page in expected}
    return expected, by_norm
