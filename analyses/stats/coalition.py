"""Shapley values: the contribution of each player, averaged over the orders in which players may come.

The value of player i is the mean over all orders of `v(those before i, and i) − v(those before i)` (Shapley, 1953). All
orders are too many of more than a few players: then some are drawn, each with its reverse, which takes out the error
that the position in an order brings (antithetic sampling: Mitchell et al., 2022). The values of every order add up to
`v(all) − v(none)`, so those drawn do too.

An order and its reverse average every pair of players exactly: where players interact in pairs alone, each pair of
orders gives the value itself, and the spread of drawn pairs is 0 however strong the interaction is. Interaction is seen
in what a player brings `alone` and `last`: equal where it is worth the same beside whomever, and with pairs alone the
value is half of their sum.

Greedy paths: players switched one after the other, each the one that helps most. Who is chosen on some samples looks
better on them than on any others. So half of the samples choose, and the other half judge; then both change places.
Every sample so has a curve that it chose with others, and one that it merely judges.
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


def orders(players: int, permutations: int, seed: int) -> Orders:
    """Return drawn orders, each followed by its reverse; `permutations` counts both.

    Example:
        >>> orders(3, 4, seed=0).tolist()
        [[2, 0, 1], [1, 0, 2], [2, 1, 0], [0, 1, 2]]
    """
    drawn = np.random.default_rng(seed % 2**64)
    pairs = [drawn.permutation(players) for _ in range(permutations // 2)]
    return np.array([one for order in pairs for one in (order, order[::-1])]).reshape(-1, players)


def along(drawn: Orders) -> list[Coalition]:
    """Return the coalitions that orders pass through, from nobody to everybody, each once."""
    passed = (frozenset(order[:count].tolist()) for order in drawn for count in range(drawn.shape[1] + 1))
    return list(dict.fromkeys(passed))


def ends(players: int) -> list[Coalition]:
    """Return each player alone, then all others of each.

    Example:
        >>> [sorted(one) for one in ends(3)]
        [[0], [1], [2], [1, 2], [0, 2], [0, 1]]
    """
    everybody = frozenset(range(players))
    singles = [frozenset({player}) for player in range(players)]
    return [*singles, *(everybody - one for one in singles)]


def needed(players: int, drawn: Orders | None) -> list[Coalition]:
    """Return the coalitions that values from these orders take, `ends` among them; None: all; of no orders none."""
    if drawn is None:
        return subsets(players)
    return list(dict.fromkeys([*along(drawn), *ends(players)])) if len(drawn) else []


def subsets(players: int) -> list[Coalition]:
    """Return all coalitions, small ones first."""
    sizes = range(players + 1)
    return [frozenset(one) for size in sizes for one in itertools.combinations(range(players), size)]


def marginals(values: Values, drawn: Orders) -> Floats:
    """Return (order, player, sample) contributions of each player at its position in each order."""
    each = np.empty((*drawn.shape, len(next(iter(values.values())))))
    for row, order in enumerate(drawn.tolist()):
        for position, player in enumerate(order):
            before = frozenset(order[:position])
            each[row, player] = values[before | {player}] - values[before]
    return each


def exact(values: Values, players: int) -> Floats:
    """Return (player, sample) Shapley values from all coalitions.

    Example, of two players who are worth 1 and 2 alone and 5 together:
        >>> sizes = {(): 0.0, (0,): 1.0, (1,): 2.0, (0, 1): 5.0}
        >>> exact({frozenset(one): np.array([value]) for one, value in sizes.items()}, 2).ravel().tolist()
        [2.0, 3.0]
    """
    total = np.zeros((players, len(next(iter(values.values())))))
    for coalition in subsets(players):
        for player in set(range(players)) - coalition:
            share = factorial(len(coalition)) * factorial(players - len(coalition) - 1) / factorial(players)
            total[player] += share * (values[coalition | {player}] - values[coalition])
    return total


def alone(values: Values, players: int) -> Floats:
    """Return (player, sample) contributions where nobody else is switched.

    Example, of the two players of `exact`:
        >>> sizes = {(): 0.0, (0,): 1.0, (1,): 2.0, (0, 1): 5.0}
        >>> alone({frozenset(one): np.array([value]) for one, value in sizes.items()}, 2).ravel().tolist()
        [1.0, 2.0]
    """
    return np.array([values[frozenset({player})] - values[frozenset()] for player in range(players)])


def last(values: Values, players: int) -> Floats:
    """Return (player, sample) contributions where all others are switched already.

    Example, of the two players of `exact`:
        >>> sizes = {(): 0.0, (0,): 1.0, (1,): 2.0, (0, 1): 5.0}
        >>> last({frozenset(one): np.array([value]) for one, value in sizes.items()}, 2).ravel().tolist()
        [3.0, 4.0]
    """
    everybody = frozenset(range(players))
    return np.array([values[everybody] - values[everybody - {player}] for player in range(players)])


def by_pair(each: Sequence[Floats] | Floats) -> Floats:
    """Return (pair, …) means of each order and its reverse, which are drawn together, of (order, …)."""
    values = np.asarray(each)
    return np.asarray(values.reshape(-1, 2, *values.shape[1:]).mean(axis=1))


def greedy_halves(samples: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two drawn halves of the samples, as sorted indices; the first has the odd one."""
    drawn = np.random.default_rng(seed % 2**64).permutation(samples)
    middle = -(-samples // 2)
    return np.sort(drawn[:middle]), np.sort(drawn[middle:])


@dataclass
class Path:
    """The players that one half of the samples has chosen so far.

    Attributes:
        choosing, judging: indices of the samples.
        chosen: players in the order in which they were chosen.
    """

    choosing: NDArray[np.int64]
    judging: NDArray[np.int64]
    chosen: list[int] = field(default_factory=list)

    def candidates(self, players: int) -> list[Coalition]:
        """Return the coalitions that could come next: the chosen players, and one more."""
        chosen = frozenset(self.chosen)
        return [chosen | {player} for player in range(players) if player not in chosen]

    def choose(self, outcomes: Mapping[Coalition, Floats], better: int) -> None:
        """Add the player with the best mean over the choosing samples; the first of equals.

        `outcomes` (choosing sample,) of each candidate; `better` is 1 where more is better, −1 where less is.
        """
        means = {coalition: better * float(values.mean()) for coalition, values in outcomes.items()}
        best = max(means, key=lambda coalition: means[coalition])
        (player,) = best - frozenset(self.chosen)
        self.chosen.append(player)

    def coalitions(self) -> list[Coalition]:
        """Return nobody, the first chosen, the first two, …."""
        return [frozenset(self.chosen[:count]) for count in range(len(self.chosen) + 1)]


def greedy_curves(
    paths: Sequence[Path], value: Callable[[Coalition, NDArray[np.int64]], Floats], samples: int
) -> tuple[Floats, Floats]:
    """Return (count, sample) outcomes with 0, 1, 2, … players switched: as chosen, and as judged.

    `value` gives a coalition's outcome in some of the samples, by their indices.
    """
    count = len(paths[0].chosen) + 1
    chosen, judged = np.full((2, count, samples), np.nan)
    for path in paths:
        for switched, coalition in enumerate(path.coalitions()):
            chosen[switched, path.choosing] = value(coalition, path.choosing)
            judged[switched, path.judging] = value(coalition, path.judging)
    return chosen, judged
