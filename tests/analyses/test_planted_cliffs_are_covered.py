"""How often the intervals of crossings, and of their ratios, hold what was planted; with ends that nobody measured."""

from __future__ import annotations

import math

import numpy as np
import pytest

from perturbkv.analyses.stats.crossings import crossing, crossing_ratio, last_crossing

GRID = np.array([0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4])
DRAWS = 400
LEAST = 0.92 - 2 * math.sqrt(0.92 * 0.08 / DRAWS)
"""What 92 % shows in so many draws, but for one simulation in forty."""
WORLDS = {
    "prompts of different size": (0.05, 1.0, 1.2, 0.0),
    "curves that wobble": (0.05, 1.0, 0.5, 0.5),
    "mostly wobble": (0.1, 1.0, 0.3, 1.0),
    "steep": (0.03, 2.0, 1.0, 0.3),
    "flat": (0.05, 0.5, 0.7, 0.3),
    "near the smallest budget": (0.006, 1.0, 0.7, 0.3),
    "near the largest budget": (0.35, 1.0, 0.7, 0.3),
    "below the budgets": (0.001, 1.0, 0.7, 0.3),
    "above the budgets": (2.0, 1.0, 0.7, 0.3),
}
"""Name → where the median curve passes 1 nat, its slope, the spread of prompts' sizes, and of single budgets."""


def planted(source: np.random.Generator, world: str, samples: int) -> np.ndarray:
    """(sample, budget) KL whose median is (b / place)^−slope."""
    place, slope, spread, wobble = WORLDS[world]
    size = source.lognormal(sigma=spread, size=(samples, 1))
    return (GRID / place) ** -slope * size * source.lognormal(sigma=wobble, size=(samples, len(GRID)))


@pytest.mark.parametrize("samples", [8, 16])
@pytest.mark.parametrize("world", WORLDS)
def test_the_planted_crossing_is_covered_in_at_least_92_percent_of_draws(world: str, samples: int) -> None:
    source, held = np.random.default_rng(1), 0
    place, slope, *_ = WORLDS[world]
    truth = last_crossing(GRID, (GRID / place) ** -slope, 1.0)
    for _ in range(DRAWS):
        found = crossing(GRID, planted(source, world, samples), 1.0)
        assert found.interval is not None
        assert found.interval.low <= found.value <= found.interval.high
        held += found.interval.low <= truth <= found.interval.high
    assert held / DRAWS >= LEAST


@pytest.mark.parametrize("samples", [8, 16])
@pytest.mark.parametrize("place", [0.002, 0.01, 0.05, 0.3, 1.5])
def test_the_planted_ratio_is_covered_however_many_prompts_pass_beyond_the_budgets(place: float, samples: int) -> None:
    """Each prompt passes at its own budget with its own slope, the treatment at 0.6 of it in the median prompt."""
    source, held = np.random.default_rng(2), 0
    for _ in range(DRAWS):
        own = place * source.lognormal(sigma=1.0, size=(samples, 1))
        slope = source.uniform(0.5, 2, (samples, 1))
        other = own * 0.6 * source.lognormal(sigma=0.4, size=(samples, 1))
        found = crossing_ratio((GRID, GRID), tuple((GRID / at) ** -slope for at in (own, other)), 1.0)  # type: ignore[arg-type]
        assert found.interval is not None
        held += found.interval.low <= 0.6 <= found.interval.high
    assert held / DRAWS >= LEAST


def test_an_interval_of_half_the_samples_would_not_cover() -> None:
    """The same simulation tells a wrong interval: the middle half of the prompts instead of the median's."""
    source, held = np.random.default_rng(3), 0
    for _ in range(DRAWS):
        each = planted(source, "prompts of different size", 8)
        low, high = np.quantile(each, [0.4, 0.6], axis=0)
        held += last_crossing(GRID, low, 1.0) <= 0.05 <= last_crossing(GRID, high, 1.0)
    assert held / DRAWS < LEAST
