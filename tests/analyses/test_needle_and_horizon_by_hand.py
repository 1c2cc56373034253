"""Retrieval grids, the link with perturbation, and growth over steps, on traces small enough to do by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from scipy import stats

from perturbkv.analyses.horizon import horizon
from perturbkv.analyses.needle import needle
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.analyses.stats.rank_correlation import mean_ranks, spearman
from perturbkv.configs.run import RunConfig, Settings
from perturbkv.errors import ConfigError, TraceError
from perturbkv.schema import VARIABLES
from perturbkv.trace import SampleTrace, Trace
from tests.oracle import theory as naive
from tests.support.measured import config
from tests.support.traces import rekept, sample_trace, trace

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
    result = needle.needle(made(scores, [1, 1, 1, 1, 0, 1], np.ones((6, 2))))
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
    exact = stats.binomtest(2, 6).proportion_ci(method="exact")
    assert attention.score_interval is not None
    assert (attention.score_interval.low, attention.score_interval.high) == pytest.approx((exact.low, exact.high))


def test_failed_samples_leave_their_cell_to_the_others() -> None:
    result = needle.needle(made([[1, 0]], [1], [[1, 1]], failures={"bad": "broke"}))
    np.testing.assert_array_equal(result.methods[0].grid, [[1, np.nan], [np.nan, np.nan]])


def test_a_trace_without_answers_is_refused() -> None:
    with pytest.raises(TraceError, match="perturbkv needle --model m"):
        needle.needle(trace(sample_trace()))
    plain = made([[1, 0]], [1], [[1, 1]])
    with pytest.raises(TraceError, match="without answers"):
        needle.needle(dataclasses.replace(plain, run=dataclasses.replace(plain.run, generate=0)))


def test_ranks_are_scipys() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.integers(0, 5, 60).astype(float), draw.integers(0, 2, 60).astype(float)
    np.testing.assert_array_equal(mean_ranks(first), stats.rankdata(first))
    np.testing.assert_array_equal(mean_ranks(np.stack([first, second], axis=1)[:8]),
                                  stats.rankdata(np.stack([first, second], axis=1)[:8], axis=0))  # fmt: skip
    assert float(spearman(first, second)) == pytest.approx(stats.spearmanr(first, second).statistic)
    assert np.isnan(spearman(first, np.ones(60)))


THREE = (*CONFIGS, config("random"))


def ranked(scores: Any, full: Any, moved: Any, later: Any = None, configs: Any = THREE) -> Trace:
    """As `made` with three configurations; `later` is what moves at every step behind the first."""
    steps = 1 if later is None else 2
    samples = []
    for place, (row, whole, levels) in enumerate(zip(scores, full, moved, strict=True)):
        arrays: dict[str, Any] = dict(sample_trace(f"s{place}", configs=len(configs), steps=steps, seed=place).arrays)
        level = np.stack([levels] if later is None else [levels, later[place]], axis=1).astype(float)
        shape = (len(configs), steps, 2, 2)
        for name in ("perturbation_isolated", "perturbation_propagated", "theta"):
            arrays[name] = np.broadcast_to(level[:, :, None, None], shape) * 10
        arrays["retained_mass"] = 1 - np.broadcast_to(level[:, :, None, None], shape)
        arrays["output_norm"], arrays["hidden_norm"] = np.full((steps, 2, 2), 10.0), np.full((steps, 2), 5.0)
        arrays["hidden_drift_l1"] = np.broadcast_to(level[:, :, None], (len(configs), steps, 2)) * 5
        arrays["logit_kl"] = level
        arrays |= {"score": np.asarray(row, dtype=float), "score_full": np.float64(whole)}
        arrays |= {"digits": 0.5 + np.asarray(row, dtype=float) / 2, "digits_full": np.float64(whole)}
        samples.append(SampleTrace(f"s{place}", arrays))
    options = {"lengths": [100, 200], "depths": [0.0, 1.0], "haystack": "noise"}
    return trace(*samples, dataset="needle", dataset_options=options, generate=8, configs=tuple(configs))


SCORES = [[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 1]]
MOVED = [[0.1, 0.9, 0.5], [0.2, 0.3, 0.1], [0.8, 0.7, 0.6], [5.0, 6.0, 7.0]]


def test_ranks_are_within_a_prompt_that_the_full_cache_answers_and_whose_methods_differ() -> None:
    result = needle.needle(ranked(SCORES, [1, 1, 1, 0], MOVED)).correlation
    assert (result.samples, result.left_out, len(result.budgets)) == (3, 1, 1)
    expected = np.mean([stats.spearmanr(MOVED[place], SCORES[place]).statistic for place in (0, 1)])
    (link,) = result.budgets
    for one in (*link.correlations, *link.circular):
        assert one.deciding == 2, one.measure  # in prompt 2 all are lost
        assert one.rho == pytest.approx(expected), one.measure
        assert one.rho_interval is not None
        assert one.rho_interval.kind == "range"
    document = result.to_dict()["budgets"][0]
    np.testing.assert_allclose(document["measured"]["propagated"], MOVED[:3])
    assert document["score"] == SCORES[:3]


def test_answers_that_are_no_numbers_are_refused_in_words() -> None:
    told = "needs answers that are numbers, got others or none in 2 of 4 samples of made.h5; give prompts"
    with pytest.raises(TraceError, match=told):
        needle.needle(ranked([[np.nan] * 3, *SCORES[1:3], [np.nan] * 3], [np.nan, 1, 1, np.nan], MOVED))


def test_numbers_that_are_found_in_part_are_refused_in_words() -> None:
    told = "needle needs scores of 0 or 1, a number found or not, got 0.250 in made.h5; grade answers by exact-number"
    for scores, full in (([[1, 0.25, 0], *SCORES[1:]], [1] * 4), (SCORES, [1, 1, 0.25, 1])):
        with pytest.raises(TraceError, match=told):
            needle.needle(ranked(scores, full, MOVED))


def test_later_steps_and_the_answers_own_tokens_are_told_apart_as_circular() -> None:
    against = [[row[place] for place in (0, 1, 2)] for row in SCORES]  # later steps move as the score does
    (link,) = needle.needle(
        ranked(SCORES, [1] * 4, MOVED, [[9 * x for x in row] for row in against])
    ).correlation.budgets
    assert {one.measure for one in link.correlations} == {"isolated", "theta", "propagated", "lost"}
    assert {one.measure for one in link.circular} == {"kl", "drift", "kl_all", "drift_all", "propagated_all"}
    np.testing.assert_allclose(link.measured["propagated"], MOVED)  # of step 0 alone
    np.testing.assert_allclose(link.measured["kl_all"], (np.array(MOVED) + 9 * np.array(against)) / 2)
    first = {one.measure: one.rho for one in link.correlations if one.outcome == "score"}
    later = {one.measure: one.rho for one in link.circular if one.outcome == "score"}
    assert first["propagated"] < later["propagated_all"]


def test_budgets_are_never_mixed_and_two_methods_have_no_ranks() -> None:
    more = [config(name, 128) for name in ("attention", "two-stage", "random")]
    scores, moved = [[1, 0, 0, 0, 0, 1]], [[0.1, 0.5, 0.9, 0.1, 0.5, 0.9]]
    small, large = needle.needle(ranked(scores, [1], moved, configs=[*THREE, *more])).correlation.budgets
    assert (small.name, large.name) == ("64", "128")
    assert small.by_outcome("score")[0].rho == pytest.approx(-large.by_outcome("score")[0].rho)
    assert small.by_outcome("score")[0].rho < 0
    few = needle.needle(made([[1, 0]], [1], [[0.1, 0.2]])).correlation
    assert (few.budgets, few.too_few) == ((), ("64",))


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"granularity": "kv"}, ("64 query", "64 kv")),
        ({"protect_first": 4}, ("64", "64 protect-first=4")),
        ({"protect_recent": 0.75}, ("64", "64 protect-recent=0.75")),
    ],
)
def test_what_holds_more_or_protects_more_is_never_ranked_with_what_does_not(
    other: dict[str, Any], names: tuple[str, str]
) -> None:
    """Within each setting the more perturbed method finds more; over both together it would find less."""
    more = [config(name, **other) for name in ("attention", "two-stage", "random")]
    measured_trace = ranked([[1, 0, 0, 1, 0, 0]], [1], [[0.3, 0.2, 0.1, 0.9, 0.8, 0.7]], configs=[*THREE, *more])
    measured_trace.arrays["held_share"] = np.array([[0.48] * 3 + [0.24] * 3])  # type: ignore[index]
    links = needle.needle(measured_trace).correlation.budgets
    assert tuple(link.name for link in links) == names
    assert [link.cache_share_range for link in links] == [(0.48, 0.48), (0.24, 0.24)]
    for link in links:
        assert link.by_outcome("score")[0].rho == pytest.approx(stats.spearmanr([3, 2, 1], [1, 0, 0]).statistic)
    json.dumps(needle.needle(measured_trace).correlation.to_dict(), allow_nan=False)


def test_methods_that_keep_the_same_entries_share_a_rank() -> None:
    made_trace = ranked([[1, 0, 0]], [1], [[0.1, 0.2, 0.2 + 1e-9]])
    rekept(made_trace.arrays, lambda where, held: [1, 2, 3] if where[1] == 2 else held)
    assert made_trace.same_kept(1, 2).all()
    measured = needle.needle(made_trace).correlation.budgets[0].measured["propagated"]
    assert measured[0, 1] == measured[0, 2] != measured[0, 0]


def test_correlation_of_scores_that_are_all_alike_is_none() -> None:
    (link,) = needle.needle(ranked([[1, 1, 1]], [1], [[0.1, 0.2, 0.3]])).correlation.budgets
    assert all(np.isnan(one.rho) and one.rho_interval is None and one.deciding == 0 for one in link.by_outcome("score"))
    none = needle.needle(ranked([[1, 0, 0]], [0], [[0.1, 0.2, 0.3]])).correlation
    assert none.samples == 0
    assert none.to_dict()["budgets"][0]["correlations"][0]["rho"] is None


def growing(samples: int = 3, steps: int = 6, floor: float = 0.1) -> Trace:
    """Head 0 of layer 0 doubles from the first third to the last; head 1 halves; layer 1 stays; norms are 10."""
    factor = np.ones((2, steps, 2, 2))
    factor[:, -2:, 0, 0], factor[:, -2:, 0, 1] = 2, 0.5
    found = []
    for place in range(samples):
        arrays: dict[str, Any] = dict(sample_trace(f"s{place}", steps=steps, seed=place).arrays)
        for name, level in (("perturbation_propagated", 4.0), ("perturbation_isolated", 2.0)):
            arrays[name] = factor * level * (1 + place)
        arrays["output_norm"] = np.full((steps, 2, 2), 10.0)
        arrays["noise_floor"] = arrays["noise_floor_isolated"] = np.full((steps, 2, 2), floor)
        found.append(SampleTrace(f"s{place}", arrays))
    return trace(*found, configs=CONFIGS)


def test_growth_is_the_last_third_over_the_first() -> None:
    result = horizon.horizon(growing(7), ["attention", "two-stage"])
    assert (
        result.steps,
        result.samples_with_growth,
        result.samples_too_short_for_growth,
        len(result.configs),
    ) == (6, 7, 0, 2)
    curve = result.configs[0].curves["propagated"]
    np.testing.assert_allclose(curve.relative, [1.6] * 4 + [1.6 * 4.5 / 4] * 2)  # mean level 16 of norm 10
    assert (curve.first, curve.last) == pytest.approx((1.6, 1.6 * 4.5 / 4))
    assert curve.growth == pytest.approx(4.5 / 4)
    assert curve.growth_interval == Interval(pytest.approx(4.5 / 4), pytest.approx(4.5 / 4))
    np.testing.assert_allclose(curve.head_growth, [[2, 0.5], [1, 1]])
    assert curve.head_verdict.tolist() == [[1, -1], [0, 0]]  # 2 of 128 flips: p = 0.016, of two heads in four
    np.testing.assert_allclose(result.configs[0].curves["isolated"].relative, curve.relative / 2)
    np.testing.assert_allclose(result.noise_floor, 0.01)
    json.dumps(result.to_dict(), allow_nan=False)


def drafting(acceptance: Any, measured: list[int]) -> horizon.Horizon:
    """`acceptance` (sample, step) of one configuration; the other takes everything. Texts end after `measured`."""
    whole = growing(len(measured), steps=len(acceptance[0]))
    taken = np.stack([np.asarray(acceptance), np.ones_like(acceptance)], axis=1)
    arrays = {**whole.arrays, "draft_acceptance": taken, "steps_measured": np.array(measured)}
    return horizon.horizon(dataclasses.replace(whole, arrays=arrays))


def test_a_draft_is_taken_in_a_row_as_the_oracle_counts() -> None:
    draw = np.random.default_rng(3)
    acceptance, measured = draw.uniform(size=(6, 7)), [7, 4, 3, 6, 7, 5]
    for row, steps in zip(acceptance, measured, strict=True):
        row[steps:] = np.nan
    result = drafting(acceptance, measured)
    drafts = [config.draft for config in result.configs]
    assert drafts[0] is not None and drafts[1] is not None
    known = [list(row[:steps]) for row, steps in zip(acceptance, measured, strict=True)]
    runs = [naive.taken_in_a_row(row, 4) for row in known if len(row) >= 4]
    assert drafts[0].taken == pytest.approx(np.mean([np.mean(row) for row in known]))
    np.testing.assert_allclose(drafts[0].by_step, np.nanmean(acceptance, axis=0))
    assert drafts[0].in_a_row == pytest.approx(np.mean(runs))
    assert drafts[0].per_verification == pytest.approx(1 + np.mean(runs))
    assert drafts[0].in_a_row_interval is not None
    assert 0 < drafts[0].in_a_row_interval.low < drafts[0].in_a_row < drafts[0].in_a_row_interval.high < 4
    assert (drafts[1].taken, drafts[1].in_a_row, drafts[1].per_verification) == (1, 4, 5)
    assert "Without 4 drafted tokens in a row: 1 sample of fewer than 4 steps." in str(result.details())
    assert [row["draft_taken"] for row in result.records()[:7]] == pytest.approx(np.nanmean(acceptance, axis=0))
    json.dumps(result.to_dict(), allow_nan=False)


def test_equal_acceptances_give_the_geometric_sum() -> None:
    """(1 − a⁵) / (1 − a) tokens a verification (Leviathan et al., 2022, equation 1)."""
    draft = drafting(np.full((5, 6), 0.8), [6] * 5).configs[0].draft
    assert draft is not None
    assert draft.per_verification == pytest.approx((1 - 0.8**5) / 0.2)


def test_texts_of_three_steps_have_no_four_in_a_row_and_earlier_traces_no_draft() -> None:
    draft = drafting(np.full((5, 3), 0.5), [3] * 5).configs[0].draft
    assert draft is not None
    assert (draft.taken, draft.in_a_row_interval) == (0.5, None)
    assert draft.to_dict()["in_a_row"] is None
    acceptance = np.full((5, 6), 0.5)
    acceptance[1] = np.nan  # a sample that stood in a trace which was added to
    assert drafting(acceptance, [6] * 5).configs[0].draft is None
    earlier = horizon.horizon(growing(5))
    assert earlier.configs[0].draft is None
    assert earlier.to_dict()["configs"][0]["draft"] is None
    assert earlier.records()[0]["draft_taken"] is None
    assert "draft" not in repr(earlier)


def test_what_is_within_two_noise_floors_has_no_growth_and_decides_nothing() -> None:
    """Where everything is kept the perturbation is the floor itself: head 0 would double for nothing."""
    rounding = growing(7, floor=9.0)  # relative: 1.6 and 1.8 of all heads, two floors are 1.8
    curve = horizon.horizon(rounding, ["attention"]).configs[0].curves["propagated"]
    assert curve.first == pytest.approx(1.6)
    assert np.isnan(curve.growth)
    assert curve.growth_interval is None
    assert np.isnan(curve.head_growth[0, 1])  # 16 falls to 8 of 10, in noise of 18
    assert curve.head_verdict.tolist() == [[0, 0], [0, 0]]


def test_growth_by_no_more_than_two_noise_floors_is_undecided() -> None:
    """Head 0 rises by 4, 8, … 28 in its seven samples: all within two floors of 14.1, none within two of 0.9."""
    for floor, verdict in ((14.1, 0), (0.9, 1)):
        rising = growing(7, floor=floor)
        rising.arrays["perturbation_propagated"][:] += 30  # type: ignore[index]
        curve = horizon.horizon(rising, ["attention"]).configs[0].curves["propagated"]
        assert curve.head_growth[0, 0] == pytest.approx((30 + 32) / (30 + 16))
        assert curve.head_verdict[0, 0] == verdict, floor


def test_five_samples_are_too_few_to_decide_any_head() -> None:
    decided = horizon.horizon(growing(5), ["attention"]).configs[0].curves["propagated"].sign_flips
    assert decided.least_tests == 0  # the smallest p is 2/32, above 0.05
    assert not decided.significant.any()


def test_one_sample_has_no_intervals_and_no_verdicts() -> None:
    curve = horizon.horizon(growing(1), ["attention"]).configs[0].curves["propagated"]
    assert curve.growth_interval is None
    assert curve.relative_interval is None
    assert not curve.head_verdict.any()


def test_growth_is_of_each_samples_own_steps_and_short_texts_are_left_out() -> None:
    """Sample 0 has all six steps, 1 three, 2 two: it has no thirds; the steps behind a text's end are NaN."""
    whole = growing(3)
    whole.arrays["steps_measured"] = np.array([6, 3, 2])  # type: ignore[index]
    for name in ("perturbation_propagated", "perturbation_isolated", "logit_kl", "output_norm", "noise_floor"):
        axis = VARIABLES[name].dims.index("step") + 1
        by_step = np.moveaxis(whole.arrays[name], axis, 1)
        by_step[1, 3:], by_step[2, 2:] = np.nan, np.nan
    whole.arrays["perturbation_propagated"][1, :, 2] *= 3
    result = horizon.horizon(whole, ["attention"])
    assert result.samples_at_step.tolist() == [3, 3, 2, 1, 1, 1]
    assert (result.samples_with_growth, result.samples_too_short_for_growth) == (2, 1)
    curve = result.configs[0].curves["propagated"]
    # Σ over four heads: 16 per step in sample 0, 18 in its last third of two steps; 32 in sample 1, 96 in its last step
    assert curve.first == pytest.approx((16 + 32) / (40 + 40))
    assert curve.last == pytest.approx((18 + 96) / (40 + 40))
    assert curve.growth == pytest.approx(114 / 48)
    np.testing.assert_allclose(curve.relative, [96 / 120, 96 / 120, 112 / 80, 16 / 40, 18 / 40, 18 / 40])
    assert curve.relative_interval is not None
    assert (curve.relative_interval.low[2], curve.relative_interval.high[2]) == pytest.approx((16 / 40, 96 / 40))
    assert np.isnan(curve.relative_interval.low[3:]).all()  # one sample has these steps
    whole.arrays["steps_measured"][2] = 3
    with pytest.raises(TraceError, match="got NaN in 'output_norm'"):
        horizon.horizon(whole, ["attention"])


def test_two_steps_are_no_horizon() -> None:
    with pytest.raises(ConfigError, match="at least 3 decode steps, got a trace of 2; use --steps 32"):
        horizon.horizon(growing(steps=2), ["attention"])


def test_the_run_config_keeps_what_is_new_and_reads_what_is_old() -> None:
    run = RunConfig("m", "d", CONFIGS, scenario="context-only", cache="rectangular", head_scores=((1.0,),), generate=3)
    assert RunConfig.from_json(run.to_json()) == run
    old = json.loads(RunConfig("m", "d", CONFIGS).to_json())
    for name in ("scenario", "cache", "head_scores", "generate"):
        del old[name]
    assert RunConfig.from_json(json.dumps(old)) == RunConfig("m", "d", CONFIGS)
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        Settings(generate=-1)
