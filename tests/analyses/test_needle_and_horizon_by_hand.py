"""Retrieval grids, the link with perturbation, and growth over steps, on traces small enough to do by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from scipy import stats

from perturbkv.analyses import horizon, needle, retrieval
from perturbkv.analyses.ranks import mean_ranks, spearman
from perturbkv.config import RunConfig
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import SampleTrace, Trace
from tests.support.measured import config
from tests.support.traces import sample_trace, trace

CONFIGS = (config("attention"), config("two-stage"))


def made(
    scores: Any,
    full: Any,
    moved: Any,
    *,
    steps: int = 1,
    lengths: tuple[int, ...] = (100, 200),
    depths: tuple[float, ...] = (0.0, 1.0),
    failures: dict[str, str] | None = None,
) -> Trace:
    """`scores` (sample, config), `full` (sample,), `moved` (sample, config): relative perturbation of every kind."""
    samples = []
    for place, (row, whole, levels) in enumerate(zip(scores, full, moved, strict=True)):
        arrays: dict[str, Any] = dict(sample_trace(f"s{place}", steps=steps, seed=place).arrays)
        level = np.asarray(levels, dtype=float)[:, None, None, None]
        shape = (2, steps, 2, 2)
        for name in ("perturbation_isolated", "perturbation_propagated", "theta", "retained_mass"):
            arrays[name] = np.broadcast_to(level, shape) * 10
        arrays["output_norm"], arrays["hidden_norm"] = np.full((steps, 2, 2), 10.0), np.full((steps, 2), 5.0)
        arrays["hidden_drift_l1"] = np.broadcast_to(level[..., 0], (2, steps, 2)) * 5
        arrays["logit_kl"] = np.broadcast_to(level[..., 0, 0], (2, steps))
        arrays |= {"score": np.asarray(row, dtype=float), "score_full": np.float64(whole)}
        arrays |= {"digits": 1 - (1 - np.asarray(row, dtype=float)) * 0.5, "digits_full": np.float64(whole)}
        samples.append(SampleTrace(f"s{place}", arrays))
    options = {"lengths": list(lengths), "depths": list(depths), "haystack": "noise"}
    fields = {"dataset": "needle", "dataset_options": options, "generate": 8, "configs": CONFIGS}
    return trace(*samples, failures=failures, **fields)


def test_the_grid_counts_each_cell() -> None:
    scores = [[1, 0], [1, 1], [0, 0], [0, 1], [0, 0], [0, 0]]  # 0-100 twice, 1-100 twice, 0-200, 1-200
    result = needle.summarise(made(scores, [1, 1, 1, 1, 0, 1], np.ones((6, 2))))
    assert (result.lengths, result.depths, result.haystack, result.scenario) == (
        (100, 200),
        (0.0, 1.0),
        "noise",
        "regular",
    )
    attention, two_stage = result.methods
    np.testing.assert_array_equal(attention.grid, [[0.5, 0.0], [0.5, 0.0]])  # depth × length
    np.testing.assert_array_equal(two_stage.grid, [[0.0, 0.0], [0.5, 1.0]])
    np.testing.assert_array_equal(result.full.grid, [[0.5, 1.0], [1.0, 1.0]])
    assert attention.score == pytest.approx(2 / 6)
    assert attention.digits == pytest.approx(2 / 6 + 0.5 * 4 / 6)
    np.testing.assert_array_equal(attention.digits_grid, [[0.75, 0.5], [0.75, 0.5]])
    low, high = attention.score_interval or (0, 0)
    assert low < 2 / 6 < high


def test_failed_samples_leave_their_cell_to_the_others() -> None:
    result = needle.summarise(made([[1, 0]], [1], [[1, 1]], failures={"bad": "broke"}))
    np.testing.assert_array_equal(result.methods[0].grid, [[1, np.nan], [np.nan, np.nan]])


def test_a_trace_without_answers_is_refused() -> None:
    with pytest.raises(TraceError, match="perturbkv needle --model m"):
        needle.summarise(trace(sample_trace()))
    plain = made([[1, 0]], [1], [[1, 1]])
    with pytest.raises(TraceError, match="without answers"):
        needle.summarise(dataclasses.replace(plain, run=dataclasses.replace(plain.run, generate=0)))


def test_ranks_are_scipys() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.integers(0, 5, 60).astype(float), draw.integers(0, 2, 60).astype(float)
    np.testing.assert_array_equal(mean_ranks(first), stats.rankdata(first))
    np.testing.assert_array_equal(mean_ranks(np.stack([first, second], axis=1)[:8]),
                                  stats.rankdata(np.stack([first, second], axis=1)[:8], axis=0))  # fmt: skip
    assert float(spearman(first, second)) == pytest.approx(stats.spearmanr(first, second).statistic)
    assert np.isnan(spearman(first, np.ones(60)))


def test_correlation_counts_only_what_the_full_cache_answers() -> None:
    scores = [[1, 0], [1, 1], [0, 0], [1, 1]]
    moved = [[0.1, 0.9], [0.2, 0.3], [0.8, 0.7], [5.0, 6.0]]
    result = retrieval.summarise(made(scores, [1, 1, 1, 0], moved))
    assert (result.samples, result.left_out, result.correlations[0].deciding) == (3, 1, 1)
    expected = stats.spearmanr(np.ravel(moved[:3]), np.ravel(scores[:3])).statistic
    for one in result.correlations:
        sign = -1 if one.measure == "lost" else 1  # made of retained mass, which rises where 1 − S falls
        assert one.rho == pytest.approx(sign * expected), one.measure
        assert one.within == pytest.approx(-sign)  # the one prompt: lower perturbation was found
    isolated = result.correlations[0]
    assert isolated.found == pytest.approx(np.median([0.1, 0.2, 0.3]))
    assert isolated.lost == pytest.approx(np.median([0.9, 0.8, 0.7]))
    low, high = isolated.interval or (0, 0)
    assert -1 <= low <= isolated.rho <= high <= 1
    assert [one.rho for one in result.of("digits")] == [one.rho for one in result.of("score")]  # the same order
    document = result.to_dict()
    np.testing.assert_allclose(document["perturbation"]["propagated"], moved[:3])
    assert document["score"] == scores[:3]


def test_correlation_of_scores_that_are_all_alike_is_none() -> None:
    result = retrieval.summarise(made([[1, 1], [1, 1]], [1, 1], [[0.1, 0.2], [0.3, 0.4]]))
    assert all(np.isnan(one.rho) and np.isnan(one.within) and one.interval is None for one in result.correlations)
    assert result.to_dict()["correlations"][0]["rho"] is None
    none = retrieval.summarise(made([[1, 0]], [0], [[0.1, 0.2]]))
    assert none.samples == 0
    assert all(np.isnan(one.rho) for one in none.correlations)


def growing(samples: int = 3, steps: int = 6) -> Trace:
    """Head 0 of layer 0 doubles from the first third to the last; head 1 halves; layer 1 stays; norms are 10."""
    factor = np.ones((2, steps, 2, 2))
    factor[:, -2:, 0, 0], factor[:, -2:, 0, 1] = 2, 0.5
    found = []
    for place in range(samples):
        arrays: dict[str, Any] = dict(sample_trace(f"s{place}", steps=steps, seed=place).arrays)
        for name, level in (("perturbation_propagated", 4.0), ("perturbation_isolated", 2.0)):
            arrays[name] = factor * level * (1 + place)
        arrays["output_norm"] = np.full((steps, 2, 2), 10.0)
        arrays["noise_floor"] = np.full((steps, 2, 2), 0.1)
        found.append(SampleTrace(f"s{place}", arrays))
    return trace(*found, configs=CONFIGS)


def test_growth_is_the_last_third_over_the_first() -> None:
    result = horizon.summarise(growing(), ["attention", "two-stage"])
    assert (result.steps, result.third, len(result.configs)) == (6, 2, 2)
    curve = result.configs[0].curves["propagated"]
    np.testing.assert_allclose(curve.relative, [0.8] * 4 + [0.8 * 4.5 / 4] * 2)  # mean level 8 of norm 10
    assert curve.growth == pytest.approx(4.5 / 4)
    assert curve.growth_interval == pytest.approx((4.5 / 4, 4.5 / 4))
    np.testing.assert_allclose(curve.head_growth, [[2, 0.5], [1, 1]])
    assert curve.head_verdict.tolist() == [[1, -1], [0, 0]]
    np.testing.assert_allclose(result.configs[0].curves["isolated"].relative, curve.relative / 2)
    np.testing.assert_allclose(result.noise_floor, 0.01)


def test_one_sample_has_verdicts_and_no_intervals() -> None:
    curve = horizon.summarise(growing(1), ["attention"]).configs[0].curves["propagated"]
    assert curve.growth_interval is None
    assert curve.relative_interval is None
    assert curve.head_verdict.tolist() == [[1, -1], [0, 0]]


def test_two_steps_are_no_horizon() -> None:
    with pytest.raises(ConfigError, match="at least 3 decode steps, got a trace of 2; use --steps 32"):
        horizon.summarise(growing(steps=2), ["attention"])


def test_the_run_config_keeps_what_is_new_and_reads_what_is_old() -> None:
    run = RunConfig("m", "d", CONFIGS, scenario="context-only", cache="rectangular", head_scores=((1.0,),), generate=3)
    assert RunConfig.from_json(run.to_json()) == run
    old = json.loads(RunConfig("m", "d", CONFIGS).to_json())
    for name in ("scenario", "cache", "head_scores", "generate"):
        del old[name]
    for entry in old["configs"]:
        for name in ("pyramid_beta", "floor", "head_beta", "recent", "history"):
            del entry[name]
    assert RunConfig.from_json(json.dumps(old)) == RunConfig("m", "d", CONFIGS)
    with pytest.raises(ConfigError, match="at least 0 tokens"):
        RunConfig("m", "d", CONFIGS, generate=-1)
