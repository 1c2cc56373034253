"""Does perturbation tell a lost answer from a kept one? The area under the ROC curve, ties at one half.

Of a lost and a kept answer it is the share of pairs in which the lost one is more perturbed. Within a prompt both are
answers to the same question; between prompts a long or hard prompt perturbs more and loses more for many reasons.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.estimates import Estimate
from perturbkv.analyses.stats.intervals import LEAST, share_of
from perturbkv.analyses.stats.rank_correlation import mean_ranks
from perturbkv.errors import ConfigError

LOST = 0.5
_ROUNDING = 1e-9
"""Scores that differ by less than this share of themselves are equal."""
AREA = share_of(0)
"""What an area under the curve is a mean of: one share of pairs per prompt."""


@dataclass(frozen=True)
class Rule:
    """Which answers count, and which of them are lost.

    Attributes:
        right: a prompt counts where the full cache's score is above this, in [0, 1).
        lost: an answer is lost where its score is below this share of the full cache's, in (0, 1].

    Raises ConfigError for other values.
    """

    right: float = 0.0
    lost: float = LOST

    def __post_init__(self) -> None:
        if not 0 <= self.right < 1:
            msg = f"expected a score from 0 to below 1, above which the full cache is right, got {self.right:g}"
            raise ConfigError(msg)
        if not 0 < self.lost <= 1:
            msg = f"expected a share above 0 and at most 1 of the full cache's score, got {self.lost:g} as lost"
            raise ConfigError(msg)

    def lost_of(self, full: Floats, evicted: Floats) -> NDArray[np.bool_]:
        """(prompt, config) True where an answer is lost, of (prompt,) and (prompt, config) scores."""
        return np.asarray(evicted < (self.lost * full * (1 - _ROUNDING))[:, None])


def within(measured: Floats, lost: NDArray[np.bool_]) -> Floats:
    """(prompt,) the area within each prompt, of (prompt, config) arrays; NaN where all answers fared alike."""
    count = lost.sum(axis=1)
    ranks = np.where(lost, mean_ranks(measured.T).T, 0).sum(axis=1)
    return np.asarray(ratio(ranks - count * (count + 1) / 2, count * (lost.shape[1] - count)))


def between(measured: Floats, lost: NDArray[np.bool_]) -> Estimate:
    """The area over pairs of answers to different prompts, with the jackknife's interval over prompts.

    It is as unsure as the scarcer side: the prompts with lost answers, or those with kept ones, are those that decide.
    """
    wins, pairs = _between_pairs(measured, lost)

    def area(weights: Floats) -> Floats:
        top, bottom = (np.einsum("wi,ij,wj->w", weights, each, weights, optimize=True) for each in (wins, pairs))
        return np.asarray(ratio(top, bottom))

    sides = [ratio(wins.sum(axis=axis), pairs.sum(axis=axis)) for axis in (0, 1)]
    each = min((side[~np.isnan(side)] for side in sides), key=len)
    value = float(ratio(wins.sum(), pairs.sum()))
    if len(each) < LEAST:
        return Estimate(value, intervals.of_mean(each, AREA), len(each))
    return Estimate(value, intervals.scalar(area, len(measured), AREA, len(each)), len(each))


def _between_pairs(measured: Floats, lost: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """(prompt of the lost, prompt of the kept) pairs in which the lost answer is more perturbed, and all pairs."""
    prompts = len(measured)
    wins, pairs = np.zeros((prompts, prompts)), np.zeros((prompts, prompts))
    for one in range(prompts):
        own = measured[one][lost[one], None, None]
        higher = ((own > measured) + 0.5 * (own == measured)) * ~lost
        wins[one], pairs[one] = higher.sum(axis=(0, 2)), lost[one].sum() * (~lost).sum(axis=1)
    np.fill_diagonal(wins, 0)
    np.fill_diagonal(pairs, 0)
    return wins, pairs
