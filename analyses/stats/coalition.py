"""Shapley values of the players of a cooperative game, and greedy paths through their coalitions.

The value of player i is the mean over all orders of `v(those before i, and i) − v(those before i)` (Shapley, 1953).
More than a few players have too many orders: then some are drawn, each with its reverse, which removes the error that
the position in an order brings (antithetic sampling: Mitchell et al., 2022). The values of every order add up to
`v(all) − v(none)`, so those drawn do too.

An order and its reverse average every pair of players exactly: where players interact in pairs alone, each pair of
orders gives the value itself, and the spread of drawn pairs is 0 however strong the interaction is. Interaction shows
in a player's contribution when it is switched first and when it is switched last: both are equal without interaction,
and with pairs alone the value is half of their sum.

A greedy path switches one player after the other, each time the one that helps most. A player chosen on some samples
looks better on them than on others, so half of the samples choose and the other half judge; then both change places.
Every sample thus has a curve for which it helped to choose, and one that it merely judges.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import factorial

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats
from perturbkv.configs.patching import Coalition

Orders = NDArray[np.int64]
"""(order, position): players, each row one permutation of them."""
Values = Mapping[Coalition, Floats]
"""Coalition -> (sample,) outcomes."""


def draw_orders(players: int, permutations: int, seed: int) -> Orders:
    """Draw orders of the players, each followed by its reverse; `permutations` counts both and is rounded down to even.

    Example:
        >>> draw_orders(3, 4, seed=0).tolist()
        [[2, 0, 1], [1, 0, 2], [2, 1, 0], [0, 1, 2]]
    """
    drawn = np.random.default_rng(seed % 2**64)
    pairs = [drawn.permutation(players) for _ in range(permutations // 2)]
    return np.array([row for order in pairs for row in (order, order[::-1])]).reshape(-1, players)


def coalitions_along(drawn: Orders) -> list[Coalition]:
    """Return every coalition along the orders, from no player to all players, without duplicates."""
    passed = (frozenset(order[:count].tolist()) for order in drawn for count in range(drawn.shape[1] + 1))
    return list(dict.fromkeys(passed))


def extreme_coalitions(players: int) -> list[Coalition]:
    """Return the coalitions of a single player, then those without a single player.

    Example:
        >>> [sorted(coalition) for coalition in extreme_coalitions(3)]
        [[0], [1], [2], [1, 2], [0, 2], [0, 1]]
    """
    everybody = frozenset(range(players))
    singles = [frozenset({player}) for player in range(players)]
    return [*singles, *(everybody - single for single in singles)]


def required_coalitions(players: int, drawn: Orders | None) -> list[Coalition]:
    """Return the coalitions whose outcomes Shapley values need: those along the orders and the extreme ones.

    All coalitions where `drawn` is None; none where it is empty.
    """
    if drawn is None:
        return subsets(players)
    return list(dict.fromkeys([*coalitions_along(drawn), *extreme_coalitions(players)])) if len(drawn) else []


def subsets(players: int) -> list[Coalition]:
    """Return all coalitions of some players, small ones first."""
    sizes = range(players + 1)
    return [frozenset(members) for size in sizes for members in itertools.combinations(range(players), size)]


def marginal_contributions(values: Values, drawn: Orders) -> Floats:
    """Return the contribution of each player at its position in each order, (order, player, sample)."""
    each = np.empty((*drawn.shape, len(next(iter(values.values())))))
    for row, order in enumerate(drawn.tolist()):
        for position, player in enumerate(order):
            before = frozenset(order[:position])
            each[row, player] = values[before | {player}] - values[before]
    return each


def exact_values(values: Values, players: int) -> Floats:
    """Return (player, sample) Shapley values from all coalitions.

    Example, of two players who are worth 1 and 2 alone and 5 together:
        >>> sizes = {(): 0.0, (0,): 1.0, (1,): 2.0, (0, 1): 5.0}
        >>> outcomes = {frozenset(members): np.array([value]) for members, value in sizes.items()}
        >>> exact_values(outcomes, 2).ravel().tolist()
        [2.0, 3.0]
    """
    total = np.zeros((players, len(next(iter(values.values())))))
    for coalition in subsets(players):
        for player in set(range(players)) - coalition:
            share = factorial(len(coalition)) * factorial(players - len(coalition) - 1) / factorial(players)
            total[player] += share * (values[coalition | {player}] - values[coalition])
    return total


def first_contributions(values: Values, players: int) -> Floats:
    """Return the contribution of each player that is switched before all others, (player, sample).

    Example, of the two players of `exact_values`:
        >>> sizes = {(): 0.0, (0,): 1.0, (1,): 2.0, (0, 1): 5.0}
        >>> outcomes = {frozenset(members): np.array([value]) for members, value in sizes.items()}
        >>> first_contributions(outcomes, 2).ravel().tolist()
        [1.0, 2.0]
    """
    return np.array([values[frozenset({player})] - values[frozenset()] for player in range(players)])


def last_contributions(values: Values, players: int) -> Floats:
    """Return the contribution of each player that is switched after all others, (player, sample).

    Example, of the two players of `exact_values`:
        >>> sizes = {(): 0.0, (0,): 1.0, (1,): 2.0, (0, 1): 5.0}
        >>> outcomes = {frozenset(members): np.array([value]) for members, value in sizes.items()}
        >>> last_contributions(outcomes, 2).ravel().tolist()
        [3.0, 4.0]
    """
    everybody = frozenset(range(players))
    return np.array([values[everybody] - values[everybody - {player}] for player in range(players)])


def draw_halves(samples: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two random halves of the samples, as sorted indices; the first is larger for an odd number."""
    drawn = np.random.default_rng(seed % 2**64).permutation(samples)
    middle = -(-samples // 2)
    return np.sort(drawn[:middle]), np.sort(drawn[middle:])


@dataclass
class GreedyPath:
    """The players that one half of the samples has chosen so far, best first.

    Attributes:
        choosing, judging: indices of the samples.
        chosen: players in the order in which they were chosen.
    """

    choosing: NDArray[np.int64]
    judging: NDArray[np.int64]
    chosen: list[int] = field(default_factory=list)

    def candidates(self, players: int) -> list[Coalition]:
        """Return the candidates for the next step: the chosen players plus one other player each."""
        chosen = frozenset(self.chosen)
        return [chosen | {player} for player in range(players) if player not in chosen]

    def choose(self, outcomes: Mapping[Coalition, Floats], better: int) -> None:
        """Add the player of the candidate with the best mean outcome over the choosing samples; ties: the first player.

        `outcomes` maps each candidate to (choosing sample,); `better` is 1 where more is better, −1 where less is.
        """
        means = {coalition: better * float(values.mean()) for coalition, values in outcomes.items()}
        best = max(means, key=lambda coalition: means[coalition])
        (player,) = best - frozenset(self.chosen)
        self.chosen.append(player)

    def coalitions(self) -> list[Coalition]:
        """Return the coalitions along the path: no player, the first one chosen, the first two, …."""
        return [frozenset(self.chosen[:count]) for count in range(len(self.chosen) + 1)]


def greedy_curves(
    paths: Sequence[GreedyPath], value: Callable[[Coalition, NDArray[np.int64]], Floats], samples: int
) -> tuple[Floats, Floats]:
    """Return outcomes with 0, 1, 2, … players switched, (count, sample), on the choosing and on the judging samples.

    `value` gives a coalition's outcome in some of the samples, by their indices.
    """
    count = len(paths[0].chosen) + 1
    chosen, judged = np.full((2, count, samples), np.nan)
    for path in paths:
        for switched, coalition in enumerate(path.coalitions()):
            chosen[switched, path.choosing] = value(coalition, path.choosing)
            judged[switched, path.judging] = value(coalition, path.judging)
    return chosen, judged
