"""Many tests at once: which differences are there, and how many would a world without effect show.

A test flips the signs of whole samples: heads of one sample are not independent, samples are. All 2ⁿ flips up to
twelve samples, else as many as of twelve, drawn; then Benjamini and Hochberg (1995) over all tests (METHOD: the
protocol, 6).

Worlds without a link, made by dealing: of which methods, and of which prompts, the numbers are does not matter.

Scores that are dealt out anew among a prompt's configurations belong to no method; a statistic that is a mean over
prompts of Σ weights × scores is made of them too. Measures that are dealt out whole among the prompts of a data set
belong to their methods still, and to no prompt. All deals where there are at most 4,096, else as many, drawn with a
fixed seed; the first of them is the real one, so that p is never 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from perturbkv.analyses.stats.arithmetic import ratio

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


MOST_DEALS = 2**12
_ENDS = (0.025, 0.975)


@dataclass(frozen=True)
class Chance:
    """What deals show.

    Attributes:
        low, high: the middle 95 % of them; NaN where no prompt decides.
        p: share of deals as far from their mean, on either side, as the real numbers; NaN where no prompt decides.
        deals: how many there are; `exact` where these are all that are possible.
    """

    low: float
    high: float
    p: float
    deals: int
    exact: bool


def chances(weights: Floats, scores: Floats) -> list[Chance]:
    """One per measure of (measure, prompt, config) weights and (prompt, config) scores.

    A prompt that does not decide has NaN weights; others sum to 0 over configurations, so that dealt scores give 0 on
    the average.
    """
    held = np.asarray(~np.isnan(weights).any(axis=2))
    deciding = np.asarray(held.any(axis=0))
    exact = math.factorial(weights.shape[2]) ** int(deciding.sum()) <= MOST_DEALS
    sums = _sums(np.where(held[:, :, None], weights, 0)[:, deciding], scores[deciding], exact)
    return [_chance(np.asarray(ratio(sums[:, one], held[one].sum())), exact) for one in range(len(weights))]


@dataclass(frozen=True)
class Dealing:
    """Prompts' measures dealt out among the prompts of each data set.

    Attributes:
        alike: (prompt, prompt) True where two are of one data set.
        dealt: (deal, prompt) whose measure each prompt gets; its own in the first.
        exact: whether these are all that are possible.
    """

    alike: NDArray[np.bool_]
    dealt: NDArray[np.int64]
    exact: bool


def dealing(alike: NDArray[np.bool_]) -> Dealing:
    """All deals where there are few, else drawn ones."""
    groups = [np.flatnonzero(row) for row in np.unique(alike, axis=0)] if len(alike) else []
    exact = math.prod(math.factorial(len(places)) for places in groups) <= MOST_DEALS
    return Dealing(alike, (_every_exchange if exact else _drawn_exchanges)(groups, len(alike)), exact)


def exchanged(tables: Sequence[Floats], deals: Dealing) -> Chance:
    """What prompts' measures show that are dealt out among the prompts of a data set, the same ones in all tables.

    A table is of one setting: (prompt scored, prompt measured) what the one's scores say with the other's measure, NaN
    where they say nothing; of these the mean over tables, then over prompts.
    """
    rows = np.flatnonzero(~np.isnan([np.diag(table) for table in tables]).all(axis=0))
    if not len(rows):
        return Chance(math.nan, math.nan, math.nan, 0, True)
    taken = np.stack([table[rows, deals.dealt[:, rows]] for table in tables])
    usual = np.stack([_mean(np.where(deals.alike, table, np.nan)[rows], 1) for table in tables])
    return _chance(_mean(_mean(taken, 0), 1), deals.exact, float(_mean(_mean(usual, 0), 0)))


def _every_exchange(groups: Sequence[NDArray[np.int64]], prompts: int) -> NDArray[np.int64]:
    found = np.arange(prompts)[None]
    for places in groups:
        orders = places[_all_deals(len(places))]
        found = np.repeat(found, len(orders), axis=0)
        found[:, places] = np.tile(orders, (len(found) // len(orders), 1))
    return found


def _drawn_exchanges(groups: Sequence[NDArray[np.int64]], prompts: int) -> NDArray[np.int64]:
    draw = np.random.default_rng(0)
    found = np.empty((MOST_DEALS, prompts), dtype=np.int64)
    for places in groups:
        found[:, places] = places[_drawn_deals(draw, len(places))]
    return found


def _mean(values: Floats, axis: int) -> Floats:
    """Of what is not NaN."""
    held = ~np.isnan(values)
    return np.asarray(ratio(np.where(held, values, 0).sum(axis=axis), held.sum(axis=axis)))


def _sums(weights: Floats, scores: Floats, exact: bool) -> Floats:
    """(deal, measure) sums over prompts."""
    draw, configs = np.random.default_rng(0), weights.shape[2]
    total = np.zeros((1 if exact else MOST_DEALS, len(weights)))
    for prompt in range(weights.shape[1]):
        own = scores[prompt][_all_deals(configs) if exact else _drawn_deals(draw, configs)] @ weights[:, prompt].T
        total = (total[:, None] + own[None]).reshape(-1, len(weights)) if exact else total + own
    return total


def _all_deals(configs: int) -> NDArray[np.int64]:
    return np.array(list(itertools.permutations(range(configs))))


def _drawn_deals(draw: np.random.Generator, configs: int) -> NDArray[np.int64]:
    deals = np.argsort(draw.random((MOST_DEALS, configs)), axis=1)
    deals[0] = np.arange(configs)
    return deals


def _chance(means: Floats, exact: bool, usual: float = 0) -> Chance:
    """`usual`: what deals show on the average."""
    if np.isnan(means[0]):
        return Chance(math.nan, math.nan, math.nan, 0, exact)
    low, high = np.quantile(means, _ENDS)
    as_far = np.abs(means - usual) >= abs(means[0] - usual) - _ROUNDING
    return Chance(float(low), float(high), float(as_far.mean()), len(means), exact)
