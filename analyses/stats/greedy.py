"""Which players to switch first: one after the other, each the one that helps most; chosen and judged apart.

Who is chosen on some samples looks better on them than on any others. So half of the samples choose, and the other half
judge; then both change places. Every sample so has a curve that it chose with others, and one that it merely judges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats
from perturbkv.configs.patching import Coalition


def halves(samples: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two halves of the samples, by their places, drawn and then in their order; the first has the odd one."""
    drawn = np.random.default_rng(seed % 2**64).permutation(samples)
    middle = -(-samples // 2)
    return np.sort(drawn[:middle]), np.sort(drawn[middle:])


@dataclass
class Path:
    """The players that one half of the samples has chosen so far.

    Attributes:
        choosing, judging: places of the samples.
        chosen: players in the order in which they were chosen.
    """

    choosing: NDArray[np.int64]
    judging: NDArray[np.int64]
    chosen: list[int] = field(default_factory=list)

    def candidates(self, players: int) -> list[Coalition]:
        """What could come next: those chosen, and one more."""
        held = frozenset(self.chosen)
        return [held | {player} for player in range(players) if player not in held]

    def choose(self, outcomes: Mapping[Coalition, Floats], better: int) -> None:
        """Add the player with the best mean over the choosing samples; the first of equals.

        `outcomes` (choosing sample,) of each candidate; `better` is 1 where more is better, −1 where less is.
        """
        told = {coalition: better * float(values.mean()) for coalition, values in outcomes.items()}
        best = max(told, key=lambda coalition: told[coalition])
        (player,) = best - frozenset(self.chosen)
        self.chosen.append(player)

    def coalitions(self) -> list[Coalition]:
        """Nobody, the first chosen, the first two, …."""
        return [frozenset(self.chosen[:count]) for count in range(len(self.chosen) + 1)]


def curves(
    paths: Sequence[Path], value: Callable[[Coalition, NDArray[np.int64]], Floats], samples: int
) -> tuple[Floats, Floats]:
    """(count, sample) outcomes with 0, 1, 2, … players switched: as chosen, and as judged by the other half's path.

    `value` gives a coalition's outcome in some of the samples, by their places.
    """
    count = len(paths[0].chosen) + 1
    chosen, judged = np.full((2, count, samples), np.nan)
    for path in paths:
        for place, coalition in enumerate(path.coalitions()):
            chosen[place, path.choosing] = value(coalition, path.choosing)
            judged[place, path.judging] = value(coalition, path.judging)
    return chosen, judged
