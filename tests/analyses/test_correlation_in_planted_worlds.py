"""Worlds of which it is known what links perturbation and score: the analysis has to find that, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.correlation.correlation import Correlation, correlation
from perturbkv.analyses.correlation.lost_answers import area_between_prompts
from perturbkv.analyses.correlation.method_identity import (
    AUC,
    RHO,
    IdentityBaseline,
    area_table,
    correlate_within_prompts,
    identity_baseline,
    rank_table,
    strengths,
)
from perturbkv.analyses.stats.intervals import Estimate
from perturbkv.analyses.stats.permutation import prompt_permutations, score_permutation_nulls
from perturbkv.analyses.verdicts import EQUIVALENT, LESS, MORE, UNDECIDED
from tests.support.linked import answered, methods

WORLDS = 400


def holds(one: Estimate, value: float) -> bool:
    return one.interval is not None and one.interval.low - 1e-12 <= value <= one.interval.high + 1e-12


def verdicts(result: Correlation) -> list[str]:
    """On ρ, on ρ less what names tell, on the share of pairs, and on this share less what names tell."""
    return [case.verdict for claim in result.claims() for case in claim.cases]


def test_a_perfect_link_is_found_whole() -> None:
    moved = np.random.default_rng(0).lognormal(size=(8, 5))
    scores = 1 / (1 + moved.argsort(axis=1).argsort(axis=1))  # each prompt's ranks turned round
    result = correlation(answered(methods(5), scores, np.ones(8), {"propagated": moved}))
    one = result.settings[0].strength("propagated")
    assert (one.rho.value, one.tau.value, one.auc.value) == pytest.approx((-1, -1, 1))
    names = result.settings[0].identity_baselines("propagated")
    assert (names.rho.significant, names.auc.significant) == (True, True)
    assert verdicts(result) == [LESS, LESS, MORE, MORE]  # and each is more than the methods' names tell
    assert [case.text.partition(" [")[0] for claim in result.claims() for case in claim.cases][::2] == [
        "ρ = −1.00",
        "100 %",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "configs", "graded"), [(8, 4, False), (8, 7, True), (24, 5, False)])
def test_without_a_link_intervals_hold_none_in_at_least_92_percent_of_worlds(
    prompts: int, configs: int, graded: bool
) -> None:
    draw, held, small = np.random.default_rng(prompts + configs), [], []
    for _ in range(WORLDS):
        hard = draw.uniform(0.2, 0.8, (prompts, 1))  # prompts differ in how much they lose
        moved = draw.lognormal(size=(prompts, configs)) * draw.lognormal(size=(prompts, 1))
        scores = draw.uniform(size=(prompts, configs)) * hard if graded else draw.random((prompts, configs)) < hard
        scores = np.asarray(scores, dtype=float)
        lost = scores < np.median(scores) if graded else scores == 0
        (one,) = strengths({"propagated": correlate_within_prompts(moved, scores, lost)})
        if min(one.rho.prompts, one.auc.prompts) >= 5:
            held.append([holds(one.rho, 0), holds(one.tau, 0), holds(one.auc, 0.5)])
        ranks = moved.argsort(axis=1).argsort(axis=1) - (configs - 1) / 2
        size = np.sqrt((ranks**2).sum(axis=1))[:, None]
        if len(small) < 150:
            small.append(score_permutation_nulls((ranks / size)[None], scores)[0].p <= 0.05)
    assert len(held) > WORLDS / 2
    assert (np.mean(held, axis=0) >= 0.92).all(), np.mean(held, axis=0)
    assert np.mean(small) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / len(small))


@pytest.mark.slow
def test_where_only_the_budget_carries_the_link_one_budget_at_a_time_says_none() -> None:
    """Over all budgets ρ is near −1; at each of them perturbation and score are drawn apart."""
    draw, held, found = np.random.default_rng(5), [], []
    budgets = (64, 128, 256)
    configs = [config for budget in budgets for config in methods(4, budget)]
    level = np.repeat([4.0, 2.0, 1.0], 4)
    for _ in range(40):
        moved = level * draw.uniform(0.9, 1.1, (10, 12))
        scores = draw.random((10, 12)) < np.repeat([0.1, 0.5, 0.9], 4)
        trace = answered(configs, scores.astype(float), np.ones(10), {"propagated": moved})
        trace.arrays["kept_count"][:] = np.repeat([1, 2, 3], 4)[:, None, None]  # type: ignore[index]
        result = correlation(trace)
        across = {one.measure: one.rho.value for one in result.across}
        found.append((across["propagated"], across["evicted"]))
        held.append(holds(result.overall[0].strength("propagated").rho, 0))
    assert np.mean(held) >= 0.92 - 2 * np.sqrt(0.92 * 0.08 / len(held))
    propagated, budget = np.mean(found, axis=0)
    assert propagated < -0.5
    assert propagated == pytest.approx(budget, abs=0.05)  # no more than the budget itself tells


def ranked(moved: np.ndarray[Any, Any], scores: np.ndarray[Any, Any]) -> IdentityBaseline:
    permutations = prompt_permutations(np.ones((len(moved), len(moved)), dtype=bool))
    return identity_baseline([rank_table(moved, scores)], permutations, RHO)


def test_where_a_methods_name_is_all_the_link_the_prompts_own_perturbation_tells_no_more() -> None:
    """One method is worse in every prompt and perturbs more in every one; beyond that nothing is linked."""
    draw, named, beyond, small = np.random.default_rng(6), [], [], []
    worse = np.array([0, 0, 0, 1.0])
    for _ in range(WORLDS // 2):
        moved = draw.lognormal(size=(10, 4)) * (1 + 9 * worse)
        scores = (draw.random((10, 4)) < 0.9 - 0.7 * worse).astype(float)
        one = ranked(moved, scores)
        named.append(one.others.interval is not None and one.others.interval.high < 0)
        beyond.append(one.beyond.interval is not None and one.beyond.interval.high < 0)
        small.append(one.exchanged.p <= 0.05)
    assert np.mean(named) > 0.5
    assert np.mean(beyond) <= 0.05
    assert np.mean(small) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / len(small))


def test_what_a_prompt_tells_beyond_the_name_is_found() -> None:
    draw = np.random.default_rng(7)
    moved = draw.lognormal(size=(12, 4))
    scores = (moved < np.median(moved, axis=1, keepdims=True)).astype(float)
    one = ranked(moved, scores)
    assert one.beyond.interval is not None
    assert one.beyond.interval.high < 0
    assert one.exchanged.p < 0.01


def by_methods_alone(draw: np.random.Generator, moved: list[float], scores: list[float], count: int = 40) -> Any:
    """Perturbation and scores of 40 prompts: constants of the methods and two independent noises."""
    each = np.abs(np.array(moved) + 0.08 * draw.standard_normal((count, len(moved))))
    return each, np.clip(np.array(scores) + 0.25 * draw.standard_normal((count, len(scores))), 0, 1)


def test_a_link_that_the_methods_names_make_is_told_as_such_and_has_no_star() -> None:
    moved, scores = by_methods_alone(np.random.default_rng(3), [0.1, 0.2, 0.3, 0.4, 0.5], [0.9, 0.7, 0.5, 0.4, 0.2])
    result = correlation(answered(methods(5), scores, np.ones(40), {"propagated": moved}))
    rho = result.settings[0].strength("propagated").rho
    assert rho.interval is not None
    assert rho.interval.high < -0.4
    assert result.settings[0].control("propagated").rho.p < 0.001  # the methods do differ
    assert verdicts(result)[1::2] == [EQUIVALENT, EQUIVALENT]
    assert not any(one.significant for names in result.settings[0].baselines for one in (names.rho, names.auc))
    assert "*" not in repr(result).replace("*: it and less names", "").replace("*: it\nand less", "")


def test_a_measure_beats_the_attention_given_up_where_names_alone_are_linked_too() -> None:
    draw = np.random.default_rng(3)
    named, scores = by_methods_alone(draw, [0.1, 0.2, 0.3, 0.4, 0.5], [0.9, 0.7, 0.5, 0.4, 0.2])
    noise = draw.random((40, 5))
    own = np.clip(1.2 - 2 * noise + 0.2 * draw.standard_normal((40, 5)), 0, 1)
    for moved, score, beyond in ((named, scores, EQUIVALENT), (noise, own, LESS)):
        result = correlation(
            answered(methods(5), score, np.ones(40), {"propagated": moved, "lost": draw.random((40, 5))})
        )
        contrast = result.overall[0].contrast("propagated", "lost").rho.interval
        assert contrast is not None
        assert contrast.high < 0
        assert verdicts(result)[1] == beyond


def test_where_a_prompts_own_perturbation_goes_against_the_names_that_is_said() -> None:
    """Methods that perturb more score less; within a method the more perturbed prompts score more."""
    draw = np.random.default_rng(5)
    noise, level = 0.08 * draw.standard_normal((40, 5)), np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    moved = np.abs(level + noise)
    result = correlation(
        answered(methods(5), np.clip(1.2 - 2 * level + 1.5 * noise, 0, 1), np.ones(40), {"propagated": moved})
    )
    assert verdicts(result)[:2] == [LESS, MORE]
    assert "score lower: ρ = " in result.conclusion()


def test_methods_that_perturb_more_and_score_more_are_told_on_their_side() -> None:
    """Names alone make a positive ρ; what prompts add lowers it: that is less than the names tell, and no star."""
    draw = np.random.default_rng(6)
    noise, level = 0.05 * draw.standard_normal((40, 5)), np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    scores = np.clip(0.2 + 1.2 * level - 1.5 * noise, 0, 1)
    result = correlation(answered(methods(5), scores, np.ones(40), {"propagated": np.abs(level + noise)}))
    rho, names = result.overall[0].strength("propagated").rho, result.overall[0].identity_baselines("propagated").rho
    assert rho.interval is not None
    assert rho.interval.low > 0
    assert names.beyond.interval is not None
    assert names.beyond.interval.high < 0
    assert verdicts(result)[:2] == [MORE, LESS]
    assert not names.significant


@pytest.mark.slow
def test_few_prompts_leave_it_undecided_whether_a_link_is_more_than_names() -> None:
    """Each prompt's own perturbation makes its scores: eight prompts of four methods are not enough to say so."""
    said = []
    for seed in range(12):
        draw = np.random.default_rng(seed)
        moved = draw.lognormal(size=(8, 4))
        scores = np.clip(0.5 - 0.3 * np.log(moved) + 0.25 * draw.standard_normal((8, 4)), 0, 1)
        said += verdicts(correlation(answered(methods(4), scores, np.ones(8), {"propagated": moved})))[1::2]
    assert EQUIVALENT not in said
    assert UNDECIDED in said


def test_methods_that_fare_otherwise_in_another_data_set_are_names_there_too() -> None:
    """In each data set the names are all; were others of the other one counted, the prompts' own would tell more."""
    draw, up = np.random.default_rng(4), [0.1, 0.2, 0.3, 0.4, 0.5]
    parts = [by_methods_alone(draw, up, [0.9, 0.7, 0.5, 0.4, 0.2], 20),
             by_methods_alone(draw, up[::-1], [0.2, 0.4, 0.5, 0.7, 0.9], 20)]  # fmt: skip
    result = correlation([answered(methods(5), scores, np.ones(20), {"propagated": moved}, dataset=name)
                   for name, (moved, scores) in zip("ab", parts, strict=True)])  # fmt: skip
    assert holds(result.overall[0].identity_baselines("propagated").rho.beyond, 0)
    assert EQUIVALENT in verdicts(result)[1::2]


@pytest.mark.slow
@pytest.mark.parametrize("deciding", [5, 8, 40])
def test_what_few_deciding_prompts_tell_beyond_the_names_is_covered(deciding: int) -> None:
    """Of forty prompts only some have scores that differ, which have nothing to do with their perturbation."""
    draw, held = np.random.default_rng(deciding), []
    permutations = prompt_permutations(np.ones((40, 40), dtype=bool))
    for _ in range(200):
        moved, scores = draw.standard_normal((40, 5)), np.ones((40, 5))
        scores[:deciding] = draw.permuted(np.tile(np.arange(5) / 5, (deciding, 1)), axis=1)
        rho = identity_baseline([rank_table(moved, scores)], permutations, RHO)
        area = identity_baseline([area_table(moved, scores < 0.5)], permutations, AUC)
        assert rho.beyond.prompts == area.beyond.prompts == deciding
        held.append([holds(rho.beyond, 0), holds(area.beyond, 0)])
    assert (np.mean(held, axis=0) >= 0.92).all(), np.mean(held, axis=0)


@pytest.mark.parametrize("lost_prompts", [5, 8, 20])
def test_an_area_between_prompts_is_as_unsure_as_its_scarcer_side(lost_prompts: int) -> None:
    draw, held = np.random.default_rng(lost_prompts), []
    for _ in range(250):
        moved = draw.standard_normal((40, 5)) + draw.standard_normal((40, 1))
        lost = np.zeros((40, 5), dtype=bool)
        lost[np.arange(lost_prompts), draw.integers(0, 5, lost_prompts)] = True
        one = area_between_prompts(moved, lost)
        assert one.prompts == lost_prompts
        held.append(holds(one, 0.5))
    assert np.mean(held) >= 0.92


@pytest.mark.parametrize("few", [2, 4])
def test_fewer_than_five_deciding_prompts_have_a_range(few: int) -> None:
    draw = np.random.default_rng(few)
    moved, scores = draw.standard_normal((40, 5)), np.ones((40, 5))
    scores[:few] = draw.permuted(np.tile(np.arange(5) / 5, (few, 1)), axis=1)
    permutations = prompt_permutations(np.ones((40, 40), dtype=bool))
    for one in (
        identity_baseline([rank_table(moved, scores)], permutations, RHO).beyond,
        identity_baseline([rank_table(moved, scores)], permutations, RHO).others,
        identity_baseline([area_table(moved, scores < 0.5)], permutations, AUC).beyond,
        area_between_prompts(moved, scores < 0.5),
        area_between_prompts(moved, scores > 0.5),  # few kept answers instead of few lost ones
    ):
        assert one.interval is not None
        assert (one.prompts, one.interval.kind) == (few, "range")
        assert one.interval.low <= one.value <= one.interval.high
