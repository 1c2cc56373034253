"""Three layers, two samples, two budgets: drifts are whole numbers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from perturbkv.analyses import budgets, last_layer, layers
from perturbkv.analyses.bootstrap import resample
from perturbkv.analyses.pairing import series, sweeps
from perturbkv.errors import TraceError, UnknownNameError
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made

CONFIGS = [config("attention", 0.1), config("two-stage", 0.1), config("attention", 0.4), config("two-stage", 0.4)]
PAIR = (CONFIGS[0].label(), CONFIGS[1].label())
# (sample, config, layer)
DRIFT = np.array(
    [[[10, 20, 40], [5, 18, 50], [1, 2, 4], [1, 2, 2]], [[30, 20, 80], [25, 20, 40], [1, 2, 8], [1, 2, 1]]]
)


def made(samples: int = 2, **changes: Any) -> Trace:
    arrays = {
        "hidden_drift_l1": DRIFT[:samples],
        "hidden_drift_l2": DRIFT[:samples] / 10,
        "hidden_norm": np.full((samples, 3), 200.0),
        "hidden_noise_floor": np.tile([0.1, 7.0, 0.1], (samples, 1)),
        "logit_kl": [[4, 2, 1, 0], [8, 2, 1, 0]][:samples],
        "logit_kl_noise_floor": [1e-9] * samples,
        "top1_agreement": [[0, 1, 1, 1], [0, 0, 1, 1]][:samples],
        "prompt_tokens": [200] * samples,
        "kept_count": np.broadcast_to(np.array([20, 20, 80, 80])[:, None, None], (samples, 4, 3, 1)),
    }
    return hand_made(CONFIGS, arrays | changes, layers=3)


def test_means_reductions_and_verdicts_per_layer() -> None:
    found = layers.summarise(made(), *PAIR)
    assert found.baseline_mean.tolist() == [20, 20, 60]
    assert found.treatment_mean.tolist() == [15, 19, 45]
    np.testing.assert_allclose(found.reduction, [0.25, 0.05, 0.25])
    assert found.verdict.tolist() == [1, 0, 1]  # layer 1 lies under three floors of 7
    assert found.baseline_relative is not None
    assert found.baseline_relative.tolist() == [0.1, 0.1, 0.3]


def test_intervals_equal_a_naive_bootstrap() -> None:
    found = layers.summarise(made(), *PAIR, resamples=200, seed=3)
    drawn = [DRIFT[rows].mean(axis=0) for rows in resample(2, 200, 3)]
    reductions = [1 - mean[1] / mean[0] for mean in drawn]
    np.testing.assert_allclose(found.reduction_interval, np.percentile(reductions, [2.5, 97.5], axis=0))
    np.testing.assert_allclose(found.baseline_interval, np.percentile([mean[0] for mean in drawn], [2.5, 97.5], axis=0))


def test_other_distances_have_no_floor_and_no_relative_drift() -> None:
    found = layers.summarise(made(), *PAIR, distance="l2")
    assert found.baseline_mean.tolist() == [2, 2, 6]
    assert found.baseline_relative is None
    assert found.verdict.tolist() == [1, 1, 1]
    with pytest.raises(UnknownNameError, match="unknown distance 'l3'; known: l2, l1, cosine"):
        layers.summarise(made(), *PAIR, distance="l3")


def test_a_stream_that_does_not_drift_has_no_reduction() -> None:
    still = layers.summarise(made(hidden_drift_l1=np.zeros_like(DRIFT)), *PAIR)
    assert np.isnan(still.reduction).all()
    assert still.verdict.tolist() == [0, 0, 0]
    json.dumps(still.to_dict(), allow_nan=False)


def test_samples_are_sorted_by_the_baselines_drift() -> None:
    found = last_layer.summarise(made(), *PAIR)
    assert found.sample_ids == ("s1", "s0")
    assert found.baseline_drift.tolist() == [80, 40]
    assert found.treatment_drift.tolist() == [40, 50]
    assert found.verdict.tolist() == [1, -1]
    assert found.improved_share == 0.5
    assert found.improved_share_interval == (0, 1)
    json.dumps(found.to_dict(), allow_nan=False)


def test_curves_run_over_kept_shares() -> None:
    found = budgets.summarise(made(), ["attention", "two-stage"])
    attention, two_stage = found.curves
    assert (attention.name, two_stage.name) == ("attention", "two-stage")
    assert attention.budgets == ("0.1", "0.4")
    assert attention.kept.tolist() == [0.1, 0.4]
    assert attention.means["drift"].tolist() == [60, 6]
    assert attention.means["kl"].tolist() == [6, 1]
    assert attention.means["top1"].tolist() == [0, 1]
    assert two_stage.means["top1"].tolist() == [0.5, 1]
    assert attention.cliff == ("0.4", "0.1")
    np.testing.assert_allclose(attention.intervals["kl"], [[4, 1], [8, 1]])
    assert found.kl_floor == pytest.approx(1e-9)
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_cliff_is_where_kl_rises_most_per_halving() -> None:
    kept, kl = np.array([0.1, 0.2, 0.8]), np.array([3.0, 2.5, 0.5])  # 0.5 over one halving, 2 over two
    assert budgets._cliff(("0.1", "0.2", "0.8"), kept, kl) == ("0.8", "0.2")
    assert budgets._cliff(("0.1", "0.2", "0.8"), kept, kl[::-1]) is None
    assert budgets._cliff(("0.1",), kept[:1], kl[:1]) is None


def test_one_sample_has_no_intervals() -> None:
    assert layers.summarise(made(1), *PAIR).reduction_interval is None
    assert last_layer.summarise(made(1), *PAIR).improved_share_interval is None
    assert budgets.summarise(made(1), ["attention"]).curves[0].intervals["kl"] is None


def test_series_and_sweeps_join_what_differs_in_budget_alone() -> None:
    run = made().run
    labels = run.labels()
    assert series(run, "attention", "two-stage") == [[(labels[0], labels[1]), (labels[2], labels[3])]]
    assert sweeps(run, "two-stage") == [[1, 3]]
    with pytest.raises(TraceError, match="of 'value'"):
        sweeps(run, "value")
