"""Correlations of measures with the score within prompts, and the method identity baseline beside them.

Some methods perturb more and score less whatever the prompt. The baseline is the part of a correlation that knowing the
method alone explains: the perturbation of every *other* prompt of the data set is correlated with this prompt's scores.
If a prompt's own perturbation held nothing but the identity of the methods, another prompt's would correlate as much.
Pairs of prompts share prompts, so the interval leaves each prompt out of all of its pairs (the jackknife); its width
follows from the number of prompts that decide.

Ranks and areas are of one prompt's configurations; strengths and contrasts are means of these over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import isnan

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, record
from perturbkv.analyses.correlation import lost_answers
from perturbkv.analyses.correlation.lost_answers import AREA
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import (
    CORRELATION,
    MIN_SAMPLES,
    Estimate,
    StatisticKind,
    estimate_mean,
    mean_where_known,
)
from perturbkv.analyses.stats.permutation import (
    PermutationNull,
    PromptPermutations,
    benjamini_hochberg,
    prompt_permutation_null,
    prompt_permutations,
)
from perturbkv.analyses.stats.rank_correlation import kendall, mean_ranks, spearman
from perturbkv.analyses.verdicts import interval_side

RHO_DIFFERENCES = StatisticKind(3 / 8, limits=(-2, 2))
"""A mean of differences between two rank correlations of the same prompt."""
AREA_DIFFERENCES = StatisticKind(3 / 8, limits=(-1, 1))
"""A mean of differences between two areas of the same prompt."""


@record
class IdentityBaseline(Record, section="method identity baseline of a statistic"):
    """The method identity baseline of one statistic, over the prompts that have others to compare with."""

    others: Estimate = column("the same with the measure of other prompts of the data set: the methods' names alone")
    beyond: Estimate = column("the prompt's own less that")
    exchanged: PermutationNull = column(
        "permutation null: measures exchanged among the prompts of a data set, names alone"
    )
    significant: bool = column(
        "whether the statistic and `beyond` are decided as a correlation with lost score, and p beside those of all "
        "measures and settings (Benjamini–Hochberg, 5 %); never of a circular measure",
        default=False,
    )


def rank_table(measured: Floats, scored: Floats) -> Floats:
    """Return (prompt scored, prompt measured) Spearman's ρ of one prompt's scores with another's measure.

    Both arrays are (prompt, config). NaN where a side is constant, where the prompt measured lacks the measure, and in
    rows of prompts whose own ρ is NaN.
    """
    units = []
    for side in (scored, measured):
        ranks = mean_ranks(side.T).T
        centred = ranks - ranks.mean(axis=1, keepdims=True)
        units.append(ratio(centred, np.sqrt((centred**2).sum(axis=1, keepdims=True))))
    return _drop_undecided(np.einsum("ic,jc->ij", *units), measured)


def area_table(measured: Floats, lost: NDArray[np.bool_]) -> Floats:
    """Return (prompt scored, prompt measured) area: the share of pairs whose lost answer is perturbed more.

    Pairs are of the prompt scored, perturbation is that of the prompt measured; both arrays are (prompt, config). NaN
    where all answers of the prompt scored are lost or all are kept, where the prompt measured lacks the measure, and in
    rows of prompts without an area of their own.
    """
    count = lost.sum(axis=1)[:, None]
    ranks = lost @ mean_ranks(measured.T)
    return _drop_undecided(ratio(ranks - count * (count + 1) / 2, count * (lost.shape[1] - count)), measured)


def _drop_undecided(table: Floats, measured: Floats) -> Floats:
    """Return the table with NaN in columns of prompts without the measure, and rows whose own statistic is NaN."""
    missing = np.isnan(measured).any(axis=1)
    known = np.where(missing, np.nan, table)
    return np.where(np.isnan(np.diag(known))[:, None], np.nan, known)


RHO, AUC = (CORRELATION, RHO_DIFFERENCES), (AREA, AREA_DIFFERENCES)
"""Of each statistic: the kinds of its mean and of the mean of its differences, which give their intervals."""


def identity_baseline(
    tables: Sequence[Floats], permutations: PromptPermutations, kinds: tuple[StatisticKind, StatisticKind]
) -> IdentityBaseline:
    """Return a statistic's method identity baseline, with its excess and permutation null, from a table per setting.

    Tables are those of `rank_table`, with the kinds `RHO`, or of `area_table`, with `AUC`.
    """
    kind, differences = kinds
    same_dataset, prompts = permutations.same_dataset, len(permutations.same_dataset)

    def others(weights: Floats) -> Floats:
        return mean_where_known([_mean_of_others(table, same_dataset, weights) for table in tables])

    def beyond(weights: Floats) -> Floats:
        return mean_where_known([np.diag(table) - _mean_of_others(table, same_dataset, weights) for table in tables])

    return IdentityBaseline(
        _estimate_mean(others, prompts, kind),
        _estimate_mean(beyond, prompts, differences),
        prompt_permutation_null(tables, permutations),
    )


def _mean_of_others(table: Floats, same_dataset: NDArray[np.bool_], weights: Floats) -> Floats:
    """Return the weighted mean of a statistic over the measures of the data set's other prompts, (row, prompt scored).

    Args:
        table: (prompt scored, prompt measured).
        same_dataset: (prompt, prompt) True where both are of one data set.
        weights: (row, prompt measured).

    NaN for a prompt that does not decide, or has no others.
    """
    counted = same_dataset & ~np.isnan(table) & ~np.eye(len(table), dtype=bool)
    return np.asarray(ratio(weights @ np.where(counted, table, 0).T, weights @ counted.T.astype(np.float64)))


def _estimate_mean(by_prompt: Callable[[Floats], Floats], prompts: int, kind: StatisticKind) -> Estimate:
    """Return the mean of a statistic over prompts; `by_prompt` maps weights (row, prompt) to values (row, prompt).

    Prompts that are NaN do not decide: the interval is as wide as the deciding ones make it.
    """

    def mean(weights: Floats) -> Floats:
        values = by_prompt(weights)
        known = ~np.isnan(values)
        return np.asarray(ratio((weights * np.where(known, values, 0)).sum(axis=1), (weights * known).sum(axis=1)))

    values = by_prompt(np.full((1, prompts), 1 / max(prompts, 1)))[0]
    known = values[~np.isnan(values)]
    if len(known) < MIN_SAMPLES:
        return estimate_mean(known, kind)
    return Estimate(float(known.mean()), intervals.of_statistic(mean, prompts, kind, len(known)), len(known))


@dataclass(frozen=True)
class PromptStatistics:
    """The statistics of one measure in each prompt: (prompt,) each, NaN where the prompt does not decide.

    Attributes:
        rho: Spearman's ρ with the score.
        tau: Kendall's τ-b with the score.
        area: share of pairs of a lost and a kept answer in which the lost one is more perturbed.
    """

    rho: Floats
    tau: Floats
    area: Floats


@record
class Strength(Record, section="strength"):
    """The correlation of one measure with the score, mean over prompts."""

    measure: str = column(
        "isolated, propagated, theta, theta_hat, lost (1 − S), or circular kl or drift, of the first decode step; of "
        "an accepted answer's steps isolated, isolated_first (its first token), effect, effect_size, theta, theta_hat, "
        "lost, or circular propagated, effect_propagated, kl, drift or text_loss"
    )
    rho: Estimate = column("Spearman's ρ with the score between the configurations of a prompt")
    tau: Estimate = column("Kendall's τ-b")
    auc: Estimate = column(
        "share of pairs of a lost and a kept answer of a prompt in which the lost one is more perturbed"
    )


@record
class Contrast(Record, section="contrast"):
    """The difference between two measures on the same prompts."""

    first: str = column("a measure")
    second: str = column("another")
    rho: Estimate = column("ρ of the first less ρ of the second; below 0 the first correlates more")
    auc: Estimate = column("the same of areas; above 0 the first separates more")


def correlate_within_prompts(measured: Floats, scored: Floats, lost: NDArray[np.bool_]) -> PromptStatistics:
    """Correlate a measure with the score in each prompt, and with which of its answers are lost.

    All arrays are (prompt, config). NaN where the prompt lacks the measure, or has no such statistic.

    Args:
        measured: the measure, NaN in prompts without it.
        scored: scores.
        lost: True where an answer is lost.
    """
    return PromptStatistics(
        rho=apply_to_measured(measured, lambda known, rows: spearman(known.T, scored[rows].T)),
        tau=apply_to_measured(measured, lambda known, rows: kendall(known.T, scored[rows].T)),
        area=apply_to_measured(measured, lambda known, rows: lost_answers.area_within_prompts(known, lost[rows])),
    )


def apply_to_measured(measured: Floats, compute: Callable[[Floats, NDArray[np.bool_]], Floats]) -> Floats:
    """Return (prompt,) values computed from the prompts that have the measure; NaN for the others.

    `compute` gets their part of `measured` (prompt, config), and a mask (prompt,) to select the like of other arrays.
    """
    rows = np.asarray(~np.isnan(measured).any(axis=1))
    values = np.full(len(measured), np.nan)
    if rows.any():
        values[rows] = compute(measured[rows], rows)
    return values


def mean_over_settings(each: Sequence[PromptStatistics]) -> PromptStatistics:
    """Return each prompt's statistics, averaged over the settings in which the prompt has them."""
    return PromptStatistics(
        *(mean_where_known([getattr(one, name) for one in each]) for name in ("rho", "tau", "area"))
    )


def select_prompts(each: Mapping[str, PromptStatistics], rows: NDArray[np.bool_]) -> dict[str, PromptStatistics]:
    """Return measure -> statistics of the prompts in `rows`."""
    return {name: PromptStatistics(one.rho[rows], one.tau[rows], one.area[rows]) for name, one in each.items()}


def strengths(each: Mapping[str, PromptStatistics]) -> tuple[Strength, ...]:
    """Return each measure's correlation with the score, mean over prompts."""
    return tuple(
        Strength(
            name,
            rho=estimate_mean(one.rho, CORRELATION),
            tau=estimate_mean(one.tau, CORRELATION),
            auc=estimate_mean(one.area, AREA),
        )
        for name, one in each.items()
    )


def contrasts(each: Mapping[str, PromptStatistics], predictors: Collection[str]) -> tuple[Contrast, ...]:
    """Return the difference between every two `predictors`, the measures that are not circular, mean over prompts."""
    return tuple(
        Contrast(
            first,
            second,
            rho=estimate_mean(each[first].rho - each[second].rho, RHO_DIFFERENCES),
            auc=estimate_mean(each[first].area - each[second].area, AREA_DIFFERENCES),
        )
        for first, second in combinations(predictors, 2)
    )


@dataclass(frozen=True)
class CrossPromptTables:
    """The statistics of every prompt's measure with every prompt's answers, (prompt scored, prompt measured) each.

    Attributes:
        rho: Spearman's ρ with the score.
        area: share of pairs in which the lost answer is perturbed more than the kept one.
    """

    rho: Floats
    area: Floats

    def select(self, rows: NDArray[np.bool_]) -> CrossPromptTables:
        """Return the tables of the prompts in `rows`."""
        return CrossPromptTables(self.rho[np.ix_(rows, rows)], self.area[np.ix_(rows, rows)])


@record
class IdentityBaselines(Record, section="method identity baseline"):
    """The method identity baselines of one measure: of its ranks and of its areas."""

    measure: str = column("the measure")
    rho: IdentityBaseline = column("of Spearman's ρ; `beyond` below 0: the prompt's own perturbation adds to the names")
    auc: IdentityBaseline = column("of the areas; `beyond` above 0: it does")


def cross_prompt_tables(
    measured: Mapping[str, Floats], scored: Floats, lost: NDArray[np.bool_]
) -> dict[str, CrossPromptTables]:
    """Return measure -> tables of the statistics of every prompt's measure with every prompt's answers."""
    return {
        name: CrossPromptTables(rank_table(array, scored), area_table(array, lost)) for name, array in measured.items()
    }


def identity_baselines(
    settings: Sequence[Mapping[str, CrossPromptTables]], same_dataset: NDArray[np.bool_]
) -> tuple[IdentityBaselines, ...]:
    """Return every measure's method identity baselines, from each prompt's mean over the settings.

    `same_dataset` is (prompt, prompt), True where both are of one data set.
    """
    permutations = prompt_permutations(same_dataset)
    return tuple(
        IdentityBaselines(
            name,
            rho=identity_baseline([one[name].rho for one in settings], permutations, RHO),
            auc=identity_baseline([one[name].area for one in settings], permutations, AUC),
        )
        for name in settings[0]
    )


def mark_significant(
    groups: Sequence[tuple[IdentityBaselines, ...]],
    strengths: Sequence[Sequence[Strength]],
    predictors: Collection[str],
) -> list[tuple[IdentityBaselines, ...]]:
    """Return the groups of baselines with `significant` set, after correction over all tests of all groups.

    Significant is a statistic of a predictor that is decided itself and beyond its baseline. `strengths`: the measures'
    own, group by group in the same order.
    """
    tests: list[tuple[int, str, str]] = []
    p_values: list[float] = []
    decided: list[bool] = []
    for index, (group, own) in enumerate(zip(groups, strengths, strict=True)):
        for one, strength in zip(group, own, strict=True):
            for statistic in _EXPECTED:
                baseline: IdentityBaseline = getattr(one, statistic)
                if one.measure in predictors and not isnan(baseline.exchanged.p):
                    tests.append((index, one.measure, statistic))
                    p_values.append(baseline.exchanged.p)
                    decided.append(_is_decided(statistic, getattr(strength, statistic), baseline))

    passing = benjamini_hochberg(np.array(p_values))
    significant = {test for test, passes, both in zip(tests, passing, decided, strict=True) if passes and both}

    def marked(index: int, one: IdentityBaselines) -> IdentityBaselines:
        rho = replace(one.rho, significant=(index, one.measure, "rho") in significant)
        auc = replace(one.auc, significant=(index, one.measure, "auc") in significant)
        return replace(one, rho=rho, auc=auc)

    return [tuple(marked(index, one) for one in group) for index, group in enumerate(groups)]


_EXPECTED = {"rho": (-1, 0.0), "auc": (1, 0.5)}
"""Statistic -> (side, number): where more perturbed answers score less, it lies on that side of the number."""


def _is_decided(statistic: str, own: Estimate, baseline: IdentityBaseline) -> bool:
    """Return whether a statistic's interval lies on the expected side of its number, and that of `beyond` of 0."""
    side, number = _EXPECTED[statistic]
    return interval_side(own.interval, number) == interval_side(baseline.beyond.interval, 0) == side
