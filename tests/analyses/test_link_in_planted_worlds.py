"""Worlds of which it is known what links perturbation and score: the analysis has to find that, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from perturbkv.analyses.by_name import beyond_name, by_name
from perturbkv.analyses.estimates import Estimate
from perturbkv.analyses.link import link
from perturbkv.analyses.link_prompts import strengths, within
from perturbkv.analyses.shuffled import chances
from tests.support.linked import answered, methods

WORLDS = 400


def holds(one: Estimate, value: float) -> bool:
    return one.interval is not None and one.interval.low - 1e-12 <= value <= one.interval.high + 1e-12


def test_a_perfect_link_is_found_whole() -> None:
    moved = np.random.default_rng(0).lognormal(size=(8, 5))
    scores = 1 / (1 + moved.argsort(axis=1).argsort(axis=1))  # each prompt's ranks turned round
    result = link(answered(methods(5), scores, np.ones(8), {"propagated": moved}))
    one = result.settings[0].strength("propagated")
    assert (one.rho.value, one.tau.value, one.auc.value) == pytest.approx((-1, -1, 1))
    assert result.settings[0].control("propagated").stands
    assert "score less: ρ = −1.00" in result.conclusion()
    assert "in 100 %" in " ".join(result.conclusion().split())


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
        (one,) = strengths({"propagated": within(moved, scores, lost)})
        if min(one.rho.prompts, one.auc.prompts) >= 5:
            held.append([holds(one.rho, 0), holds(one.tau, 0), holds(one.auc, 0.5)])
        ranks = moved.argsort(axis=1).argsort(axis=1) - (configs - 1) / 2
        size = np.sqrt((ranks**2).sum(axis=1))[:, None]
        if len(small) < 150:
            small.append(chances((ranks / size)[None], scores)[0].p <= 0.05)
    assert len(held) > WORLDS / 2
    assert (np.mean(held, axis=0) >= 0.92).all(), np.mean(held, axis=0)
    assert np.mean(small) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / len(small))


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
        result = link(trace)
        across = {one.measure: one.rho.value for one in result.across}
        found.append((across["propagated"], across["evicted"]))
        held.append(holds(result.overall[0].strength("propagated").rho, 0))
    assert np.mean(held) >= 0.92 - 2 * np.sqrt(0.92 * 0.08 / len(held))
    propagated, budget = np.mean(found, axis=0)
    assert propagated < -0.5
    assert propagated == pytest.approx(budget, abs=0.05)  # no more than the budget itself tells


def test_where_a_methods_name_is_all_the_link_the_prompts_own_perturbation_tells_no_more() -> None:
    """One method is worse in every prompt and perturbs more in every one; beyond that nothing is linked."""
    draw, named, beyond = np.random.default_rng(6), [], []
    worse = np.array([0, 0, 0, 1.0])
    for _ in range(WORLDS // 2):
        moved = draw.lognormal(size=(10, 4)) * (1 + 9 * worse)
        scores = (draw.random((10, 4)) < 0.9 - 0.7 * worse).astype(float)
        one, more = by_name(moved, scores), beyond_name(moved, scores)
        named.append(one.interval is not None and one.interval.high < 0)
        beyond.append(more.interval is not None and more.interval.high < 0)
    assert np.mean(named) > 0.5
    assert np.mean(beyond) <= 0.05


def test_what_a_prompt_tells_beyond_the_name_is_found() -> None:
    draw = np.random.default_rng(7)
    moved = draw.lognormal(size=(12, 4))
    scores = (moved < np.median(moved, axis=1, keepdims=True)).astype(float)
    more = beyond_name(moved, scores)
    assert more.interval is not None
    assert more.interval.high < 0
