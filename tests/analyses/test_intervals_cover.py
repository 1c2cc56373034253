"""Intervals against naive formulas, and how often they hold the truth in skewed populations."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from perturbkv.analyses.json_values import json_value
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import half_share
from perturbkv.analyses.stats.intervals import (
    CORRELATION,
    DIFFERENCE,
    POSITIVE,
    RATIO,
    Interval,
    StatisticKind,
    share_kind,
)

DRAW = np.random.default_rng(0)
POPULATION = 40


def test_a_share_of_samples_has_the_interval_of_clopper_and_pearson() -> None:
    for samples in (2, 8, 36):
        for hits in range(samples + 1):
            found = intervals.of_share(np.arange(samples) < hits)
            exact = stats.binomtest(hits, samples).proportion_ci(method="exact")
            assert found is not None
            assert (found.low, found.high, found.kind) == (
                pytest.approx(exact.low),
                pytest.approx(exact.high),
                "interval",
            )
    none = intervals.of_share(np.zeros(8, dtype=bool))
    assert none is not None
    assert f"[{100 * none.low:.0f}, {100 * none.high:.0f}]" == "[0, 37]"


@pytest.mark.parametrize("samples", [5, 8, 36])
def test_scores_of_0_and_1_alone_are_a_share_of_samples(samples: int) -> None:
    for hits in range(samples + 1):
        exact = stats.binomtest(hits, samples).proportion_ci(method="exact")
        scores = np.array([1.0] * hits + [0.0] * (samples - hits) + [np.nan])  # the last has no score
        expected = Interval(pytest.approx(exact.low), pytest.approx(exact.high))
        assert intervals.of_mean(scores, share_kind(0)) == expected
    partly = intervals.of_mean(np.array([0.5, 1.0, 0.0, 1.0, 0.0]), share_kind(0))
    assert partly is not None
    assert partly.high - partly.low > 0.9  # nothing is known of such a score but its few samples
    assert intervals.of_mean(np.array([1.0, 0.0, 1.0]), share_kind(0)) == Interval(0.0, 1.0, "range")


def test_a_ratio_of_sums_has_the_jackknifes_interval_on_the_logarithm() -> None:
    top, bottom = DRAW.lognormal(size=8), DRAW.lognormal(size=8)
    left_out = [math.log((top.sum() - t) / (bottom.sum() - b)) for t, b in zip(top, bottom, strict=True)]
    error = math.sqrt(7 / 8 * sum((x - sum(left_out) / 8) ** 2 for x in left_out))
    reach = stats.t.ppf(0.975, 7 / 32 * 8) * error
    middle = math.log(top.sum() / bottom.sum())
    found = intervals.of_statistic(lambda weights: (weights @ top) / (weights @ bottom), 8, RATIO)
    assert found == Interval(pytest.approx(math.exp(middle - reach)), pytest.approx(math.exp(middle + reach)))


def test_a_plain_mean_has_students_interval_with_the_kinds_degrees_of_freedom() -> None:
    values = DRAW.uniform(0.3, 0.5, size=8)
    found = intervals.of_mean(values, CORRELATION)
    reach = stats.t.ppf(0.975, 3) * values.std(ddof=1) / math.sqrt(8)
    assert found == Interval(pytest.approx(values.mean() - reach), pytest.approx(values.mean() + reach))
    wide = intervals.of_mean(values, share_kind(270))  # never surer than so many independent heads
    share = values.mean()
    error = math.sqrt(values.var(ddof=1) / 8 + share * (1 - share) / (8 * 270))
    assert wide == Interval(
        pytest.approx(share - stats.t.ppf(0.975, 3) * error), pytest.approx(share + stats.t.ppf(0.975, 3) * error)
    )


def test_a_median_lies_between_two_of_the_samples() -> None:
    values = np.array([5.0, 1, 8, 2, 7, 3, 6, 4])
    assert intervals.of_medians(values[:, None]) == Interval(np.array([2.0]), np.array([7.0]))
    for samples in range(5, 30):
        found = intervals.of_medians(np.arange(samples, dtype=float))
        assert found is not None
        below = int(found.low)
        covered = 1 - 2 * sum(math.comb(samples, k) for k in range(below + 1)) / 2**samples
        narrower = 1 - 2 * sum(math.comb(samples, k) for k in range(below + 2)) / 2**samples
        assert narrower < 0.92 <= covered
        assert intervals.median_level(samples) == pytest.approx(covered)


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_fewer_than_five_samples_have_a_range_and_it_is_called_one(samples: int) -> None:
    values = np.array([3.0, 1, 2, 5])[:samples]
    assert intervals.of_mean(values, POSITIVE) == Interval(1.0, values.max(), "range")
    assert json_value(intervals.of_mean(values, POSITIVE)) == {"low": 1.0, "high": float(values.max()), "kind": "range"}
    assert intervals.of_mean(values[:1], POSITIVE) is None
    assert intervals.of_mean(np.array([np.nan, 1.0]), POSITIVE) is None


def test_equal_sides_give_exactly_1_and_shares_without_any_head_are_as_sure_as_their_samples() -> None:
    values = DRAW.lognormal(size=8)
    assert intervals.of_statistic(lambda weights: (weights @ values) / (weights @ values), 8, RATIO) == Interval(
        1.0, 1.0
    )
    for samples in range(5, 41):  # 1/6 six times is less than 1
        sure = 0.025 ** (1 / samples)
        assert intervals.of_mean(np.zeros(samples), share_kind(270)) == Interval(0.0, pytest.approx(1 - sure))
        assert intervals.of_mean(np.ones(samples), share_kind(270)) == Interval(pytest.approx(sure), 1.0)


def test_correlations_that_are_all_1_are_as_sure_as_their_samples() -> None:
    for samples in (5, 8, 36):
        sure = stats.binomtest(samples, samples).proportion_ci(method="exact").low
        assert intervals.of_mean(np.ones(samples), CORRELATION) == Interval(pytest.approx(2 * sure - 1), 1.0)
        assert intervals.of_mean(-np.ones(samples), CORRELATION) == Interval(-1.0, pytest.approx(1 - 2 * sure))


def test_samples_that_are_all_alike_leave_room_for_others_on_both_sides() -> None:
    unseen = 1 - 0.025 ** (1 / 8)
    for level in (0.25, 3 / 7):
        found = intervals.of_mean(np.full(8, level), share_kind(0))
        assert found == Interval(pytest.approx((1 - unseen) * level), pytest.approx(level + unseen * (1 - level)))
    of_heads = intervals.of_mean(np.full(8, 0.25), share_kind(270))  # as many independent heads would differ
    error = stats.t.ppf(0.975, 3) * math.sqrt(0.25 * 0.75 / (8 * 270))
    assert of_heads == Interval(pytest.approx(0.25 - error), pytest.approx(0.25 + error))


@pytest.mark.parametrize("kind", [CORRELATION, share_kind(0), share_kind(270)], ids=["correlation", "share", "heads"])
def test_one_sample_a_little_off_the_limit_makes_the_others_no_surer(kind: StatisticKind) -> None:
    whole = intervals.of_mean(np.ones(8), kind)
    near = intervals.of_mean(np.array([1.0] * 7 + [0.999]), kind)
    assert whole is not None
    assert near is not None
    assert near.low == pytest.approx(whole.low, abs=1e-3)
    two = intervals.of_mean(np.array([1.0] * 6 + [0.99, 0.99]), kind)
    assert two is not None
    assert two.low > 0.97  # two samples that depart show how far samples do
    between = intervals.of_mean(np.array([1.0] * 6 + [0.99, 0.999]), kind)
    assert between is not None
    assert whole.low < between.low < two.low
    if kind.limits == (0, 1):
        none = intervals.of_mean(np.array([0.0] * 7 + [0.001]), kind)
        assert none is not None
        assert (none.low, none.high) == (pytest.approx(1 - near.high), pytest.approx(1 - near.low))


def test_zeros_on_a_logarithm_fall_back_on_the_plain_scale() -> None:
    found = intervals.of_mean(np.array([0.0] * 7 + [1.0]), POSITIVE)
    assert found is not None
    assert found.low == 0
    assert 0.125 < found.high < 10
    assert intervals.of_mean(np.zeros(8), POSITIVE) == Interval(0.0, 0.0)


def coverage(truth: float, make: Callable[[np.ndarray], Interval[float] | None], draws: int = 1500) -> float:
    """How often the interval of eight samples, drawn with replacement from the population, holds its value."""
    held = 0
    for drawn in np.random.default_rng(7).integers(0, POPULATION, size=(draws, 8)):
        found = make(drawn)
        held += found is not None and found.low - 1e-12 <= truth <= found.high + 1e-12
    return held / draws


def population(kind: str) -> np.ndarray:
    """40 skewed results: lognormal ones, or shares near 1 that a few samples leave."""
    draw = np.random.default_rng(11)
    return draw.lognormal(sigma=1.2, size=POPULATION) if kind == "lognormal" else draw.beta(18, 2, size=POPULATION)


MEANS: dict[str, tuple[str, StatisticKind]] = {
    "a skewed positive mean": ("lognormal", POSITIVE),
    "a share of heads near 1": ("beta", share_kind(270)),
    "a skewed correlation": ("beta", CORRELATION),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_covered_in_at_least_92_percent_of_draws_of_eight(name: str) -> None:
    values, kind = population(MEANS[name][0]), MEANS[name][1]
    assert coverage(values.mean(), lambda drawn: intervals.of_mean(values[drawn], kind)) >= 0.92


def test_a_ratio_of_skewed_sums_is_covered_and_a_percentile_bootstrap_would_not() -> None:
    bottom = population("lognormal")
    top = bottom * np.random.default_rng(12).lognormal(sigma=0.5, size=POPULATION)
    truth = top.sum() / bottom.sum()

    def ours(drawn: np.ndarray) -> Interval[float] | None:
        return intervals.of_statistic(lambda weights: (weights @ top[drawn]) / (weights @ bottom[drawn]), 8, RATIO)

    def percentile(drawn: np.ndarray) -> Interval[float]:
        again = drawn[np.random.default_rng(13).integers(0, 8, size=(400, 8))]
        low, high = np.quantile(top[again].sum(axis=1) / bottom[again].sum(axis=1), (0.025, 0.975))
        return Interval(float(low), float(high))

    assert coverage(truth, ours) >= 0.92
    assert coverage(truth, percentile, 600) < 0.92


def lost(source: np.random.Generator, share: float, samples: int) -> np.ndarray:
    """Drops of a score, 0 but in a share of the samples."""
    return np.where(source.random(samples) < share, source.beta(1, 3, samples), 0.0)


@pytest.mark.parametrize("samples", [8, 12, 20, 40, 100])
@pytest.mark.parametrize("share", [0.5, 0.2, 0.1, 0.05, 0.02])
def test_rare_losses_are_covered_in_at_least_92_percent_of_draws(share: float, samples: int) -> None:
    source, draws, held = np.random.default_rng(1), 800, 0
    for _ in range(draws):
        found = intervals.of_mean(lost(source, share, samples), DIFFERENCE)
        assert found is not None
        held += found.low <= share / 4 <= found.high
    assert held / draws >= 0.92 - 2 * math.sqrt(0.92 * 0.08 / draws)


def test_without_the_share_that_was_not_seen_rare_losses_would_be_missed() -> None:
    source, held = np.random.default_rng(1), 0
    for _ in range(800):
        found = intervals.of_mean(lost(source, 0.1, 20), StatisticKind(3 / 8, limits=(-1, 1)))
        assert found is not None
        held += found.low <= 0.025 <= found.high
    assert held / 800 < 0.9


def test_an_end_of_rare_differences_lies_further_out_by_what_n_alike_samples_leave_room_for() -> None:
    unseen = 1 - 0.025 ** (1 / 12)

    def ends(each: list[float]) -> tuple[float, float, float, float]:
        values = np.array(each)
        reach = stats.t.ppf(0.975, 3 / 8 * 12) * values.std(ddof=1) / math.sqrt(12)
        found = intervals.of_mean(values, DIFFERENCE)
        assert found is not None
        return values.mean() - reach, values.mean() + reach, found.low, found.high

    low, high, ours_low, ours_high = ends([0.0] * 8 + [0.1, 0.2, 0.4, -0.1])  # undecided: both ends
    assert ours_low == pytest.approx(low - unseen * (0.05 + 0.1))
    assert ours_high == pytest.approx(high + unseen * (0.4 - 0.05))
    low, high, ours_low, ours_high = ends([0.0] * 6 + [0.3, 0.35, 0.3, 0.4, 0.35, 0.3])  # decided, and stays so
    assert low > 0
    assert (ours_low, ours_high) == (pytest.approx(low), pytest.approx(high + unseen * (0.4 - 1 / 6)))
    low, high, ours_low, ours_high = ends([0.0] * 5 + [0.1, 0.2, 0.4, -0.1, 0.3, 0.2, 0.1])  # fewer ties than half
    assert (ours_low, ours_high) == (pytest.approx(low), pytest.approx(high))


def test_half_of_a_sum_lies_in_the_fewest_parts_that_reach_it() -> None:
    assert half_share(np.array([1.0, 1, 6, 2])) == 0.25
    assert half_share(np.ones(4)) == 0.5
    assert half_share(np.array([3.0, 2, 2, 2])) == 0.5
    assert math.isnan(half_share(np.zeros(3)))
