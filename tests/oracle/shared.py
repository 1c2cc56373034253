"""Naive reference of kept sets that heads and layers share: members as (layer, head), sets grown rank by rank.

A union grows: with every round each member adds its next best entry, as long as no more are united than there is room
for; of the first round that would be too many the entries with the largest mean score come in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.oracle import blocks, policies
from tests.oracle.theory import Array, pool
from tests.support.configs import flat

Member = tuple[int, int]
Scores = dict[int, float]


class Layer(NamedTuple):
    """What one layer has of the n − w entries before the window, each (head, entry); A of the first decoded token."""

    attention: Array
    norms: Array
    realised: Array


def groups(granularity: str, layers: int, heads: int, kv_heads: int) -> list[list[Member]]:
    """The query heads that share a kept set, for every kept set that may differ."""
    found: dict[tuple[int, int], list[Member]] = {}
    for layer in range(layers):
        for head in range(heads):
            own = head * kv_heads // heads
            names = {"kv": (layer, own), "layer": (layer, 0), "head": (0, own), "model": (0, 0)}
            found.setdefault(names[granularity], []).append((layer, head))
    return list(found.values())


def select(config: Any, layers: Sequence[Layer], n: int, kv_heads: int) -> dict[Member, tuple[list[int], list[int]]]:
    """(layer, query head) -> (kept, stage 1), the window in both, of a policy that keeps b everywhere."""
    config = flat(config)
    found = {}
    for members in groups(config.granularity, len(layers), len(layers[0].attention), kv_heads):
        stages = [_in_blocks(config, each) for each in _stages(config, [layers[i] for i, _ in members], members)]
        kept, stage1 = _fill(config, stages, n, _alpha(config, members))
        found |= {member: (kept, stage1) for member in members}
    return found


def _alpha(config: Any, members: list[Member]) -> float:
    """The mean share of stage 1 of those that share."""
    if isinstance(config.alpha, int | float):
        return float(config.alpha)
    told = config.alpha.to_document()
    shares = [told["alpha"][i][h] if told["by"] == "head" else told["alpha"][i] for i, h in members]
    return math.fsum(shares) / len(shares)


def _stages(config: Any, rows: Sequence[Layer], members: list[Member]) -> list[list[Scores]]:
    """Per stage the scores to rank by: one row, or with a union a row per member."""
    attention, norms, realised = (
        [list(map(float, row[kind][h])) for row, (_, h) in zip(rows, members, strict=True)] for kind in range(3)
    )
    if config.selection == "two-stage-uniform":
        norms = [[1.0] * len(row) for row in norms]

    def smooth(row: list[float], wanted: bool = True) -> list[float]:
        return pool(row, config.pool, config.kernel) if wanted and row else row

    def mean(of: list[list[float]]) -> list[float]:
        return [math.fsum(column) / len(of) for column in zip(*of, strict=True)]

    united, pooled2 = config.reduce == "union", config.score == "pooled"
    raw = mean(attention) if config.reduce == "mean" else [max(column) for column in zip(*attention, strict=True)]
    products = [
        [(s + config.epsilon) * v for s, v in zip(smooth(row, pooled2), norm, strict=True)]
        for row, norm in zip(attention, norms, strict=True)
    ]
    of_means = [(s + config.epsilon) * v for s, v in zip(smooth(raw, pooled2), mean(norms), strict=True)]
    realised_norms = [[a * v for a, v in zip(*both, strict=True)] for both in zip(realised, norms, strict=True)]
    first = [smooth(row) for row in attention] if united else [smooth(raw)]
    second = products if united else [mean(products) if config.product == "mean-of-products" else of_means]
    chosen = {
        "attention": [first],
        "attention-unpooled": [attention if united else [raw]],
        "two-stage": [first, second],
        "two-stage-uniform": [first, second],
        "value": [[mean(norms)]],
        "hindsight": [[mean(realised_norms)]],
        "hindsight-attention": [[mean(realised)]],
        "position": [[[2 * len(raw) - i if i < config.sinks else i for i in range(len(raw))]]],
    }[config.selection]
    return [[dict(enumerate(row)) for row in stage] for stage in chosen]


def _in_blocks(config: Any, stage: list[Scores]) -> list[Scores]:
    return stage if config.block == 1 else [blocks.scored(config, row) for row in stage]


def _fill(config: Any, stages: list[list[Scores]], n: int, alpha: float) -> tuple[list[int], list[int]]:
    """(kept, stage 1) positions of one set."""
    of_blocks, length = (config, n) if config.block == 1 else blocks.as_entries(config, n)
    prefix = length - min(of_blocks.window, length)
    stages = [[{i: row[i] for i in row if i < prefix} for row in stage] for stage in stages]
    always = policies.always(of_blocks, length)
    budget = min(of_blocks.budget.tokens(length), length)
    room = budget - len(always)
    first = math.floor(alpha * (budget if config.split == "total" else room) + 1e-9)
    first = max(0, first - len(always)) if config.split == "total" else first
    stage1 = united(stages[0], min(first, room), set(always))
    taken = {*always, *stage1}
    kept = stage1 + united(stages[-1], room - len(stage1), taken)
    both = [sorted([*always, *kept]), sorted([*always, *stage1])]
    kept, stage1 = both if config.block == 1 else [blocks.positions(config, n, one) for one in both]
    return kept, stage1


def united(members: list[Scores], room: int, taken: set[int]) -> list[int]:
    """The entries, none of them `taken`, that members agree on by adding their best in turn."""
    own = [sorted(member, key=lambda i: (-member[i], i)) for member in members]
    found: set[int] = set()
    for entries in zip(*own, strict=True):
        added = set(entries) - taken - found
        if len(found) + len(added) > room:
            best = sorted(added, key=lambda i: (-math.fsum(member[i] for member in members) / len(members), i))
            return [*found, *best[: room - len(found)]]
        found |= added
    return list(found)
