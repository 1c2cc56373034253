"""Three layers, two samples, two budgets: drifts are whole numbers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.layers import budget_curves, drift
from perturbkv.analyses.layers import budget_curves as budget_curve
from perturbkv.analyses.sides import series, sweeps
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.configs.entry_counts import Budget
from perturbkv.errors import TraceError, UnknownNameError
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made, last_layer
from tests.support.traces import rekept

CONFIGS = [config("attention", 0.1), config("two-stage", 0.1), config("attention", 0.4), config("two-stage", 0.4)]
PAIR = (CONFIGS[0], CONFIGS[1])
# (sample, config, layer)
DRIFT = np.array(
    [[[10, 20, 40], [5, 18, 50], [1, 2, 4], [1, 2, 2]], [[30, 20, 80], [25, 20, 40], [1, 2, 8], [1, 2, 1]]]
)


def made(samples: int = 2, **changes: Any) -> Trace:
    arrays = {
        "hidden_drift_l1": DRIFT[:samples],
        "hidden_drift_l2": DRIFT[:samples] / 10,
        "hidden_norm": np.full((samples, 3), 200.0),
        "hidden_noise_floor": np.tile([0.1, 0.5, 0.1], (samples, 1)),
        "logit_kl": [[4, 2, 1, 0], [8, 2, 1, 0]][:samples],
        "logit_kl_noise_floor": [1e-9] * samples,
        "top1_agreement": [[0, 1, 1, 1], [0, 0, 1, 1]][:samples],
        "prompt_tokens": [200] * samples,
        "kept_count": np.broadcast_to(np.array([20, 20, 80, 80])[:, None, None], (samples, 4, 3, 1)),
    }
    return hand_made(CONFIGS, arrays | changes, layers=3)


def test_means_reductions_and_verdicts_per_layer() -> None:
    found = drift.summarise(made(), *PAIR)
    assert found.baseline_drift.tolist() == [20, 20, 60]
    assert found.treatment_drift.tolist() == [15, 19, 45]
    np.testing.assert_allclose(found.ratio, [0.75, 0.95, 0.75])
    assert found.verdict.tolist() == [1, 0, 1]  # in layer 1 they differ by 1, in noise of 0.5
    assert found.baseline_median_drift.tolist() == [20, 20, 60]
    assert found.baseline_relative_drift is not None
    assert found.baseline_relative_drift.tolist() == [0.1, 0.1, 0.3]


def test_what_the_caches_hold_and_the_noise_floor_are_told() -> None:
    trace = made()
    trace.arrays["held_share"] = np.tile([0.1, 0.12, 0.4, 0.4], (2, 1))  # type: ignore[index]
    drifts, samples = drift.summarise(trace, *PAIR).to_dict(), last_layer(trace, *PAIR).to_dict()
    for told in (drifts, samples):
        assert (told["held_over_full_baseline"], told["held_over_full_treatment"]) == pytest.approx((0.1, 0.12))
    assert drifts["noise_floor"] == pytest.approx([0.1, 0.5, 0.1])
    assert drift.summarise(trace, *PAIR, distance="l2").to_dict()["noise_floor"] is None


def test_two_samples_show_their_range() -> None:
    found = drift.summarise(made(), *PAIR)
    ratios = DRIFT[:, 1] / DRIFT[:, 0]
    assert found.ratio_interval is not None
    assert found.ratio_interval.kind == "range"
    np.testing.assert_allclose(found.ratio_interval.low, ratios.min(axis=0))
    np.testing.assert_allclose(found.ratio_interval.high, ratios.max(axis=0))


def test_a_distance_without_a_floor_ties_only_what_is_equal_and_says_so() -> None:
    found = drift.summarise(made(), *PAIR, distance="l2")
    assert found.baseline_drift.tolist() == [2, 2, 6]
    assert found.baseline_relative_drift is None
    assert found.verdict.tolist() == [1, 1, 1]
    assert not found.noise_floor_known
    with pytest.raises(UnknownNameError, match="unknown distance 'l3'; known: l2, l1, cosine"):
        drift.summarise(made(), *PAIR, distance="l3")


@pytest.mark.parametrize(("distance", "each"), [("l2", [1, 0]), ("cosine", [0, 0])])
def test_each_distance_is_judged_by_its_own_floor(distance: str, each: list[int]) -> None:
    floors = np.tile([0.005, 0.06, 1.0], (2, 1))
    floor = {f"hidden_noise_floor_{distance}": floors, "hidden_norm_l2": np.full((2, 3), 20)}
    found = drift.summarise(made(hidden_drift_cosine=DRIFT / 10, **floor), *PAIR, distance=distance)
    assert found.noise_floor_known
    assert found.verdict.tolist() == [1, 0, 0]  # differences of 0.5, 0.1 and 1.5; of roots 0.19, 0.04 and 0.33
    assert (found.baseline_relative_drift is None) == (distance == "cosine")
    drifts = last_layer(made(hidden_drift_cosine=DRIFT / 10, **floor), *PAIR, distance=distance)
    assert drifts.verdict.tolist() == each  # s1: 8 to 4, roots 0.83 apart; s0: 4 to 5; two floors of 1


def test_layers_up_to_which_all_kept_sets_are_equal_tie_by_identity() -> None:
    trace = made(kept_count=np.full((2, 4, 3, 1), 3))
    rekept(trace.arrays, lambda where, held: [0, 1, 2] if where[2] < 2 else held)
    found = drift.summarise(trace, *PAIR)
    assert found.verdict.tolist() == [0, 0, 1]  # their sets of layer 2 differ
    assert found.ratio.tolist() == [1.0, 1.0, 0.75]


def test_a_stream_that_does_not_drift_has_no_reduction() -> None:
    still = drift.summarise(made(hidden_drift_l1=np.zeros_like(DRIFT)), *PAIR)
    assert np.isnan(still.ratio).all()
    assert still.verdict.tolist() == [0, 0, 0]
    json.dumps(still.to_dict(), allow_nan=False)


def test_samples_are_sorted_by_the_baselines_drift() -> None:
    found = last_layer(made(), *PAIR)
    assert found.sample_ids == ("s1", "s0")
    assert found.baseline_drift.tolist() == [80, 40]
    assert found.treatment_drift.tolist() == [40, 50]
    assert found.verdict.tolist() == [1, -1]
    assert found.improved_share == 0.5
    low, high = 0.5 - 0.4874, 0.5 + 0.4874  # exactly, of 1 of 2: Clopper and Pearson
    assert found.improved_share_interval is not None
    assert (found.improved_share_interval.low, found.improved_share_interval.high) == pytest.approx(
        (low, high), abs=1e-4
    )
    json.dumps(found.to_dict(), allow_nan=False)


def test_curves_run_over_kept_shares() -> None:
    found = budget_curves.summarise(made(), ["attention", "two-stage"])
    attention, two_stage = found
    assert (attention.name, two_stage.name) == ("attention", "two-stage")
    assert attention.budgets == (Budget(0.1), Budget(0.4))
    assert attention.kept.tolist() == [0.1, 0.4]
    assert attention.means.drift.tolist() == [60, 6]
    assert attention.means.kl.tolist() == [6, 1]
    assert attention.means.top1.tolist() == [0, 1]
    assert two_stage.means.top1.tolist() == [0.5, 1]
    assert attention.cliff == (Budget(0.4), Budget(0.1))
    assert attention.medians.kl.tolist() == [6, 1]
    kl, same = attention.intervals.kl, attention.intervals.top1
    assert kl is not None
    assert (kl.low.tolist(), kl.high.tolist(), kl.kind) == ([4, 1], [8, 1], "range")
    assert same is not None
    assert same.at(0) == Interval(0.0, pytest.approx(0.8419, abs=1e-4))  # 0 of 2 samples
    assert found.kl_floor == pytest.approx(1e-9)
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_cliff_is_where_kl_rises_most_per_halving() -> None:
    kept, kl = np.array([0.1, 0.2, 0.8]), np.array([3.0, 2.5, 0.5])  # 0.5 over one halving, 2 over two
    asked = [Budget(0.1), Budget(0.2), Budget(0.8)]
    assert budget_curve._cliff(asked, kept, kl) == (Budget(0.8), Budget(0.2))
    assert budget_curve._cliff(asked, kept, kl[::-1]) is None
    assert budget_curve._cliff(asked[:1], kept[:1], kl[:1]) is None


def test_one_sample_has_no_intervals() -> None:
    assert drift.summarise(made(1), *PAIR).ratio_interval is None
    assert last_layer(made(1), *PAIR).improved_share_interval is None
    assert budget_curves.summarise(made(1), ["attention"])[0].intervals.kl is None


def test_series_and_sweeps_join_what_differs_in_budget_alone() -> None:
    run = made().run
    assert series(run, "attention", "two-stage") == [[run.configs[:2], run.configs[2:]]]
    assert sweeps(run, "two-stage") == [[1, 3]]
    with pytest.raises(TraceError, match="of 'value'"):
        sweeps(run, "value")
