"""Which configurations a page sets side by side: their short names, their budgets, the pairs, where to begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from perturbkv.analyses import naming
from perturbkv.analyses.pairing import order, pairs, sweeps
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.run import RunConfig
from perturbkv.errors import TraceError
from perturbkv.visible import line

MOST_PAIRS = 400
"""More take more room than a page has."""
Places = tuple[int, int]
"""Of two configurations along a trace's `config` axis."""


@dataclass(frozen=True)
class Sides:
    """A run's configurations as sides and budgets.

    Attributes:
        names: (side,) configurations without their budget: what tells them apart, each once.
        budgets: ascending, fractions before tokens.
        side, budget: (config,) places in these two.
        pairs: two configurations each of one budget, that of the first side first.
        left_out: how many further ones there are.
    """

    names: tuple[str, ...]
    budgets: tuple[Budget, ...]
    side: tuple[int, ...]
    budget: tuple[int, ...]
    pairs: tuple[Places, ...]
    left_out: int

    def config(self, side: int, budget: int) -> int | None:
        """The configuration of a side and a budget; None where the run has none."""
        told = list(zip(self.side, self.budget, strict=True))
        return told.index((side, budget)) if (side, budget) in told else None


@dataclass(frozen=True)
class Start:
    """What a page shows first: places among sides and budgets."""

    baseline: int
    treatment: int
    budget: int


def sides_of(run: RunConfig) -> Sides:
    """The sides of a run, in the order of its configurations."""
    groups = sweeps(run, None)
    of_config = {place: side for side, group in enumerate(groups) for place in group}
    side = tuple(of_config[place] for place in range(len(run.configs)))
    budgets = tuple(dict.fromkeys(one.budget for one in sorted(run.configs, key=lambda one: order(one)[1:])))
    budget = tuple(budgets.index(config.budget) for config in run.configs)
    names = numbered([line(name) for name in naming.curves([run.configs[group[0]] for group in groups])])
    found, left_out = _pairs(side, budget)
    return Sides(names, budgets, side, budget, found, left_out)


def start_of(run: RunConfig, sides: Sides) -> Start:
    """The first of attention against two-stage, else of the first two sides; of a single side that side twice."""
    try:
        places = [(run.configs.index(first), run.configs.index(second)) for first, second in _known(run)]
    except TraceError:
        places = list(sides.pairs)
    if not places:
        return Start(sides.side[0], sides.side[0], sides.budget[0])
    first, second = places[0]
    return Start(sides.side[first], sides.side[second], sides.budget[first])


def numbered(names: Sequence[str]) -> tuple[str, ...]:
    """The names, those that were there before with a number behind them: every name once."""
    found: list[str] = []
    for name in names:
        others = (f"{name} ({number})" for number in range(2, len(names) + 2))
        found.append(name if name not in found else next(one for one in others if one not in found))
    return tuple(found)


def _known(run: RunConfig) -> list[tuple[object, object]]:
    """Pairs of one budget. Raises TraceError where the run has none of the two selections."""
    found = [pair for pair in pairs(run, "attention", "two-stage") if pair[0].budget == pair[1].budget]
    if not found:
        msg = "expected attention and two-stage of one budget, got none"
        raise TraceError(msg)
    return list(found)


def _pairs(side: Sequence[int], budget: Sequence[int]) -> tuple[tuple[Places, ...], int]:
    """Pairs of one budget, and how many were left out: where there are too many, those of the first sides stay."""
    places = range(len(side))
    found = [(first, second) for first, second in combinations(places, 2) if budget[first] == budget[second]]
    kept = found
    if len(found) > MOST_PAIRS:
        kept = sorted(found, key=lambda pair: max(side[pair[0]], side[pair[1]]))[:MOST_PAIRS]
    return tuple(sorted(kept)), len(found) - len(kept)
