"""Shapley values and greedy curves of swapped kept sets, with what is unsure of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.questions.patching.swap_values import Measured, all_of, change, scale
from perturbkv.analyses.stats import coalition as shapley_of
from perturbkv.analyses.stats import greedy as curves_of
from perturbkv.analyses.stats.coalition import Orders
from perturbkv.analyses.stats.greedy import Path
from perturbkv.analyses.stats.intervals import LEVEL, Band, Scalar
from perturbkv.analyses.text import at
from perturbkv.configs.patching import Coalition


@dataclass(frozen=True)
class Shift:
    """What a player brings beside certain others.

    Attributes:
        value: (player,) by how much the outcome changes, as `swap_values.change` says it.
        interval: over samples.
        per_sample: (player, sample) in the outcome's own unit.
    """

    value: Floats
    interval: Band
    per_sample: Floats

    @classmethod
    def of(cls, per_sample: Floats, baseline: Floats, outcome: str) -> Self:
        """Of (player, sample) differences, over the baseline's (sample,)."""
        return cls(*change(per_sample, baseline, outcome), per_sample)


@dataclass(frozen=True)
class Shapley:
    """What each player's kept sets do to the outcome, over all orders in which they may be switched.

    Attributes:
        value: (player,) by how much the treatment's sets there change the outcome, as `swap_values.change` says it.
        interval: over samples.
        sampling: (player,) half a 95 % interval of drawing orders, these samples given; 0 where all subsets were
            measured.
        total: all players together: what the values add up to.
        total_interval: over samples.
        permutations: orders drawn, reverses included; 0 where all subsets were measured.
        coalitions: that were measured for it.
        per_sample: (player, sample) in the outcome's own unit.
        alone: the same change where nobody else is switched.
        last: likewise where all others are. Both are the value where players do not interact.
    """

    value: Floats
    interval: Band
    sampling: Floats
    total: float
    total_interval: Scalar
    permutations: int
    coalitions: int
    per_sample: Floats
    alone: Shift
    last: Shift


@dataclass(frozen=True)
class Greedy:
    """Players switched one after the other, each the one that helps most on the samples that choose.

    Attributes:
        paths: the players that each half of the samples chose, by their places.
        chosen: (count,) the outcome's change with 0, 1, 2, … players switched, on the samples that chose them.
        judged: (count,) the same on the samples that did not.
        chosen_interval, judged_interval: over samples.
    """

    paths: tuple[tuple[int, ...], tuple[int, ...]]
    chosen: Floats
    chosen_interval: Band
    judged: Floats
    judged_interval: Band


def shapley(measured: Measured, outcome: str, orders: Orders | None) -> Shapley:
    """Values from drawn orders; from all subsets where they are None."""
    players = len(measured.game.players)
    nobody, everybody = frozenset[int](), measured.game.everybody
    passed = shapley_of.needed(players, orders)
    values = all_of(measured, passed, outcome)
    baseline = values[nobody]
    if orders is None:
        found, sampling = shapley_of.exact(values, players), np.zeros(players)
    else:
        each = shapley_of.marginals(values, orders)
        found, sampling = each.mean(axis=0), sampling_error(each, scale(baseline, outcome))
    value, interval = change(found, baseline, outcome)
    total, total_interval = change((values[everybody] - baseline)[None], baseline, outcome)
    drawn = 0 if orders is None else len(orders)
    ends = [Shift.of(one(values, players), baseline, outcome) for one in (shapley_of.alone, shapley_of.last)]
    return Shapley(value, interval, sampling, float(total[0]), at(total_interval, 0), drawn, len(passed), found, *ends)


def greedy(measured: Measured, outcome: str, paths: Sequence[Path]) -> Greedy:
    """The curves of two paths, which choose on one half of the samples and are judged on the other."""
    baseline = measured.coalition(frozenset(), outcome)

    def value(coalition: Coalition, places: NDArray[np.int64]) -> Floats:
        return measured.only(places).coalition(coalition, outcome)

    chosen, judged = curves_of.curves(paths, value, len(baseline))
    first, second = (change(curve - baseline, baseline, outcome) for curve in (chosen, judged))
    both = (tuple(paths[0].chosen), tuple(paths[1].chosen))
    return Greedy(both, first[0], first[1], second[0], second[1])


def sampling_error(each: Floats, unit: float) -> Floats:
    """(player,) half a 95 % interval, over drawn pairs of orders, of the mean of (order, player, sample) marginals.

    Student's t of the pairs' means, whose sums over samples are divided by `unit`.
    """
    pairs = shapley_of.by_pair(each.sum(axis=-1)) / (unit if unit else np.nan)
    error = pairs.std(axis=0, ddof=1) / np.sqrt(len(pairs))
    return np.asarray(stats.t.ppf((1 + LEVEL) / 2, len(pairs) - 1) * error)
