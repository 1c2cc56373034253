"""How much of a link is the method's name alone: some methods perturb more and score less whatever the prompt.

The perturbation of every *other* prompt is held against this prompt's scores. If the prompt's own told no more than the
names of the methods do, another prompt's would tell as much. Pairs of prompts share prompts, so that the interval
leaves each prompt out of all of its pairs (the jackknife).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from perturbkv.analyses import intervals
from perturbkv.analyses.arithmetic import ratio
from perturbkv.analyses.estimates import Estimate
from perturbkv.analyses.intervals import CORRELATION, Kind
from perturbkv.analyses.ranks import mean_ranks
from perturbkv.analyses.reading import Floats

DIFFERENCES = Kind(3 / 8, limits=(-2, 2))
"""A mean of differences between two rank correlations of the same prompt."""


def by_name(measured: Floats, scored: Floats) -> Estimate:
    """ρ between the measure of another prompt and a prompt's scores, mean over pairs, of (prompt, config) arrays."""
    table = _table(measured, scored)
    return _estimate(table, lambda weights: _of_others(table, weights), CORRELATION)


def beyond_name(measured: Floats, scored: Floats) -> Estimate:
    """ρ of the prompts' own measures less `by_name`; below 0 the prompt's own tells more."""
    table = _table(measured, scored)
    return _estimate(table, lambda weights: _of_own(table, weights) - _of_others(table, weights), DIFFERENCES)


def _table(measured: Floats, scored: Floats) -> Floats:
    """(prompt scored, prompt measured) Spearman's ρ; NaN where either side is constant."""
    units = []
    for side in (scored, measured):
        ranks = mean_ranks(side.T).T
        centred = ranks - ranks.mean(axis=1, keepdims=True)
        units.append(ratio(centred, np.sqrt((centred**2).sum(axis=1, keepdims=True))))
    return np.asarray(np.einsum("ic,jc->ij", *units))


def _of_own(table: Floats, weights: Floats) -> Floats:
    """(row,) weighted mean of the diagonal."""
    own = np.diag(table)
    held = ~np.isnan(own)
    return np.asarray(ratio(weights[:, held] @ own[held], weights[:, held].sum(axis=1)))


def _of_others(table: Floats, weights: Floats) -> Floats:
    """(row,) weighted mean of what is not on the diagonal."""
    held = ~np.isnan(table) & ~np.eye(len(table), dtype=bool)
    top, bottom = (
        np.einsum("wi,ij,wj->w", weights, each, weights, optimize=True)
        for each in (np.where(held, table, 0), held.astype(np.float64))
    )
    return np.asarray(ratio(top, bottom))


def _estimate(table: Floats, statistic: Callable[[Floats], Floats], kind: Kind) -> Estimate:
    count = len(table)
    value = float(statistic(np.full((1, count), 1 / max(count, 1)))[0])
    deciding = int((~np.isnan(np.diag(table))).sum())
    return Estimate(value, intervals.scalar(statistic, count, kind), deciding)
