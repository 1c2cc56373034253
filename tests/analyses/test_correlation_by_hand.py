"""The link between perturbation and score, held against loops over prompts, pairs and deals."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

import perturbkv as pk
from perturbkv.analyses.correlation.correlation import Correlation, correlation
from perturbkv.analyses.correlation.lost_answers import calibration_curve
from perturbkv.analyses.measures import OWN_TEXT
from perturbkv.errors import TraceError
from tests.support.linked import answered, methods

DRAW = np.random.default_rng(3)
SAMPLES, CONFIGS = 9, 4
FULL = np.array([1, 0.8, 0, 1, 0.5, 1, 0.9, 1, 0.25])
"""The third prompt is one that the full cache does not answer."""
SCORES = np.round(DRAW.uniform(0, 1, (SAMPLES, CONFIGS)) * FULL[:, None], 1)
MOVED = np.round(DRAW.lognormal(size=(SAMPLES, CONFIGS)), 1)
OTHER = np.round(DRAW.lognormal(size=(SAMPLES, CONFIGS)), 1)
HELD = [place for place in range(SAMPLES) if FULL[place] > 0]
LOST = SCORES < 0.5 * FULL[:, None]


@pytest.fixture(scope="module")
def found() -> Correlation:
    return correlation(answered(methods(CONFIGS), SCORES, FULL, {"propagated": MOVED, "isolated": OTHER}))


def correlations(of: Any, measured: np.ndarray[Any, Any]) -> list[float]:
    """One per answered prompt whose scores and measures differ."""
    return [
        float(of(measured[place], SCORES[place]).statistic)
        for place in HELD
        if len(set(SCORES[place])) > 1 and len(set(measured[place])) > 1
    ]


def student(values: list[float]) -> tuple[float, float]:
    """Student's interval of a mean with 3/8 degrees of freedom per sample."""
    each = np.array(values)
    reach = stats.t.ppf(0.975, 3 / 8 * len(each)) * each.std(ddof=1) / math.sqrt(len(each))
    return float(each.mean() - reach), float(each.mean() + reach)


def test_ranks_are_within_each_prompt_that_the_full_cache_answers(found: Correlation) -> None:
    (setting,) = found.settings
    for name, measured in (("propagated", MOVED), ("isolated", OTHER)):
        rho, tau = correlations(stats.spearmanr, measured), correlations(stats.kendalltau, measured)
        one = setting.strength(name)
        assert (one.rho.prompts, one.tau.prompts) == (len(rho), len(tau))
        assert (one.rho.value, one.tau.value) == pytest.approx((np.mean(rho), np.mean(tau)))
        for estimate, each in ((one.rho, rho), (one.tau, tau)):
            assert estimate.interval is not None
            assert (estimate.interval.low, estimate.interval.high) == pytest.approx(student(each))
    (part,) = found.parts
    assert (part.dataset, part.samples, part.answered) == ("d", SAMPLES, SAMPLES - 1)
    assert [name for _, name in found.prompts] == [f"d{place}" for place in HELD]


def areas(measured: np.ndarray[Any, Any], lost: np.ndarray[Any, Any]) -> list[float]:
    """Of each answered prompt with both the share of pairs in which the lost answer is more perturbed, ties half."""
    each = []
    for place in HELD:
        wins = [
            0.5 + 0.5 * np.sign(measured[place, a] - measured[place, b])
            for a in range(CONFIGS)
            for b in range(CONFIGS)
            if lost[place, a] and not lost[place, b]
        ]
        each += [float(np.mean(wins))] if wins else []
    return each


def test_a_lost_answer_is_held_against_the_kept_ones_of_its_prompt(found: Correlation) -> None:
    (setting,) = found.settings
    np.testing.assert_array_equal(setting.lost, LOST[HELD])
    for name, measured in (("propagated", MOVED), ("isolated", OTHER)):
        expected, one = areas(measured, LOST), setting.strength(name).auc
        assert one.prompts == len(expected) > 4
        assert one.value == pytest.approx(np.mean(expected))
        assert one.interval is not None
        assert one.interval.low == pytest.approx(max(0, student(expected)[0]))


@pytest.mark.parametrize(("right", "lost"), [(0.0, 1.0), (0.6, 0.25), (0.9, 0.5)])
def test_the_rule_says_which_prompts_count_and_which_answers_are_lost(right: float, lost: float) -> None:
    one = correlation(answered(methods(CONFIGS), SCORES, FULL, {"propagated": MOVED}), right=right, lost=lost).settings[
        0
    ]
    rows = [place for place in range(SAMPLES) if FULL[place] > right]
    expected = [[bool(score < lost * FULL[place] - 1e-12) for score in SCORES[place]] for place in rows]
    assert one.lost.tolist() == expected


def test_an_answer_at_the_very_share_is_kept_whatever_rounding_says() -> None:
    full = np.array([0.3, 0.7, 0.9])
    one = correlation(answered(methods(3), np.stack([full * 0.1, full * 0.1, full], axis=1), full,
                        {"propagated": np.ones((3, 3))}), lost=0.1).settings[0]  # fmt: skip
    assert not one.lost.any()


@pytest.mark.parametrize(("share", "decide"), [(0.5, 8), (0.25, 5)])
def test_between_prompts_no_pair_is_of_one_prompt_and_the_scarcer_side_decides(share: float, decide: int) -> None:
    (setting,) = correlation(answered(methods(CONFIGS), SCORES, FULL, {"propagated": MOVED}), lost=share).settings
    between, lost = setting.control("propagated").between, SCORES < share * FULL[:, None]
    value, count = area_between(HELD, lost), len(HELD)
    assert between.value == pytest.approx(value)
    left_out = np.array([area_between([one for one in HELD if one != left], lost) for left in HELD])
    error = math.sqrt((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum())
    scarcer = min(sum(lost[place].any() for place in HELD), sum(not lost[place].all() for place in HELD))
    assert between.prompts == scarcer == decide
    reach = stats.t.ppf(0.975, 3 / 8 * scarcer) * error
    assert between.interval is not None
    assert (between.interval.low, between.interval.high) == pytest.approx(
        (max(0, value - reach), min(1, value + reach))
    )


def area_between(prompts: list[int], lost: np.ndarray[Any, Any]) -> float:
    """The share of pairs of a lost and a kept answer of different prompts in which the lost one is more perturbed."""
    wins = [
        0.5 + 0.5 * np.sign(MOVED[i, a] - MOVED[j, b])
        for i, j in itertools.permutations(prompts, 2)
        for a, b in itertools.product(range(CONFIGS), repeat=2)
        if lost[i, a] and not lost[j, b]
    ]
    return float(np.mean(wins))


def test_theta_hat_is_of_the_heads_with_evidence_under_every_method() -> None:
    sigma = DRAW.uniform(0.45, 1, (3, 3, 2, 2))
    sigma[0] = 0.9
    sigma[2, 1] = 0.4  # the third prompt has no head with evidence
    bound = DRAW.lognormal(size=(3, 3, 2, 2))
    bound[1, 2] = np.where(sigma[1, 2] > 0.5, bound[1, 2], np.inf)
    scores = [[1, 0, 0.5]] * 3
    trace = answered(methods(3), scores, [1, 1, 1], {"propagated": MOVED[:3, :3]}, sigma=sigma, theta_hat=bound)
    (setting,) = correlation(trace).settings
    counted = 0
    for prompt in range(2):
        heads = [head for head in np.ndindex(2, 2) if all(sigma[prompt, config][head] > 0.5 for config in range(3))]
        counted += len(heads)
        expected = [sum(bound[prompt, config][head] for head in heads) / (10 * len(heads)) for config in range(3)]
        np.testing.assert_allclose(setting.measured["theta_hat"][prompt], expected)
    assert np.isnan(setting.measured["theta_hat"][2]).all()
    assert setting.evidence == pytest.approx(counted / 12)
    assert setting.strength("theta_hat").rho.prompts == 2
    assert setting.strength("theta").rho.prompts == 3
    json.dumps(correlation(trace).to_dict(), allow_nan=False)


def test_curves_have_as_many_answers_per_bin_as_quantiles_give_and_intervals_over_prompts(found: Correlation) -> None:
    pairs = sorted((MOVED[i, c], i, LOST[i, c], FULL[i] - SCORES[i, c]) for i in HELD for c in range(CONFIGS))
    bins, start = found.settings[0].curves["propagated"], 0
    assert len(bins) == 5
    for one in bins:
        inside = pairs[start : start + one.answers]
        assert (one.low, one.high) == (inside[0][0], inside[-1][0])
        assert one.prompts == len({prompt for _, prompt, _, _ in inside})
        assert one.lost == pytest.approx(np.mean([lost for *_, lost, _ in inside]))
        assert one.drop == pytest.approx(np.mean([drop for *_, drop in inside]))
        start += one.answers
        assert start == len(pairs) or pairs[start][0] > one.high  # equal perturbations are never parted
    assert start == len(pairs)
    assert {one.lost_interval.kind for one in bins if one.lost_interval} == {
        "interval" if one.prompts >= 5 else "range" for one in bins if one.prompts > 1
    }


def test_bins_hold_equally_many_answers_and_their_upper_end() -> None:
    moved = np.arange(1, 13.0).reshape(3, 4)
    one = correlation(answered(methods(4), np.ones((3, 4)), np.ones(3), {"propagated": moved}), bins=3).settings[0]
    assert [(each.low, each.high, each.middle) for each in one.curves["propagated"]] == [
        (1, 4, 2.5), (5, 8, 6.5), (9, 12, 10.5)
    ]  # fmt: skip


def test_a_bin_in_which_few_prompts_hold_most_answers_is_as_unsure_as_their_effective_number() -> None:
    """Of forty prompts of a bin twelve hold four answers each: (Σ c)² / Σ c² = 27.6 prompts of equally many."""
    counts, hits = np.repeat([4, 2, 1], [12, 4, 24]), np.arange(40) % 2
    moved = np.where(np.arange(4) < counts[:, None], 1.0, 2.0)
    (first, _) = calibration_curve(moved, np.repeat(hits[:, None], 4, axis=1) == 1, np.zeros((40, 4)), bins=2)
    assert (first.answers, first.prompts) == (80, 40)
    share = (counts * hits).sum() / counts.sum()
    left = [np.delete(counts * hits, one).sum() / np.delete(counts, one).sum() for one in range(40)]
    error = math.sqrt(39 / 40 * ((np.array(left) - np.mean(left)) ** 2).sum())
    reach = stats.t.ppf(0.975, 3 / 8 * counts.sum() ** 2 / (counts**2).sum()) * error
    assert first.lost_interval is not None
    assert 0 < share - reach < share + reach < 1
    assert (first.lost_interval.low, first.lost_interval.high) == pytest.approx((share - reach, share + reach))


def test_a_bin_whose_answers_are_all_of_a_few_prompts_is_as_unsure_as_these() -> None:
    """Thirty prompts of four alike answers each say no more of a share than thirty answers do."""
    each = np.arange(30) % 2
    lost, moved = np.repeat(each[:, None], 4, axis=1), np.ones((30, 4))
    one = (
        correlation(answered(methods(4), 1 - lost, np.ones(30), {"propagated": moved})).settings[0].curves["propagated"]
    )
    assert len(one) == 1
    assert one[0].lost_interval is not None
    assert (one[0].lost_interval.low, one[0].lost_interval.high) == pytest.approx(student(each.tolist()))


def test_few_deals_are_all_counted() -> None:
    scores, moved = [[1, 0, 0.5], [0, 1, 1], [0.2, 0.1, 1]], [[1, 3, 2], [5, 1, 4], [1, 2, 3]]
    control = (
        correlation(answered(methods(3), scores, [1, 1, 1], {"propagated": moved})).settings[0].control("propagated")
    )
    means = [
        np.mean([stats.spearmanr(m, deal).statistic for m, deal in zip(moved, deals, strict=True)])
        for deals in itertools.product(*(itertools.permutations(row) for row in scores))
    ]
    own = np.mean([stats.spearmanr(m, s).statistic for m, s in zip(moved, scores, strict=True)])
    assert (control.rho.exact, control.rho.permutations) == (True, 6**3)
    assert control.rho.p == pytest.approx(np.mean(np.abs(means) >= abs(own) - 1e-9))
    assert (control.rho.low, control.rho.high) == pytest.approx(tuple(np.quantile(means, (0.025, 0.975))))


def test_many_deals_are_drawn_and_agree_with_all_of_them() -> None:
    scores, moved = SCORES[3:7, :3], MOVED[3:7, :3]
    trace = answered(methods(3), scores, FULL[3:7], {"propagated": moved})
    exact = correlation(trace).settings[0].control("propagated").rho
    assert exact.exact
    more = answered(
        methods(3), np.repeat(scores, 2, axis=0), np.repeat(FULL[3:7], 2), {"propagated": np.repeat(moved, 2, axis=0)}
    )
    drawn = correlation(more).settings[0].control("propagated").rho
    assert (drawn.exact, drawn.permutations) == (False, 4096)
    assert drawn.high == pytest.approx(exact.high / math.sqrt(2), abs=0.12)  # twice the prompts
    assert drawn.p >= 1 / 4096


def test_measures_are_held_against_each_other_on_the_same_prompts(found: Correlation) -> None:
    (one,) = [each for each in found.settings[0].contrasts if (each.first, each.second) == ("isolated", "propagated")]
    differences = [a - b for a, b in zip(correlations(stats.spearmanr, OTHER), correlations(stats.spearmanr, MOVED),
                                         strict=True)]  # fmt: skip
    assert one.rho.value == pytest.approx(np.mean(differences))
    assert one.rho.interval is not None
    assert (one.rho.interval.low, one.rho.interval.high) == pytest.approx(student(differences))
    assert one.auc.value == pytest.approx(np.mean(areas(OTHER, LOST)) - np.mean(areas(MOVED, LOST)))


def test_budgets_are_ranked_one_at_a_time_and_their_mean_is_each_prompts() -> None:
    configs = [*methods(3, 64), *methods(3, 128)]
    scores, moved = DRAW.integers(0, 2, (6, 6)), DRAW.lognormal(size=(6, 6))
    result = correlation(answered(configs, scores, np.ones(6), {"propagated": moved}))
    assert [one.name for one in result.settings] == ["64", "128"]
    each: list[list[float]] = []
    for place in range(6):
        rhos = [
            float(stats.spearmanr(moved[place, part], scores[place, part]).statistic)
            for part in (slice(0, 3), slice(3, 6))
            if len(set(scores[place, part])) > 1
        ]
        each += [rhos] if rhos else []
    rho = result.overall[0].strength("propagated").rho
    assert (rho.value, rho.prompts) == (pytest.approx(np.mean([np.mean(one) for one in each])), len(each))


def test_across_the_budgets_of_a_method_the_budget_itself_stands_beside_the_measures() -> None:
    configs = [config for budget in (64, 128, 256) for config in methods(3, budget)]
    moved, scores = DRAW.lognormal(size=(4, 9)), DRAW.uniform(size=(4, 9))
    trace = answered(configs, scores, np.ones(4), {"propagated": moved})
    trace.arrays["kept_count"][:] = np.repeat([1, 2, 3], 3)[:, None, None]  # type: ignore[index]
    found = {one.measure: one.rho for one in correlation(trace).across}
    for measure, values in (("propagated", moved), ("evicted", -np.tile(np.repeat([1, 2, 3], 3), (4, 1)))):
        expected = [
            np.mean(
                [stats.spearmanr(values[place, method::3], scores[place, method::3]).statistic for method in range(3)]
            )
            for place in range(4)
        ]
        assert found[measure].value == pytest.approx(np.mean(expected))
    assert set(found) == {"evicted", *OWN_TEXT.names}
    assert correlation(answered(configs[:6], scores[:, :6], np.ones(4), {"propagated": moved[:, :6]})).across == ()


def test_traces_are_pooled_prompt_by_prompt_and_their_data_sets_told_apart() -> None:
    configs = methods(3)
    scores, moved = SCORES[3:, :3], MOVED[3:, :3]
    first = answered(configs, scores[:3], FULL[3:6], {"propagated": moved[:3]}, dataset="a")
    turned = [configs[place] for place in (2, 0, 1)]  # the other trace measured them in another order
    second = answered(turned, scores[3:][:, [2, 0, 1]], FULL[6:], {"propagated": moved[3:][:, [2, 0, 1]]}, dataset="b")
    whole, both = correlation(answered(configs, scores, FULL[3:], {"propagated": moved})), correlation([first, second])
    assert (both.overall[0].strengths, both.overall[0].contrasts) == (
        whole.overall[0].strengths,
        whole.overall[0].contrasts,
    )
    assert both.settings[0].control("propagated") == whole.settings[0].control("propagated")
    assert [one.dataset for one in both.overall] == ["", "a", "b"]
    alone = correlation(second).overall[0]
    assert both.overall[2].strength("propagated").rho == alone.strength("propagated").rho
    assert (
        both.overall[2].identity_baselines("propagated").rho.beyond == alone.identity_baselines("propagated").rho.beyond
    )
    apart = [correlation(one).settings[0].identity_baselines("propagated").rho.others for one in (first, second)]
    pooled = sum(one.value * one.prompts for one in apart) / sum(one.prompts for one in apart)
    assert both.settings[0].identity_baselines("propagated").rho.others.value == pytest.approx(
        pooled
    )  # others of its own data set
    assert (both.identity.dataset, both.identity.samples) == ("a, b", 6)
    assert [row["dataset"] for row in both.records()] == ["a"] * 9 + ["b"] * 9
    assert f"3 of 3 prompts of a (score > 0; median {np.median(FULL[3:6]):g})" in both.details()[0]
    assert [part.median_full for part in both.parts] == [np.median(FULL[3:6]), np.median(FULL[6:])]


def test_only_the_methods_asked_for_are_ranked() -> None:
    trace = answered(methods(6), DRAW.integers(0, 2, (6, 6)), np.ones(6), {"propagated": DRAW.lognormal(size=(6, 6))})
    (setting,) = correlation(trace, only=["attention", "two-stage", "value"]).settings
    assert [one.selection.name for one in setting.configs] == ["attention", "two-stage", "value"]


def test_the_rows_of_a_frame_are_answers_and_say_what_they_lack() -> None:
    sigma = np.full((2, 3, 2, 2), 0.9)
    sigma[1] = 0.3
    trace = answered(methods(3), [[1, 0, 0.5]] * 2, [1, 1], {"propagated": MOVED[:2, :3]}, sigma=sigma)
    rows = pk.correlation(trace).records()
    assert len(rows) == 6
    assert [row["lost_answer"] for row in rows] == [0, 1, 0] * 2
    assert [row["propagated"] for row in rows] == pytest.approx(MOVED[:2, :3].ravel().tolist())
    assert [row["theta_hat"] is None for row in rows] == [False] * 3 + [True] * 3


def test_what_is_no_trace_is_refused_in_a_line() -> None:
    for wrong in ("trace.h5", ["trace.h5"], None):
        with pytest.raises(TraceError, match="expected traces, as pk.read_trace or pk.measure give them; got "):
            correlation(wrong)  # type: ignore[arg-type]
