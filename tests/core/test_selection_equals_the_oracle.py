from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.selections import PRESETS, SELECTIONS
from perturbkv.errors import ConfigError
from perturbkv.scoring.value_norms import euclidean_value_norms, projected_value_norms
from perturbkv.selection.grid import configuration
from perturbkv.selection.layer_statistics import LayerStatistics
from perturbkv.selection.ranking import rank
from tests.oracle import selection as naive
from tests.support.models import HEADS
from tests.support.resolved import select

EUCLIDEAN = ["two-stage(norm=l2)", "value(norm=l2)", "hindsight(norm=l2)"]
PREFIX_SELECTIONS = [*(name for name in SELECTIONS if name not in ("random", "position", "given")), *EUCLIDEAN]
POLICIES = ["pyramidkv", "adakv", "headkv", "h2o", "scissorhands", "tova"]
LAYERS = 3


def config(budget: int = 20, **fields: object) -> EvictionConfig:
    return configuration(budget, **{"window": 6, **fields})


def statistics(heads: int, kv_heads: int, n: int, window: int, seed: int, ties: bool = False) -> LayerStatistics:
    generator = np.random.default_rng(seed)
    prefix = max(0, n - window)
    attention = generator.dirichlet(np.full(prefix, 0.3), size=heads) if prefix else np.zeros((heads, 0))
    norms, euclidean = generator.lognormal(size=(2, heads, prefix))
    if ties:
        attention, norms, euclidean = np.round(attention * 8) / 8, np.round(norms), np.round(euclidean)
    realised = generator.random((heads, prefix))
    accumulated, value_norms, known = (torch.from_numpy(array) for array in (attention, norms, realised))
    scores = generator.integers(1, 9, (LAYERS, heads)).astype(float).tolist()
    return LayerStatistics(
        accumulated, value_norms, kv_heads, 1, LAYERS, "s", known, scores, euclidean=torch.from_numpy(euclidean)
    )


def check(chosen: EvictionConfig, heads: int, kv_heads: int, n: int, seed: int, ties: bool = False) -> None:
    given_statistics = statistics(heads, kv_heads, n, chosen.window, seed, ties)
    expected = naive.select(
        chosen,
        given_statistics.accumulated.numpy(),
        given_statistics.norms.numpy(),
        given_statistics.hindsight.numpy(),
        n,
        kv_heads,
        given_statistics.layer,
        LAYERS,
        given_statistics.head_scores,
        np.asarray(given_statistics.euclidean),
    )
    found = select(chosen, given_statistics, n)
    sharing = heads // len(found.kept)
    for head in range(heads):
        kept, stage1 = (mask[head // sharing].nonzero().flatten().tolist() for mask in (found.kept, found.stage1))
        assert (kept, stage1) == expected[head]
        if chosen.policy.name in ("snapkv", "h2o", "scissorhands", "tova", "streaming-llm"):
            assert len(kept) == chosen.kept_entries(n)
            assert chosen.block > 1 or len(kept) == min(chosen.budget.tokens(n), n)
        assert set(stage1) <= set(kept)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("granularity", ["query", "kv"])
@pytest.mark.parametrize("selection", PREFIX_SELECTIONS)
def test_every_selection(selection: str, granularity: str, heads: tuple[int, int]) -> None:
    check(config(selection=selection, granularity=granularity), *heads, n=50, seed=3)


@pytest.mark.parametrize(
    ("score", "product", "stage2", "split"),
    list(itertools.product(["mean", "max"], ["product-of-means", "mean-of-products"], ["accumulated", "pooled"],
                           ["prefix", "total"])),
)  # fmt: skip
def test_every_choice_of_the_second_stage(score: str, product: str, stage2: str, split: str) -> None:
    chosen = config(budget=24, alpha=0.5, granularity="kv", reduce=score, product=product,
                    score=stage2, split=split, epsilon=1e-4)  # fmt: skip
    check(chosen, 4, 2, n=60, seed=5)


@pytest.mark.parametrize("policy", ["snapkv", "pyramidkv", "adakv"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset(preset: str, policy: str) -> None:
    check(configuration(96, preset=preset, policy=policy), 4, 2, n=200, seed=7)
    check(configuration(90, preset=preset, policy=policy, window=8), 4, 2, n=200, seed=8)


@pytest.mark.parametrize("sinks", [0, 4, 40])
def test_streaming_llm_keeps_the_first_and_the_last(sinks: int) -> None:
    chosen = config(policy="streaming-llm", selection="position", sinks=sinks)
    check(chosen, 4, 2, n=50, seed=1)


def test_a_budget_above_the_prompt_keeps_everything() -> None:
    for selection in PREFIX_SELECTIONS:
        check(config(budget=80, selection=selection), 4, 2, n=50, seed=1)
    check(config(budget=80), 4, 2, n=4, seed=1)


@pytest.mark.parametrize("granularity", ["query", "kv"])
@pytest.mark.parametrize("selection", PREFIX_SELECTIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_with_every_selection(policy: str, selection: str, granularity: str) -> None:
    check(config(policy=policy, selection=selection, granularity=granularity), 4, 2, n=50, seed=11)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(POLICIES),
    st.sampled_from(["attention", "two-stage"]),
    st.sampled_from(["query", "kv"]),
    st.sampled_from(["prefix", "total"]),
    st.integers(1, 60),
    st.integers(7, 40),
    st.integers(0, 10**6),
)
def test_any_policy_with_ties(
    policy: str, selection: str, granularity: str, split: str, n: int, budget: int, seed: int
) -> None:
    chosen = config(budget=budget, policy=policy, selection=selection, granularity=granularity, split=split, alpha=0.5)
    check(chosen, 4, 2, n, seed, ties=True)


PROTECTED = [(4, 0), (0, 9), (3, 0.5), (0.2, 8), (0.15, 0.45)]


@pytest.mark.parametrize("granularity", ["query", "kv"])
@pytest.mark.parametrize("selection", PREFIX_SELECTIONS)
@pytest.mark.parametrize("policy", ["snapkv", *POLICIES])
@pytest.mark.parametrize(("first", "recent"), PROTECTED)
def test_what_is_protected_stays_in_every_head(
    first: float, recent: float, policy: str, selection: str, granularity: str
) -> None:
    chosen = config(policy=policy, selection=selection, granularity=granularity, protect_first=first,
                    protect_recent=recent, alpha=0.5)  # fmt: skip
    check(chosen, 4, 2, n=50, seed=11, ties=True)
    kept = select(chosen, statistics(4, 2, 50, 6, seed=11), 50).kept
    first, recent = (int(20 * asked + 1e-9) if isinstance(asked, float) else asked for asked in (first, recent))
    assert kept[:, :first].all() and kept[:, 50 - max(recent, 6) :].all()
    if policy not in ("pyramidkv", "headkv"):
        assert int(kept.sum()) == 20 * len(kept)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["snapkv", *POLICIES]),
    st.sampled_from(["attention", "two-stage"]),
    st.sampled_from(["prefix", "total"]),
    st.sampled_from(["mixture", "guaranteed"]),
    st.sampled_from([1, *range(2, 70)]),
    st.integers(20, 60),
    st.sampled_from([0, 1, 5, 0.1, 0.3]),
    st.sampled_from([0, 3, 8, 0.25, 0.5]),
    st.floats(0, 1),
    st.integers(0, 10**6),
)
def test_any_protection_with_ties(
    policy: str, selection: str, whole: str, safeguard: str, n: int, budget: int, first: float, recent: float,
    floor: float, seed: int,
) -> None:  # fmt: skip
    chosen = config(budget=budget, policy=policy, selection=selection, split=whole, safeguard=safeguard,
                    line=whole, floor=round(floor, 2), beta=1.5, protect_first=first,
                    protect_recent=recent, alpha=0.5, granularity="kv")  # fmt: skip
    check(chosen, 4, 2, n, seed, ties=True)


def test_a_random_control_protects_the_same_entries() -> None:
    chosen = config(selection="random", protect_first=4, protect_recent=10)
    kept = select(chosen, statistics(4, 2, 50, 6, seed=1), 50).kept
    assert kept[:, :4].all() and kept[:, 40:].all()
    assert kept.sum(dim=-1).tolist() == [20] * 4
    assert kept[:, 4:40].any(dim=0).sum() > 6, "beside them the heads differ"


def test_hindsight_attention_leaves_the_norms_out() -> None:
    given_statistics = statistics(4, 2, 50, 6, seed=1)
    doubled = dataclasses.replace(given_statistics, norms=given_statistics.norms.flip(-1))
    for selection, same in (("hindsight-attention", True), ("hindsight", False)):
        one, other = (select(config(selection=selection), each, 50).kept for each in (given_statistics, doubled))
        assert torch.equal(one, other) is same


def test_either_norm_keeps_its_own_largest_by_hand() -> None:
    """Two entries of equal attention: projected, (3, 3) is 6 in L1 and 4.24 in L2; (5, 0) is 5 in both."""
    values = torch.tensor([[[3.0, 3.0], [5.0, 0.0], [0.1, 0.1]]], dtype=torch.float64)
    found = LayerStatistics(
        accumulated=torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64),
        norms=projected_value_norms(values, torch.eye(2, dtype=torch.float64)),
        kv_heads=1, layer=0, layers=1, sample="s",
        realised=torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64),
        euclidean=euclidean_value_norms(values, torch.eye(2, dtype=torch.float64)),
    )  # fmt: skip
    assert found.norms.tolist() == [[6.0, 5.0, pytest.approx(0.2)]]
    assert found.euclidean.tolist() == [[pytest.approx(18**0.5), 5.0, pytest.approx(0.02**0.5)]]
    for name in ("two-stage(alpha=0", "value(alpha=0", "hindsight(alpha=0"):
        for norm, kept in (("l1", 0), ("l2", 1)):
            chosen = EvictionConfig(2, selection=f"{name}, norm={norm})", window=1)
            assert select(chosen, found, 4).kept[0].tolist() == [place in (kept, 3) for place in range(4)], chosen


def test_a_norm_that_was_not_computed_is_refused() -> None:
    bare = dataclasses.replace(statistics(4, 2, 50, 6, seed=1), euclidean=None)
    select(config(selection="two-stage"), bare, 50)
    with pytest.raises(ConfigError, match=r"'two-stage\(norm=l2\)' looks at L2 norms, which are not known here"):
        select(config(selection="two-stage(norm=l2)"), bare, 50)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PREFIX_SELECTIONS),
    st.sampled_from(["query", "kv"]),
    st.integers(1, 90),
    st.integers(7, 60),
    st.floats(0, 1),
    st.integers(0, 10**6),
)
def test_any_shape_with_ties(selection: str, granularity: str, n: int, budget: int, alpha: float, seed: int) -> None:
    check(config(budget=budget, selection=selection, granularity=granularity, alpha=alpha), 4, 2, n, seed, ties=True)


def test_equal_scores_go_to_the_earlier_position() -> None:
    found = rank(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]]))
    assert found.ranks.tolist() == [[3, 0, 1, 4, 2]]
    assert found.order.tolist() == [[1, 2, 4, 0, 3]]


def test_random_depends_on_seed_sample_and_layer_alone() -> None:
    given_statistics = statistics(4, 2, 50, 6, seed=1)
    first = select(config(selection="random"), given_statistics, 50)
    again = select(config(selection="random"), statistics(4, 2, 50, 6, seed=2), 50)
    other = select(config(selection="random", seed=1), given_statistics, 50)
    assert torch.equal(first.kept, again.kept)
    assert not torch.equal(first.kept, other.kept)
    assert first.kept.sum(dim=-1).tolist() == [20] * 4


def test_headkv_without_scores_says_where_to_get_them() -> None:
    bare = dataclasses.replace(statistics(4, 2, 50, 6, seed=1), head_scores=())
    with pytest.raises(ConfigError, match="--head-scores"):
        select(config(policy="headkv"), bare, 50)


def test_a_kept_set_without_entries_behind_some_places_keeps_none_of_them() -> None:
    """As when a ragged cache is compressed again: places on the left are padding."""
    given_statistics = statistics(4, 2, 50, 6, seed=1)
    valid = torch.arange(44) >= torch.tensor([[0], [10], [40], [44]])
    padded = dataclasses.replace(given_statistics, valid=valid)
    for policy, first, recent in itertools.product(("snapkv", *POLICIES), (0, 3), (0, 9)):
        found = select(config(policy=policy, protect_first=first, protect_recent=recent), padded, 50)
        assert not (found.kept[:, :44] & ~valid).any()
        assert (found.kept[2:, :44] == valid[2:]).all()
        for row, begin in zip(found.kept, (0, 10, 40, 44), strict=True):
            assert row[begin : begin + first].all() and row[max(begin, 50 - max(recent, 6)) :].all()
