"""2 layers × 2 heads × 3 samples, every number worked out here."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.bootstrap import interval, resample
from perturbkv.analyses.heads import HeadComparison, summarise
from perturbkv.analyses.pairing import pairs
from perturbkv.analyses.verdicts import verdicts
from perturbkv.config import Budget, EvictionConfig, RunConfig
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import SampleTrace, Trace
from tests.support.traces import run_config, sample_trace, trace

# baseline and treatment, means over three samples: [[4, 2], [1e-3, 3]] against [[2, 5], [2e-3, 3]]
BASELINE = np.array([[[3, 2], [1e-3, 3]], [[4, 2], [1e-3, 3]], [[5, 2], [1e-3, 3]]])
TREATMENT = np.array([[[1, 4], [2e-3, 3]], [[2, 5], [2e-3, 3]], [[3, 6], [2e-3, 3]]])
FLOOR = np.full((2, 2), 1e-3)
LABELS = run_config().labels()


def hand_made(count: int = 3, **changes: Any) -> list[SampleTrace]:
    samples = []
    for index in range(count):
        arrays = dict(sample_trace(f"s{index}").arrays)
        for kind in ("isolated", "propagated"):
            arrays[f"perturbation_{kind}"] = np.stack([BASELINE[index], TREATMENT[index]])[:, None]
        arrays["noise_floor"] = arrays["noise_floor_isolated"] = FLOOR[None]
        arrays["output_norm"] = np.full((1, 2, 2), 10.0)
        arrays["sigma_stage1"] = np.broadcast_to([[0.9, 0.5], [0.4, 0.6]], (2, 1, 2, 2)).astype(float)
        arrays["retained_mass"] = np.stack([np.full((1, 2, 2), 0.7), np.full((1, 2, 2), 0.6)])
        samples.append(SampleTrace(f"s{index}", {**arrays, **changes}))
    return samples


def compare(of: Trace, **more: Any) -> HeadComparison:
    return summarise(of, *LABELS, **more)


def test_means_verdicts_and_shares() -> None:
    result = compare(trace(*hand_made()))
    for kind in (result.isolated, result.propagated):
        np.testing.assert_allclose(kind.baseline_mean, [[4, 2], [1e-3, 3]])
        np.testing.assert_allclose(kind.treatment_mean, [[2, 5], [2e-3, 3]])
        assert kind.verdict.tolist() == [[1, -1], [0, 0]]  # under the noise, and exactly equal
        assert (kind.improved_count, kind.tied_count, kind.worsened_count) == (1, 2, 1)
        assert kind.improved_share == 0.25
        assert kind.total_reduction == pytest.approx(1 - 10.002 / 9.001)
        assert kind.median_reduction == pytest.approx(np.median([0.5, -1.5, -1.0, 0.0]))
        assert kind.floor_relative_median == pytest.approx(1e-4)
    assert result.retained_mass == pytest.approx((0.7, 0.6))


def test_flagged_heads_are_those_whose_mean_sigma_is_at_most_a_half() -> None:
    result = compare(trace(*hand_made()))
    assert result.flagged.tolist() == [[False, True], [True, False]]
    assert result.isolated.unflagged_improved_share == 0.5
    assert result.to_dict()["flagged_heads"] == ["0-1", "1-0"]


def test_three_floors_make_a_tie_only_where_both_lie_below() -> None:
    baseline, treatment = np.array([2.9, 3.1, 2.9]), np.array([2.0, 2.0, 3.1])
    assert verdicts(baseline, treatment, np.ones(3)).tolist() == [0, 1, -1]


def test_intervals_equal_a_naive_bootstrap() -> None:
    result = compare(trace(*hand_made()), resamples=300, seed=4)
    shares, reductions = [], []
    for drawn in resample(3, 300, 4):
        baseline, treatment = BASELINE[drawn].mean(axis=0), TREATMENT[drawn].mean(axis=0)
        improved = [t < b and max(t, b) >= 3 * 1e-3 for b, t in zip(baseline.flat, treatment.flat, strict=True)]
        shares.append(sum(improved) / 4)
        reductions.append(1 - treatment.sum() / baseline.sum())
    assert result.isolated.improved_share_interval == pytest.approx(tuple(np.percentile(shares, [2.5, 97.5])))
    assert result.isolated.total_reduction_interval == pytest.approx(tuple(np.percentile(reductions, [2.5, 97.5])))


def test_one_sample_has_no_intervals() -> None:
    result = compare(trace(*hand_made(1)))
    assert result.isolated.improved_share_interval is None
    assert result.isolated.total_reduction_interval is None
    assert interval(lambda weights: weights.sum(axis=1), 1) is None


def test_a_failed_sample_is_left_out_and_counted() -> None:
    result = compare(trace(*hand_made(), failures={"broken": "NaN"}))
    np.testing.assert_allclose(result.isolated.baseline_mean, [[4, 2], [1e-3, 3]])
    assert (result.identity.samples, result.identity.failed) == (3, 1)


def test_the_summary_is_plain_json() -> None:
    zero = {"perturbation_isolated": np.zeros((2, 1, 2, 2))}
    text = json.dumps(compare(trace(*hand_made(**zero))).to_dict(), allow_nan=False)
    assert json.loads(text)["isolated"]["total_reduction"] is None


def test_what_cannot_be_compared_is_refused() -> None:
    made = trace(*hand_made())
    with pytest.raises(TraceError, match="expected one of the trace's configurations"):
        summarise(made, LABELS[0], "nothing")
    with pytest.raises(ConfigError, match="a step from 0 to 0, got 1"):
        compare(made, step=1)
    nothing = Trace(made.run, made.sample_ids, made.arrays, dict.fromkeys(made.sample_ids, "broke"))
    with pytest.raises(TraceError, match="at least one complete sample"):
        compare(nothing)
    lacking = Trace(made.run, made.sample_ids, {k: v for k, v in made.arrays.items() if k != "sigma_stage1"})
    with pytest.raises(TraceError, match="heads needs the variable 'sigma_stage1'"):
        compare(lacking)
    poisoned = trace(*hand_made(sigma_stage1=np.full((2, 1, 2, 2), np.nan)))
    with pytest.raises(TraceError, match="got NaN in 'sigma_stage1'"):
        compare(poisoned)


def test_pairs_differ_in_selection_alone() -> None:
    made = [EvictionConfig(budget=Budget(b), selection=name) for b in (64, 128) for name in ("attention", "value")]
    stream = EvictionConfig(budget=Budget(64), policy="streaming-llm", selection="position")
    run = RunConfig(model="m", dataset="d", configs=(*made, stream))
    labels = run.labels()
    assert pairs(run, "attention", "value") == [(labels[0], labels[1]), (labels[2], labels[3])]
    assert pairs(run, "streaming-llm", "snapkv:value") == [(labels[4], labels[1])]
    with pytest.raises(TraceError, match="got a trace of snapkv:attention, snapkv:value, streaming-llm:position"):
        pairs(run, "attention", "two-stage")


def test_bare_selections_are_compared_within_each_policy() -> None:
    sides = [("snapkv", "attention"), ("snapkv", "two-stage"), ("adakv", "attention"), ("adakv", "two-stage"),
             ("h2o", "attention")]  # fmt: skip
    configs = tuple(
        EvictionConfig(Budget(64), policy, selection, pool="none" if policy == "h2o" else "max")
        for policy, selection in sides
    )
    run = RunConfig("m", "d", configs)
    labels = run.labels()
    assert pairs(run, "attention", "two-stage") == [(labels[0], labels[1]), (labels[2], labels[3])]
    assert pairs(run, "attention", "adakv:two-stage") == [(labels[0], labels[3])]
    assert pairs(run, "attention", "h2o") == [(labels[0], labels[4])]  # which does not pool: part of what it is
