"""Worlds without a link, made by dealing: of which methods, and of which prompts, the numbers are does not matter.

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

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats.arithmetic import ratio

MOST_EXACT = 2**12
_ENDS = (0.025, 0.975)
_ROUNDING = 1e-9
"""Means that differ by less are equal: they were added in another order."""


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
    exact = math.factorial(weights.shape[2]) ** int(deciding.sum()) <= MOST_EXACT
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
    exact = math.prod(math.factorial(len(places)) for places in groups) <= MOST_EXACT
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
    found = np.empty((MOST_EXACT, prompts), dtype=np.int64)
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
    total = np.zeros((1 if exact else MOST_EXACT, len(weights)))
    for prompt in range(weights.shape[1]):
        own = scores[prompt][_all_deals(configs) if exact else _drawn_deals(draw, configs)] @ weights[:, prompt].T
        total = (total[:, None] + own[None]).reshape(-1, len(weights)) if exact else total + own
    return total


def _all_deals(configs: int) -> NDArray[np.int64]:
    return np.array(list(itertools.permutations(range(configs))))


def _drawn_deals(draw: np.random.Generator, configs: int) -> NDArray[np.int64]:
    deals = np.argsort(draw.random((MOST_EXACT, configs)), axis=1)
    deals[0] = np.arange(configs)
    return deals


def _chance(means: Floats, exact: bool, usual: float = 0) -> Chance:
    """`usual`: what deals show on the average."""
    if np.isnan(means[0]):
        return Chance(math.nan, math.nan, math.nan, 0, exact)
    low, high = np.quantile(means, _ENDS)
    as_far = np.abs(means - usual) >= abs(means[0] - usual) - _ROUNDING
    return Chance(float(low), float(high), float(as_far.mean()), len(means), exact)
