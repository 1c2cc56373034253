"""One-sided 95 % bounds of means over samples, and how many samples it takes until a bound holds.

A safe budget rests on a bound, so each is chosen to cover where an interval round the mean would not:

- A share of samples has the exact bound of Clopper and Pearson.
- A mean of numbers in [0, 1] has the bound of a bet (Waudby-Smith and Ramdas, 2024): were the mean at most m, a gambler
  who stakes shares of his capital on samples above m would own 20 times his capital with at most 5 % probability. The
  bound is the largest m at which he does, with half of the capital at the largest stake and half spread over smaller
  ones. It holds for every distribution and every n; in exchange n samples without any loss cannot exclude that
  3.7 / n of all are lost.
- A mean of positive numbers without an upper end has no such bound. Here it is the larger of two: Student's, and that
  of a lognormal whose middle is the samples' median and whose spread is theirs above it, taken from its generalised
  pivot (Krishnamoorthy and Mathew, 2003). Of 8 to 40 samples of lognormal and gamma populations it covers in at least
  95 % of simulated draws; no bound sees a prompt that carries the mean and was not drawn. Where nine prompts in ten are
  lognormal about e⁻⁴ and the tenth about e, which carries the mean, it covers in 74 % of draws of 8 and 90 % of 40.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import special

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats.intervals import MIN_SAMPLES

RISK = 0.05
"""How often a bound may fail."""
MOST_SAMPLES = 1_000_000
"""Larger numbers of samples are not searched: nobody measures so many."""
_STAKES = np.append(np.geomspace(1e-3, 0.9, 40), 1.0)
"""Shares of the largest stake, at which a sample of 0 takes all."""
_CAPITALS = np.log(np.append(np.full(40, 0.5 / 40), 0.5))
"""Logarithm of the capital behind each stake."""
_STEPS = 50
"""Bisections of the interval in which a bound is searched."""
_LEVELS = (np.arange(200) + 0.5) / 200
"""Levels of χ² over which the unknown variance of a lognormal is averaged."""
_LARGEST_EXPONENT = 700.0
"""Beyond it a float overflows."""


def share_at_least(hits: NDArray[np.bool_], samples: int | None = None) -> float:
    """Return the lower bound of the share of True in `hits`; `samples`: as if there were that many."""
    count = samples or len(hits)
    successes = int(hits.mean() * count + 1e-9)  # rounded down, but for rounding errors
    return float(special.betaincinv(successes, count - successes + 1, RISK)) if successes else 0.0


def mean_at_least(each: Floats, samples: int | None = None) -> float:
    """Return the lower bound of the mean of (sample,) numbers in [0, 1]; `samples`: as if there were that many."""
    times, low, high = (samples or len(each)) / len(each), 0.0, float(each.mean())
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _log_capital(each, middle, times) >= -np.log(RISK) else (low, middle)
    return low


def _log_capital(each: Floats, mean: float, times: float) -> float:
    """Return the log capital after betting against `mean` on the samples, repeated `times`; the first capital is 1."""
    if mean == 0:
        return np.inf
    with np.errstate(divide="ignore"):  # the largest stake loses all
        gains = np.log1p(_STAKES[:, None] * (each / mean - 1)).sum(axis=1)
    return float(np.logaddexp.reduce(_CAPITALS + times * gains))


def mean_at_most(each: Floats, samples: int | None = None) -> float:
    """Return the upper bound of the mean of (sample,) positive numbers; `samples`: as if there were that many.

    Infinite for fewer than five samples.
    """
    count = samples or len(each)
    if min(count, len(each)) < MIN_SAMPLES:
        return float("inf")
    student = each.mean() + special.stdtrit(count - 1, 1 - RISK) * each.std(ddof=1) / np.sqrt(count)
    return max(float(student), _lognormal_bound(np.log(each), count))


def _lognormal_bound(logs: Floats, count: int) -> float:
    """Return the upper bound of a lognormal mean, from the logarithms' median and the spread above the median.

    `logs` are (sample,); `count` is the number of samples that the bound is of.
    """
    middle = float(np.median(logs))
    spread = float(((np.sort(logs)[-(len(logs) // 2) :] - middle) ** 2).mean())
    if spread == 0:
        return float(np.exp(middle))
    freedom = max(1, count // 2)
    variances = spread * freedom / (2 * special.gammaincinv(freedom / 2, _LEVELS))
    errors = np.sqrt(variances * np.pi / 2 / count)  # standard errors of the median

    from scipy import optimize

    def excess_coverage(end: float) -> float:
        return float(special.ndtr((end - middle - variances / 2) / errors).mean()) - (1 - RISK)

    most = float((variances / 2 + 10 * errors).max())
    return float(np.exp(min(_LARGEST_EXPONENT, optimize.brentq(excess_coverage, middle - most, middle + most))))


def samples_for(holds: Callable[[int], bool], samples: int) -> int | None:
    """Return the smallest number above `samples` from which on `holds` is true; None if beyond about a million."""
    low, high = samples, 2 * samples
    while not holds(high):
        if high > MOST_SAMPLES:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
