"""Where a falling curve over budgets comes down to a level: plain loops."""

from __future__ import annotations

import math


def pooled(values: list[float]) -> list[float]:
    """The nearest falling numbers, neighbours that rise averaged until none do."""
    blocks = [[value] for value in values]
    while True:
        rising = [place for place in range(len(blocks) - 1) if mean(blocks[place]) < mean(blocks[place + 1])]
        if not rising:
            return [mean(block) for block in blocks for _ in block]
        place = rising[0]
        blocks[place : place + 2] = [blocks[place] + blocks[place + 1]]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def crossing(budgets: list[float], losses: list[float], level: float, log: bool) -> float:
    """By hand: the first line between two budgets that comes down to the level."""
    curve = pooled(losses)
    if log:
        curve, level = [math.log(loss) for loss in curve], math.log(level)
    if curve[0] < level:
        return 0.0
    for place in range(1, len(curve)):
        if curve[place] <= level <= curve[place - 1] and curve[place] < curve[place - 1]:
            share = (curve[place - 1] - level) / (curve[place - 1] - curve[place])
            return budgets[place - 1] * (budgets[place] / budgets[place - 1]) ** share
    return math.inf
