"""Rank correlations of many columns at once: Spearman's, ties at their mean rank, and Kendall's τ-b."""

from __future__ import annotations

import numpy as np

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats.arithmetic import ratio


def spearman(first: Floats, second: Floats) -> Floats:
    """Return Spearman's ρ of two arrays along their first axis; NaN where one side is constant, or empty."""
    if not len(first):
        return np.full(first.shape[1:], np.nan)
    ranks = [mean_ranks(side) for side in (first, second)]
    centred = [rank - rank.mean(axis=0) for rank in ranks]
    products = (centred[0] * centred[1]).sum(axis=0)
    return np.asarray(ratio(products, np.sqrt(np.prod([(side**2).sum(axis=0) for side in centred], axis=0))))


def kendall(first: Floats, second: Floats) -> Floats:
    """Return Kendall's τ-b of two arrays along their first axis; NaN where one side is constant, or empty.

    Not `scipy.stats.kendalltau`, which takes one column after the other: 2,000 of 20 numbers take 3.1 s, here 0.1 s; it
    differs in the last bit of one in seven, and warns of columns of one number.
    """
    orders = [np.sign(side[:, None] - side[None]) for side in (first, second)]
    agreeing = np.prod(orders, axis=0).sum(axis=(0, 1))
    return np.asarray(ratio(agreeing, np.sqrt(np.prod([(order**2).sum(axis=(0, 1)) for order in orders], axis=0))))


def mean_ranks(values: Floats) -> Floats:
    """Return ranks from 1 along the first axis, ties at their mean, in the values' memory order: sums depend on it."""
    from scipy import stats  # its import takes 0.6 s, which only rank correlations need

    ranks = np.empty_like(values, dtype=np.float64)
    ranks[...] = stats.rankdata(values, axis=0)
    return ranks
