"""A mean over prompts with its interval and the number of prompts that it is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import Kind, Scalar


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts.

    Attributes:
        value: the mean; NaN where no prompt has a value.
        interval: of the mean, over prompts.
        prompts: that have a value.
    """

    value: float
    interval: Scalar
    prompts: int


def over_prompts(each: Floats, kind: Kind) -> Estimate:
    """The mean of (prompt,) values; prompts that are NaN are left out."""
    held = each[~np.isnan(each)]
    return Estimate(float(ratio(held.sum(), len(held))), intervals.of_mean(held, kind), len(held))


def mean_of(each: Sequence[Floats]) -> Floats:
    """(prompt,) mean of several (prompt,) values over those that are not NaN; NaN where all are."""
    stacked = np.stack(each)
    held = ~np.isnan(stacked)
    return np.asarray(ratio(np.where(held, stacked, 0).sum(axis=0), held.sum(axis=0)))
