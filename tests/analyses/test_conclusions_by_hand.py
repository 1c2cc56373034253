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
from perturbkv.analyses.verdicts import ALIKE, FEW, LESS, MORE, UNDECIDED, interval_side
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
    assert (reading.share, interval_side(reading.share_interval, 0.5)) == (share, verdict)
    assert Counter(head.layer for head in reading.weak_heads) == weak
    table = result.table()
    (row,) = (dict(zip(result.SHOWN[1:], cells[-4:], strict=True)) for cells in table.rows)
    assert row["stage1_share"].startswith(f"{100 * share:.0f} %\n[")
    assert row["weak_count"] == f"{sum(weak.values())} of 32"


def test_the_conclusion_of_the_assumption_names_verdict_share_and_n() -> None:
    assert assumption(sigmas([[0.4, 0.9, 0.9, 0.9]])).conclusion() == (
        "The paper's assumption holds in most heads: 75 % [59, 91] (heads with σ > 0.5 in the first stage of "
        "two-stage; n = 8 samples)."
    )
    (both,) = assumption(sigmas([[0.4] * 4, [0.9] * 4], budgets=(64, 128))).claims()
    assert [(case.name, case.value, case.verdict) for case in both.cases] == [("b=64", 0, LESS), ("b=128", 1, MORE)]


@pytest.mark.parametrize("samples", [1, 4])
def test_few_samples_judge_no_assumption(samples: int) -> None:
    result = assumption(sigmas([[0.4, 0.9, 0.9, 0.9]], samples))
    assert interval_side(result.configs[0].sigma_stage1.share_interval, 0.5) is None
    assert [case.verdict for case in result.claims()[0].cases] == [FEW]


def test_the_conclusion_names_the_selection_that_was_asked_for() -> None:
    assert assumption(sigmas([[0.9] * 4]), "snapkv").scope()[0] == "heads with σ > 0.5 in the first stage of snapkv"


def test_a_bound_is_told_by_how_far_it_lies_above_and_how_it_orders() -> None:
    assert bound_tightness(one_config()).conclusion() == (  # L/θ̂ of 1/4, 1/4 and 3/5: quantiles 0.25 and 0.565
        "The ratio of the paper's bound θ̂ to the perturbation of two-stage is 4.0 × (1.8 to 4.0); "
        "whether the one of two-stage and two-stage-uniform with the lower θ̂ perturbs less in most heads cannot "
        "be said: the trace lacks one of them (median over heads with σ > 0.5, nine in ten in parentheses; n = 2 "
        "samples: ranges, too few for intervals)."
    )


@pytest.mark.parametrize(
    ("theta", "share", "verdict"),
    [
        ([[10, 20, 30]] * 8, 1, MORE),
        ([[10, 30, 20]] * 8, 0, LESS),
        ([[10, 20, 30], [10, 30, 20]] * 4, 0.5, UNDECIDED),
    ],
)
def test_a_bound_orders_the_two_selections_of_one_stage_1_or_not(theta: Any, share: float, verdict: str) -> None:
    result = bound_tightness(bounds([[1, 2, 3]] * len(theta), theta))
    (pair,) = [one for one in result.agreements[0].pairs if one.bound == "θ̂"]
    assert (pair.share, pair.samples) == (share, 8)
    _, order, gain = result.claims()
    assert [(case.value, case.verdict) for case in order.cases] == [(share, verdict)]
    # eight alike: 1 − 0.025^(1/8) may differ
    assert [(case.verdict, case.text) for case in gain.cases] == [(UNDECIDED, "0.0 [−36.9, 36.9] points")]


def test_four_samples_say_nothing_of_the_order() -> None:
    result = bound_tightness(bounds([[1, 2, 3]] * 4, [[10, 20, 30]] * 4))
    assert all(np.isnan(one.agreement) for one in result.agreements[0].pairs)
    order = result.claims()[-1]
    assert (order.cases, order.missing) == ([], "too few samples hold heads in which σ > 0.5 and both differ")


def test_a_bound_that_says_nothing_is_said_to() -> None:
    flagged = bound_tightness(bounds([[1, 2, 3]] * 5, [[10, 20, 30]] * 5, sigma=0.5))
    assert [one.flagged_share for one in flagged.configs] == [1, 1, 1]
    assert flagged.conclusion().startswith(
        "Nothing can be said of the ratio of the paper's bound θ̂ to the perturbation of two-stage: stage 1 keeps at "
        "most half of the attention in every head"
    )
    nothing = bounds([[1, 2, 3]] * 5, [[10, 20, 30]] * 5, configs=THREE)
    nothing.arrays["evicted"][:] = 0  # type: ignore[index]
    result = bound_tightness(nothing)
    assert [one.evicted_samples for one in result.configs] == [0, 0, 0]
    assert result.claims()[0].missing == "nothing was evicted"


def test_a_gain_is_taken_apart() -> None:
    said = ablation(chain(CHAIN, [10, 8, 6, 3, 1], samples=8)).conclusion()
    assert said == (
        "two-stage perturbs 70 % [70, 70] less than attention; two-stage-uniform (un-pooling alone) perturbs 40 % "
        "[40, 40] less than attention; two-stage (value norms added) perturbs 50 % [50, 50] less than "
        "two-stage-uniform (propagated, all heads; n = 8 samples)."
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
    (kind,) = (row.propagated for row in result.settings[0].rows if row.name == "two-stage")
    assert kind.sum_ratio == result.cases("two-stage")[0].value == pytest.approx(0.5)
    ends = None if len(factors) == 1 else Interval(pytest.approx(0.4), pytest.approx(0.6), "range")
    assert kind.sum_ratio_interval == ends


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
    assert said.startswith("Whether two-stage perturbs less than attention cannot be said: too little is perturbed; ")


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
        "two-stage perturbs 50 % [50, 50] less than attention in the first third; two-stage perturbs 25 % [25, 25] "
        "less than attention in the last third; the error grows from the first third to the last in both "
        "configurations: 1.12 × [1.12, 1.13] at attention to 1.69 × [1.69, 1.69] at two-stage (propagated, all heads; "
        "up to 6 decode steps; n = 8 samples)."
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
    assert [interval_side(interval, 1) for interval in growth] == [None, None]
    assert [case.verdict for case in result.claims()[-1].cases] == [FEW, FEW]


def test_growth_alone_and_growth_within_rounding() -> None:
    alone = horizon(growing(8), "attention").conclusion()
    assert alone == (
        "The error grows from the first third to the last: 1.12 × [1.12, 1.13] (propagated, all heads; up to 6 decode "
        "steps; n = 8 samples)."
    )
    rounding = horizon(growing(8, floor=9.0))
    assert [np.isnan(one.first_ratio) for one in rounding.advantages] == [True]
    assert rounding.conclusion().startswith("Whether two-stage perturbs less than attention in the first third cannot")
    assert "whether the error grows from the first third to the last cannot be said: it is within" in (
        rounding.conclusion()
    )
    assert np.isnan([config.curves["propagated"].growth for config in rounding.configs]).all()
    assert rounding.caveats()[0] == "A dash: within two noise floors."


def needles(scores: Any, moved: Any, full: Any = None) -> Trace:
    return ranked(scores, full or [1] * len(scores), [moved] * len(scores))


def test_a_needle_is_found_by_the_best_and_the_worst() -> None:
    said = needle(needles([[1, 1, 0]] * 8, [0.1, 0.2, 0.9])).conclusion()
    assert said.startswith(
        "An evicted cache finds the number in 0 % [0, 37] at random to 100 % [63, 100] at two-stage; the full cache "
        "finds it in 100 % [63, 100]; methods that perturb a prompt's first step more find fewer digits: ρ = −0.87 ["
    )
    assert said.endswith("(share of prompts; n = 8 prompts; ρ: n = 8 deciding prompts).")


def verdict(result: Needle) -> tuple[float, int | None]:
    """ρ of propagated perturbation with the digits, and on which side of 0 its interval lies."""
    (budget,) = result.correlation.budgets
    return round(budget.principal().rho, 2), interval_side(budget.principal().rho_interval, 0)


def test_perturbation_predicts_misleads_or_decides_nothing() -> None:
    assert verdict(needle(needles([[1, 1, 0]] * 8, [0.1, 0.2, 0.9]))) == (-0.87, -1)
    assert verdict(needle(needles([[1, 1, 0]] * 8, [0.9, 0.8, 0.1]))) == (0.87, 1)
    assert verdict(needle(needles([[1, 0, 0], [0, 1, 1]] * 4, [0.1, 0.2, 0.9])))[1] == 0
    alike = needle(needles([[1, 1, 1]] * 8, [0.1, 0.2, 0.9]))
    assert [budget.principal().deciding for budget in alike.correlation.budgets] == [0]
    assert alike.claims()[-1].missing == "no two methods of a prompt differ"
    assert alike.conclusion().endswith(
        "cannot be said: no two methods of a prompt differ (share of prompts; n = 8 prompts)."
    )


def test_few_prompts_decide_nothing_and_two_methods_have_no_ranks() -> None:
    single = needle(needles([[1, 1, 0]], [0.1, 0.2, 0.9]))
    assert verdict(single) == (-0.87, None)
    assert [case.verdict for case in single.claims()[-1].cases] == [FEW]
    two = needle(answers([[1, 0]], [1], [[0.1, 0.2]]))
    assert two.correlation.budgets == ()
    assert two.claims()[-1].missing == "too few methods share a budget"


def test_a_full_cache_that_finds_nothing_has_nothing_to_lose() -> None:
    result = needle(needles([[0, 0, 0]] * 8, [0.1, 0.2, 0.9], full=[0] * 8))
    assert (result.full.score, result.correlation.samples) == (0, 0)
    assert result.conclusion().startswith("Nothing can be said of evicted caches: the full cache finds no number, so ")
