"""Cliffs by hand, and how planted ones are covered."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses.stats.crossings import crossing, crossing_ratio, first_crossing, last_crossing
from perturbkv.errors import ConfigError, TraceError
from tests.support.swept import swept

BUDGETS = np.array([0.01, 0.1, 1.0])
INF = float("inf")


def walked(budgets: list[float], curve: list[float], threshold: float) -> float:
    """The oracle: from the largest budget down, step by step, to the first that is at the threshold or above."""
    place = len(curve)
    while place > 0 and curve[place - 1] < threshold:
        place -= 1
    if place == len(curve):
        return INF
    if place == 0:
        return 0.0
    low, high = math.log10(budgets[place - 1]), math.log10(budgets[place])
    above, below = math.log10(curve[place - 1]), math.log10(curve[place])
    slope = (below - above) / (high - low)
    return float(10 ** (low + (math.log10(threshold) - above) / slope))


def test_the_crossing_lies_on_the_line_of_both_logarithms() -> None:
    curve = np.array([100.0, 1.0, 0.01])  # −2 per decade everywhere: KL is 0.1 half a decade beyond 0.1
    assert last_crossing(BUDGETS, curve, 1.0) == pytest.approx(0.1)
    assert last_crossing(BUDGETS, curve, 0.1) == pytest.approx(0.1 * math.sqrt(10) ** 0.5 * 10**0.25)
    assert last_crossing(BUDGETS, curve, 10.0) == pytest.approx(10**-1.5)


def test_random_curves_pass_where_the_oracle_walks() -> None:
    source, budgets = np.random.default_rng(0), [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4]
    for _ in range(200):
        curve = source.lognormal(sigma=2, size=7) * np.array(budgets) ** -0.7 / 20
        assert last_crossing(np.array(budgets), curve, 1.0) == pytest.approx(walked(budgets, curve.tolist(), 1.0))


def test_beyond_the_budgets_nothing_is_extrapolated() -> None:
    falling = np.array([8.0, 4.0, 2.0])
    assert last_crossing(BUDGETS, falling, 1.0) == first_crossing(BUDGETS, falling, 1.0) == INF
    assert last_crossing(BUDGETS, falling / 100, 1.0) == first_crossing(BUDGETS, falling / 100, 1.0) == 0.0
    told = crossing(BUDGETS, np.tile(falling, (6, 1)), 1.0).to_dict()
    assert told["value"] is None
    assert (told["beyond"], told["mean_beyond"]) == ("above 1", "above 1")


def test_of_a_curve_that_passes_twice_the_largest_budget_counts() -> None:
    curve = np.array([2.0, 0.5, 2.0, 0.5])
    found = crossing(np.array([1.0, 2.0, 4.0, 8.0]), np.tile(curve, (6, 1)), 1.0)
    assert found.value == pytest.approx(math.sqrt(4 * 8))
    assert found.passes == 2
    assert found.interval is not None
    assert found.interval.low == pytest.approx(math.sqrt(2))  # from here on the side cannot be told
    assert found.interval.high == pytest.approx(math.sqrt(32))


def test_the_interval_is_that_of_the_median_turned_round() -> None:
    """Eight prompts whose curves are parallel: the second and the seventh bound the median."""
    sizes = np.array([1.0, 2, 3, 4, 5, 6, 7, 8])
    found = crossing(BUDGETS, sizes[:, None] * np.array([10.0, 1.0, 0.1]), 1.0)
    assert found.value == pytest.approx(0.45)  # the median is 4.5 times 0.1 / b
    assert found.mean == pytest.approx(0.45)
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == pytest.approx((0.2, 0.7))


def test_few_prompts_have_a_range_and_one_has_none() -> None:
    each = np.array([[10.0, 1.0, 0.1], [20.0, 2.0, 0.2]])
    found = crossing(BUDGETS, each, 1.0)
    assert found.interval is not None
    assert found.interval.kind == "range"
    assert (found.interval.low, found.interval.high) == pytest.approx((0.1, 0.2))
    assert crossing(BUDGETS, each[:1], 1.0).interval is None


def test_one_prompt_makes_the_mean_and_not_the_median() -> None:
    each = np.tile([10.0, 1.0, 0.1], (7, 1))
    each[0] *= 50
    found = crossing(BUDGETS, each, 1.0)
    assert found.value == pytest.approx(0.1)
    assert found.mean == pytest.approx(0.8)  # (6 + 50) / 7 times as much


def test_methods_are_compared_prompt_by_prompt() -> None:
    """Prompts differ tenfold, and in each the treatment needs half: no difference of medians shows it that well."""
    sizes = np.geomspace(1, 10, 7)[:, None]
    baseline = sizes * np.array([10.0, 1.0, 0.01])
    found = crossing_ratio((BUDGETS, BUDGETS / 2), (baseline, baseline), 1.0)
    assert found.ratio == pytest.approx(0.5)
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == pytest.approx((0.5, 0.5))
    assert (found.known, found.samples) == (7, 7)


def test_prompts_beyond_the_budgets_count_with_all_that_they_can_be() -> None:
    curve = np.array([10.0, 1.0, 0.1])
    baseline = np.array([1.0, 1.0, 1.0])[:, None] * curve  # passes at 0.1
    treatment = np.array([0.01, 1.0, 100.0])[:, None] * curve  # below 0.01; at 0.1; above 1
    found = crossing_ratio((BUDGETS, BUDGETS), (baseline, treatment), 1.0)
    assert found.ratio == pytest.approx(1.0)
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == (0.0, INF)
    assert found.known == 1
    both = crossing_ratio((BUDGETS, BUDGETS), (100 * baseline, treatment[[2, 2, 2]]), 1.0)
    assert both.limits == (0.0, INF)
    assert math.isnan(both.ratio)
    assert both.known == 0
    least = crossing_ratio((BUDGETS, BUDGETS), (baseline, treatment[[2, 2, 1]]), 1.0)
    assert least.limits == (pytest.approx(10.0), INF)


def made(samples: int = 6) -> pk.Trace:
    """KL 0.04 / b² of attention, a quarter of it of two-stage, times 1.2 + a tenth of the prompt's number."""
    budgets, sizes = np.array([0.1, 0.2, 0.4, 0.6, 0.8]), 1.2 + np.arange(samples) / 10
    return swept(kl=sizes[:, None, None] * np.array([0.04, 0.01])[None, :, None] * budgets**-2.0)


def test_of_a_trace_by_hand() -> None:
    found = pk.cliff(made())
    attention, staged = found
    assert [one.name for one in found] == ["attention", "two-stage"]
    # The median prompt has 1.45 times as much: 0.058 / b² is 1 at √0.058, and 0.1 at √0.58.
    assert [one.value for one in attention.crossings] == pytest.approx([math.sqrt(0.58), math.sqrt(0.058)])
    assert [one.value for one in staged.crossings] == pytest.approx([math.sqrt(0.145), math.sqrt(0.0145)])
    assert [one.ratio for one in staged.ratios] == pytest.approx([0.5, 0.5], rel=1e-6)
    assert attention.ratios == ()
    assert attention.interpolate(0.2, attention.cache_shares) == pytest.approx(0.2)
    assert math.isnan(attention.interpolate(0.0, attention.cache_shares))
    assert found.identity.samples == 6
    assert found.conclusion() == (
        "Median KL of the next token below 0.1 nat needs a budget of 0.38 [0.35, 0.41] at two-stage to 0.76 [0.69, "
        ">0.8] at attention; median KL of the next token below 1 nat needs a budget of 0.12 [0.11, 0.13] at two-stage "
        "to 0.24 [0.22, 0.26] at attention (n = 6 samples)."
    )
    json.dumps(found.to_dict(), allow_nan=False)


def test_thresholds_beyond_what_was_measured_are_told_as_such() -> None:
    found = pk.cliff(made(), kl=(1e-3, 100.0))
    assert [(one.value, one.known) for one in found[0].crossings] == [(INF, False), (0.0, False)]
    assert [one.budget.partition(" [")[0] for one in found[0].crossings] == ["> 0.8", "< 0.1"]
    told = found.to_dict()["methods"][0]["crossings"]
    assert [one["beyond"] for one in told] == ["above 0.8", "below 0.1"]
    assert [one["value"] for one in told] == [None, None]
    assert [one.over_first for one in found[1].ratios] == ["?", "?"]


def test_kl_of_several_steps_is_each_samples_mean() -> None:
    same = np.ones((6, 2, 5, 3))
    trace = swept(kl=np.tile(np.array([4.0, 2.0, 1.0, 0.5, 0.25]), (6, 2, 1)), same=same)
    trace.arrays["logit_kl"][:, :, 0] *= 3  # (3 + 1 + 1) / 3 of what the others are
    found = pk.cliff(trace, kl=[1.0])
    np.testing.assert_allclose(found[0].median, np.array([4.0, 2.0, 1.0, 0.5, 0.25]) * 5 / 3)


def test_budgets_of_which_stage_1_takes_nothing_are_told() -> None:
    trace = made()
    trace.arrays["stage1_count"][:] = 3
    trace.arrays["stage1_count"][:4, [0, 5]] = 0  # the smallest budget of both, in four prompts
    found = pk.cliff(trace)
    assert [one.unstaged.tolist() for one in found] == [[0] * 5, [4, 0, 0, 0, 0]]
    assert len(found.caveats()) == 1


@pytest.mark.parametrize("samples", [1, 3, 6])
def test_tables_fit_80_columns(samples: int) -> None:
    assert max(map(len, repr(pk.cliff(made(samples))).splitlines())) <= 80


def test_the_order_of_sides_names_the_baseline() -> None:
    found = pk.cliff(made(), sides=["two-stage", "attention"])
    assert [one.name for one in found] == ["two-stage", "attention"]
    assert found[1].ratios[0].ratio == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("kl", [(), (0.0,), (0.1, 0.1), (-1.0, 1.0), (math.nan,)])
def test_bad_thresholds_are_one_line(kl: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="--kl"):
        pk.cliff(made(), kl=kl)


def test_two_budgets_make_no_curve() -> None:
    with pytest.raises(TraceError, match=r"at least 3 budgets of every method, got 0\.1, 0\.2"):
        pk.cliff(swept(kl=np.ones((6, 2, 2)), budgets=(0.1, 0.2)))


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
