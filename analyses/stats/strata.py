"""The interval of a mean over several data sets, whose samples were drawn apart from each other.

The samples of one data set say nothing of those of another, so the data sets are strata: the squared distances from
each data set's mean to the ends of its own interval add up, each end for itself (MOVER, the method of variance
estimates recovery: Zou and Donner, Statistics in Medicine 27, 2008). Nothing is pooled: a data set in which all samples
are alike keeps the room that its own interval leaves for others, and one of few samples stays as unsure as it is. Of a
single data set this is the interval of `intervals.of_mean`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import Floats, Interval, Kind, Scalar


def mean(strata: Sequence[Floats]) -> float:
    """The mean over data sets of each one's mean over its (sample,) values: every data set counts the same."""
    return float(np.mean([one.mean() for one in strata]))


def of_mean(strata: Sequence[Floats], kind: Kind) -> Scalar:
    """The interval of `mean`; each stratum holds the (sample,) values of one data set.

    A range where one of them has fewer than five samples: the mean of all least to the mean of all largest samples, or
    ends of intervals. None where one has a single sample.
    """
    each = [intervals.of_mean(one, kind) for one in strata]
    known = [one for one in each if one is not None]
    if len(known) < len(each):
        return None
    lows, highs = (np.array([getattr(one, end) for one in known]) for end in ("low", "high"))
    if any(one.kind == "range" for one in known):
        return Interval(float(lows.mean()), float(highs.mean()), "range")
    means = np.array([one.mean() for one in strata])
    low, high = (float(np.sqrt(((end - means) ** 2).sum()) / len(means)) for end in (lows, highs))
    return Interval(float(means.mean()) - low, float(means.mean()) + high)
