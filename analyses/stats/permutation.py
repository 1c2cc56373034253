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

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.stats.arithmetic import ratio

LEVEL = 0.05
MOST_EXACT = 12
_ROUNDING = 1e-9
"""Sums that differ by less than this share of their size are equal: they were added in another order."""

Floats = NDArray[np.float64]


@record
class SignFlips(Record):
    """Sign-flip tests of (layer, head) mean differences on the same samples, corrected together."""

    significant: NDArray[np.int8] = column(
        "1 where the mean difference is above 0 beyond chance, −1 below, 0 undecided; corrected",
        dims=("layer", "head"),
        json=False,
    )
    p: Floats = column("two-sided p-values, uncorrected", dims=("layer", "head"), json=False)
    uncorrected: int = column("tests with p ≤ 0.05")
    chance_mean: float = column("of such tests in a world without effect, mean", key="by_chance_mean")
    chance_high: int = column("of such tests what 95 % of worlds without effect stay under", key="by_chance_95")
    flips: int = column("flips of whole samples' signs")
    smallest: float = column(
        "the smallest p that so many samples can give: 2 / flips where all flips are made, 1 / flips where they are "
        "drawn",
        key="smallest_p",
    )
    least_tests: int = column("how many tests must reach the smallest p for any to count; 0: none can", json=False)

    @derived()
    def above(self) -> int:
        """Tests decided above 0, corrected for their number."""
        return int((self.significant == 1).sum())

    @derived()
    def below(self) -> int:
        """Tests decided below 0."""
        return int((self.significant == -1).sum())

    @derived()
    def least_tests_together(self) -> int | None:
        """How many tests must reach the smallest p for any to count; null: none can."""
        return self.least_tests or None

    @derived(heading="#significant\n+ / −", json=False)
    def counts(self) -> str:
        """Heads better / worse beyond chance (sign flips, corrected)."""
        return f"{self.above}/{self.below}"


def decide(differences: Floats) -> SignFlips:
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
    return SignFlips(
        significant=np.where(corrected(p[0]).reshape(own.shape), side, np.int8(0)).astype(np.int8),
        p=own,
        flips=len(signs),
        uncorrected=int(found[0]),
        chance_mean=float(found.mean()),
        chance_high=int(np.quantile(found, 0.95, method="higher")),
        least_tests=_least_together(smallest, flat.shape[1]),
        smallest=smallest,
    )


def _flips(samples: int) -> Floats:
    """Return (flip, sample) signs, the first of which changes nothing."""
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
    """Return (test,) True for the tests that Benjamini and Hochberg's procedure keeps at 5 %.

    Bit-equal to `scipy.stats.false_discovery_control`, whose import takes longer than all that `heads` computes.
    """
    order = np.argsort(p)
    scaled = p[order] * (len(p) / np.arange(1, len(p) + 1))
    adjusted = np.empty_like(scaled)
    adjusted[order] = np.minimum.accumulate(scaled[::-1])[::-1]
    return np.asarray(adjusted <= LEVEL)


def _least_together(smallest: float, count: int) -> int:
    """Return so many tests at the smallest p pass, as k of m do where p ≤ 0.05 k / m."""
    return 0 if smallest > LEVEL else int(np.ceil(smallest * count / LEVEL - _ROUNDING))


MOST_DEALS = 2**12
_ENDS = (0.025, 0.975)


@record
class Chance(Record):
    """A permutation null; NaN where no prompt decides."""

    low: float = column("lower end of the middle 95 % of the permutations")
    high: float = column("upper end")
    p: float = column("share of the permutations as far from their mean, on either side, as the real numbers")
    deals: int = column("how many permutations")
    exact: bool = column("whether these are all that are possible")


def chances(weights: Floats, scores: Floats) -> list[Chance]:
    """Return one per measure of (measure, prompt, config) weights and (prompt, config) scores.

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
    """Return all deals where there are few, else drawn ones."""
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
    """Return (deal, measure) sums over prompts."""
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
    """Return `usual`: what deals show on the average."""
    if np.isnan(means[0]):
        return Chance(math.nan, math.nan, math.nan, 0, exact)
    low, high = np.quantile(means, _ENDS)
    as_far = np.abs(means - usual) >= abs(means[0] - usual) - _ROUNDING
    return Chance(float(low), float(high), float(as_far.mean()), len(means), exact)
