"""How much of a link is the method's name alone: some methods perturb more and score less in every prompt.

A method's mean rank in all *other* prompts is held against this prompt's scores. All prompts share these means, so that
the interval leaves a prompt out of them too (the jackknife of a statistic of pairs of prompts).
"""

from __future__ import annotations

import numpy as np

from perturbkv.analyses import intervals
from perturbkv.analyses.arithmetic import ratio
from perturbkv.analyses.estimates import Estimate
from perturbkv.analyses.intervals import CORRELATION, Kind
from perturbkv.analyses.ranks import mean_ranks, spearman
from perturbkv.analyses.reading import Floats

DIFFERENCES = Kind(3 / 8, limits=(-2, 2))
"""A mean of differences between two rank correlations of the same prompt."""


def by_name(measured: Floats, scored: Floats) -> Estimate:
    """ρ between the mean rank in all other prompts and the score, of (prompt, config) arrays."""
    return _estimate(measured, scored, np.zeros(len(measured)), 1, CORRELATION)


def beyond_name(measured: Floats, scored: Floats) -> Estimate:
    """ρ of the prompt's own measure less `by_name`; below 0 the prompt's own tells more."""
    return _estimate(measured, scored, spearman(measured.T, scored.T), -1, DIFFERENCES)


def _estimate(measured: Floats, scored: Floats, own: Floats, sign: int, kind: Kind) -> Estimate:
    """The mean of `own` + `sign` × the name's ρ over the prompts that have both."""
    ranks = mean_ranks(measured.T).T
    count = len(measured)

    def each(weights: Floats) -> Floats:
        return np.asarray(own + sign * _named(ranks, scored, weights))

    def mean(rows: Floats) -> Floats:
        found = [each(row) for row in rows]
        return np.array([_mean(values, row) for values, row in zip(found, rows, strict=True)])

    equal = np.full((1, count), 1 / max(count, 1))
    value = float(mean(equal)[0])
    prompts = int((~np.isnan(each(equal[0]))).sum())
    return Estimate(value, intervals.scalar(mean, count, kind), prompts)


def _named(ranks: Floats, scored: Floats, weights: Floats) -> Floats:
    """(prompt,) ρ of the other prompts' weighted ranks with this prompt's scores; NaN where there is no other."""
    weighted = ranks * weights[:, None]
    others = (weighted.sum(axis=0) - weighted).round(_DIGITS)
    return spearman(others.T, scored.T)


def _mean(values: Floats, weights: Floats) -> float:
    held = ~np.isnan(values)
    return float(ratio(values[held] @ weights[held], weights[held].sum()))


_DIGITS = 9
"""Sums of ranks that differ by less were added in another order: they are equal."""
