"""2 layers × 2 heads × 3 samples, every number worked out here."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import HeadComparison, compare_kind, summarise
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.sides import pairs
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.analyses.text import intervals_note
from perturbkv.analyses.verdicts import (
    ALIKE,
    FEW,
    equal_isolated,
    equal_layers,
    equal_propagated,
    equal_whole,
    verdicts,
)
from perturbkv.configs.choice import parse
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError, TraceError
from perturbkv.schema import VARIABLES
from perturbkv.selection.grid import configuration, grid
from perturbkv.trace import SampleTrace, Trace
from tests.support.measured import config
from tests.support.measured import hand_made as hand_measured
from tests.support.traces import rekept, run_config, sample_trace, trace

# baseline and treatment, means over three samples: [[4, 2], [1e-3, 3]] against [[2, 5], [2e-3, 3]]
BASELINE = np.array([[[3, 2], [1e-3, 3]], [[4, 2], [1e-3, 3]], [[5, 2], [1e-3, 3]]])
TREATMENT = np.array([[[1, 4], [2e-3, 3]], [[2, 5], [2e-3, 3]], [[3, 6], [2e-3, 3]]])
FLOOR = np.full((2, 2), 1e-3)
PAIR = run_config().configs


def hand_made(count: int = 3, **changes: Any) -> list[SampleTrace]:
    samples = []
    for index in range(count):
        arrays = dict(sample_trace(f"s{index}").arrays)
        for kind in ("isolated", "propagated"):
            arrays[f"perturbation_{kind}"] = np.stack([BASELINE[index], TREATMENT[index]])[:, None]
        arrays["noise_floor"] = arrays["noise_floor_isolated"] = FLOOR[None]
        arrays["output_norm"] = np.full((1, 2, 2), 10.0)
        arrays["sigma_stage1"] = np.broadcast_to([[0.9, 0.5], [0.4, 0.6]], (2, 1, 2, 2)).astype(float)
        arrays["retained_mass"] = np.stack([np.full((1, 2, 2), 0.7), np.full((1, 2, 2), 0.6)])
        samples.append(SampleTrace(f"s{index}", {**arrays, **changes}))
    return samples


def compare(of: Trace, **more: Any) -> HeadComparison:
    return summarise(of, *PAIR, **more)


def test_means_verdicts_and_shares() -> None:
    result = compare(trace(*hand_made()))
    for kind in (result.isolated, result.propagated):
        np.testing.assert_allclose(kind.baseline_mean, [[4, 2], [1e-3, 3]])
        np.testing.assert_allclose(kind.treatment_mean, [[2, 5], [2e-3, 3]])
        assert kind.verdict.tolist() == [[1, -1], [0, 0]]  # one floor apart, and exactly equal
        assert (kind.improved, kind.tied, kind.worsened) == (1, 2, 1)
        assert kind.better_share == 0.25
        assert kind.sum_ratio == pytest.approx(10.002 / 9.001)
        assert kind.median_ratio == pytest.approx(np.median([0.5, 2.5, 2.0, 1.0]))
        assert kind.half_share == 0.5  # 4 of 9.001 is less than half of it, 4 + 3 is more
        assert kind.floor_relative_median == pytest.approx(1e-4)
    assert result.retained_mass == pytest.approx((0.7, 0.6))


def test_a_number_of_all_samples_can_lie_outside_the_range_of_single_ones_which_the_note_says() -> None:
    """Heads of 0, 1, 1 and 1, 0, 1 over 1, 1, 1: either sample's median head is at 1, that of both together at 1/2."""
    treatment = np.array([[[0.0, 1.0, 1.0]], [[1.0, 0.0, 1.0]]])
    arrays = {
        f"perturbation_{kind}": np.stack([np.ones((2, 1, 3)), treatment], axis=1) for kind in ("isolated", "propagated")
    }
    found = summarise(hand_measured(PAIR, arrays, heads=3), *PAIR)
    kind, ends = found.isolated, found.isolated.median_ratio_interval
    assert ends is not None and (kind.median_ratio, ends.low, ends.high, ends.kind) == (0.5, 1.0, 1.0, "range")
    assert "range of single samples, outside which a number of all of them together can lie" in intervals_note(2)


def test_flagged_heads_are_those_whose_mean_sigma_is_at_most_a_half() -> None:
    result = compare(trace(*hand_made()))
    assert result.flagged.tolist() == [[False, True], [True, False]]
    assert result.isolated.unflagged_better_share == 0.5
    assert result.to_dict()["flagged_heads"] == ["0-1", "1-0"]


def test_a_tie_is_a_difference_of_at_most_two_floors_whatever_the_size() -> None:
    baseline, treatment = np.array([1.0, 1000, 1000, 3, 1]), np.array([3.0, 1002, 1002.1, 1, 3.1])
    assert verdicts(baseline, treatment, np.ones(5)).tolist() == [0, 0, -1, 0, -1]


def test_a_share_of_heads_is_the_mean_of_each_samples_share() -> None:
    # head 0 is better in one sample of two, head 1 in both; by their means both are better
    first, second = np.array([[[4.0, 4.0]], [[4.0, 4.0]]]), np.array([[[9.0, 2.0]], [[-3.0, 2.0]]])
    found = head_comparison.compare_kind(
        first, second, np.zeros_like(first), np.ones_like(first), np.zeros((1, 2), dtype=bool)
    )
    assert found.verdict.tolist() == [[1, 1]]
    assert found.better_share == 0.75
    assert found.better_share_interval == Interval(0.5, 1.0, "range")


def same_kept(**changes: Any) -> Trace:
    """Both configurations keep entries 0, 1, 2 in every head: what differs between them is rounding."""
    samples = hand_made(**changes)
    for sample in samples:
        rekept(sample.arrays, lambda where, held: [0, 1, 2])
    return trace(*samples)


def keeping_another(place: tuple[int, ...]) -> Trace:
    """As `same_kept`, but for one configuration's head."""
    made = same_kept()
    rekept(made.arrays, lambda where, held: [1, 2, 9] if where[1:] == place else held)
    return made


def test_equal_kept_sets_tie_by_identity_and_their_ratio_is_exactly_1() -> None:
    result = compare(same_kept())
    for kind in (result.isolated, result.propagated):
        assert (kind.improved, kind.tied, kind.worsened) == (0, 4, 0)
        assert (kind.sum_ratio, kind.median_ratio, kind.better_share) == (1.0, 1.0, 0.0)
        assert np.array_equal(kind.baseline_mean, kind.treatment_mean)
        assert not kind.sign_flips.significant.any()


def test_a_propagated_tie_needs_equal_sets_in_all_earlier_layers_too() -> None:
    made = keeping_another((1, 0, 0))  # treatment, layer 0, head 0
    same = equal_isolated(made, 0, 1)[0]
    assert same.tolist() == [[False, True], [True, True]]
    assert equal_propagated(made, 0, 1)[0].tolist() == [[False, True], [False, False]]
    assert equal_layers(made, 0, 1)[0].tolist() == [False, False]
    assert not equal_whole(made, 0, 1).any()
    last = keeping_another((1, 1, 1))  # treatment, layer 1, head 1
    assert equal_propagated(last, 0, 1)[0].tolist() == [[True, True], [True, False]]
    assert equal_layers(last, 0, 1)[0].tolist() == [True, False]
    assert equal_whole(same_kept(), 0, 1).all()


@pytest.mark.parametrize("moved", [0, 1])
def test_equal_sets_at_other_positions_are_no_tie(moved: int) -> None:
    """What is decoded differs, but where everything stays."""
    kept = EvictionConfig(Budget(16), "streaming-llm", "position", 4)
    configs = [kept, kept]
    configs[moved] = dataclasses.replace(kept, policy=parse("streaming-llm(positions=in-cache)"))
    samples = hand_made(3)
    for sample, evicted in zip(samples, (1, 0, 1), strict=True):
        rekept(sample.arrays, lambda where, held: [0, 1, 2])
        sample.arrays["evicted"][:] = evicted
    made = trace(*samples, configs=tuple(configs))
    assert equal_isolated(made, 0, 1).all(axis=(1, 2)).tolist() == [False, True, False]
    assert equal_propagated(made, 0, 1).all(axis=(1, 2)).tolist() == [False, True, False]
    assert not equal_propagated(made, 0, 1)[::2].any()
    assert equal_layers(made, 0, 1).all(axis=1).tolist() == [False, True, False]
    assert equal_whole(made, 0, 1).tolist() == [False, True, False]
    alike = trace(*samples, configs=(kept, dataclasses.replace(kept, policy=parse("streaming-llm(sinks=2)"))))
    assert equal_propagated(alike, 0, 1).all()


def test_selections_are_compared_at_equal_positions() -> None:
    configs = grid(14, policy=["snapkv", "snapkv(positions=in-cache)"], selection=["attention", "two-stage"], window=5)
    found = pairs(RunConfig("m", "d", configs), "attention", "two-stage")
    assert sorted((one.positions, other.positions) for one, other in found) == [("in-cache",) * 2, ("kept",) * 2]


def test_eviction_and_moving_are_told_apart() -> None:
    """Of sums over samples: (2 + 4) of (1 + 2) is 2, (0.5 + 1) of it 0.5."""
    kept = EvictionConfig(14, "snapkv", "attention", 5)
    inside = dataclasses.replace(kept, policy=parse("snapkv(positions=in-cache)"))
    arrays = {
        "perturbation_isolated": [[[[1.0]], [[2.0]]], [[[2.0]], [[4.0]]]],
        "perturbation_eviction": [[[[1.0]], [[1.0]]], [[[2.0]], [[2.0]]]],
        "perturbation_change": [[[[0.0]], [[0.5]]], [[[0.0]], [[1.0]]]],
    }
    found = pk.compare_heads(
        hand_measured([kept, inside], arrays), "snapkv:attention", "snapkv(positions=in-cache):attention"
    )
    (apart,) = found.changed
    assert (apart.config, apart.whole_ratio, apart.change_ratio) == (inside, 2.0, 0.5)
    assert any("2.00" in note and "0.50" in note and "eviction alone" in note for note in found.caveats())
    rounding = arrays | {"perturbation_eviction": [[[[1.0]], [[1e-13]]], [[[2.0]], [[2e-13]]]]}
    whole = Measurements(hand_measured([kept, inside], rounding), "heads")
    assert head_comparison.changed_losses(whole, [kept, inside]) == (), "nothing that it evicts is lost"
    alone = hand_measured([kept, inside], {"perturbation_isolated": arrays["perturbation_isolated"]})
    assert head_comparison.changed_losses(Measurements(alone, "heads"), [kept, inside]) == ()


def test_fewer_than_five_samples_show_their_range_and_one_shows_nothing() -> None:
    kind = compare(trace(*hand_made())).isolated
    assert kind.better_share_interval == Interval(0.25, 0.25, "range")
    assert kind.sum_ratio_interval is not None
    assert kind.sum_ratio_interval.kind == "range"
    each = [TREATMENT[sample].sum() / BASELINE[sample].sum() for sample in range(3)]
    assert (kind.sum_ratio_interval.low, kind.sum_ratio_interval.high) == pytest.approx((min(each), max(each)))
    one = compare(trace(*hand_made(1))).isolated
    assert one.better_share_interval is None
    assert one.sum_ratio_interval is None


@pytest.mark.parametrize(("distance", "noise"), [("l2", 0.1), ("cosine", 0.01)])
def test_each_distance_has_its_own_numbers_and_its_own_floor(distance: str, noise: float) -> None:
    samples = []
    for sample in hand_made():
        arrays = dict(sample.arrays)
        for kind, floor in (("isolated", "noise_floor_isolated"), ("propagated", "noise_floor")):
            arrays[f"perturbation_{kind}_{distance}"] = arrays[f"perturbation_{kind}"] / 10
            arrays[f"{floor}_{distance}"] = np.full((1, 2, 2), noise if kind == "isolated" else 1e-15)
        arrays["output_norm_l2"] = np.full((1, 2, 2), 5.0)
        samples.append(SampleTrace(sample.sample_id, arrays))
    result = compare(trace(*samples), distance=distance)
    np.testing.assert_allclose(result.isolated.baseline_mean, [[0.4, 0.2], [1e-4, 0.3]])
    assert result.isolated.verdict.tolist() == [
        [0, -1],
        [0, 0],
    ]  # 0.4 and 0.2 are within noise, 0.2 and 0.5 not
    assert result.propagated.verdict.tolist() == [[1, -1], [-1, 0]]
    with pytest.raises(TraceError, match=f"heads needs the variable 'perturbation_isolated_{distance}'"):
        compare(trace(*hand_made()), distance=distance)


def test_a_step_is_of_the_samples_whose_text_reaches_it() -> None:
    def lengthened(sample: SampleTrace, measured: int) -> SampleTrace:
        arrays = dict(sample.arrays)
        for name, array in arrays.items():
            if "step" in VARIABLES[name].dims:
                axis = VARIABLES[name].dims.index("step")
                later = np.full_like(array, np.nan) if measured == 1 and array.dtype.kind == "f" else array
                arrays[name] = np.concatenate([array, later], axis=axis)
        return SampleTrace(sample.sample_id, {**arrays, "steps_measured": np.asarray(measured)})

    made = trace(*(lengthened(sample, steps) for sample, steps in zip(hand_made(), (2, 1, 2), strict=True)))
    assert compare(made, step=0).identity.samples == 3
    later = compare(made, step=1)
    assert (later.identity.samples, later.identity.ended) == (2, 1)
    np.testing.assert_allclose(later.isolated.baseline_mean, BASELINE[[0, 2]].mean(axis=0))
    assert "2 samples" in later.identity.lines()[0]
    assert "1 ended before" in later.identity.lines()[0]
    made.arrays["theta"][0, 0, 1] = np.nan  # at a step that sample 0 measured
    with pytest.raises(TraceError, match="got NaN in 'theta'"):
        Measurements(made, "heads", 1)["theta"]
    assert not np.isnan(Measurements(made, "heads", 0)["theta"]).any()
    made.arrays["steps_measured"][:] = 1
    with pytest.raises(ConfigError, match="from 0 to 0, where the longest text ends, got 1"):
        compare(made, step=1)


@pytest.mark.parametrize("granularity", ["query", "kv"])
def test_held_over_full_counts_each_stored_set_once(granularity: str) -> None:
    """Four query heads in groups of two, 100 entries: 20 entries in each of four sets, or of two."""
    configs = [config("attention", granularity=granularity), config("attention", 65, granularity="kv")]
    made = hand_measured(configs, {"prompt_tokens": [100], "kept_count": np.full((1, 2, 1, 4), 20)}, heads=4)
    offsets = np.array([[0, 20, 40, 60], [80, 80, 100, 100]])
    made.arrays["kept_offset"][0, :, 0] = offsets if granularity == "query" else offsets[[1, 1]]
    sets = 4 if granularity == "query" else 2
    assert Measurements(made, "test").cache_shares[0] == pytest.approx(sets * 20 / (2 * 100))
    alone = hand_measured(configs[:1], {"prompt_tokens": [100], "kept_count": np.full((1, 1, 1, 4), 20)}, heads=4)
    unknown = granularity == "query"  # which does not show the groups
    assert np.isnan(Measurements(alone, "test").cache_shares[0]) == unknown


def test_a_failed_sample_is_left_out_and_counted() -> None:
    result = compare(trace(*hand_made(), failures={"broken": "NaN"}))
    np.testing.assert_allclose(result.isolated.baseline_mean, [[4, 2], [1e-3, 3]])
    assert (result.identity.samples, result.identity.failed) == (3, 1)


def test_the_summary_is_plain_json() -> None:
    zero = {"perturbation_isolated": np.zeros((2, 1, 2, 2))}
    text = json.dumps(compare(trace(*hand_made(**zero))).to_dict(), allow_nan=False)
    assert json.loads(text)["isolated"]["sum_ratio"] is None


def test_what_cannot_be_compared_is_refused() -> None:
    made = trace(*hand_made())
    with pytest.raises(TraceError, match="expected one of the trace's configurations"):
        summarise(made, PAIR[0], config("value"))
    with pytest.raises(ConfigError, match="a step from 0 to 0, got 1"):
        compare(made, step=1)
    nothing = Trace(made.run, made.sample_ids, made.arrays, dict.fromkeys(made.sample_ids, "broke"))
    with pytest.raises(TraceError, match="at least one complete sample"):
        compare(nothing)
    lacking = Trace(made.run, made.sample_ids, {k: v for k, v in made.arrays.items() if k != "sigma_stage1"})
    with pytest.raises(TraceError, match="heads needs the variable 'sigma_stage1'"):
        compare(lacking)
    poisoned = trace(*hand_made(sigma_stage1=np.full((2, 1, 2, 2), np.nan)))
    with pytest.raises(TraceError, match="got NaN in 'sigma_stage1'"):
        compare(poisoned)
    endless = trace(*hand_made(perturbation_isolated=np.full((2, 1, 2, 2), np.inf)))
    with pytest.raises(TraceError, match="got infinity in 'perturbation_isolated'"):
        compare(endless)


def test_bounds_without_any_attention_in_stage_1_are_infinite_and_nothing_else_is() -> None:
    made = trace(*hand_made(theta_hat=np.full((2, 1, 2, 2), np.inf)))
    assert np.isinf(Measurements(made, "bounds", None)["theta_hat"]).all()
    made.arrays["theta"][0, 0, 0] = -np.inf
    with pytest.raises(TraceError, match="got infinity in 'theta'"):
        Measurements(made, "bounds", None)["theta"]


def test_pairs_differ_in_selection_alone() -> None:
    made = [EvictionConfig(budget=Budget(b), selection=name) for b in (64, 128) for name in ("attention", "value")]
    stream = EvictionConfig(budget=Budget(64), policy="streaming-llm", selection="position")
    run = RunConfig(model="m", dataset="d", configs=(*made, stream))
    configs = run.configs
    assert pairs(run, "attention", "value") == [(configs[0], configs[1]), (configs[2], configs[3])]
    assert pairs(run, "streaming-llm", "snapkv:value") == [(configs[4], configs[1])]
    inside = dataclasses.replace(stream, policy=parse("streaming-llm(positions=in-cache)"))
    both = dataclasses.replace(run, configs=(*run.configs, inside))
    assert pairs(both, "snapkv:value", "streaming-llm") == [(configs[1], configs[4]), (configs[1], inside)]
    assert pairs(both, "streaming-llm", "snapkv:value") == [(configs[4], configs[1]), (inside, configs[1])]
    with pytest.raises(TraceError, match="got a trace of snapkv:attention, snapkv:value, streaming-llm:position"):
        pairs(run, "attention", "two-stage")


def paired(sides: tuple[str, str], **choices: Any) -> list[tuple[str, str]]:
    run = RunConfig("m", "d", grid(128, **choices))
    return [(str(one.selection), str(other.selection)) for one, other in pairs(run, *sides)]


def test_a_control_is_compared_with_the_method_of_its_own_score() -> None:
    asked = {"selection": ["two-stage", "two-stage-uniform"], "score": ["pooled", "accumulated"]}
    assert paired(("two-stage-uniform", "two-stage"), **asked) == [
        ("two-stage-uniform(score=pooled)", "two-stage(score=pooled)"),
        ("two-stage-uniform", "two-stage"),
    ]


def test_a_side_may_say_its_options_as_a_label_does() -> None:
    asked = {"selection": ["attention", "two-stage(alpha=0.5)"], "policy": ["snapkv(pool=none)", "snapkv"]}
    sides = ("snapkv(pool=none):attention", "snapkv(pool=none):two-stage(alpha=0.5)")
    assert paired(sides, **asked) == [("attention", "two-stage(alpha=0.5)")]


def test_two_sides_of_one_policy_may_differ_in_the_options_that_they_name() -> None:
    run = RunConfig("m", "d", grid(128, policy=["adakv(floor=0.1)", "adakv(floor=0.3)"], selection="two-stage"))
    sides = ("adakv(floor=0.1):two-stage", "adakv(floor=0.3):two-stage")
    assert pairs(run, *sides) == [run.configs]
    with pytest.raises(TraceError, match="expected configurations to compare"):
        pairs(run, "adakv:two-stage", "two-stage")


def test_bare_selections_are_compared_within_each_policy() -> None:
    sides = [("snapkv", "attention"), ("snapkv", "two-stage"), ("adakv", "attention"), ("adakv", "two-stage"),
             ("h2o", "attention")]  # fmt: skip
    configs = tuple(configuration(64, policy=policy, selection=selection) for policy, selection in sides)
    run = RunConfig("m", "d", configs)
    configs = run.configs
    assert pairs(run, "attention", "two-stage") == [(configs[0], configs[1]), (configs[2], configs[3])]
    assert pairs(run, "attention", "adakv:two-stage") == [(configs[0], configs[3])]
    assert pairs(run, "attention", "h2o") == [(configs[0], configs[4])]  # which does not pool: part of what it is


def test_noise_adds_in_the_angle_so_equal_cosines_that_both_shake_are_tied() -> None:
    angle, noise = 0.3, 1e-3  # the same true angle on both sides, each measured with the angle of the floor beside it
    baseline, treatment = (np.array([1 - np.cos(angle + sign * noise)]) for sign in (1, -1))
    floor = np.array([1 - np.cos(noise)])
    assert verdicts(baseline, treatment, floor, "cosine") == 0
    assert verdicts(baseline, treatment, floor) == 1  # held against the difference, noise would decide


def test_cosines_that_lie_further_apart_than_their_noise_are_decided() -> None:
    baseline, treatment, floor = (np.array([1 - np.cos(angle)]) for angle in (0.3, 0.29, 1e-3))
    assert verdicts(baseline, treatment, floor, "cosine") == 1
    assert verdicts(treatment, baseline, floor, "cosine") == -1


def test_a_sum_is_tied_only_where_every_head_ties_in_every_sample() -> None:
    """Two samples that differ by as much in either direction have equal means and are no tie; rounding is."""
    floor, norm, flagged = np.full((2, 1, 1), 1e-3), np.ones((2, 1, 1)), np.zeros((1, 1), dtype=bool)
    baseline = np.full((2, 1, 1), 1.0)
    opposite = compare_kind(baseline, baseline + np.array([0.5, -0.5])[:, None, None], floor, norm, flagged)
    rounded = compare_kind(baseline, baseline + 1e-3, floor, norm, flagged)
    assert (opposite.tied, opposite.case().verdict) == (1, FEW)
    assert (rounded.tied, rounded.case().verdict) == (1, ALIKE)
