"""Ranks of heads by hand: the same, reversed, unrelated; planted noise; depth; traces that do not go together."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from itertools import combinations, count

import numpy as np
import pytest
from scipy import stats

import perturbkv as pk
from perturbkv.analyses.questions.stability.rank_reliability import (
    RankedHeads,
    agreement,
    depth_profile,
    halves,
    profiles,
    reliability,
    spearman_brown,
)
from perturbkv.display import Table
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made

CONFIGS = (config("attention", 128), config("two-stage", 128))
NORM = 10.0
DIGESTS = count()


def made(suffered: np.ndarray, baseline: np.ndarray | None = None, **run: object) -> Trace:
    """A trace of (sample, layer, head) relative L1, isolated; propagated is a root of it; attention suffers double."""
    other = 2 * suffered if baseline is None else baseline
    both = NORM * np.stack([other, suffered], axis=1)
    layers, heads = suffered.shape[1:]
    found = hand_made(
        CONFIGS, {"perturbation_isolated": both, "perturbation_propagated": np.sqrt(both)}, layers=layers, heads=heads
    )
    return renamed(found, **run)


def renamed(trace: Trace, **run: object) -> Trace:
    """The same of another run: a data set, a seed, a model of its own; with a digest of its own."""
    return dataclasses.replace(trace, run=dataclasses.replace(trace.run, **run), digest=f"{next(DIGESTS):012}")  # type: ignore[arg-type]


def naive_rho(first: Sequence[float], second: Sequence[float]) -> float:
    """The oracle: Pearson's correlation of ranks that are counted, pair by pair."""
    ranks = [[sum(b < a for b in side) + (sum(b == a for b in side) + 1) / 2 for a in side] for side in (first, second)]
    means = [sum(one) / len(one) for one in ranks]
    top = sum((a - means[0]) * (b - means[1]) for a, b in zip(*ranks, strict=True))
    squares = [sum((a - mean) ** 2 for a in one) for one, mean in zip(ranks, means, strict=True)]
    return top / math.sqrt(squares[0] * squares[1])


def naive_reliability(values: np.ndarray) -> float:
    """The oracle: every half of the samples against the others, Spearman–Brown of the mean."""
    samples = len(values)
    ranks = [[sum(b < a for b in row) + (sum(b == a for b in row) + 1) / 2 for a in row] for row in values]
    found = []
    for half in combinations(range(samples), samples // 2):
        if samples % 2 == 0 and 0 not in half:
            continue
        sides = ([one for place, one in enumerate(ranks) if (place in half) == inside] for inside in (True, False))
        found.append(naive_rho(*[[sum(column) for column in zip(*side, strict=True)] for side in sides]))
    mean = sum(found) / len(found)
    return 2 * mean / (1 + abs(mean))


def test_two_samples_of_two_heads() -> None:
    """Two heads have but one order: the samples agree fully, or not at all."""
    same = reliability(RankedHeads.from_values(np.array([[1.0, 2.0], [3.0, 9.0]])))
    assert (same.split_half.value, same.pairwise.value, same.splits) == (1.0, 1.0, 1)
    other = reliability(RankedHeads.from_values(np.array([[1.0, 2.0], [9.0, 3.0]])))
    assert (other.split_half.value, other.pairwise.value) == (-1.0, -1.0)
    assert other.split_half.interval is not None
    assert other.split_half.interval.kind == "range"


def test_spearman_brown_by_hand() -> None:
    assert spearman_brown(0.5) == pytest.approx(2 / 3)
    assert (spearman_brown(0.0), spearman_brown(1.0), spearman_brown(-1.0)) == (0.0, 1.0, -1.0)


@pytest.mark.parametrize("samples", [2, 3, 5, 6])
def test_reliability_is_the_oracles(samples: int) -> None:
    values = np.random.default_rng(samples).lognormal(size=(samples, 7)).round(1)  # some ties
    found = reliability(RankedHeads.from_values(values))
    assert found.split_half.value == pytest.approx(naive_reliability(values))
    pairs = [naive_rho(one, other) for one, other in combinations(values.tolist(), 2)]
    assert found.pairwise.value == pytest.approx(sum(pairs) / len(pairs))


def test_splits_are_all_or_two_hundred_and_always_the_same() -> None:
    assert [len(halves(samples)) for samples in (1, 2, 3, 4, 8, 9, 10, 11)] == [0, 1, 3, 3, 35, 126, 126, 200]
    first, second = halves(20), halves(20)
    assert len(first) == 200
    assert all(one.sum() == 10 for one in first)
    np.testing.assert_array_equal(first, second)
    assert len({tuple(one) for one in halves(8)}) == 35


ORDER = np.arange(1.0, 21.0)


@pytest.mark.parametrize(("other", "rho", "shared"), [(ORDER, 1.0, 1.0), (ORDER[::-1], -1.0, 0.0)])
def test_the_same_and_the_reversed_order(other: np.ndarray, rho: float, shared: float) -> None:
    found = agreement(*(RankedHeads.from_values(np.tile(one, (5, 1))) for one in (ORDER, other)), paired=False)
    assert found.rho.value == pytest.approx(rho)
    assert found.corrected.value == pytest.approx(rho)
    assert found.shared == shared  # 2 of 20 heads
    assert found.chance == pytest.approx(0.1)


@pytest.mark.slow
def test_unrelated_orders_agree_by_chance() -> None:
    source = np.random.default_rng(4)
    found = [
        agreement(
            *(RankedHeads.from_values(np.tile(source.permutation(200) + 0.0, (5, 1))) for _ in range(2)), paired=False
        )
        for _ in range(60)
    ]
    assert abs(np.mean([one.rho.value for one in found])) < 0.03
    assert np.mean([one.shared for one in found]) == pytest.approx(0.1, abs=0.03)
    assert np.mean([one.shared > one.chance_most for one in found]) <= 0.1
    assert found[0].chance_most == stats.hypergeom(200, 20, 20).ppf(0.975) / 20


def noisy(source: np.random.Generator, profile: np.ndarray, samples: int, noise: float) -> np.ndarray:
    return np.exp(profile + source.normal(scale=noise, size=(samples, len(profile))))


@pytest.mark.slow
def test_what_noise_takes_from_a_correlation_is_given_back() -> None:
    """Two profiles with ρ = 0.8, each measured with noise: measured it is less, corrected it is 0.8 again."""
    source, measured, corrected, truth = np.random.default_rng(5), [], [], []
    for _ in range(30):
        profile = source.normal(size=300)
        other = 0.8 * profile + 0.6 * source.normal(size=300)
        sides = [RankedHeads.from_values(noisy(source, one, 6, 2.5)) for one in (profile, other)]
        found = agreement(*sides, paired=False)
        measured.append(found.rho.value)
        corrected.append(found.corrected.value)
        truth.append(float(stats.spearmanr(profile, other).statistic))
    assert np.mean(measured) < np.mean(truth) - 0.25
    assert np.mean(corrected) == pytest.approx(np.mean(truth), abs=0.03)


def test_without_reliability_nothing_is_corrected() -> None:
    opposed = np.array([ORDER, ORDER[::-1]] * 3)[:5]
    opposed = np.concatenate([opposed, ORDER[::-1][None]])
    found = agreement(RankedHeads.from_values(opposed), RankedHeads.from_values(np.tile(ORDER, (6, 1))), paired=False)
    assert math.isnan(found.corrected.value) == (reliability(RankedHeads.from_values(opposed)).split_half.value <= 0)
    assert math.isnan(found.corrected.value)
    assert found.corrected.interval is None


def test_of_traces_by_hand() -> None:
    """Every sample ranks the heads 1 … 6; the second trace turns two neighbours round: ρ = 1 − 6 · 2 / (6 · 35)."""
    suffered = np.tile(np.arange(1.0, 7.0).reshape(1, 3, 2), (5, 1, 1)) / 10
    turned = suffered.copy()
    turned[:, 0] = suffered[:, 0, ::-1]
    found = pk.stability([made(suffered), made(turned, dataset="e")])
    assert [one.perturbation["isolated"].split_half.value for one in found.traces] == pytest.approx([1.0, 1.0])
    (pair,) = found.pairs
    for kind in ("isolated", "propagated"):
        assert pair.perturbation[kind].rho.value == pytest.approx(1 - 12 / 210)
        assert pair.gain[kind].rho.value == pytest.approx(1 - 12 / 210)  # attention suffers double
        assert pair.perturbation[kind].shared == 1.0  # the worst of six heads
        assert not pair.perturbation[kind].paired
    assert pair.depth == {}
    lines = repr(found).splitlines()
    assert max(map(len, lines)) <= 80
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.conclusion() == (
        "Samples of a trace rank the heads by propagated L1 with a reliability of 1.00 [−0.04, 1.00]; mean ranks of "
        "two traces of one model correlate with ρ = 0.94 [−0.49, 0.99] (2 traces, n = 5 samples)."
    )


def test_the_same_seed_and_data_set_leave_prompts_out_together() -> None:
    source = np.random.default_rng(6)
    first, second = (made(source.lognormal(size=(6, 2, 3))) for _ in range(2))
    (pair,) = pk.stability([first, second]).pairs
    assert pair.perturbation["isolated"].paired
    (other,) = pk.stability([first, renamed(second, dataset="e")]).pairs
    assert not other.perturbation["isolated"].paired
    assert other.perturbation["isolated"].rho.value == pair.perturbation["isolated"].rho.value


def test_depth_by_hand() -> None:
    """Layers of 3, 1, 0 and 0 a head: three quarters in the first, half of the sum in one head of eight."""
    suffered = np.tile(np.array([[4.0, 2.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]), (5, 1, 1))
    places = np.linspace(0, 1, 4)
    found = depth_profile(suffered, places)
    assert found.first_layer.value == pytest.approx(0.75)
    assert found.first_tenth.value == pytest.approx(0.75)  # of four layers a tenth is one
    assert found.half.value == pytest.approx(1 / 8)
    (each,) = profiles(suffered[:1], places)
    assert (each[0], each[-1]) == pytest.approx((3.0, 0.0))
    assert each[1] == pytest.approx(3 - 2 * 3 / 19)  # on the line from the first layer to the second, a third below


def test_layers_that_are_not_measured_have_no_depth() -> None:
    """Layers 5, 11 and 17 of 18: nothing is known before 5/17, and lines join what lies between."""
    source = np.random.default_rng(12)
    suffered = np.tile(np.array([3.0, 2.0, 1.0])[None, :, None], (5, 1, 2)) * source.uniform(0.99, 1.01, (5, 3, 2))
    some = made(suffered, model="n")
    some = dataclasses.replace(some, attrs={**some.attrs, "measured_layers": "5 11 17 of 18"})
    found = pk.stability([made(np.tile(np.linspace(5, 1, 9)[None, :, None], (5, 1, 3))), some])
    profile = found.traces[1].depth["isolated"].profile
    assert np.isnan(profile[: math.ceil(19 * 5 / 17)]).all()
    assert profile[math.ceil(19 * 5 / 17) :] == pytest.approx(
        1.5 - (np.arange(6, 20) / 19 - 5 / 17) * 17 / 12, abs=0.02
    )
    assert found.pairs[0].depth["isolated"].value == pytest.approx(1.0)
    json.dumps(found.to_dict(), allow_nan=False)


def test_models_are_compared_over_depth_alone() -> None:
    source = np.random.default_rng(7)
    shallow = np.tile(np.linspace(4, 1, 4)[None, :, None], (5, 1, 3)) * source.uniform(0.99, 1.01, (5, 4, 3))
    deep = np.tile(np.linspace(4, 1, 9)[None, :, None], (6, 1, 2)) * source.uniform(0.99, 1.01, (6, 9, 2))
    found = pk.stability([made(shallow), made(deep, model="n")])
    (pair,) = found.pairs
    assert pair.perturbation == pair.gain == {}
    assert pair.depth["isolated"].value == pytest.approx(1.0, abs=0.02)
    (turned,) = pk.stability([made(shallow), made(deep[:, ::-1], model="n")]).pairs
    assert turned.depth["isolated"].value == pytest.approx(-1.0, abs=0.02)


def test_steps_are_held_against_the_first() -> None:
    """Three steps: the heads of the third are in the order of the first, or the other way round."""
    for last, rho in ((1, 1.0), (-1, -1.0)):
        trace = made(np.tile(np.arange(1.0, 7.0).reshape(1, 3, 2), (5, 1, 1)))
        arrays = dict(trace.arrays)
        for name in ("perturbation_isolated", "perturbation_propagated"):
            first = arrays[name][:, :, 0]
            turned = first.reshape(5, 2, 6)[:, :, ::last].reshape(5, 2, 3, 2)
            arrays[name] = np.stack([first, first, turned], axis=2)
        arrays["output_norm"] = np.repeat(arrays["output_norm"], 3, axis=1)
        longer = dataclasses.replace(trace, arrays=arrays, run=dataclasses.replace(trace.run, steps=3))
        found = pk.stability(longer).traces[0].over_steps
        assert [found[kind].value for kind in ("isolated", "propagated")] == pytest.approx([rho, rho])
        assert found["isolated"].prompts == 5


@pytest.mark.parametrize("samples", [1, 3, 6])
def test_few_samples_have_ranges_or_nothing(samples: int) -> None:
    source = np.random.default_rng(8)
    traces = [made(source.lognormal(size=(samples, 3, 4)), dataset=name) for name in ("d", "e")]
    found = pk.stability(traces)
    kinds = {1: None, 3: "range", 6: "interval"}
    interval = found.pairs[0].perturbation["isolated"].rho.interval
    assert (interval and interval.kind) == kinds[samples]
    own = found.traces[0].perturbation["isolated"].pairwise.interval
    assert (own and own.kind) == kinds[samples]
    assert max(map(len, repr(found).splitlines())) <= 80
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_trace_without_the_baseline_has_no_gain() -> None:
    source = np.random.default_rng(9)
    found = pk.stability(made(source.lognormal(size=(5, 2, 2))), baseline="random")
    assert found.baseline is None
    assert found.traces[0].gain == {}
    assert not any("gain" in part.title for part in found.details() if isinstance(part, Table))


def swept(*budgets: float) -> Trace:
    configs = [config("two-stage", budget) for budget in budgets]
    moved = np.random.default_rng(10).lognormal(size=(5, len(configs), 2, 2))
    arrays = {"perturbation_isolated": moved, "perturbation_propagated": moved}
    return renamed(hand_made(configs, arrays, layers=2, heads=2))


def test_one_budget_at_a_time() -> None:
    with pytest.raises(ConfigError, match="one budget at a time, got traces of 64, 128; choose one with --budget"):
        pk.stability(swept(64, 128))
    assert pk.stability(swept(64, 128), budget=64).traces[0].config.budget.value == 64
    with pytest.raises(TraceError, match="expected the same budget of 'two-stage' in every trace"):
        pk.stability(swept(64, 128), budget=32)
    apart = pk.stability([swept(64), renamed(swept(0.2), dataset="e")])  # matched by all but the budget
    assert [str(one.config.budget) for one in apart.traces] == ["64", "0.2"]


def test_configurations_that_differ_in_more_are_refused() -> None:
    other = config("two-stage", 64, granularity="kv")
    moved = np.ones((5, 1, 2, 2))
    arrays = {"perturbation_isolated": moved, "perturbation_propagated": moved}
    with pytest.raises(TraceError, match="differ in budget at most, got granularity query and kv"):
        pk.stability([swept(64), renamed(hand_made([other], arrays, layers=2, heads=2))])


def test_no_trace_and_the_same_twice_are_refused(tmp_path: object) -> None:
    with pytest.raises(TraceError, match="at least one trace"):
        pk.stability([])
    path = str(tmp_path) + "/t.h5"
    made(np.random.default_rng(11).lognormal(size=(5, 2, 2))).save(path)
    with pytest.raises(TraceError, match="twice; leave one out"):
        pk.stability([pk.read_trace(path), pk.read_trace(path)])
