"""The budget at which a baseline does as well as a treatment: against naive loops, in planted worlds, at the edges."""

from __future__ import annotations

import doctest
import importlib
import math

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses import intervals
from perturbkv.analyses.intervals import DIFFERENCE, RATIO
from perturbkv.analyses.reaching import reached, reached_by_half
from perturbkv.analyses.savings import PairSavings
from perturbkv.errors import ConfigError, TraceError, UnknownNameError
from perturbkv.selection.grid import configuration
from perturbkv.trace import SampleTrace
from tests.oracle.budgets import crossing
from tests.support.swept import BUDGETS, swept
from tests.support.traces import sample_trace, trace

GRID, BUDGETS_LIST = np.array(BUDGETS), list(BUDGETS)


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

        one = intervals.scalar(over, 8, RATIO)
        assert one is not None
        if one.low <= 1 <= one.high:
            alike.append(budget)
    assert found.interval.low == pytest.approx(min(alike), rel=0.02)
    assert found.interval.high == pytest.approx(max(alike), rel=0.02)
    assert found.interval.low <= found.value <= found.interval.high


def test_a_curve_reaches_itself_at_its_own_budgets() -> None:
    losses = falling(8, 1)
    for place, budget in enumerate(GRID):
        for found in (reached(GRID, losses, losses[:, place], RATIO), reached_by_half(GRID, losses, losses[:, place])):
            assert found.value == pytest.approx(budget)
            assert found.interval is not None
            assert found.interval.low <= budget * (1 + 1e-9)
            assert budget * (1 - 1e-9) <= found.interval.high


def test_what_lies_beyond_the_budgets_measured_is_on_a_side_and_no_number() -> None:
    losses = falling(8, 2)
    better, worse = reached(GRID, losses, losses[:, 4] / 9, RATIO), reached(GRID, losses, losses[:, 0] * 9, RATIO)
    assert (better.value, better.told, better.beyond) == (math.inf, False, "above")
    assert (worse.value, worse.told, worse.beyond) == (0, False, "below")
    assert better.interval is not None
    assert worse.interval is not None
    assert (better.interval.low, better.interval.high) == (0.8, math.inf)
    assert (worse.interval.low, worse.interval.high) == (0, pytest.approx(0.1))
    halves = reached_by_half(GRID, losses, losses[:, 4] / 9)
    assert halves.interval is not None
    assert (halves.value, halves.interval.low, halves.interval.high) == (math.inf, 0.8, math.inf)


def test_of_a_flat_curve_nothing_is_told() -> None:
    source = np.random.default_rng(0)
    flat = 0.5 + source.normal(0, 0.05, (8, 5))
    found = reached(GRID, flat, 0.5 + source.normal(0, 0.05, 8), DIFFERENCE)
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == (0, math.inf)
    assert (found.told, found.beyond) == (False, "both")
    (result,) = pk.savings(swept(score=np.full((8, 2, 5), 0.5)), by=["score"])
    assert all(math.isnan(point.saving) for point in result.measures[0].points)
    assert "undecided in all 5 cases: nothing is told" in " ".join(repr(result).split())
    assert repr(result).count("not told") == 5


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
        assert point.interval is not None
        assert point.interval.low < point.saving < point.interval.high
        assert point.saving == pytest.approx(1 - point.at / point.reached.value)
    last = propagated.points[-1]
    assert (last.reached.beyond, math.isnan(last.saving)) == ("above", True)
    assert "by propagated L1 two-stage saves" in found.conclusion().replace("By", "by")
    assert "> 0 %" in repr(found)
    assert "> 0.8" in repr(found)
    assert "full cache 100.0" in repr(found)


def test_json_and_rows_hold_what_is_shown() -> None:
    found = measured(["propagated"])
    (told,) = found.to_dict()["savings"]
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
    assert "By propagated L1 attention does worse with more budget from 0.2 to 0.4: pooled." in found.notes()


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
    assert "Budgets are compared as held / full" in found.notes()


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
    module = importlib.import_module("perturbkv.analyses.savings")
    losses = np.stack([falling(8, 9)] * 2, axis=1)
    ran = doctest.testmod(module, extraglobs={"trace": swept(moved=losses, budgets=(40, 48, 56, 60, 64))})
    assert (ran.attempted > 0, ran.failed) == (True, 0)
