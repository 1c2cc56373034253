"""Ranks of heads by hand: the same, reversed, unrelated; planted noise; depth; traces that do not go together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import combinations, count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

import perturbkv as pk
from tests.support.measured import config, hand_made
from tests.support.scripts import STUDIES, functions

stability = SimpleNamespace(**functions("stability", STUDIES))
Ranked = stability.HeadRanks
CONFIGS = (config("attention", 128), config("two-stage", 128))
NORM = 10.0
DIGESTS = count()
ORDER = np.arange(1.0, 21.0)


def made(suffered: np.ndarray, **run: object) -> pk.Trace:
    """A trace of (sample, layer, head) relative L1, isolated; propagated is a root of it; attention suffers double."""
    both = NORM * np.stack([2 * suffered, suffered], axis=1)
    layers, heads = suffered.shape[1:]
    arrays = {"perturbation_isolated": both, "perturbation_propagated": np.sqrt(both)}
    return renamed(hand_made(CONFIGS, arrays, layers=layers, heads=heads), **run)


def renamed(trace: pk.Trace, **run: object) -> pk.Trace:
    """The same of another run: a data set, a seed, a model of its own; with a digest of its own."""
    return dataclasses.replace(trace, run=dataclasses.replace(trace.run, **run), digest=f"{next(DIGESTS):012}")  # type: ignore[arg-type]


def told(*traces: pk.Trace, selection: str = "two-stage", baseline: str = "attention", budget: Any = None) -> Any:
    return stability.document_of(stability.rank_traces(traces, selection, baseline, budget), baseline)


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


@pytest.mark.parametrize("samples", [2, 3, 5, 6])
def test_reliability_is_the_oracles(samples: int) -> None:
    values = np.random.default_rng(samples).lognormal(size=(samples, 7)).round(1)  # some ties
    found = stability.trace_reliability(Ranked.of(values))
    assert found["split_half"]["value"] == pytest.approx(naive_reliability(values))
    pairs = [naive_rho(one, other) for one, other in combinations(values.tolist(), 2)]
    assert found["pairwise"]["value"] == pytest.approx(sum(pairs) / len(pairs))


def test_splits_are_all_or_two_hundred_and_always_the_same() -> None:
    assert [len(stability.halves(samples)) for samples in (1, 2, 3, 4, 8, 9, 10, 11)] == [0, 1, 3, 3, 35, 126, 126, 200]
    first, second = stability.halves(20), stability.halves(20)
    assert all(one.sum() == 10 for one in first)
    np.testing.assert_array_equal(first, second)
    assert len({tuple(one) for one in stability.halves(8)}) == 35


@pytest.mark.parametrize(("other", "rho", "shared"), [(ORDER, 1.0, 1.0), (ORDER[::-1], -1.0, 0.0)])
def test_the_same_and_the_reversed_order(other: np.ndarray, rho: float, shared: float) -> None:
    found = stability.agreement(*(Ranked.of(np.tile(one, (5, 1))) for one in (ORDER, other)), paired=False)
    assert found["rho"]["value"] == pytest.approx(rho)
    assert found["corrected"]["value"] == pytest.approx(rho)
    assert found["shared"] == shared  # 2 of 20 heads
    assert found["chance"] == pytest.approx(0.1)
    assert found["chance_most"] == stats.hypergeom(20, 2, 2).ppf(0.975) / 2


def noisy(source: np.random.Generator, profile: np.ndarray, samples: int, noise: float) -> np.ndarray:
    return np.exp(profile + source.normal(scale=noise, size=(samples, len(profile))))


@pytest.mark.slow
def test_what_noise_takes_from_a_correlation_is_given_back() -> None:
    """Two profiles with ρ = 0.8, each measured with noise: measured it is less, corrected it is 0.8 again."""
    source, measured, corrected, truth = np.random.default_rng(5), [], [], []
    for _ in range(30):
        profile = source.normal(size=300)
        other = 0.8 * profile + 0.6 * source.normal(size=300)
        sides = [Ranked.of(noisy(source, one, 6, 2.5)) for one in (profile, other)]
        found = stability.agreement(*sides, paired=False)
        measured.append(found["rho"]["value"])
        corrected.append(found["corrected"]["value"])
        truth.append(float(stats.spearmanr(profile, other).statistic))
    assert np.mean(measured) < np.mean(truth) - 0.25
    assert np.mean(corrected) == pytest.approx(np.mean(truth), abs=0.03)


def test_without_reliability_nothing_is_corrected() -> None:
    opposed = Ranked.of(np.array([ORDER, ORDER[::-1]] * 3))
    found = stability.agreement(opposed, Ranked.of(np.tile(ORDER, (6, 1))), paired=False)
    assert opposed.reliability <= 0
    assert math.isnan(found["corrected"]["value"]) and found["corrected"]["interval"] is None


def test_of_traces_by_hand() -> None:
    """Every sample ranks the heads 1 … 6; the second trace turns two neighbours round: ρ = 1 − 6 · 2 / (6 · 35)."""
    suffered = np.tile(np.arange(1.0, 7.0).reshape(1, 3, 2), (5, 1, 1)) / 10
    turned = suffered.copy()
    turned[:, 0] = suffered[:, 0, ::-1]
    found = told(made(suffered), made(turned, dataset="e"))
    assert [one["perturbation"]["isolated"]["split_half"]["value"] for one in found["members"]] == pytest.approx([1, 1])
    (pair,) = found["pairs"]
    for kind in ("isolated", "propagated"):
        assert pair["perturbation"][kind]["rho"]["value"] == pytest.approx(1 - 12 / 210)
        assert pair["gain"][kind]["rho"]["value"] == pytest.approx(1 - 12 / 210)  # attention suffers double
        assert pair["perturbation"][kind]["shared"] == 1.0  # the worst of six heads
        assert not pair["perturbation"][kind]["paired"]
    assert pair["depth"] == {}


def test_the_same_seed_and_data_set_leave_prompts_out_together() -> None:
    source = np.random.default_rng(6)
    first, second = (made(source.lognormal(size=(6, 2, 3))) for _ in range(2))
    paired, other = (told(first, one)["pairs"][0]["perturbation"]["isolated"]
                     for one in (second, renamed(second, dataset="e")))  # fmt: skip
    assert (paired["paired"], other["paired"]) == (True, False)
    assert other["rho"]["value"] == paired["rho"]["value"]
    assert other["rho"]["interval"] != paired["rho"]["interval"]


def test_depth_by_hand() -> None:
    """Layers of 3, 1, 0 and 0 a head: three quarters in the first, half of the sum in one head of eight."""
    suffered = np.tile(np.array([[4.0, 2.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]), (5, 1, 1))
    found = stability.depth_summary(suffered, np.linspace(0, 1, 4))
    assert found["first_layer"].value == pytest.approx(0.75)
    assert found["first_tenth"].value == pytest.approx(0.75)  # of four layers a tenth is one
    assert found["half"].value == pytest.approx(1 / 8)
    (each,) = stability.depth_profiles(suffered[:1], np.linspace(0, 1, 4))
    assert (each[0], each[-1]) == pytest.approx((3.0, 0.0))
    assert each[1] == pytest.approx(3 - 2 * 3 / 19)  # on the line from the first layer to the second, a third below


def test_models_are_compared_over_depth_alone_where_layers_are_measured() -> None:
    """Layers 5, 11 and 17 of 18: nothing is known before 5/17, and lines join what lies between."""
    source = np.random.default_rng(12)
    suffered = np.tile(np.array([3.0, 2.0, 1.0])[None, :, None], (5, 1, 2)) * source.uniform(0.99, 1.01, (5, 3, 2))
    some = made(suffered, model="n")
    some = dataclasses.replace(some, attrs={**some.attrs, "measured_layers": "5 11 17 of 18"})
    found = told(made(np.tile(np.linspace(5, 1, 9)[None, :, None], (5, 1, 3))), some)
    profile, begin = found["members"][1]["depth"]["isolated"]["profile"], math.ceil(19 * 5 / 17)
    assert np.isnan(profile[:begin]).all()
    assert profile[begin:] == pytest.approx(1.5 - (np.arange(6, 20) / 19 - 5 / 17) * 17 / 12, abs=0.02)
    (pair,) = found["pairs"]
    assert pair["perturbation"] == pair["gain"] == {}
    assert pair["depth"]["isolated"]["value"] == pytest.approx(1.0)


@pytest.mark.parametrize(("last", "rho"), [(1, 1.0), (-1, -1.0)])
def test_steps_are_held_against_the_first(last: int, rho: float) -> None:
    """Three steps: the heads of the third are in the order of the first, or the other way round."""
    trace = made(np.tile(np.arange(1.0, 7.0).reshape(1, 3, 2), (5, 1, 1)))
    arrays = dict(trace.arrays)
    for name in ("perturbation_isolated", "perturbation_propagated"):
        first = arrays[name][:, :, 0]
        turned = first.reshape(5, 2, 6)[:, :, ::last].reshape(5, 2, 3, 2)
        arrays[name] = np.stack([first, first, turned], axis=2)
    for name in ("output_norm", "token_id"):
        arrays[name] = np.repeat(arrays[name], 3, axis=1)
    longer = dataclasses.replace(trace, arrays=arrays, run=dataclasses.replace(trace.run, steps=3))
    found = told(longer)["members"][0]["over_steps"]
    assert [found[kind]["value"] for kind in ("isolated", "propagated")] == pytest.approx([rho, rho])
    assert found["isolated"]["prompts"] == 5


@pytest.mark.parametrize(("samples", "kind"), [(1, None), (3, "range"), (6, "interval")])
def test_few_samples_have_ranges_or_nothing(samples: int, kind: str | None) -> None:
    source = np.random.default_rng(8)
    found = told(*(made(source.lognormal(size=(samples, 3, 4)), dataset=name) for name in ("d", "e")))
    rho, own = (one["perturbation"]["isolated"] for one in (found["pairs"][0], found["members"][0]))
    for interval in (rho["rho"]["interval"], own["pairwise"]["interval"]):
        assert (interval and interval.kind) == kind


def test_corrections_and_other_norms_beside_it_are_not_meant() -> None:
    configs = (CONFIGS[0], config("attention", 128, correction="corrected"), CONFIGS[1],
               config("two-stage(norm=l2)", 128), config("two-stage", 128, correction="corrected"))  # fmt: skip
    suffered = np.random.default_rng(1).lognormal(size=(5, len(configs), 2, 2))
    arrays = {"perturbation_isolated": suffered, "perturbation_propagated": suffered}
    every = renamed(hand_made(configs, arrays, layers=2, heads=2))
    alone = {name: one[:, [0, 2]] for name, one in arrays.items()}
    plain = renamed(hand_made(CONFIGS, alone, layers=2, heads=2))
    assert told(every)["members"][0]["gain"] == told(plain)["members"][0]["gain"]
    assert told(every, selection="attention")["baseline"] is None  # it gains nothing over itself
    assert told(every, baseline="random")["members"][0]["gain"] == {}


def test_traces_that_do_not_go_together_are_refused() -> None:
    def swept(*budgets: float, **more: Any) -> pk.Trace:
        configs = [config("two-stage", budget, **more) for budget in budgets]
        moved = np.random.default_rng(10).lognormal(size=(5, len(configs), 2, 2))
        arrays = {"perturbation_isolated": moved, "perturbation_propagated": moved}
        return renamed(hand_made(configs, arrays, layers=2, heads=2))

    first = swept(64)
    for traces, budget, said in (
        ([swept(64, 128)], None, "expected one configuration of 'two-stage', got .*b=64.*; .*b=128"),
        ([swept(64, 128)], "32", "expected one configuration of 'two-stage'"),
        ([first, swept(64, granularity="kv")], None, "differ in budget at most, got .*query; .*kv"),
        ([first, first], None, "expected different traces"),
    ):
        with pytest.raises(pk.PerturbkvError, match=said):
            told(*traces, budget=budget)
    assert told(swept(64, 128), budget="64")["members"][0]["config"].endswith("b=64 w=32 query")
    assert len(told(swept(64), swept(0.2))["pairs"]) == 1  # matched by all but the budget
