"""Permutation tests: sign flips of many tests at once, and permutation nulls of correlations with a score.

A sign-flip test flips whole samples: heads of one sample are not independent, samples are. All 2ⁿ flips up to twelve
samples, else as many as of twelve, drawn; then Benjamini and Hochberg (1995) over all tests (METHOD: the protocol, 6).

Two nulls of a correlation. Scores permuted among a prompt's configurations belong to no method; a statistic that is a
mean over prompts of Σ weights × scores is made of them too. Measures exchanged whole among the prompts of a data set
still belong to their methods, but to no prompt. All permutations where there are at most 4,096, else as many, drawn
with a fixed seed; the first of them is the real data, so that p is never 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import mean_where_known

LEVEL = 0.05
"""Largest p, or false discovery rate, that is significant."""
MOST_EXACT = 12
"""Largest number of samples of which all sign flips are made."""
_ROUNDING = 1e-9
"""Sums that differ by less than this share of their size are equal: they were added in another order."""

Floats = NDArray[np.float64]


@record
class SignFlips(Record):
    """Sign-flip tests of (layer, head) mean differences on the same samples, corrected together."""

    significant: NDArray[np.int8] = column(
        "1 where the mean difference is above 0 beyond chance, −1 below, 0 undecided; corrected",
        dims=("layer", "head"),
        json=False,
    )
    p: Floats = column("two-sided p-values, uncorrected", dims=("layer", "head"), json=False)
    uncorrected: int = column("tests with p ≤ 0.05")
    chance_mean: float = column("of such tests in a world without effect, mean", key="by_chance_mean")
    chance_high: int = column("of such tests what 95 % of worlds without effect stay under", key="by_chance_95")
    flips: int = column("flips of whole samples' signs")
    smallest: float = column(
        "the smallest p that so many samples can give: 2 / flips where all flips are made, 1 / flips where they are "
        "drawn",
        key="smallest_p",
    )
    least_tests: int = column("how many tests must reach the smallest p for any to count; 0: none can", json=False)

    @derived()
    def above(self) -> int:
        """Tests significantly above 0, corrected for their number."""
        return int((self.significant == 1).sum())

    @derived()
    def below(self) -> int:
        """Tests significantly below 0."""
        return int((self.significant == -1).sum())

    @derived()
    def least_tests_together(self) -> int | None:
        """Number of tests that must reach the smallest p for any to be significant; null: none can be."""
        return self.least_tests or None

    @derived(heading="#signif.\n+ / −", json=False)
    def counts(self) -> str:
        """Heads better / worse beyond chance (sign flips, corrected)."""
        return f"{self.above}/{self.below}"

    def power_caveat(self) -> list[str]:
        """Return the note that too few samples make significance impossible, as a list; empty for enough samples."""
        return [] if self.least_tests else [f"No head can be significant: the smallest p is {self.smallest:.2g}."]


def sign_flip_tests(differences: Floats) -> SignFlips:
    """Test the mean of (sample, …) differences against 0 by sign flips, all tests corrected together.

    Each flip in turn is a world without effect, in which the same tests are made.
    """
    flat = differences.reshape(len(differences), -1)
    samples = len(flat)
    if samples <= MOST_EXACT:
        bits = np.arange(2**samples)[:, None] >> np.arange(samples) & 1
    else:
        bits = np.random.default_rng(0).integers(0, 2, size=(2**MOST_EXACT, samples))
        bits[0] = 0
    signs = np.asarray(1.0 - 2.0 * bits)
    p = _p_values(np.abs(signs @ flat))
    shape = differences.shape[1:]
    passing = (p <= LEVEL).sum(axis=1)
    smallest = (2 if len(flat) <= MOST_EXACT else 1) / len(signs)
    side = np.sign(differences.sum(axis=0)).astype(np.int8)
    return SignFlips(
        significant=np.where(benjamini_hochberg(p[0]).reshape(shape), side, np.int8(0)).astype(np.int8),
        p=p[0].reshape(shape),
        flips=len(signs),
        uncorrected=int(passing[0]),
        chance_mean=float(passing.mean()),
        chance_high=int(np.quantile(passing, 0.95, method="higher")),
        least_tests=0 if smallest > LEVEL else int(np.ceil(smallest * flat.shape[1] / LEVEL - _ROUNDING)),
        smallest=smallest,
    )


def _p_values(sizes: Floats) -> Floats:
    """Return the p-value of each test under each flip, (flip, test): the share of flips with an equal or larger sum.

    `sizes`: (flip, test) absolute sums.
    """
    shares = []
    for test in np.ascontiguousarray(sizes.T):
        below = np.searchsorted(np.sort(test), test * (1 - _ROUNDING), side="left")
        shares.append(1 - below / len(test))
    return np.stack(shares, axis=1)


def benjamini_hochberg(p: Floats) -> NDArray[np.bool_]:
    """Return (test,) True for the tests that are significant by Benjamini and Hochberg's procedure at 5 %.

    Bit-equal to `scipy.stats.false_discovery_control`, whose import takes longer than all that `heads` computes.
    """
    order = np.argsort(p)
    scaled = p[order] * (len(p) / np.arange(1, len(p) + 1))
    adjusted = np.empty_like(scaled)
    adjusted[order] = np.minimum.accumulate(scaled[::-1])[::-1]
    return np.asarray(adjusted <= LEVEL)


_MOST_PERMUTATIONS = 2**12
"""Number of permutations up to which all are made, and that are drawn of more."""


@record
class PermutationNull(Record):
    """The null distribution of a statistic over permutations; NaN where no prompt decides."""

    low: float = column("lower end of the middle 95 % of the permutations")
    high: float = column("upper end")
    p: float = column("share of the permutations as far from their mean, on either side, as the real numbers")
    permutations: int = column("how many permutations", key="deals")
    exact: bool = column("whether these are all that are possible")


def score_permutation_nulls(weights: Floats, scores: Floats) -> list[PermutationNull]:
    """Return each measure's null: scores (prompt, config) permuted among the configurations of each prompt.

    The statistic of a measure is the mean over prompts of Σ weights × scores, of (measure, prompt, config) weights. A
    prompt that does not decide has NaN weights; others sum to 0, so that the mean over permutations is 0.
    """
    known = np.asarray(~np.isnan(weights).any(axis=2))
    deciding = np.asarray(known.any(axis=0))
    exact = math.factorial(weights.shape[2]) ** int(deciding.sum()) <= _MOST_PERMUTATIONS
    sums = _permuted_sums(np.where(known[:, :, None], weights, 0)[:, deciding], scores[deciding], exact)
    return [_null(np.asarray(ratio(sums[:, index], known[index].sum())), exact) for index in range(len(weights))]


@dataclass(frozen=True)
class PromptPermutations:
    """Permutations of the prompts within each data set.

    Attributes:
        same_dataset: (prompt, prompt) True where two are of one data set.
        indices: (permutation, prompt) index of the prompt whose measure each prompt gets; its own in the first.
        exact: whether these are all that are possible.
    """

    same_dataset: NDArray[np.bool_]
    indices: NDArray[np.int64]
    exact: bool


def prompt_permutations(same_dataset: NDArray[np.bool_]) -> PromptPermutations:
    """Return all permutations of prompts within data sets, or drawn ones where there are too many."""
    groups = [np.flatnonzero(row) for row in np.unique(same_dataset, axis=0)] if len(same_dataset) else []
    exact = math.prod(math.factorial(len(group)) for group in groups) <= _MOST_PERMUTATIONS
    permute = _all_within_groups if exact else _drawn_within_groups
    return PromptPermutations(same_dataset, permute(groups, len(same_dataset)), exact)


def prompt_permutation_null(tables: Sequence[Floats], permutations: PromptPermutations) -> PermutationNull:
    """Return the null of a mean statistic under exchange of measures among the prompts of a data set.

    There is a table per setting, (prompt scored, prompt measured): the statistic of one prompt's scores with another
    prompt's measure, NaN where there is none. All tables are permuted alike; the mean is over tables, then prompts.
    """
    rows = np.flatnonzero(~np.isnan([np.diag(table) for table in tables]).all(axis=0))
    if not len(rows):
        return PermutationNull(math.nan, math.nan, math.nan, 0, True)
    permuted = [table[rows, permutations.indices[:, rows]] for table in tables]
    same = [np.where(permutations.same_dataset, table, np.nan)[rows] for table in tables]
    expected = mean_where_known([mean_where_known(table, axis=1) for table in same])
    means = mean_where_known(mean_where_known(permuted), axis=1)
    return _null(means, permutations.exact, float(mean_where_known(expected)))


def _all_within_groups(groups: Sequence[NDArray[np.int64]], prompts: int) -> NDArray[np.int64]:
    """Return prompt indices in all permutations within the groups, (permutation, prompt)."""
    indices = np.arange(prompts)[None]
    for group in groups:
        orders = group[_all_orders(len(group))]
        indices = np.repeat(indices, len(orders), axis=0)
        indices[:, group] = np.tile(orders, (len(indices) // len(orders), 1))
    return indices


def _drawn_within_groups(groups: Sequence[NDArray[np.int64]], prompts: int) -> NDArray[np.int64]:
    """Return prompt indices in random permutations within the groups, (permutation, prompt)."""
    draw = np.random.default_rng(0)
    indices = np.empty((_MOST_PERMUTATIONS, prompts), dtype=np.int64)
    for group in groups:
        indices[:, group] = group[_drawn_orders(draw, len(group))]
    return indices


def _permuted_sums(weights: Floats, scores: Floats, exact: bool) -> Floats:
    """Return (permutation, measure) sums over prompts of Σ weights × permuted scores; all permutations if `exact`."""
    draw, configs = np.random.default_rng(0), weights.shape[2]
    total = np.zeros((1 if exact else _MOST_PERMUTATIONS, len(weights)))
    for prompt in range(weights.shape[1]):
        orders = _all_orders(configs) if exact else _drawn_orders(draw, configs)
        sums = scores[prompt][orders] @ weights[:, prompt].T
        total = (total[:, None] + sums[None]).reshape(-1, len(weights)) if exact else total + sums
    return total


def _all_orders(count: int) -> NDArray[np.int64]:
    """Return all orders of 0 … `count` − 1, (order, position); the first is ascending."""
    return np.array(list(itertools.permutations(range(count))))


def _drawn_orders(draw: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Return random orders of 0 … `count` − 1, (order, position); the first is ascending."""
    orders = np.argsort(draw.random((_MOST_PERMUTATIONS, count)), axis=1)
    orders[0] = np.arange(count)
    return orders


def _null(means: Floats, exact: bool, expected: float = 0) -> PermutationNull:
    """Return the null of (permutation,) means, the first unpermuted; `expected`: the mean under the null."""
    if np.isnan(means[0]):
        return PermutationNull(math.nan, math.nan, math.nan, 0, exact)
    low, high = np.quantile(means, (0.025, 0.975))
    as_far = np.abs(means - expected) >= abs(means[0] - expected) - _ROUNDING
    return PermutationNull(float(low), float(high), float(as_far.mean()), len(means), exact)
