"""The first line of a screen: what it says where a result is better, worse, undecided, of few samples or of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.ablation.ablation import ablation
from perturbkv.analyses.bounds.assumption import assumption
from perturbkv.analyses.bounds.bound_tightness import bound_tightness
from perturbkv.analyses.horizon.horizon import horizon
from perturbkv.analyses.needle.needle import needle
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.analyses.text import compared, decided, difference, extremes, over, tally_verdicts
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


def test_the_assumption_holds_in_most_heads_and_fails_in_the_first_layer() -> None:
    said = assumption(sigmas([[0.4, 0.9, 0.9, 0.9]])).conclusion()
    assert said.startswith("The paper's assumption holds in most heads: the first stage of two-stage keeps more than ")
    assert "in 75 % [" in said
    assert said.endswith("(n = 8 samples); most that fail are in layer 0 (8 of 8 heads).")


def test_an_assumption_that_fails_is_said_to_fail() -> None:
    said = assumption(sigmas([[0.4, 0.4, 0.4, 0.9]])).conclusion()
    assert said.startswith("The paper's assumption fails in most heads: ")
    assert "in 25 % [" in said
    assert said.endswith("24 heads of 32 fail, in 3 layers.")


def test_an_assumption_that_holds_in_half_the_heads_is_undecided() -> None:
    said = assumption(sigmas([[0.4, 0.4, 0.9, 0.9]])).conclusion()
    assert said.startswith("Whether the paper's assumption holds in most heads is undecided: ")


def test_budgets_of_which_one_fails_are_told_by_both_ends() -> None:
    said = assumption(sigmas([[0.4] * 4, [0.9] * 4], budgets=(64, 128))).conclusion()
    assert said.startswith("Whether the paper's assumption holds in most heads depends on the budget: ")
    assert "0 % [0, " in said
    assert "at b=64 to 100 % [" in said
    assert said.endswith("all 32 heads fail at b=64.")


@pytest.mark.parametrize(
    ("samples", "words"),
    [(1, "in 75 % of heads (one sample: no interval)"),
     (4, "in 75 % (75 … 75) of heads (n = 4 samples: ranges, too few for intervals)")],
)  # fmt: skip
def test_few_samples_judge_no_assumption(samples: int, words: str) -> None:
    said = assumption(sigmas([[0.4, 0.9, 0.9, 0.9]], samples)).conclusion()
    assert said.startswith("The first stage of two-stage keeps more than half of the attention in ")
    assert words in said


def test_the_conclusion_names_the_selection_that_was_asked_for() -> None:
    trace = sigmas([[0.9] * 4])
    assert "the first stage of snapkv keeps" in assumption(trace, "snapkv").conclusion()


def test_a_bound_is_told_by_how_far_it_lies_above() -> None:
    said = bound_tightness(one_config()).conclusion()  # L/θ̂ of 1/4, 1/4 and 3/5: quantiles 0.25 and 0.565
    assert said.startswith(
        "The paper's bound θ̂ covers 75 % (50 … 100) of heads and is 4.0 × (1.8 to 4.0) the perturbation of two-stage "
    )
    assert "nine heads in ten; n = 2 samples" in said
    assert said.endswith("cannot be said: fewer than three of a budget.")


@pytest.mark.parametrize(
    ("theta", "words"),
    [
        ([[10, 20, 30]] * 8, "the selection with the lower bound perturbs less: ρ = 1.00 ["),
        ([[30, 20, 10]] * 8, "the selection with the lower bound perturbs more: ρ = −1.00 ["),
        ([[10, 20, 30], [30, 20, 10]] * 4, "whether the selection with the lower bound perturbs less is undecided: "),
    ],
)
def test_a_bound_orders_selections_or_not(theta: Any, words: str) -> None:
    said = bound_tightness(bounds([[1, 2, 3]] * len(theta), theta)).conclusion()
    assert words in said
    assert said.endswith("(n = 8 samples).")


def test_four_samples_say_nothing_of_the_order() -> None:
    said = bound_tightness(bounds([[1, 2, 3]] * 4, [[10, 20, 30]] * 4)).conclusion()
    assert said.endswith("perturbs less cannot be said: too few samples hold ranks where σ > 0.5.")


def test_a_bound_that_says_nothing_is_said_to() -> None:
    flagged = bounds([[1, 2, 3]] * 5, [[10, 20, 30]] * 5, sigma=0.5)
    assert bound_tightness(flagged).conclusion().startswith(
        "There is no bound to judge for two-stage: stage 1 keeps at most half of the attention in every head, "
    )  # fmt: skip
    nothing = bounds([[1, 2, 3]] * 5, [[10, 20, 30]] * 5, configs=THREE)
    nothing.arrays["evicted"][:] = 0  # type: ignore[index]
    assert "for two-stage: nothing was evicted; " in bound_tightness(nothing).conclusion()


def test_a_gain_is_taken_apart() -> None:
    said = ablation(chain(CHAIN, [10, 8, 6, 3, 1], samples=8)).conclusion()
    assert said == (
        "two-stage perturbs 70 % [70, 70] less than attention; un-pooling by itself: 40 % [40, 40] less; the value "
        "norms on top of it: 50 % [50, 50] less (propagated, all heads; n = 8 samples)."
    )


def test_a_loss_is_told_as_one() -> None:
    said = ablation(chain([config(name) for name in NAMES], [10, 9, 12], samples=8)).conclusion()
    assert said.startswith("two-stage perturbs 20 % [20, 20] more than attention; un-pooling by itself: 10 % [10, 10] ")
    assert "the value norms on top of it: 33 % [33, 33] more" in said


def varying(factors: Any) -> Trace:
    """`factors` (sample,): the last selection's perturbation over the first's, propagated."""
    trace = chain([config(name) for name in NAMES], [10, 10, 10], samples=len(factors))
    trace.arrays["perturbation_propagated"][:, 2] *= np.reshape(factors, (-1, 1, 1, 1))  # type: ignore[index]
    return trace


def test_a_gain_in_half_of_the_samples_is_undecided() -> None:
    said = ablation(varying([0.5, 1.5] * 4)).conclusion()
    assert said.startswith("Whether two-stage perturbs less than attention is undecided: 0 % [−")
    assert "; un-pooling by itself: nothing; the value norms on top of it: 0 % [−" in said
    assert "less, undecided (propagated" in said


@pytest.mark.parametrize(
    ("factors", "words"),
    [([0.5], "two-stage perturbs 50 % less than attention;"),
     ([0.4, 0.6], "two-stage perturbs 50 % (40 … 60) less than attention;")],
)  # fmt: skip
def test_few_samples_tell_a_gain_without_a_verdict(factors: list[float], words: str) -> None:
    said = ablation(varying(factors)).conclusion()
    assert said.startswith(words)
    assert ("one sample: no interval" if len(factors) == 1 else "n = 2 samples: ranges, too few") in said


def test_settings_are_counted_and_both_ends_told() -> None:
    configs = [config(name, budget) for budget in (64, 128) for name in NAMES]
    said = ablation(chain(configs, [10, 9, 5, 10, 11, 12], samples=8)).conclusion()
    assert said.startswith(
        "two-stage perturbs less than attention in 1 of 2 cases, more in 1: 50 % [50, 50] less at b=64 to 20 % "
        "[20, 20] more at b=128; un-pooling by itself: less in 1 of 2 cases, more in 1; "
    )


def test_a_trace_without_the_two_stages_speaks_of_what_it_holds() -> None:
    said = ablation(chain([config("attention"), config("value")], [4, 6], samples=8)).conclusion()
    assert said == "value perturbs 50 % [50, 50] more than attention (propagated, all heads; n = 8 samples)."


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


def test_a_lead_that_lasts_and_one_that_turns() -> None:
    said = horizon(led(0.5, 0.75)).conclusion()
    assert said.startswith(
        "two-stage perturbs 50 % [50, 50] less than attention in the first third of 6 decode steps; it "
    )
    assert "it perturbs 25 % [25, 25] less than attention in the last third; the error grows in both" in said
    turned = horizon(led(0.5, 1.25)).conclusion()
    assert "it perturbs 25 % [25, 25] more than attention in the last third" in turned


def test_a_lead_of_some_samples_is_undecided() -> None:
    trace = led(0.5, 1)
    trace.arrays["perturbation_propagated"][::2, 1, 4:] *= 1.5  # type: ignore[index]
    trace.arrays["perturbation_propagated"][1::2, 1, 4:] *= 0.5  # type: ignore[index]
    said = horizon(trace).conclusion()
    assert "; whether it perturbs less than attention in the last third is undecided: " in said


@pytest.mark.parametrize(
    ("samples", "words"), [(1, "(one sample: no interval)"), (4, "(n = 4 samples: ranges, too few for intervals)")]
)
def test_few_samples_tell_a_lead_without_a_verdict(samples: int, words: str) -> None:
    said = horizon(led(0.5, 0.75, samples)).conclusion()
    assert said.startswith("two-stage perturbs 50 % ")
    assert "the error changes, last third over first: " in said
    assert words in said


def test_growth_alone_and_growth_within_rounding() -> None:
    alone = horizon(growing(8), "attention").conclusion()
    assert alone == "The error grows, last third over first: 1.12 × [1.12, 1.13] (n = 8 samples)."
    rounding = horizon(growing(8, floor=9.0)).conclusion()
    assert rounding.startswith("two-stage cannot be compared with attention in the first third of 6 decode steps: ")
    assert rounding.endswith("whether the error grows cannot be told from rounding (n = 8 samples).")


def test_the_table_of_leads_holds_what_the_sentence_says() -> None:
    result = horizon(led(0.5, 0.75))
    (lead,) = result.leads
    assert (lead.first, lead.last) == pytest.approx((0.5, 0.75))
    assert "0.50 [0.50, 0.50]  0.75 [0.75, 0.75]" in repr(result)
    assert result.to_dict()["leads"][0]["last"] == pytest.approx(0.75)


def needles(scores: Any, moved: Any, full: Any = None) -> Trace:
    return ranked(scores, full or [1] * len(scores), [moved] * len(scores))


def test_a_needle_is_found_by_the_best_and_the_worst() -> None:
    said = needle(needles([[1, 1, 0]] * 8, [0.1, 0.2, 0.9])).conclusion()
    assert said.startswith(
        "two-stage finds 100 % [63, 100] of the numbers, random 0 % [0, 37]; the full cache finds 100 % [63, 100] "
        "(n = 8 prompts); methods that perturb a prompt's first step more find fewer digits: ρ = −0.87 ["
    )
    assert said.endswith("(n = 8 deciding prompts).")


def test_perturbation_that_misleads_is_said_to() -> None:
    said = needle(needles([[1, 1, 0]] * 8, [0.9, 0.8, 0.1])).conclusion()
    assert "; methods that perturb a prompt's first step more find more digits: ρ = 0.87 [" in said


def test_methods_that_cannot_be_told_apart_say_so() -> None:
    said = needle(needles([[1, 0, 0], [0, 1, 1]] * 4, [0.1, 0.2, 0.9])).conclusion()
    assert "(their intervals overlap)" in needle(needles([[1, 0, 0]] + [[1, 1, 1]] * 7, [0.1, 0.2, 0.9])).conclusion()
    assert said.startswith("All 3 methods find 50 % [16, 84] of the numbers; ")
    assert "whether methods that perturb a prompt's first step more find fewer digits is undecided: " in said
    alike = needle(needles([[1, 1, 1]] * 8, [0.1, 0.2, 0.9])).conclusion()
    assert alike.endswith(
        "whether those that perturb more find less cannot be said: no two methods of a prompt differ."
    )


def test_few_prompts_have_their_n_and_two_methods_no_ranks() -> None:
    one = needle(needles([[1, 1, 0]], [0.1, 0.2, 0.9])).conclusion()
    assert "(n = 1 prompt)" in one
    assert one.endswith("is undecided: ρ = −0.87 (n = 1 deciding prompt, too few for an interval).")
    two = needle(answers([[1, 0]], [1], [[0.1, 0.2]])).conclusion()
    assert two.endswith("cannot be said: too few methods share a budget.")


def test_a_full_cache_that_finds_nothing_has_nothing_to_lose() -> None:
    said = needle(needles([[0, 0, 0]] * 8, [0.1, 0.2, 0.9], full=[0] * 8)).conclusion()
    assert said == (
        "Even the full cache finds no number (0 % [0, 37]; n = 8 prompts): there is nothing that eviction can lose."
    )


def test_parts_of_sentences() -> None:
    assert [over(number) for number in (1, 4, 8)] == [
        "one sample: no interval", "n = 4 samples: ranges, too few for intervals", "n = 8 samples"]  # fmt: skip
    assert difference(0.83, Interval(0.78, 0.88)) == "17 % [12, 22] less"
    assert difference(3.1, Interval(2.4, 4.0)) == "210 % [140, 300] more"
    assert [decided(Interval(*found), 1) for found in ((0.5, 0.9), (0.9, 1.1), (1.1, 2))] == [-1, 0, 1]
    assert decided(Interval(0.5, 0.9, "range"), 1) is decided(None, 1) is None
    words = {1: ("it grows", "grows"), 0: ("undecided", "undecided")}
    assert tally_verdicts([1, 0, 0], words, "case") == "undecided in 2 of 3 cases, grows in 1"
    assert tally_verdicts([1, 1], words, "case") == "it grows in both cases"
    assert extremes([("a", 2.0, "two"), ("b", 1.0, "one"), ("c", float("nan"), "–")]) == "one at b to two at a"
    assert compared("a", "b", [("", 1.0, None)]) == "a perturbs exactly as much as b"


@pytest.mark.parametrize("kind", ["range", "interval"])
def test_what_rounds_to_nothing_is_no_difference(kind: str) -> None:
    """It read '0 % (0 … 0) more'; with an end that is seen, or a case that is, the numbers stand."""
    near, seen = Interval(0.996, 1.004, kind), Interval(0.99, 1.002, kind)
    assert compared("a", "b", [("", 1.003, near)], " there") == "a perturbs as much as b there, within 0.5 %"
    assert compared("a", "b", [("x", 1.003, near), ("y", 0.997, None)]).endswith("as much as b, within 0.5 %")
    assert "within" not in compared("a", "b", [("", 0.998, seen)])
    assert "within" not in compared("a", "b", [("x", 1.003, near), ("y", 1.2, Interval(1.1, 1.3, kind))])
