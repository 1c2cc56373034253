"""Many tests at once: which differences are there, and how many would a world without effect show.

A test flips the signs of whole samples: heads of one sample are not independent, samples are. All 2ⁿ flips up to
twelve samples, else as many as of twelve, drawn; then Benjamini and Hochberg (1995) over all tests (METHOD: the
protocol, 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LEVEL = 0.05
MOST_EXACT = 12
_ROUNDING = 1e-9
"""Sums that differ by less than this share of their size are equal: they were added in another order."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Decided:
    """The outcome of many tests on the same samples.

    Attributes:
        verdict: (…) 1 where the mean difference is above 0 beyond chance, −1 below, 0 undecided; after correction.
        p: (…) two-sided p-values.
        flips: how many flips of signs they are of.
        smallest: the smallest p-value that so many samples can give: 2 / flips, of the differences and of all of them
            turned round; 1 / flips where flips are drawn, in which the latter need not be.
        uncorrected: how many tests have p ≤ 0.05.
        chance_mean, chance_high: of such tests without any effect: mean, and what 95 % of worlds stay under.
        least_together: how many tests must reach the smallest p together for any to count; 0 where none can.
    """

    verdict: NDArray[np.int8]
    p: Floats
    flips: int
    uncorrected: int
    chance_mean: float
    chance_high: int
    least_together: int
    smallest: float

    @property
    def better(self) -> int:
        """Tests decided above 0."""
        return int((self.verdict == 1).sum())

    @property
    def worse(self) -> int:
        """Tests decided below 0."""
        return int((self.verdict == -1).sum())

    def to_dict(self) -> dict[str, Any]:
        """Everything but the tests' own p-values, as JSON-able numbers."""
        return {
            "above": self.better,
            "below": self.worse,
            "uncorrected": self.uncorrected,
            "by_chance_mean": self.chance_mean,
            "by_chance_95": self.chance_high,
            "flips": self.flips,
            "smallest_p": self.smallest,
            "least_tests_together": self.least_together or None,
        }


def decide(differences: Floats) -> Decided:
    """Tests of the mean of (sample, …) differences against 0; all of them corrected together.

    A world without effect is each flip in turn: its tests are made as those of the real differences.
    """
    flat = differences.reshape(len(differences), -1)
    signs = _flips(len(flat))
    p = _p_values(np.abs(signs @ flat))
    own = p[0].reshape(differences.shape[1:])
    found = (p <= LEVEL).sum(axis=1)
    smallest = (2 if len(flat) <= MOST_EXACT else 1) / len(signs)
    side = np.sign(differences.sum(axis=0)).astype(np.int8)
    return Decided(
        verdict=np.where(corrected(p[0]).reshape(own.shape), side, np.int8(0)).astype(np.int8),
        p=own,
        flips=len(signs),
        uncorrected=int(found[0]),
        chance_mean=float(found.mean()),
        chance_high=int(np.quantile(found, 0.95, method="higher")),
        least_together=_least_together(smallest, flat.shape[1]),
        smallest=smallest,
    )


def _flips(samples: int) -> Floats:
    """(flip, sample) signs, the first of which changes nothing."""
    if samples <= MOST_EXACT:
        bits = np.arange(2**samples)[:, None] >> np.arange(samples) & 1
    else:
        bits = np.random.default_rng(0).integers(0, 2, size=(2**MOST_EXACT, samples))
        bits[0] = 0
    return np.asarray(1.0 - 2.0 * bits)


def _p_values(sizes: Floats) -> Floats:
    """(flip, test) for each flip the share of all flips whose sum is at least as large: the flips form a group."""
    found = []
    for own in np.ascontiguousarray(sizes.T):
        below = np.searchsorted(np.sort(own), own * (1 - _ROUNDING), side="left")
        found.append(1 - below / len(own))
    return np.stack(found, axis=1)


def corrected(p: Floats) -> NDArray[np.bool_]:
    """(test,) True for the tests that Benjamini and Hochberg's procedure keeps at 5 %."""
    return np.asarray(stats.false_discovery_control(p) <= LEVEL)


def _least_together(smallest: float, count: int) -> int:
    """So many tests at the smallest p pass, as k of m do where p ≤ 0.05 k / m."""
    return 0 if smallest > LEVEL else int(np.ceil(smallest * count / LEVEL - _ROUNDING))
