"""A world without a link: each prompt's scores dealt out anew among its configurations.

A statistic that is a mean over prompts of Σ weights × scores is made of the dealt scores too. All deals where there are
at most 4,096, else as many, drawn with a fixed seed; the first of them is the real one, so that p is never 0.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.arithmetic import ratio
from perturbkv.analyses.reading import Floats

MOST_EXACT = 2**12
_ENDS = (0.025, 0.975)
_ROUNDING = 1e-9
"""Sums that differ by less than this share of their size are equal: they were added in another order."""


@dataclass(frozen=True)
class Chance:
    """What dealt scores show.

    Attributes:
        low, high: the middle 95 % of them; NaN where no prompt decides.
        p: share of deals as far from no link, on either side, as the real scores; NaN where no prompt decides.
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


def _chance(means: Floats, exact: bool) -> Chance:
    if np.isnan(means[0]):
        return Chance(math.nan, math.nan, math.nan, 0, exact)
    low, high = np.quantile(means, _ENDS)
    as_far = np.abs(means) >= abs(means[0]) * (1 - _ROUNDING)
    return Chance(float(low), float(high), float(as_far.mean()), len(means), exact)
