"""One-sided bounds against naive formulas, and how often they hold the truth in populations made to break them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from perturbkv.analyses.budget.criteria import Criterion
from perturbkv.analyses.stats import one_sided

Draw = Callable[[np.random.Generator, int], np.ndarray]
DRAWS = 300
LEAST = 0.95 - 2 * math.sqrt(0.95 * 0.05 / DRAWS)
"""What a bound of exactly 95 % shows in so many draws, but for one simulation in forty."""


def covered(bound: Callable[[np.ndarray], float], draw: Draw, samples: int, truth: float, upper: bool) -> float:
    """How often the bound of `samples` samples holds the population's mean."""
    source = np.random.default_rng(5)
    found = np.array([bound(draw(source, samples)) for _ in range(DRAWS)])
    return float(((found >= truth - 1e-12) if upper else (found <= truth + 1e-12)).mean())


def student(each: np.ndarray) -> float:
    return float(each.mean() + stats.t.ppf(0.95, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each)))


def test_a_share_of_samples_has_the_exact_bound() -> None:
    for samples in (5, 8, 40):
        for hits in range(samples + 1):
            exact = stats.binomtest(hits, samples, alternative="greater").proportion_ci(0.95, method="exact").low
            assert one_sided.share_at_least(np.arange(samples) < hits) == pytest.approx(exact)


def gambler(each: np.ndarray, mean: float) -> float:
    """What he owns in the end, stake by stake and sample by sample."""
    stakes = [1e-3 * 900 ** (place / 39) for place in range(40)]
    owned = 0.0
    for stake, share in [*((one, 0.5 / 40) for one in stakes), (1.0, 0.5)]:
        capital = share
        for value in each:
            capital *= 1 + stake / mean * (value - mean)
        owned += capital
    return owned


def test_the_bet_is_won_twentyfold_up_to_the_bound_and_no_further() -> None:
    for each in (np.array([0.9, 1, 0.7, 1, 1, 0.8, 1, 1]), np.array([0.0, 0.2, 1, 1, 0.5]), np.ones(30)):
        bound = one_sided.mean_at_least(each)
        assert gambler(each, bound * (1 - 1e-6)) >= 20 > gambler(each, bound * (1 + 1e-6))
    assert one_sided.mean_at_least(np.zeros(8)) == 0


def test_the_bet_of_samples_that_all_win_is_what_half_of_the_capital_wins_at_least() -> None:
    bound = one_sided.mean_at_least(np.ones(40))
    assert 40 ** (-1 / 40) <= bound <= 20 ** (-1 / 40)


RARE: dict[str, tuple[Draw, float]] = {
    "one answer in fifty is lost": (lambda source, n: (source.random(n) >= 0.02).astype(float), 0.98),
    "a rare loss beside small noise": (
        lambda source, n: np.clip(0.9 + source.normal(0, 0.01, n) - 0.8 * (source.random(n) < 0.05), 0, 1),
        0.86,
    ),
    "half of all lost": (lambda source, n: (source.random(n) < 0.5).astype(float), 0.5),
}


@pytest.mark.parametrize("samples", [8, 24, 40])
@pytest.mark.parametrize("name", RARE)
def test_a_mean_in_0_to_1_is_covered_whatever_its_distribution(name: str, samples: int) -> None:
    draw, truth = RARE[name]
    assert covered(one_sided.mean_at_least, draw, samples, truth, upper=False) >= LEAST


def test_students_bound_would_miss_a_rare_loss() -> None:
    draw, truth = RARE["a rare loss beside small noise"]
    assert covered(lambda each: -student(-each), draw, 24, truth, upper=False) < 0.85


SKEWED: dict[str, tuple[Draw, float]] = {
    **{
        f"lognormal, spread {spread}": (
            lambda source, n, spread=spread: source.lognormal(sigma=spread, size=n),  # type: ignore[misc]
            math.exp(spread**2 / 2),
        )
        for spread in (0.5, 1.0, 1.5, 2.0)
    },
    "gamma, shape 0.5": (lambda source, n: source.gamma(0.5, size=n) + 1e-12, 0.5),
}


@pytest.mark.parametrize("samples", [8, 16, 40])
@pytest.mark.parametrize("name", SKEWED)
def test_a_skewed_positive_mean_is_covered(name: str, samples: int) -> None:
    draw, truth = SKEWED[name]
    assert covered(one_sided.mean_at_most, draw, samples, truth, upper=True) >= LEAST


@pytest.mark.parametrize(("samples", "least", "most"), [(8, 0.66, 0.82), (40, 0.84, 0.95)])
def test_a_mean_that_one_prompt_in_ten_carries_is_covered_as_often_as_is_said(
    samples: int, least: float, most: float
) -> None:
    def draw(source: np.random.Generator, count: int) -> np.ndarray:
        small, large = source.lognormal(-4, 1, count), source.lognormal(1, 0.5, count)
        return np.where(source.random(count) < 0.9, small, large)

    truth = 0.9 * math.exp(-3.5) + 0.1 * math.exp(1.125)
    assert least < covered(one_sided.mean_at_most, draw, samples, truth, upper=True) < most  # 74 and 90 % of 1,500


EXCESS: dict[str, tuple[Draw, float]] = {
    "lognormal, spread 1": (lambda source, n: source.lognormal(-4, 1, n), math.exp(-4 + 1 / 2)),
    "lognormal, spread 1.5": (lambda source, n: source.lognormal(-4, 1.5, n), math.exp(-4 + 1.5**2 / 2)),
    "log p lost is gamma": (lambda source, n: np.expm1(source.gamma(0.3, 0.15, n)), (1 - 0.15) ** -0.3 - 1),
}
"""What perplexity exceeds the full cache's by, and its mean."""


@pytest.mark.parametrize("samples", [8, 16, 40])
@pytest.mark.parametrize("name", EXCESS)
def test_a_mean_ratio_of_perplexities_is_covered_where_a_bound_of_the_ratio_itself_is_not(
    name: str, samples: int
) -> None:
    draw, excess = EXCESS[name]

    def ratios(source: np.random.Generator, count: int) -> np.ndarray:
        return 1 + draw(source, count)

    limit = Criterion("perplexity", 1 + excess)
    assert covered(limit.bound, ratios, samples, 1 + excess, upper=True) >= 0.92
    assert covered(one_sided.mean_at_most, ratios, samples, 1 + excess, upper=True) < 0.9


def test_students_bound_alone_would_not_cover_it() -> None:
    draw, truth = SKEWED["lognormal, spread 1.5"]
    assert covered(student, draw, 24, truth, upper=True) < 0.85


def test_the_lognormals_bound_is_the_quantile_of_its_drawn_pivot() -> None:
    each = np.random.default_rng(2).lognormal(sigma=1.3, size=17)
    logs = np.log(each)
    middle = float(np.median(logs))
    spread = sum((one - middle) ** 2 for one in logs if one > middle) / 8
    source = np.random.default_rng(3)
    variances = spread * 8 / source.chisquare(8, 400_000)
    pivot = middle + variances / 2 + source.standard_normal(400_000) * np.sqrt(variances * math.pi / 2 / 17)
    assert one_sided.mean_at_most(each) == pytest.approx(math.exp(np.quantile(pivot, 0.95)), rel=0.03)


def test_the_larger_of_both_bounds_counts_and_fewer_than_five_samples_have_none() -> None:
    carried = np.array([0.01] * 40 + [5.0])  # a single prompt carries the mean
    assert one_sided.mean_at_most(carried) == pytest.approx(student(carried))
    assert one_sided.mean_at_most(np.full(8, 0.3)) == pytest.approx(0.3)
    assert math.isinf(one_sided.mean_at_most(np.ones(4)))


def test_the_samples_that_would_do_are_the_fewest() -> None:
    each = np.array([0.9, 1, 0.7, 1, 1, 0.8, 1, 1])

    def holds(samples: int) -> bool:
        return one_sided.mean_at_least(each, samples) >= 0.85

    found = one_sided.samples_for(holds, len(each))
    assert found == next(samples for samples in range(9, 10_000) if holds(samples))
    assert one_sided.samples_for(lambda samples: False, 8) is None


def test_bounds_as_of_more_samples_are_those_of_samples_repeated() -> None:
    each = np.random.default_rng(4).random(10)
    assert one_sided.mean_at_least(each, 30) == pytest.approx(one_sided.mean_at_least(np.tile(each, 3)))
    hits = np.arange(10) < 7
    assert one_sided.share_at_least(hits, 30) == pytest.approx(one_sided.share_at_least(np.tile(hits, 3)))
    assert one_sided.share_at_least(hits, 33) == one_sided.share_at_least(np.arange(33) < 23)  # 23.1 hits are 23
