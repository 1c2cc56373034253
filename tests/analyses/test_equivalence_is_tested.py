"""Equivalence and many tests at once."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from perturbkv.analyses.stats import equivalence
from perturbkv.analyses.stats.equivalence import BETTER, EQUIVALENT, UNDECIDED, WORSE, decide, smallest_effect
from perturbkv.analyses.stats.permutation import sign_flip_tests

Sums = np.ndarray


def by_hand(method: Sums, control: Sums, margin: float) -> tuple[str, bool]:
    """The verdict, and whether both one-sided tests reject: the jackknife in a loop, Student's t as p-values."""
    count = len(method)
    logs = []
    for left in range(count):
        top = sum(float(one) for place, one in enumerate(method) if place != left)
        bottom = sum(float(one) for place, one in enumerate(control) if place != left)
        logs.append(math.log(top / bottom))
    middle = sum(logs) / count
    error = math.sqrt((count - 1) / count * sum((one - middle) ** 2 for one in logs))
    log = math.log(sum(map(float, method)) / sum(map(float, control)))
    student = stats.t(max(1.0, min(7 / 32 * count, count - 1)))
    not_below = student.sf((log + math.log(1 + margin)) / error)  # that the ratio is at most 1/(1 + δ)
    not_above = student.cdf((log - math.log(1 + margin)) / error)  # that it is at least 1 + δ
    within = max(not_below, not_above) <= 0.05
    if 2 * student.sf(abs(log) / error) < 0.05:
        return (BETTER if log < 0 else WORSE), within
    return (EQUIVALENT if within else UNDECIDED), within


def drawn(source: np.random.Generator, ratio: float, spread: float, samples: int) -> tuple[Sums, Sums]:
    """Sums of a method and its control over prompts; `ratio` is that of their expectations."""
    control = source.lognormal(sigma=0.7, size=samples)
    return ratio * control * source.lognormal(-(spread**2) / 2, spread, samples), control


@pytest.mark.slow
def test_verdicts_are_those_of_two_one_sided_tests_by_hand() -> None:
    source, seen = np.random.default_rng(3), set()
    for _ in range(600):
        margin, samples = float(source.choice([0.02, 0.05, 0.2])), int(source.integers(5, 41))
        sums = drawn(source, math.exp(source.normal(0, 0.05)), float(source.choice([0.005, 0.03, 0.1])), samples)
        found = decide(*sums, margin)
        assert (found.verdict, found.within_margin) == by_hand(*sums, margin)
        assert (found.samples_to_decide is None) == (found.verdict != UNDECIDED)
        seen.add((found.verdict, found.within_margin))
    assert seen == {(BETTER, True), (BETTER, False), (WORSE, True), (WORSE, False), (EQUIVALENT, True),
                    (UNDECIDED, False)}  # fmt: skip


def test_which_side_is_the_control_does_not_matter() -> None:
    source, turned = np.random.default_rng(5), {BETTER: WORSE, WORSE: BETTER}
    for _ in range(200):
        method, control = drawn(source, math.exp(source.normal(0, 0.05)), 0.04, 12)
        one, other = decide(method, control), decide(control, method)
        assert other.verdict == turned.get(one.verdict, one.verdict)
        assert (other.within_margin, other.samples_to_decide) == (one.within_margin, one.samples_to_decide)


@pytest.mark.parametrize("samples", [8, 16, 40])
@pytest.mark.parametrize("spread", [0.02, 0.05, 0.1])
def test_a_ratio_at_the_margin_is_called_equivalent_in_at_most_5_percent_of_draws(spread: float, samples: int) -> None:
    source, draws = np.random.default_rng(7), 1200
    wrong = sum(decide(*drawn(source, 1.05, spread, samples)).within_margin for _ in range(draws))
    assert wrong / draws <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / draws)


@pytest.mark.parametrize(("samples", "spread", "least"), [(8, 0.02, 0.8), (16, 0.03, 0.8), (40, 0.05, 0.9)])
def test_equal_sums_are_found_equivalent_where_prompts_spread_little(samples: int, spread: float, least: float) -> None:
    source = np.random.default_rng(8)
    assert np.mean([decide(*drawn(source, 1, spread, samples)).within_margin for _ in range(300)]) >= least


@pytest.mark.parametrize(("ratio", "spread"), [(1.3, 0.3), (1.1, 0.1), (1.0, 0.1), (1.03, 0.05)])
def test_so_many_samples_as_are_told_decide_in_four_of_five_runs(ratio: float, spread: float) -> None:
    source, draws = np.random.default_rng(9), 800
    weight = math.exp(0.7**2 / 2)  # prompts of unequal size: √E[X²] / E[X] of the lognormal
    needed = equivalence.samples_to_decide(ratio, weight * spread)
    assert needed is not None

    def decided(samples: int) -> float:
        return float(np.mean([decide(*drawn(source, ratio, spread, samples)).verdict != UNDECIDED
                              for _ in range(draws)]))  # fmt: skip

    assert 0.76 <= decided(needed) <= 0.9
    assert decided(max(5, int(needed * 0.6))) < 0.76


def test_no_fewer_samples_would_do() -> None:
    for ratio in (0.7, 0.96, 1.0, 1.02, 1.2):
        for spread in (0.04, 0.2):
            found = equivalence.samples_to_decide(ratio, spread)
            counts = range(6, 2000)
            assert found == next(n for n in counts if equivalence.chance_to_decide(ratio, spread, n) >= 0.8)


def test_an_undecided_run_tells_the_n_of_its_own_ratio_and_spread() -> None:
    method, control = np.array([1.1, 0.8, 1.3, 0.9, 1.0, 1.2, 0.7, 1.05]), np.ones(8)
    found = decide(method, control)
    left_out = [math.log(sum(np.delete(method, place)) / 7) for place in range(8)]
    spread = math.sqrt(7 / 8 * sum((one - sum(left_out) / 8) ** 2 for one in left_out)) * math.sqrt(8)
    assert found.verdict == UNDECIDED
    assert found.samples_to_decide == equivalence.samples_to_decide(float(method.mean()), spread, 0.05, 8)
    assert found.words(0.05) == "undecided, n ≈ 150"


def test_numbers_of_samples_are_told_roughly() -> None:
    told = {count: equivalence.ControlVerdict(UNDECIDED, False, None, count).words(0.05)
            for count in (9, 61, 123, 1189, 20_000, None)}  # fmt: skip
    assert told == {
        9: "undecided, n ≈ 9",
        61: "undecided, n ≈ 61",
        123: "undecided, n ≈ 130",
        1189: "undecided,\nn ≈ 1,200",
        20_000: "undecided,\nn > 10,000",
        None: "undecided",
    }


def test_fewer_than_five_samples_and_what_is_0_decide_nothing() -> None:
    assert decide(np.ones(4), np.full(4, 9.0)) == equivalence.ControlVerdict(UNDECIDED, False, None, None)
    nothing = decide(np.ones(8), np.zeros(8))
    assert (nothing.verdict, nothing.samples_to_decide) == (UNDECIDED, None)
    assert decide(np.zeros(8), np.ones(8)).verdict == BETTER
    assert decide(np.zeros(8), np.zeros(8), tied=True).verdict == EQUIVALENT


@pytest.mark.parametrize("samples", [5, 8, 20, 40])
def test_the_smallest_effect_is_what_four_of_five_runs_decide(samples: int) -> None:
    told = smallest_effect(samples, margin=0.05)
    assert told.better_below is not None
    assert told.worse_above is not None
    assert told.equivalent_spread is not None
    for ratio in (told.better_below, told.worse_above):
        assert equivalence.chance_to_decide(ratio, told.spread, samples) == pytest.approx(0.8, abs=0.02)
    assert equivalence.chance_to_decide(1, told.equivalent_spread, samples) >= 0.8 - 1e-9
    assert equivalence.chance_to_decide(1, 1.1 * told.equivalent_spread, samples) < 0.8
    assert smallest_effect(samples).equivalent_spread is None
    assert smallest_effect(4).better_below is None


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
