"""Lost answers by perturbation: areas under the ROC curve, ties at one half, and calibration curves.

The area is the share of pairs of a lost and a kept answer in which the lost one is more perturbed. Within a prompt both
are answers to the same question; between prompts a long or hard prompt perturbs more and loses more for many reasons.

A calibration curve shows, in quantile bins of perturbation, how often an answer is lost and how much of its score.
Nothing is fitted. The bins hold answers of all prompts, so the curve also shows differences between prompts; each bin's
interval is over the prompts in it, whose answers are not independent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, interval, record
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import MIN_SAMPLES, Estimate, OptionalInterval, StatisticKind, share_kind
from perturbkv.analyses.stats.rank_correlation import mean_ranks
from perturbkv.errors import ConfigError

LOST = 0.5
"""Share of the full cache's score below which an answer is lost, unless another is given."""
_ROUNDING = 1e-9
"""Scores that differ by less than this share of themselves are equal."""
AREA = share_kind(0)
"""A mean over prompts of each one's share of pairs."""


@record
class Rule(Record):
    """The thresholds that decide which prompts count and which answers are lost.

    Raises ConfigError for values out of range.
    """

    right: float = column("a prompt counts where the full cache's score is above this, in [0, 1)", default=0.0)
    lost: float = column(
        "an answer is lost where its score is below this share of the full cache's, in (0, 1]", default=LOST
    )

    def __post_init__(self) -> None:
        if not 0 <= self.right < 1:
            raise ConfigError(
                f"expected a score from 0 to below 1, above which the full cache is right, got {self.right:g}"
            )
        if not 0 < self.lost <= 1:
            raise ConfigError(
                f"expected a share above 0 and at most 1 of the full cache's score, got {self.lost:g} as lost"
            )

    def lost_of(self, full: Floats, evicted: Floats) -> NDArray[np.bool_]:
        """Return (prompt, config) True where an answer is lost; `full` (prompt,), `evicted` (prompt, config) scores."""
        return np.asarray(evicted < (self.lost * full * (1 - _ROUNDING))[:, None])


def area_within_prompts(measured: Floats, lost: NDArray[np.bool_]) -> Floats:
    """Return (prompt,) ROC areas of lost against kept answers, from (prompt, config) arrays; NaN without both kinds."""
    count = lost.sum(axis=1)
    ranks = np.where(lost, mean_ranks(measured.T).T, 0).sum(axis=1)
    return np.asarray(ratio(ranks - count * (count + 1) / 2, count * (lost.shape[1] - count)))


def area_between_prompts(measured: Floats, lost: NDArray[np.bool_]) -> Estimate:
    """Return the ROC area over pairs of answers to different prompts, with the jackknife's interval over prompts.

    The scarcer side decides how wide the interval is, and is the estimate's number of prompts: those with lost answers,
    or those with kept ones. `measured` is (prompt, config) without NaN.
    """
    wins, pairs = _between_pairs(measured, lost)

    def area(weights: Floats) -> Floats:
        top, bottom = (np.einsum("wi,ij,wj->w", weights, each, weights, optimize=True) for each in (wins, pairs))
        return np.asarray(ratio(top, bottom))

    by_side = [ratio(wins.sum(axis=axis), pairs.sum(axis=axis)) for axis in (0, 1)]  # per kept, per lost prompt
    scarcer = min((areas[~np.isnan(areas)] for areas in by_side), key=len)
    value, prompts = float(ratio(wins.sum(), pairs.sum())), len(scarcer)
    if prompts < MIN_SAMPLES:
        return Estimate(value, intervals.of_mean(scarcer, AREA), prompts)
    return Estimate(value, intervals.of_statistic(area, len(measured), AREA, prompts), prompts)


def _between_pairs(measured: Floats, lost: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return numbers of wins and of pairs, (lost answer's prompt, kept answer's prompt); 0 within a prompt.

    A win is a pair whose lost answer is more perturbed; a tie is half of one.
    """
    prompts = len(measured)
    wins, pairs = np.zeros((prompts, prompts)), np.zeros((prompts, prompts))
    for index in range(prompts):
        own = measured[index][lost[index], None, None]
        higher = ((own > measured) + 0.5 * (own == measured)) * ~lost
        wins[index], pairs[index] = higher.sum(axis=(0, 2)), lost[index].sum() * (~lost).sum(axis=1)
    np.fill_diagonal(wins, 0)
    np.fill_diagonal(pairs, 0)
    return wins, pairs


BINS = 5
"""Number of bins of a calibration curve, unless another is given."""
_DROP = StatisticKind(3 / 8, limits=(-1, 1))
"""A mean of drops of a score from 0 to 1."""


@record
class Bin(Record, section="calibration bin"):
    """Answers of similar perturbation."""

    low: float = column("least perturbation in it")
    high: float = column("largest")
    middle: float = column("median")
    answers: int = column("how many answers")
    prompts: int = column("of how many prompts")
    lost: float = column("share of the answers that are lost")
    lost_interval: OptionalInterval = interval("over prompts")
    drop: float = column("mean loss of the score, −1 to 1")
    drop_interval: OptionalInterval = interval("over prompts")


def check_bins(bins: int) -> int:
    """Return the number of bins. Raises ConfigError for fewer than two."""
    if bins < 2:
        raise ConfigError(f"expected at least 2 bins of a calibration curve, got {bins}")
    return bins


def calibration_curve(measured: Floats, lost: NDArray[np.bool_], drop: Floats, bins: int = BINS) -> tuple[Bin, ...]:
    """Return the calibration curve of (prompt, config) arrays in quantile bins, least perturbed first.

    Equal perturbations stay in one bin, so that there can be fewer; prompts without the measure (NaN) are left out, and
    the curve is empty where all are.

    Args:
        measured: perturbation.
        lost: True where an answer is lost.
        drop: how much of its score is lost.
        bins: how many.
    """
    known = measured[~np.isnan(measured)]
    if not len(known):
        return ()
    edges = np.quantile(known, np.arange(1, bins) / bins, method="inverted_cdf")
    indices = np.where(np.isnan(measured), -1, np.searchsorted(np.unique(edges), measured, side="left"))
    return tuple(_calibration_bin(measured, lost, drop, indices == index) for index in np.unique(indices[indices >= 0]))


def _calibration_bin(measured: Floats, lost: NDArray[np.bool_], drop: Floats, inside: NDArray[np.bool_]) -> Bin:
    """Return the calibration bin of the answers selected by `inside`; all arrays are (prompt, config)."""
    perturbed = measured[inside]
    lost_share, lost_interval = _mean_in_bin(lost, inside, share_kind(0))
    mean_drop, drop_interval = _mean_in_bin(drop, inside, _DROP)
    return Bin(
        low=float(perturbed.min()),
        high=float(perturbed.max()),
        middle=float(np.median(perturbed)),
        answers=len(perturbed),
        prompts=int(inside.any(axis=1).sum()),
        lost=lost_share,
        lost_interval=lost_interval,
        drop=mean_drop,
        drop_interval=drop_interval,
    )


def _mean_in_bin(
    values: NDArray[np.generic], inside: NDArray[np.bool_], kind: StatisticKind
) -> tuple[float, OptionalInterval]:
    """Return the mean of (prompt, config) values over the answers in `inside`, with its interval over prompts."""
    prompts = inside.any(axis=1)
    total = np.where(inside, values, 0)[prompts].sum(axis=1, dtype=np.float64)
    count = inside[prompts].sum(axis=1)
    effective = float(count.sum() ** 2 / (count**2).sum())  # as many prompts of equally many answers
    ends = intervals.of_statistic(
        lambda weights: np.asarray(ratio(weights @ total, weights @ count)), len(total), kind, effective
    )
    return float(total.sum() / count.sum()), ends
