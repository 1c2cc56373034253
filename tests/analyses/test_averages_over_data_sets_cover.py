"""How often the interval of an average over data sets holds the truth, in populations as scores have them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import Interval, StatisticKind, share_kind

SCORE, DIFFERENCE = share_kind(0), StatisticKind(3 / 8, limits=(-1, 1))
Draw = Callable[[np.random.Generator, int], np.ndarray]
DRAWS = 400


def exact(share: float) -> Draw:
    return lambda draw, size: (draw.random(size) < share).astype(float)


def overlap(draw: np.random.Generator, size: int) -> np.ndarray:
    """An F1: often 0, at times 1, else between."""
    kind = draw.random(size)
    return np.where(kind < 0.45, 0.0, np.where(kind < 0.75, 1.0, draw.random(size)))


def lost(share: float) -> Draw:
    return lambda draw, size: -(draw.random(size) < share).astype(float)


POPULATIONS: dict[str, tuple[list[Draw], float, StatisticKind]] = {
    "nearly always right": ([exact(0.95)] * 6, 0.95, SCORE),
    "nearly never right": ([exact(0.02)] * 6, 0.02, SCORE),
    "from never to always right": ([exact(share) for share in np.linspace(0.02, 1, 6)], 0.51, SCORE),
    "token overlap": ([overlap] * 6, 0.3 + 0.25 / 2, SCORE),
    "texts that resemble a summary": ([lambda draw, size: draw.beta(2, 6, size)] * 3, 0.25, SCORE),
    "answers that are rarely lost": ([lost(share) for share in (0.0, 0.05, 0.1, 0.2)], -0.0875, DIFFERENCE),
}


def covered(name: str, samples: list[int], of: Callable[[list[np.ndarray]], Interval[float] | None]) -> float:
    """Share of draws whose interval holds the mean over data sets; these have `samples` samples in turn."""
    populations, truth, _ = POPULATIONS[name]
    draw, held = np.random.default_rng(3), 0
    for _ in range(DRAWS):
        drawn = [one(draw, samples[place % len(samples)]) for place, one in enumerate(populations)]
        found = of(drawn)
        held += found is not None and found.low - 1e-12 <= truth <= found.high + 1e-12
    return held / DRAWS


@pytest.mark.parametrize("samples", [[8], [40], [5, 20]], ids=str)
@pytest.mark.parametrize("name", POPULATIONS)
def test_the_average_is_covered_in_at_least_92_percent_of_draws(name: str, samples: list[int]) -> None:
    kind = POPULATIONS[name][2]
    assert covered(name, samples, lambda drawn: intervals.of_stratified_mean(drawn, kind)) >= 0.92


def test_summed_standard_errors_would_miss_answers_that_are_nearly_never_right() -> None:
    def summed(drawn: list[np.ndarray]) -> Interval[float]:
        errors = [one.var(ddof=1) / len(one) for one in drawn]
        middle, reach = np.mean([one.mean() for one in drawn]), 2.0 * np.sqrt(sum(errors)) / len(drawn)
        return Interval(float(middle - reach), float(middle + reach))

    assert covered("nearly never right", [8], summed) < 0.92


def test_one_data_set_has_the_interval_of_its_mean() -> None:
    values = np.array([0.5, 0.25, 1.0, 0.0, 0.75, 0.5])
    assert intervals.of_stratified_mean([values], SCORE) == intervals.of_mean(values, SCORE)


def test_more_data_sets_make_an_average_surer_and_the_largest_does_not_outweigh_the_others() -> None:
    draw = np.random.default_rng(0)
    few, many = draw.random(8), draw.random(400)
    one, four = intervals.of_stratified_mean([few], SCORE), intervals.of_stratified_mean([few] * 4, SCORE)
    assert one is not None
    assert four is not None
    assert four.high - four.low == pytest.approx((one.high - one.low) / 2)
    assert intervals.stratified_mean([few, many]) == pytest.approx((few.mean() + many.mean()) / 2)
    both = intervals.of_stratified_mean([few, many], SCORE)
    assert both is not None
    assert both.high - both.low > (one.high - one.low) / 2
