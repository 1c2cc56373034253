"""What the methods' names alone make of a link, held against loops over prompts and orders."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from perturbkv.analyses.correlation.correlation import Correlation, correlation
from tests.analyses.test_correlation_by_hand import (
    CONFIGS,
    DRAW,
    FULL,
    HELD,
    LOST,
    MOVED,
    OTHER,
    SCORES,
    areas,
    correlations,
)
from tests.support.linked import answered, methods


@pytest.fixture(scope="module")
def found() -> Correlation:
    return correlation(answered(methods(CONFIGS), SCORES, FULL, {"propagated": MOVED, "isolated": OTHER}))


def test_a_methods_name_tells_what_other_prompts_perturbation_tells(found: Correlation) -> None:
    others = [
        stats.spearmanr(MOVED[other], SCORES[place]).statistic
        for place, other in itertools.permutations(HELD, 2)
        if len(set(SCORES[place])) > 1
    ]
    own = correlations(stats.spearmanr, MOVED)
    names = found.settings[0].identity_baselines("propagated").rho
    assert names.others.value == pytest.approx(np.mean(others))
    assert names.beyond.value == pytest.approx(np.mean(own) - np.mean(others))
    assert names.others.prompts == names.beyond.prompts == len(own)


def test_a_methods_name_tells_lost_answers_as_other_prompts_perturbation_does(found: Correlation) -> None:
    moved = {place: MOVED[place] for place in HELD}
    others = [
        np.mean([
            0.5 + 0.5 * np.sign(moved[other][a] - moved[other][b])
            for a in range(CONFIGS) for b in range(CONFIGS) if LOST[place, a] and not LOST[place, b]
        ])
        for place, other in itertools.permutations(HELD, 2) if 0 < LOST[place].sum() < CONFIGS
    ]  # fmt: skip
    own, names = areas(MOVED, LOST), found.settings[0].identity_baselines("propagated").auc
    assert names.others.value == pytest.approx(np.mean(others))
    assert names.beyond.value == pytest.approx(np.mean(own) - np.mean(others))
    assert names.others.prompts == names.beyond.prompts == len(own)


def test_few_prompts_measures_are_dealt_out_in_all_ways() -> None:
    scores, moved = np.array([[1, 0, 0.5], [0, 1, 1], [0.2, 0.1, 1], [1, 0, 0]]), DRAW.lognormal(size=(4, 3))
    names = (
        correlation(answered(methods(3), scores, np.ones(4), {"propagated": moved}))
        .settings[0]
        .identity_baselines("propagated")
        .rho
    )
    means = [
        np.mean([stats.spearmanr(moved[other], row).statistic for other, row in zip(order, scores, strict=True)])
        for order in itertools.permutations(range(4))
    ]
    far = np.abs(np.array(means) - np.mean(means))
    assert (names.exchanged.exact, names.exchanged.permutations) == (True, 24)
    assert names.exchanged.p == pytest.approx(np.mean(far >= far[0] - 1e-9))
    assert (names.exchanged.low, names.exchanged.high) == pytest.approx(tuple(np.quantile(means, (0.025, 0.975))))


def test_over_budgets_a_prompts_own_less_others_is_its_mean_over_them() -> None:
    configs = [*methods(3, 64), *methods(3, 128)]
    scores, moved = DRAW.integers(0, 2, (7, 6)), DRAW.lognormal(size=(7, 6))
    found = (
        correlation(answered(configs, scores, np.ones(7), {"propagated": moved}))
        .overall[0]
        .identity_baselines("propagated")
        .rho
    )
    each: dict[int, list[float]] = {}
    for place, part in itertools.product(range(7), (slice(0, 3), slice(3, 6))):
        if len(set(scores[place, part])) > 1:
            rhos = [stats.spearmanr(one[part], scores[place, part]).statistic for one in moved]
            each.setdefault(place, []).append(rhos[place] - np.mean(np.delete(rhos, place)))
    assert found.beyond.value == pytest.approx(np.mean([np.mean(one) for one in each.values()]))
    assert found.beyond.prompts == len(each)
