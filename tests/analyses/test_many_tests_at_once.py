"""Sign flips of whole samples, corrected for their number, against naive loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from perturbkv.analyses.stats.permutation import sign_flip_tests


def naive_p(differences: np.ndarray) -> list[float]:
    """Two-sided, test by test, over all 2ⁿ flips."""
    found = []
    for column in differences.T:
        sums = [abs(sum(s * x for s, x in zip(flip, column, strict=True)))
                for flip in itertools.product((1, -1), repeat=len(column))]  # fmt: skip
        found.append(float(np.mean([total >= sums[0] - 1e-12 for total in sums])))
    return found


def test_p_values_are_those_of_all_flips_and_the_correction_is_benjamini_and_hochbergs() -> None:
    draw = np.random.default_rng(0)
    differences = draw.normal(size=(8, 12)) + np.r_[np.full(6, 2.0), np.zeros(6)]
    found = sign_flip_tests(differences)
    expected = naive_p(differences)
    np.testing.assert_allclose(found.p, expected)
    adjusted = stats.false_discovery_control(expected, method="bh")
    np.testing.assert_array_equal(found.significant, np.where(adjusted <= 0.05, np.sign(differences.mean(axis=0)), 0))
    assert found.significant.any()
    assert found.uncorrected == sum(p <= 0.05 for p in expected)
    assert (found.flips, found.smallest) == (256, 2 / 256)


def test_chance_is_counted_in_the_same_flips() -> None:
    differences = np.random.default_rng(1).normal(size=(6, 5)) + 1
    counts = []
    for flip in itertools.product((1, -1), repeat=6):
        flipped = differences * np.array(flip)[:, None]
        counts.append(sum(p <= 0.05 for p in naive_p(flipped)))
    found = sign_flip_tests(differences)
    assert found.chance_mean == pytest.approx(np.mean(counts))
    assert found.chance_high == np.quantile(counts, 0.95, method="higher")


@pytest.mark.slow
def test_without_an_effect_hardly_a_world_has_any_head_decided() -> None:
    draw = np.random.default_rng(2)
    decided = [
        sign_flip_tests(draw.normal(size=(10, 1)) + 0.5 * draw.normal(size=(10, 60))).significant.any()
        for _ in range(200)
    ]
    assert np.mean(decided) < 0.1  # heads of a sample move together; independent tests would decide far more
    assert sign_flip_tests(draw.normal(size=(10, 60)) + 3).significant.all()


@pytest.mark.parametrize(("samples", "least"), [(5, 0), (6, 169), (8, 43), (12, 3)])
def test_it_is_known_when_so_few_samples_can_decide_nothing(samples: int, least: int) -> None:
    found = sign_flip_tests(np.ones((samples, 270)))
    assert found.least_tests == least
    assert found.significant.all() == (least > 0)
    alone = np.zeros((samples, 270))
    alone[:, : max(least - 1, 1)] = 1
    assert not sign_flip_tests(alone).significant.any() or least == 1


def test_more_samples_than_twelve_are_flipped_at_random_and_the_same_each_time() -> None:
    differences = np.random.default_rng(3).normal(size=(20, 7)) + 0.4
    found = sign_flip_tests(differences)
    assert (found.flips, found.smallest) == (4096, 1 / 4096)
    sure = sign_flip_tests(np.ones((20, 270)))
    assert sure.p.min() == sure.smallest
    assert sure.least_tests == 2  # of 270 tests: 0.05 · 1 / 270 is less than 1 / 4096, 0.05 · 2 / 270 is not
    np.testing.assert_array_equal(found.p, sign_flip_tests(differences).p)
    exact = [stats.permutation_test((column,), np.mean, permutation_type="samples", n_resamples=20_000,
                                    rng=np.random.default_rng(4)).pvalue for column in differences.T]  # fmt: skip
    np.testing.assert_allclose(found.p, exact, atol=0.03)


def test_no_difference_at_all_is_decided_nowhere() -> None:
    found = sign_flip_tests(np.zeros((8, 4)))
    assert found.p.tolist() == [1.0] * 4
    assert (found.uncorrected, found.chance_mean, found.above, found.below) == (0, 0.0, 0, 0)
