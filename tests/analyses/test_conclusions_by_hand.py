"""The first line of a screen: what it says where a result is better, worse, undecided, of few samples or of one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.ablation.ablation import Ablation, ablation
from perturbkv.analyses.bounds.assumption import assumption
from perturbkv.analyses.bounds.bound_tightness import bound_tightness
from perturbkv.analyses.horizon.horizon import horizon
from perturbkv.analyses.needle.needle import Needle, needle
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.analyses.text import (
    ALIKE,
    FEW,
    LESS,
    MORE,
    UNDECIDED,
    Case,
    comparison,
    difference,
    extremes,
    interval_verdict,
    sample_note,
    tally,
)
from perturbkv.trace import Trace
from tests.analyses.test_ablation_by_hand import CHAIN
from tests.analyses.test_ablation_by_hand import made as chain
from tests.analyses.test_bounds_by_hand import THREE, one_config
from tests.analyses.test_bounds_by_hand import ranked as bounds
from tests.analyses.test_needle_and_horizon_by_hand import growing, ranked
from tests.analyses.test_needle_and_horizon_by_hand import made as answers
from tests.support.measured import config, hand_made

NAMES = ("attention", "two-stage-uniform", "two-stage")


def sigmas(values: Any, samples: int = 8, budgets: tuple[float, ...] = (64,)) -> Trace:
    """Four layers of eight heads; `values` (config, layer) of σ, the same in every sample and head."""
    whole = np.broadcast_to(np.asarray(values)[None, :, :, None], (samples, len(budgets), 4, 8)).astype(float)
    names = ("sigma_stage1", "sigma_topk", "retained_mass")
    configs = [config("two-stage", budget) for budget in budgets]
    return hand_made(configs, dict.fromkeys(names, whole), layers=4, heads=8)


@pytest.mark.parametrize(
    ("values", "share", "verdict", "weak"),
    [
        ([0.4, 0.9, 0.9, 0.9], 0.75, 1, {0: 8}),
        ([0.4, 0.4, 0.4, 0.9], 0.25, -1, {0: 8, 1: 8, 2: 8}),
        ([0.4, 0.4, 0.9, 0.9], 0.5, 0, {0: 8, 1: 8}),
    ],
)
def test_the_assumption_is_judged_by_the_interval_of_the_share(
    values: list[float], share: float, verdict: int, weak: dict[int, int]
) -> None:
    result = assumption(sigmas([values]))
    reading = result.configs[0].sigma_stage1
    assert (reading.share, interval_verdict(reading.share_interval, 0.5)) == (share, verdict)
    assert Counter(head.layer for head in reading.weak_heads) == weak
    table = result.table()
    (row,) = (dict(zip(result.SHOWN[1:], cells[-4:], strict=True)) for cells in table.rows)
    assert row["stage1_share"].startswith(f"{100 * share:.0f} %\n[")
    assert row["weak_count"] == f"{sum(weak.values())} of 32"


def test_the_conclusion_of_the_assumption_names_verdict_share_n_and_where_it_fails() -> None:
    said = assumption(sigmas([[0.4, 0.9, 0.9, 0.9]])).conclusion()
    assert said.startswith("The paper's assumption holds in most heads: the first stage of two-stage keeps more than ")
    assert "in 75 % [" in said
    assert said.endswith("of heads (n = 8 samples); 8 heads of 32 fail, in layer 0.")
    both = assumption(sigmas([[0.4] * 4, [0.9] * 4], budgets=(64, 128))).conclusion()
    assert both.startswith("Whether the paper's assumption holds in most heads depends on the budget: ")
    assert both.endswith("all 32 heads fail at b=64.")


@pytest.mark.parametrize("samples", [1, 4])
def test_few_samples_judge_no_assumption(samples: int) -> None:
    result = assumption(sigmas([[0.4, 0.9, 0.9, 0.9]], samples))
    assert interval_verdict(result.configs[0].sigma_stage1.share_interval, 0.5) is None
    assert result.conclusion().startswith("The first stage of two-stage keeps more than half of the attention in 75 %")


def test_the_conclusion_names_the_selection_that_was_asked_for() -> None:
    trace = sigmas([[0.9] * 4])
    assert "the first stage of snapkv keeps" in assumption(trace, "snapkv").conclusion()


def test_a_bound_is_told_by_how_far_it_lies_above_and_how_it_orders() -> None:
    said = bound_tightness(one_config()).conclusion()  # L/θ̂ of 1/4, 1/4 and 3/5: quantiles 0.25 and 0.565
    assert said.startswith(
        "The paper's bound θ̂ covers 75 % (50 … 100) of heads and is 4.0 × (1.8 to 4.0) the perturbation of two-stage "
    )
    assert "nine heads in ten; n = 2 samples" in said
    assert said.endswith("cannot be said: θ̂ compares selections of one stage 1, two-stage and two-stage-uniform.")


@pytest.mark.parametrize(
    ("theta", "share", "verdict", "words"),
    [
        ([[10, 20, 30]] * 8, 1, 1, "the one with the lower θ̂ perturbs less in most heads: 100 % ["),
        ([[10, 30, 20]] * 8, 0, -1, "the one with the lower θ̂ perturbs more in most heads: 0 % ["),
        ([[10, 20, 30], [10, 30, 20]] * 4, 0.5, 0, "whether θ̂ tells which of two-stage and two-stage-uniform perturbs"),
    ],
)
def test_a_bound_orders_the_two_selections_of_one_stage_1_or_not(
    theta: Any, share: float, verdict: int, words: str
) -> None:
    result = bound_tightness(bounds([[1, 2, 3]] * len(theta), theta))
    (pair,) = [one for one in result.agreements[0].pairs if one.bound == "θ̂"]
    assert (pair.share, pair.samples) == (share, 8)
    assert interval_verdict(pair.share_interval, 0.5) == verdict
    assert words in result.conclusion()
    assert "whether θ̂ tells this more often than the attention given up, 1 − S, is undecided" in result.conclusion()
    assert "undecided: 0.0 [−36.9, 36.9] points" in result.conclusion()  # eight alike: 1 − 0.025^(1/8) may differ


def test_four_samples_say_nothing_of_the_order() -> None:
    result = bound_tightness(bounds([[1, 2, 3]] * 4, [[10, 20, 30]] * 4))
    assert all(np.isnan(one.agreement) for one in result.agreements[0].pairs)
    assert result.conclusion().endswith("cannot be said: too few samples hold heads in which σ > 0.5 and both differ.")


def test_a_bound_that_says_nothing_is_said_to() -> None:
    flagged = bound_tightness(bounds([[1, 2, 3]] * 5, [[10, 20, 30]] * 5, sigma=0.5))
    assert [one.flagged_share for one in flagged.configs] == [1, 1, 1]
    assert flagged.conclusion().startswith("There is no bound to judge for two-stage: stage 1 keeps at most half")
    nothing = bounds([[1, 2, 3]] * 5, [[10, 20, 30]] * 5, configs=THREE)
    nothing.arrays["evicted"][:] = 0  # type: ignore[index]
    result = bound_tightness(nothing)
    assert [one.evicted_samples for one in result.configs] == [0, 0, 0]
    assert "for two-stage: nothing was evicted; " in result.conclusion()


def test_a_gain_is_taken_apart() -> None:
    said = ablation(chain(CHAIN, [10, 8, 6, 3, 1], samples=8)).conclusion()
    assert said == (
        "two-stage perturbs 70 % [70, 70] less than attention; un-pooling by itself: 40 % [40, 40] less; the value "
        "norms on top of it: 50 % [50, 50] less (propagated, all heads; n = 8 samples)."
    )


def test_a_loss_is_told_as_one() -> None:
    result = ablation(chain([config(name) for name in NAMES], [10, 9, 12], samples=8))
    assert verdicts(result) == ([MORE], [LESS], [MORE])


def verdicts(result: Ablation) -> tuple[list[str], ...]:
    """Of two stages over the baseline, of un-pooling, and of the value norms on top of it."""
    cases = (result.cases("two-stage"), *(result.cases(name, "brings") for name in ("un-pooling", "the value norms ν")))
    return tuple([case.verdict for case in each] for each in cases)


def varying(factors: Any) -> Trace:
    """`factors` (sample,): the last selection's perturbation over the first's, propagated."""
    trace = chain([config(name) for name in NAMES], [10, 10, 10], samples=len(factors))
    trace.arrays["perturbation_propagated"][:, 2] *= np.reshape(factors, (-1, 1, 1, 1))  # type: ignore[index]
    return trace


def test_a_gain_in_half_of_the_samples_is_undecided() -> None:
    assert verdicts(ablation(varying([0.5, 1.6] * 4))) == ([UNDECIDED], [ALIKE], [UNDECIDED])


@pytest.mark.parametrize("factors", [[0.5], [0.4, 0.6]])
def test_few_samples_tell_a_gain_without_a_verdict(factors: list[float]) -> None:
    result = ablation(varying(factors))
    assert verdicts(result) == ([FEW], [ALIKE], [FEW])
    (case,) = result.cases("two-stage")
    assert case.ratio == pytest.approx(0.5)
    assert case.interval == (None if len(factors) == 1 else Interval(pytest.approx(0.4), pytest.approx(0.6), "range"))


def test_settings_are_counted_and_both_ends_told() -> None:
    configs = [config(name, budget) for budget in (64, 128) for name in NAMES]
    result = ablation(chain(configs, [10, 9, 5, 10, 11, 12], samples=8))
    assert verdicts(result) == ([LESS, MORE], [LESS, MORE], [LESS, MORE])
    assert [case.name for case in result.cases("two-stage")] == ["b=64", "b=128"]


def test_a_trace_without_the_two_stages_speaks_of_what_it_holds() -> None:
    result = ablation(chain([config("attention"), config("value")], [4, 6], samples=8))
    assert [case.verdict for case in result.cases("value")] == [MORE]
    assert result.conclusion().startswith("value perturbs 50 % [50, 50] more than attention")


def test_a_baseline_that_perturbs_nothing_is_compared_with_nothing() -> None:
    said = ablation(chain(CHAIN, [0] * 5, samples=8)).conclusion()
    assert said.startswith("two-stage cannot be compared with attention: too little is perturbed (")


def led(first: float, last: float, samples: int = 8) -> Trace:
    """Two-stage's perturbation over attention's in the first four and in the last two of six steps."""
    trace = growing(samples)
    moved = trace.arrays["perturbation_propagated"]
    moved[:, 1, :4] *= first  # type: ignore[index]
    moved[:, 1, 4:] *= last  # type: ignore[index]
    return trace


@pytest.mark.parametrize(("last", "verdict"), [(0.75, LESS), (1.25, MORE)])
def test_an_advantage_lasts_or_turns(last: float, verdict: str) -> None:
    result = horizon(led(0.5, last))
    (advantage,) = result.advantages
    assert [case.verdict for case in advantage.cases()] == [LESS, verdict]
    assert (advantage.first_ratio, advantage.last_ratio) == pytest.approx((0.5, last))
    assert result.to_dict()["advantages"][0]["last"] == pytest.approx(last)
    table = result.table()
    (baseline, treatment) = (dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows)
    assert (baseline["#first third\n/ baseline"], baseline["#last third\n/ baseline"]) == ("", "")
    assert treatment["#first third\n/ baseline"] == "0.50\n[0.50, 0.50]"
    assert treatment["#last third\n/ baseline"] == f"{last:.2f}\n[{last:.2f}, {last:.2f}]"


def test_an_advantage_and_growth_are_one_sentence() -> None:
    assert horizon(led(0.5, 0.75)).conclusion() == (
        "two-stage perturbs 50 % [50, 50] less than attention in the first third of 6 decode steps; it perturbs 25 % "
        "[25, 25] less than attention in the last third; the error grows in both configurations, last third over "
        "first: 1.12 × [1.12, 1.13] of attention to 1.69 × [1.69, 1.69] of two-stage (n = 8 samples)."
    )


def test_an_advantage_of_some_samples_is_undecided() -> None:
    trace = led(0.5, 1)
    trace.arrays["perturbation_propagated"][::2, 1, 4:] *= 1.5  # type: ignore[index]
    trace.arrays["perturbation_propagated"][1::2, 1, 4:] *= 0.5  # type: ignore[index]
    (advantage,) = horizon(trace).advantages
    assert [case.verdict for case in advantage.cases()] == [LESS, UNDECIDED]


@pytest.mark.parametrize("samples", [1, 4])
def test_few_samples_decide_no_advantage_and_no_growth(samples: int) -> None:
    result = horizon(led(0.5, 0.75, samples))
    (advantage,) = result.advantages
    assert [case.verdict for case in advantage.cases()] == [FEW, FEW]
    assert (advantage.first_ratio, advantage.last_ratio) == pytest.approx((0.5, 0.75))
    growth = [config.curves["propagated"].growth_interval for config in result.configs]
    assert [interval_verdict(interval, 1) for interval in growth] == [None, None]
    assert "the error changes, last third over first: " in result.conclusion()


def test_growth_alone_and_growth_within_rounding() -> None:
    alone = horizon(growing(8), "attention").conclusion()
    assert alone == "The error grows, last third over first: 1.12 × [1.12, 1.13] (n = 8 samples)."
    rounding = horizon(growing(8, floor=9.0))
    assert [np.isnan(one.first_ratio) for one in rounding.advantages] == [True]
    assert "two-stage cannot be compared with attention in the first third" in rounding.conclusion()
    assert np.isnan([config.curves["propagated"].growth for config in rounding.configs]).all()
    assert rounding.caveats()[0] == "A dash: within two noise floors."


def needles(scores: Any, moved: Any, full: Any = None) -> Trace:
    return ranked(scores, full or [1] * len(scores), [moved] * len(scores))


def test_a_needle_is_found_by_the_best_and_the_worst() -> None:
    said = needle(needles([[1, 1, 0]] * 8, [0.1, 0.2, 0.9])).conclusion()
    assert said.startswith(
        "two-stage finds 100 % [63, 100] of the numbers, random 0 % [0, 37]; the full cache finds 100 % [63, 100] "
        "(n = 8 prompts); methods that perturb a prompt's first step more find fewer digits: ρ = −0.87 ["
    )
    assert said.endswith("(n = 8 deciding prompts).")


def verdict(result: Needle) -> tuple[float, int | None]:
    """ρ of propagated perturbation with the digits, and on which side of 0 its interval lies."""
    (budget,) = result.correlation.budgets
    return round(budget.principal().rho, 2), interval_verdict(budget.principal().rho_interval, 0)


def test_perturbation_predicts_misleads_or_decides_nothing() -> None:
    assert verdict(needle(needles([[1, 1, 0]] * 8, [0.1, 0.2, 0.9]))) == (-0.87, -1)
    assert verdict(needle(needles([[1, 1, 0]] * 8, [0.9, 0.8, 0.1]))) == (0.87, 1)
    assert verdict(needle(needles([[1, 0, 0], [0, 1, 1]] * 4, [0.1, 0.2, 0.9])))[1] == 0
    alike = needle(needles([[1, 1, 1]] * 8, [0.1, 0.2, 0.9]))
    assert [budget.principal().deciding for budget in alike.correlation.budgets] == [0]
    assert "no two methods of a prompt differ" in alike.conclusion()


def test_methods_whose_intervals_overlap_say_so() -> None:
    assert "(their intervals overlap)" in needle(needles([[1, 0, 0]] + [[1, 1, 1]] * 7, [0.1, 0.2, 0.9])).conclusion()
    equal = needle(needles([[1, 0, 0], [0, 1, 1]] * 4, [0.1, 0.2, 0.9]))
    assert {method.score for method in equal.methods} == {0.5}
    assert "overlap" not in equal.conclusion()


def test_few_prompts_decide_nothing_and_two_methods_have_no_ranks() -> None:
    single = needle(needles([[1, 1, 0]], [0.1, 0.2, 0.9]))
    assert verdict(single) == (-0.87, None)
    assert "too few samples to decide" in single.conclusion()
    two = needle(answers([[1, 0]], [1], [[0.1, 0.2]]))
    assert two.correlation.budgets == ()
    assert "too few methods share a budget" in two.conclusion()


def test_a_full_cache_that_finds_nothing_has_nothing_to_lose() -> None:
    result = needle(needles([[0, 0, 0]] * 8, [0.1, 0.2, 0.9], full=[0] * 8))
    assert (result.full.score, result.correlation.samples) == (0, 0)
    assert "nothing that eviction can lose" in result.conclusion()


def test_parts_of_sentences() -> None:
    assert [sample_note(number) for number in (1, 4, 8)] == [
        "one sample: no interval", "n = 4 samples: ranges, too few for intervals", "n = 8 samples"]  # fmt: skip
    assert difference(0.83, Interval(0.78, 0.88)) == "17 % [12, 22] less"
    assert difference(3.1, Interval(2.4, 4.0)) == "210 % [140, 300] more"
    assert [interval_verdict(Interval(*found), 1) for found in ((0.5, 0.9), (0.9, 1.1), (1.1, 2))] == [-1, 0, 1]
    assert interval_verdict(Interval(0.5, 0.9, "range"), 1) is interval_verdict(None, 1) is None
    words = {1: ("it grows", "grows"), 0: ("undecided", "undecided")}
    assert tally([1, 0, 0], words, "case") == "undecided in 2 of 3 cases, grows in 1"
    assert tally([1, 1], words, "case") == "it grows in both cases"
    assert extremes([("a", 2.0, "two"), ("b", 1.0, "one"), ("c", float("nan"), "–")]) == "one at b to two at a"
    assert comparison("a", "b", [Case("", 1.0, None)]) == "a perturbs as much as b, up to rounding"
    ends = ((0.5, 0.9), (0.9, 1.1), (1.1, 2))
    cases = [Case("", 1.01, Interval(*pair)) for pair in ends] + [Case("", 0.7, None), Case("", 0.7, None, tied=True)]
    assert [case.verdict for case in cases] == [LESS, UNDECIDED, MORE, FEW, ALIKE]


@pytest.mark.parametrize("kind", ["range", "interval"])
def test_what_rounds_to_nothing_is_no_difference(kind: str) -> None:
    """It read '0 % (0 … 0) more'; with an end that is seen, or a case that is, the numbers stand."""
    near, seen = Interval(0.996, 1.004, kind), Interval(0.99, 1.002, kind)
    assert comparison("a", "b", [Case("", 1.003, near)], " there") == "a perturbs as much as b there, within 0.5 %"
    assert comparison("a", "b", [Case("x", 1.003, near), Case("y", 0.997, None)]).endswith("as much as b, within 0.5 %")
    assert "within" not in comparison("a", "b", [Case("", 0.998, seen)])
    assert "within" not in comparison("a", "b", [Case("x", 1.003, near), Case("y", 1.2, Interval(1.1, 1.3, kind))])
