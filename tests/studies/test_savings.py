"""The budget at which a baseline does as well as a treatment: against naive loops, in planted worlds, at the edges."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.stats import intervals
from perturbkv.selection.grid import configuration
from perturbkv.trace import SampleTrace, Trace
from tests.oracle.budgets import crossing
from tests.support.scripts import STUDIES, functions, study
from tests.support.swept import BUDGETS, swept
from tests.support.traces import sample_trace, trace

script = SimpleNamespace(**functions("savings", STUDIES))
GRID, BUDGETS_LIST = np.array(BUDGETS), list(BUDGETS)


def reached(budgets: np.ndarray, baseline: np.ndarray, level: np.ndarray, log: bool, own: float = 0.4) -> Any:
    """Of a treatment with one budget."""
    (found,) = script.equivalent_budgets(budgets, baseline, np.array([own]), level[:, None], log)
    return found


def reached_by_half(budgets: np.ndarray, baseline: np.ndarray, level: np.ndarray, own: float = 0.4) -> Any:
    """Of a treatment with one budget."""
    (found,) = script.median_equivalent_budgets(budgets, baseline, np.array([own]), level[:, None])
    return found


def savings(of: Trace, *by: str, treatment: str = "two-stage") -> list[dict[str, Any]]:
    """Of the only pair of curves, by every measure."""
    ((first, second, _),) = script.pairs(of, "attention", treatment)
    return [script.measured_savings(loss, first, second) for loss in script.losses(of, by, 0)]


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
        assert reached(GRID, losses, level, log=True).value == pytest.approx(naive)
        scores = losses / losses.max()
        naive = crossing(BUDGETS_LIST, [float(one) for one in scores.mean(axis=0)], scores[:, 1].mean() * factor, False)
        assert reached(GRID, scores, scores[:, 1] * factor, log=False).value == pytest.approx(naive)


def test_the_interval_holds_the_budgets_that_cannot_be_told_from_the_treatment() -> None:
    losses = falling(8, 3)
    level = losses[:, 2] * np.random.default_rng(1).lognormal(sigma=0.1, size=8)
    found = reached(GRID, losses, level, log=True)
    assert found.interval is not None
    alike = []
    for budget in np.geomspace(0.1, 0.8, 2000):
        right = next(place for place in range(1, 5) if budget <= GRID[place] * (1 + 1e-12))
        share = math.log(budget / GRID[right - 1]) / math.log(GRID[right] / GRID[right - 1])

        def over(weights: np.ndarray, right: int = right, share: float = share) -> np.ndarray:
            at = np.log(weights @ losses[:, right - 1]) * (1 - share) + np.log(weights @ losses[:, right]) * share
            return np.asarray((weights @ level) / np.exp(at))

        one = intervals.of_statistic(over, 8, intervals.RATIO)
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
        for found in (reached(GRID, losses, level, log=True), reached_by_half(GRID, losses, level)):
            assert found.value == pytest.approx(budget)
            assert found.interval is not None
            assert found.interval.low <= budget * (1 + 1e-9)
            assert budget * (1 - 1e-9) <= found.interval.high


def test_what_lies_beyond_the_budgets_measured_is_on_a_side_and_no_number() -> None:
    losses = falling(8, 2)
    better, worse = reached(GRID, losses, losses[:, 4] / 9, log=True), reached(GRID, losses, losses[:, 0] * 9, log=True)
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
    found = reached(GRID, losses, np.zeros(40), log=False, own=GRID[0])
    assert (found.flat, found.known, found.value) == (False, True, GRID[-1])
    assert found.interval is not None
    assert found.interval.low > GRID[-2]


def at_the_floor_and_the_ceiling() -> np.ndarray:
    """(sample, side, budget) scores: the baseline's first two answers are wrong, its last two right."""
    rights = {"attention": (0, 0, 4, 8, 8), "two-stage": (0, 2, 0, 6, 8)}
    return np.array(
        [[[place < count for count in side] for side in rights.values()] for place in range(8)], dtype=float
    )


def test_a_treatment_that_scores_nothing_has_no_budget_even_where_the_baseline_always_scores() -> None:
    lost = np.repeat([[0.9, 0.8, 0.5, 0.3, 0.2]], 8, axis=0)
    found = reached(GRID, lost, np.ones(8), log=False)
    assert (found.value, found.flat, found.beyond) == (0.1, True, "flat")
    assert reached(GRID, lost, np.full(8, 0.95), log=False).beyond == "below"


@pytest.mark.parametrize("log", [False, True], ids=["score", "L1"])
def test_equal_sides_are_equal_however_their_numbers_lie_in_memory(log: bool) -> None:
    source = np.random.default_rng(0)
    for _ in range(100):
        losses = np.ascontiguousarray(np.sort(source.random((int(source.integers(5, 41)), 5)), axis=1)[:, ::-1])
        for place, budget in enumerate(GRID):
            found = reached(GRID, losses, losses[:, place], log, budget)
            assert found.value == pytest.approx(budget)
            assert not found.flat


@pytest.mark.parametrize("samples", [8, 40])
def test_noise_on_each_samples_curve_is_no_saving(samples: int) -> None:
    source, draws = np.random.default_rng(1), 120
    saves, values = np.zeros(5), []
    for _ in range(draws):
        middle = source.standard_normal((samples, 1)) - 0.5 * np.log(GRID)
        baseline, treatment = (np.exp(middle + 1.5 * source.standard_normal((samples, 5))) for _ in range(2))
        found = script.median_equivalent_budgets(GRID, baseline, GRID, treatment)
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
    found = reached(GRID, losses, losses[:, 1], log=True)
    assert found.interval is not None
    assert found.interval.kind == "range"
    assert reached(GRID, losses[:1], losses[:1, 1], log=True).interval is None
    assert reached_by_half(GRID, losses[:1], losses[:1, 1]).interval is None


def test_where_answers_are_all_wrong_or_all_right_no_saving_is_told() -> None:
    (found,) = savings(swept(score=at_the_floor_and_the_ceiling()), "score")
    assert [point["beyond"] == "flat" for point in found["points"]] == [True, False, False, False, True]
    never = at_the_floor_and_the_ceiling()
    never[:, 1, :3] = 0
    (found,) = savings(swept(score=never), "score")
    assert [point["beyond"] for point in found["points"]] == ["flat", "flat", "flat", "", "flat"]
    assert [point["reached"] for point in found["points"]][:3] == [0.1] * 3
    assert found["points"][4]["reached"] == 0.6
    told = [script.table_row(found, point) for point in found["points"]]
    assert [row["b*"] for row in told] == ["≤ 0.1", "≤ 0.1", "≤ 0.1", "0.49", "≤ 0.6"]
    assert [row[""] for row in told] == ["unknown", "unknown", "unknown", "undecided", "unknown"]


def test_a_point_whose_ends_are_both_open_has_its_value() -> None:
    score = at_the_floor_and_the_ceiling()
    score[:, 0] = [[0, 0, place < 2, place < 4, place < 7] for place in range(8)]
    score[:, 1] = [[0, 0, 0, place in (1, 4, 6), place < 6] for place in range(8)]
    point = savings(swept(score=score), "score")[0]["points"][3]
    expected = 0.4 * 1.5**0.5  # 3 of 8 lies halfway between 2 at 0.4 and 4 at 0.6
    assert point["beyond"] == "both"
    assert point["reached"] == pytest.approx(expected)
    assert point["saving"] == pytest.approx(1 - 0.6 / expected)


@pytest.mark.parametrize("seed", range(20))
def test_a_curve_saves_nothing_against_itself_wherever_its_means_rise(seed: int) -> None:
    source = np.random.default_rng(seed)
    losses = np.clip(source.normal(0.5, 0.3, (int(source.integers(8, 41)), 5)), 0.01, 0.99)
    both = np.stack([losses, losses], axis=1)
    for found in savings(swept(kl=both, moved=both, score=1 - both)):
        for point in found["points"]:
            assert point["beyond"] == "flat" or point["saving"] == pytest.approx(0, abs=1e-9)
            assert point["beyond"] != "flat" or found["measure"] == "score"


def moved(samples: int = 8) -> Trace:
    """Two-stage is the baseline moved by a factor of 1.5 in budget."""
    losses = falling(samples, 9) / 100
    both = np.stack([losses, losses * 1.5**-1.2], axis=1)
    return swept(kl=both, moved=both, score=np.clip(1 - both / both.max(), 0, 1))


def test_a_third_is_saved_where_the_baseline_needs_half_as_much_again() -> None:
    found = savings(moved())
    assert [one["measure"] for one in found] == ["score", "propagated", "kl"]
    for point in found[1]["points"][:3]:
        assert point["saving"] == pytest.approx(1 / 3, abs=0.12)
        assert point["saving_interval"].low < point["saving"] < point["saving_interval"].high
        assert point["saving"] == pytest.approx(1 - point["at"] / point["reached"])
    last = found[1]["points"][-1]
    assert (last["beyond"], math.isnan(last["saving"])) == ("above", True)
    assert script.table_row(found[1], last)["b*"] == "> 0.8"
    assert found[0]["full"] == 1


def test_a_curve_that_does_worse_with_more_budget_is_pooled_and_said() -> None:
    losses = falling(8, 9)
    losses[:, 2] = losses[:, 1] * 1.2
    (found,) = savings(swept(moved=np.stack([losses, losses], axis=1)), "propagated")
    assert found["rising"] == found["treatment_rising"] == [(0.2, 0.4)]


def test_sides_of_other_kept_sets_are_compared_by_what_they_hold() -> None:
    configs = [configuration(budget, selection="attention", granularity="query") for budget in BUDGETS]
    configs += [configuration(budget, selection="two-stage", granularity="kv") for budget in BUDGETS]
    samples = []
    for place, one in enumerate(falling(8, 9)):
        arrays = dict(sample_trace(f"s{place}", configs=10).arrays)
        arrays["held_share"] = np.array([3 * budget for budget in BUDGETS] + list(BUDGETS))
        arrays["output_norm"] = np.ones_like(arrays["output_norm"])
        each = np.concatenate([one, one * 0.9]).reshape(-1, 1, 1, 1)
        arrays["perturbation_propagated"] = np.broadcast_to(each, arrays["perturbation_propagated"].shape)
        samples.append(SampleTrace(f"s{place}", arrays))
    made = trace(*samples, configs=tuple(configs))
    ((first, second, along),) = script.pairs(made, "attention", "two-stage")
    assert along == "held"
    (found,) = savings(made, "propagated")
    assert [point["at"] for point in found["points"]] == pytest.approx(BUDGETS)
    assert found["points"][2]["saving"] == pytest.approx(1 - 1 / 3, abs=0.1)  # a third of the entries, a little better


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"budgets": BUDGETS[:4]}, "savings needs 5 budgets, all entries or all shares, got 0.1, 0.2, 0.4, 0.6"),
        ({"budgets": (0.2, 0.4, 0.8, 100, 200)}, "all entries or all shares, got 0.2, 0.4, 0.8, 100, 200"),
        ({}, "savings needs the variable 'score_full', which made.h5 lacks"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    asked: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = np.stack([falling(8, 9)] * 2, axis=1)[:, :, : len(asked.get("budgets", BUDGETS))]
    path = swept(moved=losses, **asked).save(tmp_path / "made.h5")
    monkeypatch.chdir(tmp_path)
    assert told in study("savings", path.name, "--by", "propagated" if asked else "score", code=2)


def test_it_leaves_a_document_and_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "out"
    study("savings", moved().save(tmp_path / "made.h5"), "-o", out)
    (member,) = json.loads((out / "savings.json").read_text())["savings"]
    assert [len(one["points"]) for one in member["measures"]] == [5, 5, 5]
    assert (out / "savings.png").stat().st_size > 10_000
