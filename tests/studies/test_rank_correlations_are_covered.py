"""How often intervals of reliability and of correlations between traces hold what very many samples would show."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from tests.studies.test_stability import noisy, stability

DRAWS, SAMPLES, HEADS = 80, 8, 40
LEAST = 0.92 - 2 * math.sqrt(0.92 * 0.08 / DRAWS)
"""What 92 % shows in so many draws, but for one simulation in forty."""


def profiles() -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(0)
    first = source.normal(size=HEADS)
    return first, 0.8 * first + 0.6 * source.normal(size=HEADS)


def holds(interval: Any, truth: float) -> bool:
    assert interval is not None
    return bool(interval.low <= truth <= interval.high)


def ends_of(interval: Any) -> tuple[float, float]:
    assert interval is not None
    return interval.low, interval.high


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.5, pytest.param(2.0, marks=pytest.mark.chaos)])
def test_reliability_and_the_mean_of_pairs_are_covered(noise: float) -> None:
    source, (profile, _) = np.random.default_rng(1), profiles()
    found = [
        stability.trace_reliability(stability.HeadRanks.of(noisy(source, profile, SAMPLES, noise)))
        for _ in range(DRAWS)
    ]
    many = stability.sample_correlations(stability.HeadRanks.of(noisy(source, profile, 60, noise)).ranks)
    pairs = float(many[np.triu_indices(60, 1)].mean())
    whole = float(np.mean([one["split_half"]["value"] for one in found]))  # of so many samples, over many traces
    assert np.mean([holds(one["pairwise"]["interval"], pairs) for one in found]) >= LEAST
    assert np.mean([holds(one["split_half"]["interval"], whole) for one in found]) >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "paired"),
    [
        (2.0, True),
        (0.5, False),
        pytest.param(0.5, True, marks=pytest.mark.chaos),
        pytest.param(2.0, False, marks=pytest.mark.chaos),
    ],
)
def test_correlations_between_traces_are_covered(noise: float, paired: bool) -> None:
    source, sides = np.random.default_rng(2), profiles()
    found: list[dict[str, Any]] = []
    for _ in range(DRAWS):
        first, second = (stability.HeadRanks.of(noisy(source, one, SAMPLES, noise)) for one in sides)
        found.append(stability.agreement(first, second, paired))
    measured = float(np.mean([one["rho"]["value"] for one in found]))
    ranks = [np.argsort(np.argsort(one)) for one in sides]
    truth = float(np.corrcoef(*ranks)[0, 1])
    assert np.mean([holds(one["rho"]["interval"], measured) for one in found]) >= LEAST
    told = [one["corrected"]["interval"] for one in found if one["corrected"]["interval"] is not None]
    assert len(told) > 0.75 * DRAWS  # none where a reliability without some sample is not positive
    assert np.mean([holds(one, truth) for one in told]) >= LEAST
    narrow = [
        pk.stats.intervals.Interval(
            *(one["rho"]["value"] + (end - one["rho"]["value"]) / 4 for end in ends_of(one["rho"]["interval"]))
        )
        for one in found
    ]
    assert np.mean([holds(one, measured) for one in narrow]) < LEAST  # the simulation tells a quarter of the width
