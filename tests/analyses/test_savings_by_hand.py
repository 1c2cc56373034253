"""The budget at which a baseline does as well as a treatment: against naive loops, in planted worlds, at the edges."""

from __future__ import annotations

import doctest
import importlib
import math

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses.budget.budget_equivalence import EquivalentBudget, equivalent_budgets, median_equivalent_budgets
from perturbkv.analyses.budget.savings import PairSavings
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import DIFFERENCE, RATIO, StatisticKind
from perturbkv.errors import ConfigError, TraceError, UnknownNameError
from perturbkv.selection.grid import configuration
from perturbkv.trace import SampleTrace
from tests.oracle.budgets import crossing
from tests.support.swept import BUDGETS, swept
from tests.support.traces import sample_trace, trace

GRID, BUDGETS_LIST = np.array(BUDGETS), list(BUDGETS)


def reached(
    budgets: np.ndarray, baseline: np.ndarray, level: np.ndarray, kind: StatisticKind, own: float = 0.4
) -> EquivalentBudget:
    """Of a treatment with one budget."""
    (found,) = equivalent_budgets(budgets, baseline, np.array([own]), level[:, None], kind)
    return found


def reached_by_half(budgets: np.ndarray, baseline: np.ndarray, level: np.ndarray, own: float = 0.4) -> EquivalentBudget:
    """Of a treatment with one budget."""
    (found,) = median_equivalent_budgets(budgets, baseline, np.array([own]), level[:, None])
    return found


def falling(samples: int, seed: int, spread: float = 0.4) -> np.ndarray:
    """(sample, budget) positive losses that fall by factors, some samples larger than others, with noise."""
    source = np.random.default_rng(seed)
    size = source.lognormal(sigma=spread, size=(samples, 1))
    return size * GRID**-1.2 * source.lognormal(sigma=0.15, size=(samples, len(GRID)))


@pytest.mark.parametrize("seed", range(6))
def test_the_budget_is_where_the_falling_curve_of_means_comes_down_to_the_treatments(seed: int) -> None:
    losses = falling(8, seed)
    losses[:, 3] *= 1.5 if seed % 2 else 1  # rises once: pooled
    for factor in (0.3, 0.6, 0.9, 1.3):
        level = losses[:, 1] * factor
        naive = crossing(BUDGETS_LIST, [float(one) for one in losses.mean(axis=0)], float(level.mean()), log=True)
        assert reached(GRID, losses, level, RATIO).value == pytest.approx(naive)
        scores = losses / losses.max()
        naive = crossing(BUDGETS_LIST, [float(one) for one in scores.mean(axis=0)], scores[:, 1].mean() * factor, False)
        assert reached(GRID, scores, scores[:, 1] * factor, DIFFERENCE).value == pytest.approx(naive)


def test_the_interval_holds_the_budgets_that_cannot_be_told_from_the_treatment() -> None:
    losses = falling(8, 3)
    level = losses[:, 2] * np.random.default_rng(1).lognormal(sigma=0.1, size=8)
    found = reached(GRID, losses, level, RATIO)
    assert found.interval is not None
    alike = []
    for budget in np.geomspace(0.1, 0.8, 2000):
        right = next(place for place in range(1, 5) if budget <= GRID[place] * (1 + 1e-12))
        share = math.log(budget / GRID[right - 1]) / math.log(GRID[right] / GRID[right - 1])

        def over(weights: np.ndarray, right: int = right, share: float = share) -> np.ndarray:
            at = np.log(weights @ losses[:, right - 1]) * (1 - share) + np.log(weights @ losses[:, right]) * share
            return np.asarray((weights @ level) / np.exp(at))

        one = intervals.of_statistic(over, 8, RATIO)
        assert one is not None
        if one.low <= 1 <= one.high:
            alike.append(budget)
    assert found.interval.low == pytest.approx(min(alike), rel=0.02)
    assert found.interval.high == pytest.approx(max(alike), rel=0.02)
    assert found.interval.low <= found.value <= found.interval.high


def test_a_curve_reaches_itself_at_its_own_budgets() -> None:
    losses = falling(8, 1)
    for place, budget in enumerate(GRID):
        level = losses[:, place]
        for found in (reached(GRID, losses, level, RATIO), reached_by_half(GRID, losses, level)):
            assert found.value == pytest.approx(budget)
            assert found.interval is not None
            assert found.interval.low <= budget * (1 + 1e-9)
            assert budget * (1 - 1e-9) <= found.interval.high


def test_what_lies_beyond_the_budgets_measured_is_on_a_side_and_no_number() -> None:
    losses = falling(8, 2)
    better, worse = reached(GRID, losses, losses[:, 4] / 9, RATIO), reached(GRID, losses, losses[:, 0] * 9, RATIO)
    assert (better.value, better.known, better.beyond) == (math.inf, False, "above")
    assert (worse.value, worse.known, worse.beyond) == (0, False, "below")
    assert better.interval is not None
    assert worse.interval is not None
    assert (better.interval.low, better.interval.high) == (0.8, math.inf)
    assert (worse.interval.low, worse.interval.high) == (0, pytest.approx(0.1))
    halves = reached_by_half(GRID, losses, losses[:, 4] / 9)
    assert halves.interval is not None
    assert (halves.value, halves.interval.low, halves.interval.high) == (math.inf, 0.8, math.inf)


def test_a_treatment_at_the_level_where_a_steep_curve_ends_is_told() -> None:
    """All right at every budget, where the baseline is at the largest alone: what it saves there is its most."""
    draw = np.random.default_rng(3)
    right = np.array([0.1, 0.2, 0.4, 0.6, 1.0])
    losses = 1 - (draw.random((40, 1)) < right).astype(float)
    found = reached(GRID, losses, np.zeros(40), DIFFERENCE, GRID[0])
    assert (found.flat, found.known, found.value) == (False, True, GRID[-1])
    assert found.interval is not None
    assert found.interval.low > GRID[-2]


def test_of_a_flat_curve_nothing_is_told() -> None:
    source = np.random.default_rng(0)
    flat = 0.5 + source.normal(0, 0.05, (8, 5))
    found = reached(GRID, flat, flat.mean() + source.normal(0, 0.05, 8), DIFFERENCE)
    if not found.flat:
        assert found.interval is not None
        assert (found.interval.low, found.interval.high, found.beyond) == (0, math.inf, "both")
    (result,) = pk.savings(swept(score=np.full((8, 2, 5), 0.5)), by=["score"])
    assert all(math.isnan(point.saving) for point in result.measures[0].points)
    assert result.conclusion() == (
        "By score the saving of two-stage over attention is unknown in all 5 cases (n = 8 samples)."
    )
    points = result.measures[0].points
    assert [(point.saved, point.equivalent_budget) for point in points] == [("?", "≤ 0.1")] * 5


def at_the_floor_and_the_ceiling() -> np.ndarray:
    """(sample, side, budget) scores: the baseline's first two answers are wrong, its last two right."""
    rights = {"attention": (0, 0, 4, 8, 8), "two-stage": (0, 2, 0, 6, 8)}
    return np.array(
        [[[place < count for count in side] for side in rights.values()] for place in range(8)], dtype=float
    )


def test_where_answers_are_all_wrong_or_all_right_no_saving_is_told() -> None:
    (found,) = pk.savings(swept(score=at_the_floor_and_the_ceiling()), by=["score"])
    points = found.measures[0].points
    assert [point.equivalent.beyond == "flat" for point in points] == [True, False, False, False, True]
    assert points[2].equivalent.known  # at 0.4 nothing is right, but the means of 0.2 and 0.4 are pooled: one of eight
    never = at_the_floor_and_the_ceiling()
    never[:, 1, :3] = 0
    (found,) = pk.savings(swept(score=never), by=["score"])
    rows = found.to_dict()["measures"][0]["points"]
    assert [row["reached"]["beyond"] for row in rows] == ["flat", "flat", "flat", "", "flat"]
    assert [row["reached"]["value"] for row in rows[:3]] == [0.1] * 3
    assert rows[4]["reached"]["value"] == 0.6
    assert {row["saving"] for row in rows if row["reason"]} == {None}
    assert {row["saving_interval"] for row in rows if row["reason"]} == {None}
    assert rows[2]["reason"] == "the baseline does as well at 0.1, the smallest budget measured"
    assert rows[4]["reason"] == "the baseline does as well from 0.6 on, where it is at its best"
    assert found.to_frame()["reason"].tolist()[:3] == [rows[0]["reason"]] * 3
    cells = [(point.equivalent_budget.partition("\n")[0], point.saved) for point in found.measures[0].points]
    assert [budget for budget, _ in cells] == ["≤ 0.1", "≤ 0.1", "≤ 0.1", "0.49", "≤ 0.6"]
    assert [saved == "?" for _, saved in cells] == [True, True, True, False, True]


def test_a_treatment_that_scores_nothing_has_no_budget_even_where_the_baseline_always_scores() -> None:
    lost = np.repeat([[0.9, 0.8, 0.5, 0.3, 0.2]], 8, axis=0)
    found = reached(GRID, lost, np.ones(8), DIFFERENCE)
    assert (found.value, found.flat, found.beyond) == (0.1, True, "flat")
    assert reached(GRID, lost, np.full(8, 0.95), DIFFERENCE).beyond == "below"


def test_a_point_whose_ends_are_both_open_shows_its_value_and_why() -> None:
    score = at_the_floor_and_the_ceiling()
    score[:, 0] = [[0, 0, place < 2, place < 4, place < 7] for place in range(8)]
    score[:, 1] = [[0, 0, 0, place in (1, 4, 6), place < 6] for place in range(8)]
    (found,) = pk.savings(swept(score=score), by=["score"])
    point, row = found.measures[0].points[3], found.to_dict()["measures"][0]["points"][3]
    assert (point.equivalent.beyond, row["reason"]) == ("both", "no budget measured can be told from it")
    expected = 0.4 * 1.5**0.5  # 3 of 8 lies halfway between 2 at 0.4 and 4 at 0.6
    assert point.equivalent.value == pytest.approx(expected)
    assert row["saving"] == pytest.approx(1 - 0.6 / expected)
    assert (point.equivalent_budget, point.saved) == ("0.49\n[…, …]", "−22 %\n[…, …]")
    assert "−22 %" not in found.conclusion()


@pytest.mark.parametrize("seed", range(20))
def test_a_curve_saves_nothing_against_itself_wherever_its_means_rise(seed: int) -> None:
    source = np.random.default_rng(seed)
    losses = np.clip(source.normal(0.5, 0.3, (int(source.integers(8, 41)), 5)), 0.01, 0.99)
    both = np.stack([losses, losses], axis=1)
    (found,) = pk.savings(swept(kl=both, moved=both, score=1 - both))
    for one in found.measures:
        for point in one.points:
            assert point.equivalent.flat or point.saving == pytest.approx(0, abs=1e-9)
            assert not point.equivalent.flat or one.measure == "score"
    assert "treatment_rising" in found.to_dict()["measures"][0]


@pytest.mark.parametrize("kind", [DIFFERENCE, RATIO], ids=["score", "L1"])
def test_equal_sides_are_equal_however_their_numbers_lie_in_memory(kind: StatisticKind) -> None:
    source = np.random.default_rng(0)
    for _ in range(100):
        losses = np.ascontiguousarray(np.sort(source.random((int(source.integers(5, 41)), 5)), axis=1)[:, ::-1])
        for place, budget in enumerate(GRID):
            found = reached(GRID, losses, losses[:, place], kind, budget)
            assert found.value == pytest.approx(budget)
            assert not found.flat


@pytest.mark.parametrize("samples", [8, 40])
def test_noise_on_each_samples_curve_is_no_saving(samples: int) -> None:
    source, draws = np.random.default_rng(1), 120
    saves, values = np.zeros(5), []
    for _ in range(draws):
        middle = source.standard_normal((samples, 1)) - 0.5 * np.log(GRID)
        baseline, treatment = (np.exp(middle + 1.5 * source.standard_normal((samples, 5))) for _ in range(2))
        found = median_equivalent_budgets(GRID, baseline, GRID, treatment)
        values.append([one.value for one in found])
        saves += [one.interval is not None and one.interval.low > budget * (1 + 1e-9)
                  for one, budget in zip(found, GRID, strict=True)]  # fmt: skip
    assert saves.max() / draws <= 0.04 + 2 * math.sqrt(0.04 * 0.96 / draws)
    assert (np.median(values, axis=0)[1:] <= GRID[1:] * (1 + 1e-9)).all()


def test_each_samples_own_budget_is_not_moved_by_one_that_carries_the_mean() -> None:
    losses = falling(9, 4)
    level = losses[:, 2] * 0.9
    carried = np.vstack([losses[:8], losses[8:] * 1e6])
    usual = reached_by_half(GRID, losses, level)
    moved = reached_by_half(GRID, carried, np.append(level[:8], level[8] * 1e6))
    assert (moved.value, moved.interval) == (pytest.approx(usual.value), usual.interval)
    own = sorted(
        crossing(BUDGETS_LIST, list(map(float, one)), float(at), True) for one, at in zip(losses, level, strict=True)
    )
    assert usual.value == pytest.approx(own[4])


def test_few_samples_have_a_range_and_one_has_none() -> None:
    losses = falling(3, 5)
    found = reached(GRID, losses, losses[:, 1], RATIO)
    assert found.interval is not None
    assert found.interval.kind == "range"
    assert reached(GRID, losses[:1], losses[:1, 1], RATIO).interval is None
    assert reached_by_half(GRID, losses[:1], losses[:1, 1]).interval is None


def measured(by: list[str] | None = None, samples: int = 8, **more: object) -> PairSavings:
    """Two-stage is the baseline moved by a factor of 1.5 in budget."""
    losses = falling(samples, 9) / 100
    moved = np.stack([losses, losses * 1.5**-1.2], axis=1)
    score = np.clip(1 - moved / moved.max(), 0, 1)
    (found,) = pk.savings(swept(kl=moved, moved=moved, score=score, **more), by=by)  # type: ignore[arg-type]
    return found


def test_a_third_is_saved_where_the_baseline_needs_half_as_much_again() -> None:
    found = measured()
    assert [one.measure for one in found.measures] == ["score", "propagated", "kl"]
    propagated = found.measures[1]
    for point in propagated.points[:3]:
        assert point.saving == pytest.approx(1 / 3, abs=0.12)
        assert point.saving_interval is not None
        assert point.saving_interval.low < point.saving < point.saving_interval.high
        assert point.saving == pytest.approx(1 - point.at / point.equivalent.value)
    last = propagated.points[-1]
    assert (last.equivalent.beyond, math.isnan(last.saving)) == ("above", True)
    assert "by propagated L1 two-stage saves" in found.conclusion().replace("By", "by")
    assert last.saved.startswith("> 0 %")
    assert last.equivalent_budget.startswith("> 0.8")
    assert "The full cache scores 1." in found.details()


def test_json_and_rows_hold_what_is_shown() -> None:
    found = measured(["propagated"])
    told = found.to_dict()
    assert (told["along"], told["step"], len(told["measures"])) == ("budget", 0, 1)
    last = told["measures"][0]["points"][-1]
    assert (last["reached"]["value"], last["reached"]["beyond"], last["saving"]) == (None, "above", None)
    frame = found.to_frame()
    assert frame["budget"].tolist() == list(map(str, BUDGETS))
    assert frame["saving"].tolist()[:2] == [point.saving for point in found.measures[0].points[:2]]


def test_a_curve_that_does_worse_with_more_budget_is_pooled_and_said() -> None:
    losses = falling(8, 9)
    losses[:, 2] = losses[:, 1] * 1.2
    (found,) = pk.savings(swept(moved=np.stack([losses, losses], axis=1)), by=["propagated"])
    assert found.measures[0].rising == ((0.2, 0.4),)
    assert "By propagated L1 attention does worse with more budget from 0.2 to 0.4: pooled." in found.details()


def test_sides_of_other_kept_sets_are_compared_by_what_they_hold() -> None:
    losses = falling(8, 9)
    configs = [configuration(budget, selection="attention", granularity="query") for budget in BUDGETS]
    configs += [configuration(budget, selection="two-stage", granularity="kv") for budget in BUDGETS]
    samples = []
    for place, one in enumerate(losses):
        arrays = dict(sample_trace(f"s{place}", configs=10).arrays)
        arrays["held_share"] = np.array([3 * budget for budget in BUDGETS] + list(BUDGETS))
        arrays["output_norm"] = np.ones_like(arrays["output_norm"])
        moved = np.concatenate([one, one * 0.9]).reshape(-1, 1, 1, 1)
        arrays["perturbation_propagated"] = np.broadcast_to(moved, arrays["perturbation_propagated"].shape)
        samples.append(SampleTrace(f"s{place}", arrays))
    (found,) = pk.savings(trace(*samples, configs=tuple(configs)), by=["propagated"])
    assert found.along == "held"
    points = found.measures[0].points
    assert [point.at for point in points] == pytest.approx(BUDGETS)
    assert points[2].saving == pytest.approx(1 - 1 / 3, abs=0.1)  # a third of the entries does a little better
    assert found.along == "held" and len(found.caveats()) == 1


def test_what_cannot_be_compared_is_one_line() -> None:
    losses = np.stack([falling(8, 9)] * 2, axis=1)
    with pytest.raises(ConfigError, match=r"at least 5 budgets of each curve, got 0.1, 0.2, 0.4, 0.6; measure more"):
        pk.savings(swept(moved=losses[:, :, :4], budgets=BUDGETS[:4]))
    with pytest.raises(ConfigError, match="savings needs budgets of one kind, got"):
        pk.savings(swept(moved=losses, budgets=(0.2, 0.4, 0.8, 100, 200)))
    with pytest.raises(TraceError, match="savings needs graded answers, made.h5 has none"):
        pk.savings(swept(moved=losses), by=["score"])
    with pytest.raises(UnknownNameError, match="unknown measure 'drift'; known: score, propagated, kl"):
        pk.savings(swept(moved=losses), by=["drift"])
    with pytest.raises(ConfigError, match="expected a measure"):
        pk.savings(swept(moved=losses), by=[])
    with pytest.raises(TraceError, match="got a trace of snapkv:attention"):
        pk.savings(swept(moved=losses), "attention", "value")
    with pytest.raises(TraceError):
        pk.savings(swept(moved=losses), "attention", "attention")


def test_answers_that_nothing_graded_leave_the_other_measures() -> None:
    losses = np.stack([falling(8, 9)] * 2, axis=1)
    made = swept(kl=losses, moved=losses, score=losses / losses.max(), full=float("nan"))
    (found,) = pk.savings(made)
    assert [one.measure for one in found.measures] == ["propagated", "kl"]
    with pytest.raises(TraceError, match="got none in 8 of 8 samples"):
        pk.savings(made, by=["score"])


def test_the_example_of_the_docstring_works() -> None:
    module = importlib.import_module("perturbkv.analyses.budget.savings")
    losses = np.stack([falling(8, 9)] * 2, axis=1)
    ran = doctest.testmod(module, extraglobs={"trace": swept(moved=losses, budgets=(40, 48, 56, 60, 64))})
    assert (ran.attempted > 0, ran.failed) == (True, 0)
