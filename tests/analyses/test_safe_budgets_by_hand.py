"""The smallest safe budget: the order of the tests, what it keeps of the level, exit codes, bytes, mistakes."""

from __future__ import annotations

import doctest
import importlib
import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

import perturbkv as pk
from perturbkv.analyses import verdicts
from perturbkv.analyses.budget.budget_axis import Axis
from perturbkv.analyses.budget.criteria import FEW, NONE, SAFE, Criterion, judge_curve
from perturbkv.analyses.stats import one_sided
from perturbkv.errors import ConfigError, TraceError
from perturbkv.selection.grid import configuration
from tests.support.swept import BUDGETS, TOKEN_BYTES, swept

KL = Criterion("kl", 0.1)


def curve(count: int) -> Axis:
    """So many budgets, smallest first, as they stand in (sample, budget) numbers."""
    budgets = np.linspace(0.2, 0.8, count)
    configs = tuple(configuration(float(budget)) for budget in budgets)
    return Axis(tuple(range(count)), configs, budgets, budgets)


def levels(*means: float, samples: int = 40, seed: int = 0) -> np.ndarray:
    """(sample, budget) skewed numbers whose means are close to these."""
    spread = np.random.default_rng(seed).lognormal(sigma=0.5, size=(samples, 1))
    return spread / spread.mean() * np.array(means)


def test_budgets_are_tested_down_to_the_first_that_fails() -> None:
    found = judge_curve(KL, levels(0.001, 0.5, 0.02, 0.01), curve(4))  # the smallest would pass again
    assert [one.tested for one in found.budgets] == [True, True, True, False]
    assert [one.holds for one in found.budgets] == [True, True, False, False]
    assert found.safe is not None
    assert found.first_failure is not None
    assert (found.safe.config.budget.value, found.first_failure.config.budget.value) == (
        pytest.approx(0.6),
        pytest.approx(0.4),
    )
    assert (found.state, found.samples_for) == (SAFE, None)
    assert [one.mean for one in found.budgets] == pytest.approx([0.01, 0.02, 0.5, 0.001])


def test_a_mean_within_its_limit_whose_bound_is_not_says_how_many_samples_would_do() -> None:
    each = levels(0.08, samples=8)
    found = judge_curve(KL, each, curve(1))
    assert (found.safe, found.state) == (None, FEW)
    enough = found.samples_for
    assert enough is not None
    assert KL.allows(KL.bound(each[:, 0], enough))
    assert not KL.allows(KL.bound(each[:, 0], enough - 1))


def test_a_mean_beyond_its_limit_has_none_and_no_number_of_samples() -> None:
    found = judge_curve(KL, levels(0.01, 0.2), curve(2))
    assert (found.safe, found.state, found.samples_for) == (None, NONE, None)
    assert judge_curve(KL, levels(0.01, 0.02), curve(2)).first_failure is None


@pytest.mark.slow
def test_the_fixed_order_keeps_the_level_and_taking_the_smallest_that_passes_would_not() -> None:
    """Five budgets, each of them barely unsafe, measured on samples of their own."""
    source, draws, unsafe = np.random.default_rng(8), 300, math.exp(1.5**2 / 2)
    limit, axis = Criterion("kl", unsafe * (1 - 1e-9)), curve(5)
    fixed = searched = 0
    for _ in range(draws):
        found = judge_curve(limit, source.lognormal(sigma=1.5, size=(16, 5)), axis)
        fixed += found.safe is not None
        searched += any(limit.allows(one.bound) for one in found.budgets)
    assert fixed / draws <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / draws)
    assert searched / draws > 0.08


TIGHT = np.array([0.006, 0.004, 0.003, 0.008, 0.004, 0.003])
"""KL of six prompts close to one another."""
SPREAD = np.array([5e-3, 2e-7, 1e-5, 3e-7, 4e-4, 1e-6])
"""KL of the same prompts at a better budget, over four powers of ten."""


def test_a_larger_budget_that_is_better_takes_no_verdict_from_a_smaller_one() -> None:
    alone, both = judge_curve(KL, TIGHT[:, None], curve(1)), judge_curve(KL, np.stack([TIGHT, SPREAD], 1), curve(2))
    assert [one.holds for one in alone.budgets] == [True]
    assert [one.holds for one in both.budgets] == [True, True]
    assert both.budgets[0].mean == pytest.approx(SPREAD.mean())
    tight = Criterion("kl", 0.015)  # whose hundredth is less than much of the KL
    assert tight.bound(TIGHT) <= 0.015 < tight.bound(SPREAD)
    assert [one.holds for one in judge_curve(tight, np.stack([TIGHT, SPREAD], 1), curve(2)).budgets] == [True, True]
    worse = np.where(np.arange(6) == 3, 0.02, SPREAD)  # on one prompt
    assert [one.tested for one in judge_curve(tight, np.stack([TIGHT, worse], 1), curve(2)).budgets] == [True, False]


def test_kl_below_a_hundredth_of_the_limit_counts_as_that_much() -> None:
    quiet = SPREAD / 10
    assert KL.bound(quiet) == KL.bound(np.maximum(quiet, 0.001)) == pytest.approx(0.001)
    assert one_sided.mean_at_most(quiet) > 0.1


def test_the_excess_of_perplexity_over_1_is_judged_as_kl_is() -> None:
    tight, kl = Criterion("perplexity", 1.015), Criterion("kl", 0.015)
    for excess in (TIGHT, SPREAD, SPREAD / 100, SPREAD - 1e-5):  # some texts are likelier from the evicted cache
        assert tight.bound(1 + excess) == pytest.approx(1 + kl.bound(excess), rel=1e-9)
    assert tight.bound(1 + TIGHT) <= 1.015 < tight.bound(1 + SPREAD)
    found = judge_curve(tight, 1 + np.stack([TIGHT, SPREAD], 1), curve(2))
    assert [one.holds for one in found.budgets] == [True, True]


@pytest.mark.slow
def test_a_budget_that_joins_never_makes_another_ones_verdict_worse_where_kl_falls_on_every_prompt() -> None:
    source = np.random.default_rng(9)
    for _ in range(60):
        spread = source.uniform(0.2, 2.5)
        steps = source.exponential(source.choice([0.3, 1, 3]), (6, 3)) * (source.random((6, 3)) < 0.7)
        smallest = np.log(0.03) + spread * source.standard_normal((6, 1))
        each = np.exp(np.concatenate([smallest, smallest - steps.cumsum(axis=1)], axis=1))
        passed = {}
        for places in (list(some) for count in range(1, 5) for some in combinations(range(4), count)):
            found = judge_curve(KL, each[:, places], curve(len(places)))
            passed[tuple(places)] = {place for place, one in zip(places, found.budgets[::-1], strict=True) if one.holds}
        for fewer, safe in passed.items():
            assert all(safe <= passed[more] for more in passed if {*fewer} <= {*more})


@pytest.mark.slow
@pytest.mark.parametrize("together", [0.5, 0.9])
@pytest.mark.parametrize("spreads", [(1.0,) * 4, (2.0,) * 4, (0.2, 0.5, 1.0, 2.0)], ids=str)
def test_an_unsafe_budget_is_called_safe_in_no_more_than_5_percent_of_worlds(
    spreads: tuple[float, ...], together: float
) -> None:
    """Mean KL falls to the limit at the largest of four budgets; a prompt's KL at all of them has a part in common."""
    source, draws, samples, sigma = np.random.default_rng(11), 1000, 8, np.array(spreads)
    means = 1.5 ** np.arange(3, -1, -1)
    limit, wrong = Criterion("kl", 1 - 1e-9), 0
    for _ in range(draws):
        own, common = source.standard_normal((samples, 4)), source.standard_normal((samples, 1))
        logs = math.sqrt(1 - together) * own + math.sqrt(together) * common
        wrong += judge_curve(limit, means * np.exp(sigma * logs - sigma**2 / 2), curve(4)).safe is not None
    assert wrong / draws <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / draws)


def test_a_drop_is_in_points_and_its_bound_that_of_a_bet() -> None:
    score = np.ones((400, 2, 5))
    score[:40, 0] = 0.5  # of attention a tenth of the answers is half right: 5 points
    found = pk.safe_budget(swept(score=score), max_drop=8)
    (attention, two_stage) = (one.verdicts[0].budgets[0] for one in found)
    assert (attention.mean, two_stage.mean) == (pytest.approx(0.05), 0)
    assert 0.05 < attention.bound <= 0.08
    assert two_stage.bound == pytest.approx(1 - 40 ** (-1 / 400), rel=0.1)  # half of the capital at the largest stake
    assert (found.exit_code, [str(one.safe.config.budget) for one in found if one.safe]) == (0, ["0.1", "0.1"])
    assert "mean drop of the score ≤ 8 points" in found.conclusion()
    few = pk.safe_budget(swept(score=score[40:80]), max_drop=1)
    assert few.exit_code == 2
    enough = few[0].verdicts[0].samples_for
    assert enough is not None
    assert math.log(20) / -math.log(0.99) < enough <= math.log(40) / -math.log(0.99) + 1
    assert [(case.verdict, case.text.rpartition(", ")[2]) for case in (one.case() for one in few)] == [
        (verdicts.FEW, f"n = {one[0].samples_for:,} would do") for one in (few[0].verdicts, few[1].verdicts)
    ]


def test_the_same_token_is_a_share_of_samples_or_of_the_steps_that_each_has() -> None:
    single = np.ones((40, 2, 5, 1))
    single[:4, 0, 0] = 0
    (told, _) = pk.safe_budget(swept(same=single), min_top1=0.85)
    assert told.verdicts[0].budgets[-1].mean == 0.9
    assert told.verdicts[0].budgets[0].bound == pytest.approx(0.05 ** (1 / 40))  # exact
    assert told.safe is not None
    assert told.safe.config.budget.value == 0.2  # 0.9 of 40 may be 0.79
    steps = np.ones((40, 2, 5, 4))
    steps[:, :, :, 3] = 0
    made = swept(same=steps)
    made.arrays["steps_measured"] = np.full(40, 3)  # type: ignore[index]
    (short, _) = pk.safe_budget(made, min_top1=0.85)
    assert short.verdicts[0].budgets[0].mean == 1


def test_of_several_limits_all_must_hold_and_the_worst_is_the_exit_code() -> None:
    kl = np.empty((40, 2, 5))
    kl[:, 0] = levels(0.5, 0.04, 0.03, 0.02, 0.01)
    kl[:, 1] = levels(0.9, 0.8, 0.7, 0.6, 0.5, seed=1)
    same = np.ones((40, 2, 5, 1))
    same[:20, 0, :2] = 0
    found = pk.safe_budget(swept(kl, same=same), max_kl=0.1, min_top1=0.9)
    assert [str(one.safe.config.budget) for one in found[0].verdicts if one.safe] == ["0.2", "0.4"]
    assert found[0].safe is not None
    assert (str(found[0].safe.config.budget), found[0].state) == ("0.4", SAFE)
    assert (found[1].safe, found[1].state, found.exit_code) == (None, NONE, 1)
    assert found.conclusion().startswith(
        "attention has a safe budget: 0.4 or more; two-stage has no safe budget: at 0.8, the largest, mean KL is 0.5 "
        "(safe: mean KL ≤ 0.1 nat and "
    )
    alone = pk.safe_budget(swept(kl, same=same), max_kl=0.1, sides="attention")
    assert (len(alone), alone.exit_code) == (1, 0)
    assert len(pk.safe_budget(swept(kl, same=same), max_kl=0.1, sides=["snapkv", "attention"])) == 2  # each once
    fewer = pk.safe_budget(swept(kl[:6] / 6, same=same[:6]), min_top1=0.9)
    assert fewer.exit_code == 2
    tenth = pk.safe_budget(swept(kl[:4], same=same[:4]), max_kl=0.1, sides="attention")
    assert (tenth[0].state, tenth[0].verdicts[0].budgets[0].bound) == (FEW, math.inf)
    assert tenth.to_dict()["selections"][0]["verdicts"][0]["budgets"][0]["bound"] is None


def test_steps_past_the_end_of_a_text_and_numbers_under_rounding_do_not_count() -> None:
    made = swept(np.zeros((8, 2, 5)), same=np.ones((8, 2, 5, 3)))
    kl = made.arrays["logit_kl"]
    made.arrays["steps_measured"] = np.full(8, 2)  # type: ignore[index]
    kl[:, :, 0], kl[:, :, 1], kl[:, :, 2] = 0.02, 0.04, np.nan  # type: ignore[call-overload]
    found = pk.safe_budget(made, max_kl=0.1)
    assert [one.mean for one in found[0].verdicts[0].budgets] == pytest.approx([0.03] * 5)
    quiet = pk.safe_budget(swept(np.zeros((8, 2, 5))), max_kl=0.1)
    assert quiet[0].verdicts[0].budgets[0].mean == pytest.approx(1e-9)  # the floor


def test_of_too_few_samples_the_headline_says_that_nothing_can_be_told_and_how_many_have_a_bound() -> None:
    kl = np.stack([levels(0.5, 0.04, 0.03, 0.02, 0.01, samples=3)] * 2, axis=1)
    found = pk.safe_budget(swept(kl), max_kl=0.1)
    assert found.conclusion().startswith(
        "Too few samples to decide whether attention has a safe budget: at 0.8, the largest, mean KL is 0.01, n ≥ 5 "
        "has a bound; "
    )
    assert found.scope() == [
        "safe: mean KL ≤ 0.1 nat, which bounds no answer",
        "95 % bounds, of KL if lognormal",
        "n = 3 samples",
    ]
    assert [one.verdicts[0].failure for one in found] == ["0.8: 0.01;\nn ≥ 5 has a bound"] * 2
    assert "∞" not in repr(found)
    assert "n unknown" not in repr(found)
    none = pk.safe_budget(swept(np.stack([levels(5, 4, 3, 2, 1)] * 2, axis=1)), max_kl=0.1)
    assert [one.safe for one in none] == [None, None]


def test_the_level_of_a_kl_bound_names_what_it_assumes_and_the_share_above_the_limit_is_exact() -> None:
    kl = np.stack([levels(0.5, 0.04, 0.03, 0.02, 0.01)] * 2, axis=1)
    kl[:3, :, 4] = 0.2
    found = pk.safe_budget(swept(kl), max_kl=0.3)
    for said in (found.conclusion(), found.notes()):
        assert "of KL if lognormal" in said
    smaller = pk.safe_budget(swept(kl), max_kl=0.15)[0].verdicts[0].budgets[0]
    assert smaller.above is not None
    exact = stats.binomtest(3, 40, alternative="less").proportion_ci(0.95, method="exact").high
    assert smaller.above == pytest.approx(exact)
    (safe,) = {one.safe.above for one in found if one.safe is not None}
    assert found[0].verdicts[0].above_shown == f"≤ {100 * (1 - 0.05 ** (1 / 40)):.0f} %"
    assert safe == pytest.approx(1 - 0.05 ** (1 / 40))
    drop = pk.safe_budget(swept(score=np.ones((40, 2, 5))), max_drop=20)
    assert "lognormal" not in repr(drop)
    assert drop[0].verdicts[0].budgets[0].above is None


def test_the_room_that_samples_without_a_loss_leave_is_the_bound_shown_beside_it() -> None:
    for samples in (8, 40):
        found = pk.safe_budget(swept(score=np.ones((samples, 2, 5))), max_drop=60)
        bound = 100 * found[0].verdicts[0].budgets[0].bound
        assert f"{samples} samples without any loss leave room for {bound:.3g} points" in str(found.details())
        assert found[0].verdicts[0].mean_shown == f"0 (≤ {bound:.3g})"


def test_limits_of_single_steps_are_not_taken_for_whole_answers() -> None:
    kl, score = np.full((8, 2, 5), 0.01), np.zeros((8, 2, 5))
    made = swept(kl, score=score)  # the next token is safe, and every answer is lost
    said = (
        "mean KL ≤ 0.1 nat, which bounds no answer; ",
        "mean share of the same token ≥ 0.1, which bounds no answer; ",
    )
    assert said[0] in pk.safe_budget(made, max_kl=0.1).conclusion()
    made.arrays["top1_agreement"] = np.ones_like(made.arrays["top1_agreement"])  # type: ignore[index]
    assert said[1] in pk.safe_budget(made, min_top1=0.1).conclusion()
    assert "bounds no answer" not in pk.safe_budget(made, max_kl=0.1, max_drop=50).conclusion()


def test_a_budget_that_never_fails_is_not_one_that_was_not_measured() -> None:
    kl = np.stack([levels(0.05, 0.04, 0.03, 0.02, 0.01)] * 2, axis=1)
    found = pk.safe_budget(swept(kl), max_kl=0.1)
    assert [(one.verdicts[0].first_failure, one.verdicts[0].failure) for one in found] == [(None, "none")] * 2


def test_caches_that_hold_more_than_the_full_one_are_explained_where_they_stand() -> None:
    kl = np.stack([levels(0.5, 0.04, 0.03, 0.02, 0.01)] * 2, axis=1)
    made = swept(kl, moved=kl, score=np.clip(1 - kl, 0, 1))
    said = "Cache shares above 1 save nothing: each query head keeps its own set."
    assert said not in pk.safe_budget(made, max_kl=0.1).notes()
    made.arrays["held_share"] = 3 * np.asarray(made.arrays["held_share"])  # type: ignore[index]
    assert said in pk.safe_budget(made, max_kl=0.1).notes()


def test_bytes_are_those_of_the_length_and_batch_asked_for() -> None:
    kl = np.stack([levels(0.5, 0.04, 0.03, 0.02, 0.01)] * 2, axis=1)
    found = pk.safe_budget(swept(kl), max_kl=0.1, for_length=2000, for_batch=3)
    told = found.to_dict()
    whole = TOKEN_BYTES * 2000 * 3
    assert told["cache"]["full_bytes"] == pytest.approx(whole)
    assert told["selections"][0]["evicted_bytes"] == pytest.approx(0.2 * whole)
    entries = pk.safe_budget(swept(kl, budgets=(50, 100, 200, 300, 400)), max_kl=0.1, for_length=2000, for_batch=3)
    assert entries.to_dict()["selections"][0]["evicted_bytes"] == pytest.approx(100 / 2000 * whole)
    short = pk.safe_budget(swept(kl, budgets=(50, 100, 200, 300, 400)), max_kl=0.1, for_length=80)
    assert short.to_dict()["selections"][0]["evicted_bytes"] == pytest.approx(TOKEN_BYTES * 80)  # evicts nothing
    assert "caches of 2,000 entries × 3" in repr(found)


@pytest.mark.slow
def test_what_cannot_be_asked_is_one_line() -> None:
    kl = np.ones((8, 2, 5))
    for limits, words in (
        ({}, r"expected what a safe budget may cost, got nothing; give max_kl \(--max-kl 0.1\)"),
        ({"max_kl": 0.0}, "above 0, finite \\(nat\\), got 0"),
        ({"max_kl": float("nan")}, "above 0, finite \\(nat\\), got nan"),
        ({"max_kl": float("inf")}, "above 0, finite \\(nat\\), got inf"),
        ({"max_drop": -1.0}, "above 0 and below 100 \\(points of 100\\), got -1"),
        ({"min_top1": 99}, "above 0 and below 1 \\(a share of tokens, such as 0.99\\), got 99"),
        ({"max_kl": "much"}, "got much"),
        ({"max_kl": 1.0, "for_length": 0}, "at least 1, got 0"),
        ({"max_kl": 1.0, "for_batch": 2}, "no effect without for_length"),
    ):
        with pytest.raises(ConfigError, match=words):
            pk.safe_budget(swept(kl), **limits)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="budget needs graded answers, made.h5 has none"):
        pk.safe_budget(swept(kl), max_drop=1)
    with pytest.raises(TraceError, match="answers none of the 8 prompts of made.h5 .*nothing that eviction can lose"):
        pk.safe_budget(swept(score=np.zeros((8, 2, 5)), full=0.0), max_drop=5)
    with pytest.raises(TraceError, match="expected configurations of 'h2o'"):
        pk.safe_budget(swept(kl), max_kl=1, sides="h2o")
    with pytest.raises(ConfigError, match=r"of one kind, got 0.8 \(share of the prompt\) and 200 \(entries\)"):
        pk.safe_budget(swept(kl, budgets=(0.4, 0.8, 64, 100, 200)), max_kl=1)
    with pytest.raises(TraceError, match="expected a trace, as pk.read_trace or pk.measure give it; got str"):
        pk.safe_budget("t.h5", max_kl=1)  # type: ignore[arg-type]


def test_a_row_of_the_frame_per_selection_limit_and_budget() -> None:
    kl = np.stack([levels(0.5, 0.04, 0.03, 0.02, 0.01)] * 2, axis=1)
    frame = pk.safe_budget(swept(kl), max_kl=0.1).to_frame()
    assert len(frame) == 10
    first = frame[frame["selection"].str.startswith("attention")]
    assert first["budget"].tolist() == [str(budget) for budget in BUDGETS[::-1]]
    assert first["holds"].tolist() == [1] * 4 + [0]


def test_the_example_of_the_docstring_works() -> None:
    module = importlib.import_module("perturbkv.analyses.budget.safe_budget")
    ran = doctest.testmod(module, extraglobs={"trace": swept(np.ones((8, 2, 5)), budgets=(40, 48, 56, 60, 64))})
    assert (ran.attempted > 0, ran.failed) == (True, 0)
