"""One layer, two heads, two samples: L, θ, θ̂ and θ̂_relax are small whole numbers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from scipy.stats import t as student

from perturbkv.analyses.bounds import bound_tightness
from perturbkv.analyses.bounds.bound_tightness import bound_tightness as summarise
from perturbkv.analyses.bounds.rank_agreement import RankAgreement, compare_orders
from perturbkv.analyses.bounds.ratios import LEVELS, read_bounds
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.sides import group_by_selection
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.analyses.stats.rank_correlation import spearman
from perturbkv.display import Table
from perturbkv.errors import BoundError, ConfigError, TraceError
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace
from tests.support.measured import MEASURED, config, hand_made

MEDIAN = LEVELS.index(0.5)


def one_config(**changes: Any) -> Trace:
    """Samples s0, s1; heads 0, 1; σ of head 1 is 0.5 in s1: three values are evidence, one is flagged."""
    arrays = {
        "perturbation_isolated": [[[[1, 2]]], [[[3, 4]]]],
        "theta": [[[[2, 4]]], [[[4, 8]]]],
        "theta_hat": [[[[4, 8]]], [[[5, 16]]]],
        "theta_hat_relax": [[[[8, 8]]], [[[10, 2]]]],
        "sigma_stage1": [[[[0.9, 0.8]]], [[[0.7, 0.5]]]],
        "retained_mass": [[[[0.91, 0.93]]], [[[0.72, 0.52]]]],
    }
    return hand_made([config("two-stage")], arrays | changes, heads=2)


def rank_agreements(trace: Trace) -> tuple[RankAgreement, ...]:
    return compare_orders(read_bounds(Measurements(trace, "bound-tightness")), trace.run)


def test_ratios_are_those_of_each_sample_and_head() -> None:
    (found,) = summarise(one_config()).configs
    medians = {name: spread.evidence[MEDIAN] for name, spread in found.spreads.items()}
    assert medians == pytest.approx({"L/θ": 0.5, "L/θ̂": 0.25, "θ/θ̂": 0.5, "θ̂/θ̂_relax": 0.5})
    flagged = {name: spread.flagged[MEDIAN] for name, spread in found.spreads.items()}
    assert flagged == pytest.approx({"L/θ": 0.5, "L/θ̂": 0.25, "θ/θ̂": 0.5, "θ̂/θ̂_relax": 8})
    np.testing.assert_allclose(found.spreads["L/θ̂"].by_layer[MEDIAN], [0.25])
    np.testing.assert_allclose(found.spreads["L/θ̂"].by_head[:, 0, 0], [0.25, 0.425, 0.6])  # least, median, largest
    np.testing.assert_allclose(found.spreads["L/θ̂"].evidence[[0, -1]], np.quantile([0.25, 0.25, 0.6], [0.05, 0.95]))


def test_flagged_values_are_counted_apart() -> None:
    (found,) = summarise(one_config()).configs
    assert found.flagged_share == 0.25
    assert found.flagged_heads.tolist() == [[0, 0.5]]
    assert found.retained_mass == pytest.approx((0.91 + 0.93 + 0.72 + 0.52) / 4)


def test_tightness_is_binned_by_retained_mass() -> None:
    (found,) = summarise(one_config()).configs
    assert found.mass.count.sum() == 4
    bins = [place for place, count in enumerate(found.mass.count) if count]
    assert bins == [10, 14, 18]  # 0.52, 0.72, and 0.91 with 0.93, in twentieths
    assert found.mass.quantiles[MEDIAN, 14] == 0.75
    assert found.mass.quantiles[MEDIAN, 18] == 0.5


@pytest.mark.parametrize(
    ("variable", "values", "inequality"),
    [
        ("perturbation_isolated", [[[[1, 2]]], [[[3, 8.001]]]], "L ≤ θ"),
        ("theta", [[[[2, 4]]], [[[4, 16.001]]]], "θ ≤ θ̂"),
        ("theta_hat_relax", [[[[8, 8]]], [[[4.999, 2]]]], "θ̂ ≤ θ̂_relax"),
    ],
)
def test_a_violation_is_an_error_that_names_layer_head_and_sample(
    variable: str, values: object, inequality: str
) -> None:
    with pytest.raises(BoundError, match=rf"expected {inequality} .* layer 0, head [01] of sample 's1'.*1 violations"):
        summarise(one_config(**{variable: values}))


def test_rounding_is_no_violation_and_a_flagged_head_may_exceed_theorem_4() -> None:
    nearly = one_config(perturbation_isolated=[[[[1, 2]]], [[[3, 8 + 1e-6]]]])
    assert summarise(nearly).inequalities_checked == {"L ≤ θ": 4, "θ ≤ θ̂": 4, "θ̂ ≤ θ̂_relax": 3}


def test_a_sample_that_lost_nothing_is_left_out() -> None:
    trace = one_config()
    trace.arrays["evicted"][1] = 0
    (found,) = summarise(trace).configs
    assert found.evicted_samples == 1
    assert found.spreads["L/θ̂"].evidence[MEDIAN] == 0.25
    assert found.flagged_share_interval is None
    trace.arrays["evicted"][0] = 0
    (nothing,) = summarise(trace).configs
    assert np.isnan(nothing.flagged_share)
    json.dumps(summarise(trace).to_dict(), allow_nan=False)


def test_bounds_of_zero_give_no_ratio() -> None:
    zero = [[[[0, 0]]], [[[0, 0]]]]
    names = ("perturbation_isolated", "theta", "theta_hat", "theta_hat_relax")
    (found,) = summarise(one_config(**dict.fromkeys(names, zero))).configs
    assert np.isnan(found.spreads["L/θ"].evidence).all()


def test_what_cannot_be_read_is_refused() -> None:
    trace = one_config()
    with pytest.raises(ConfigError, match="a step from 0 to 0"):
        summarise(trace, step=1)
    with pytest.raises(TraceError, match="of 'value', got a trace of snapkv:two-stage"):
        bound_tightness.bound_tightness(trace, "value")
    lacking = Trace(trace.run, trace.sample_ids, {k: v for k, v in trace.arrays.items() if k != "theta_hat"})
    with pytest.raises(TraceError, match="bound-tightness needs the variable 'theta_hat'"):
        summarise(lacking)


THREE = [config("attention"), config("two-stage-uniform"), config("two-stage")]


def ranked(perturbation: object, theta: object, sigma: object = 0.9, configs: Any = THREE) -> Trace:
    """One layer, one head; values are (sample, config)."""
    values = np.asarray(perturbation, dtype=float)[..., None, None]
    bound = np.asarray(theta, dtype=float)[..., None, None]
    share = np.broadcast_to(np.asarray(sigma, dtype=float), values.shape[:2])[..., None, None]
    arrays = {
        "perturbation_isolated": values,
        "theta": bound,
        "theta_hat": 2 * bound[:, ::-1] if bound.shape[0] == 1 else 2 * bound,
        "theta_hat_relax": 9 * bound,
        "sigma_stage1": share,
        "retained_mass": 1 - bound / 100,
    }
    return hand_made(configs, arrays)


def test_rank_correlation_is_spearmans() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.normal(size=(6, 4)), draw.integers(0, 3, (6, 4)).astype(float)
    expected = [spearmanr(first[:, column], second[:, column]).statistic for column in range(4)]
    np.testing.assert_allclose(spearman(first, second), expected)
    assert np.isnan(spearman(np.ones((3, 1)), first[:3, :1])).all()
    assert np.isnan(spearman(np.ones((0, 4)), np.ones((0, 4)))).tolist() == [True] * 4  # of no values


def test_correlations_and_concordance_of_a_bound_that_orders_in_one_sample_of_two() -> None:
    # s0: θ orders L exactly (ρ = 1, all three pairs agree); s1: exactly the other way (ρ = −1, none agrees)
    trace = ranked([[1, 2, 3], [3, 2, 1]], [[10, 20, 30], [10, 20, 30]])
    (found,) = rank_agreements(trace)
    (theta,) = [correlation for correlation in found.correlations if correlation.bound == "θ"]
    assert (theta.mean, theta.mean_interval, theta.values) == (0, Interval(-1.0, 1.0, "range"), 2)
    assert theta.selections == ("attention", "two-stage-uniform", "two-stage")
    assert {pair.share for pair in found.pairs if pair.bound == "θ"} == {0.5}
    (lost,) = [correlation for correlation in found.correlations if correlation.bound == "1 − S"]
    assert lost.mean == 0  # 1 − S orders as θ does here


def test_the_bound_of_a_stage_1_compares_only_selections_that_have_the_same_one() -> None:
    """`attention` and `attention-unpooled` have no stages: what stands for their stage 1 is ours."""
    four = [config("attention"), config("attention-unpooled"), *THREE[1:]]
    (found,) = rank_agreements(ranked([[1, 2, 3, 4]] * 6, [[10, 30, 20, 40]] * 6, configs=four))
    assert {one.bound for one in found.correlations} == {"θ", "1 − S"}
    compared = {(pair.first, pair.second): pair.same_stage1 for pair in found.pairs if pair.bound == "θ̂"}
    assert compared == {("two-stage-uniform", "two-stage"): True}
    everywhere = {(pair.first, pair.second): pair.same_stage1 for pair in found.pairs if pair.bound == "1 − S"}
    assert len(everywhere) == 6
    assert [names for names, same in everywhere.items() if same] == [("two-stage-uniform", "two-stage")]


def test_the_two_selections_with_stages_hold_the_same_stage_1_when_measured_and_others_do_not() -> None:
    trace = read_trace(MEASURED)
    sigma = Measurements(trace, "bound-tightness")["sigma_stage1"]
    groups = [group for group in group_by_selection(trace.run) if {"two-stage", "two-stage-uniform"} <= set(group)]
    assert groups
    for group in groups:
        np.testing.assert_array_equal(sigma[:, group["two-stage"]], sigma[:, group["two-stage-uniform"]])
        assert (sigma[:, group["two-stage"]] != sigma[:, group["attention-unpooled"]]).any()


def picked_by_loops(bounds: dict[str, np.ndarray], moved: np.ndarray, sigma: np.ndarray) -> dict[str, list[float]]:
    """Per sample the share of heads in which each bound picks the selection of two that perturbs less."""
    shares: dict[str, list[float]] = {name: [] for name in bounds}
    for sample in range(moved.shape[0]):
        right, count = dict.fromkeys(bounds, 0), 0
        for layer in range(moved.shape[2]):
            for head in range(moved.shape[3]):
                here = (sample, slice(None), layer, head)
                if min(sigma[here]) <= 0.5 or moved[here][0] == moved[here][1]:
                    continue
                if any(bound[here][0] == bound[here][1] for bound in bounds.values()):
                    continue
                count += 1
                for name, bound in bounds.items():
                    right[name] += int(np.argmin(bound[here]) == np.argmin(moved[here]))
        for name in bounds:
            shares[name].append(right[name] / count)
    return shares


def test_at_one_stage_1_all_bounds_are_counted_on_the_same_heads_and_differ_by_the_paired_difference() -> None:
    draw, size = np.random.default_rng(3), (8, 2, 3, 40)
    moved = draw.integers(1, 9, size).astype(float)
    noise = {"θ": 2, "θ̂": 5, "1 − S": 9}
    bounds = {name: moved + draw.integers(0, width, size) for name, width in noise.items()}  # the later, the worse
    sigma = np.repeat(draw.uniform(0.3, 1, (8, 1, 3, 40)), 2, axis=1)
    arrays = {
        "perturbation_isolated": moved,
        "theta": bounds["θ"],
        "theta_hat": bounds["θ̂"],
        "theta_hat_relax": 9 * bounds["θ̂"],
        "sigma_stage1": sigma,
        "retained_mass": 1 - bounds["1 − S"] / 64,  # a power of 2, so that equal sums stay equal
    }
    (found,) = rank_agreements(hand_made(THREE[1:], arrays, 3, 40))
    expected = picked_by_loops(bounds, moved, sigma)
    rows = {pair.bound: pair for pair in found.pairs}
    for name, shares in expected.items():
        assert rows[name].share == pytest.approx(np.mean(shares))
    assert len({rows[name].values for name in rows}) == 1
    gains = np.subtract(expected["θ̂"], expected["1 − S"])
    assert rows["θ̂"].gain == pytest.approx(gains.mean())
    reach = student.ppf(0.975, 3) * gains.std(ddof=1) / np.sqrt(8)  # 3/8 degrees of freedom a sample
    assert rows["θ̂"].gain_interval == Interval(pytest.approx(gains.mean() - reach), pytest.approx(gains.mean() + reach))
    assert np.isnan(rows["1 − S"].gain)


def test_selections_without_a_common_stage_1_are_compared_in_all_heads() -> None:
    sigma = [[0.9, 0.9, 0.9], [0.9, 0.9, 0.5], [0.9, 0.5, 0.5], [0.5, 0.5, 0.5]]
    (found,) = rank_agreements(ranked([[1, 2, 3]] * 4, [[10, 20, 30]] * 4, sigma=sigma))
    counts = {(one["first"], one["second"], one["bound"]): (one["values"], one["samples"])
              for one in found.to_dict()["concordance"]}  # fmt: skip
    assert counts[("attention", "two-stage", "θ")] == counts[("attention", "two-stage", "1 − S")] == (4, 4)
    assert counts[("two-stage-uniform", "two-stage", "θ̂")] == (1, 1)
    assert counts[("two-stage-uniform", "two-stage", "θ")] == (1, 1)  # the same heads
    for one in found.to_dict()["rank_correlations"]:
        assert (one["values"], one["samples"]) == (4, 4), one["bound"]


def test_equal_sides_are_no_evidence_of_order() -> None:
    (found,) = rank_agreements(ranked([[1, 1, 2]], [[5, 6, 6]]))
    values = {(pair.first, pair.second): pair.values for pair in found.pairs if pair.bound == "θ"}
    assert values[("attention", "two-stage-uniform")] == 0  # L is equal
    assert values[("two-stage-uniform", "two-stage")] == 0  # θ is equal
    assert values[("attention", "two-stage")] == 1


def test_two_selections_have_pairs_but_no_ranks() -> None:
    (found,) = rank_agreements(ranked([[1, 2]], [[5, 6]], configs=THREE[:2]))
    assert found.correlations == ()
    assert [pair.share for pair in found.pairs if pair.bound == "θ"] == [1]
    json.dumps(found.to_dict(), allow_nan=False)


def test_controls_are_ranked_apart_from_contenders() -> None:
    four = [*THREE, config("random")]
    (found,) = rank_agreements(ranked([[1, 2, 3, 9]], [[30, 20, 10, 90]], configs=four))
    means = {len(c.selections): c.mean for c in found.correlations if c.bound == "θ"}
    assert means == pytest.approx({3: -1, 4: spearmanr([1, 2, 3, 9], [30, 20, 10, 90]).statistic})


def test_a_measured_trace_holds_every_inequality() -> None:
    result = bound_tightness.bound_tightness(read_trace(MEASURED))
    assert result.inequalities_checked["L ≤ θ"] == 3 * 15 * 2 * 4
    assert len(result.shown) == 3


def test_settings_that_differ_in_the_groups_product_alone_are_told_apart() -> None:
    result = bound_tightness.bound_tightness(read_trace(MEASURED))
    (ranks,) = [part for part in result.details() if isinstance(part, Table) and part.title.startswith("order of")]
    settings = [row[0] for row in ranks.rows if row[0]]
    assert len(settings) == len(set(settings)) == len([one for one in result.agreements if one.correlations])
    assert sum("mean-of-products" in name.replace("\n", "") for name in settings) == len(settings) // 2


def test_the_table_shows_the_ratios_where_sigma_is_evidence_and_the_details_where_it_is_not() -> None:
    result = summarise(one_config())  # no head flagged in s0, one of two in s1
    shown = dict(zip(result.SHOWN[1:], result.table().rows[0][-3:], strict=True))
    assert shown["share"] == "75 %\n(50 … 100)"
    assert shown["l_theta_hat"] == "0.25\n0.25–0.56"
    flagged = result.configs[0].cells(flagged=True)
    assert (flagged.share, flagged.share_interval) == (0.25, Interval(0.0, 0.5, "range"))
    assert flagged.hat_relax == "8.00\n8.00–8.00"


def test_a_pair_of_fewer_than_five_samples_is_a_dash_beside_its_n() -> None:
    for flagged, values in ((1, 5), (2, 4)):
        sigma = [[0.9] * 3] * (6 - flagged) + [[0.4] * 3] * flagged
        (found,) = rank_agreements(ranked([[1, 2, 3]] * 6, [[10, 30, 20]] * 6, sigma))
        pairs = [pair for pair in found.pairs if pair.same_stage1]
        assert [(one.values, one.samples) for one in pairs] == [(values, values)] * 3
        assert [np.isnan(pair.agreement) for pair in pairs] == [values < 5] * 3
        assert [pair.advantage is None for pair in pairs] == [values < 5, values < 5, True]
        assert [one.mean for one in found.correlations] == [pytest.approx(0.5)] * 2


def test_tables_show_the_bound_of_a_stage_1_beside_the_others_where_stage_1_is_one() -> None:
    picks = summarise(ranked([[1, 2, 3]] * 6, [[10, 30, 20]] * 6)).details()[-1]
    assert isinstance(picks, Table)
    assert [row[0].split("\n")[0] for row in picks.rows] == [
        "attention or two-stage",
        "",
        "two-stage-uniform or",
        "",
        "",
    ]
    assert [row[1] for row in picks.rows] == ["θ", "1 − S", "θ", "θ̂", "1 − S"]


def test_few_bits_and_corrections_are_left_out_by_name() -> None:
    """θ bounds what eviction loses: what few bits lose beside it, or a correction adds, is no violation."""
    whole, few = config("two-stage"), config("two-stage", precision="quantise(bits=2)")
    corrected = config("two-stage", correction="corrected")
    names = ("theta", "theta_hat", "theta_hat_relax", "sigma_stage1", "retained_mass")
    arrays = {name: np.full((2, 3, 1, 1), 0.9) for name in names}
    arrays["perturbation_isolated"] = np.tile(np.array([0.5, 7.0, 8.0])[:, None, None], (2, 1, 1, 1))
    found = summarise(hand_made([whole, few, corrected], arrays))
    assert [one.config for one in found.configs] == [whole]
    assert found.inequalities_checked["L ≤ θ"] == 2
    left_out = f"{few.label()}, {corrected.label()}"
    assert f"not of few bits, moved keys, corrected outputs or other entries: {left_out}." in " ".join(found.caveats())
    with pytest.raises(TraceError, match="expected a configuration that only evicts, as bounds speak"):
        summarise(hand_made([few], {name: array[:, :1] for name, array in arrays.items()}))
    arrays["perturbation_isolated"] = arrays["perturbation_isolated"][:, ::-1]
    with pytest.raises(BoundError):
        summarise(hand_made([whole, few, corrected], arrays))
