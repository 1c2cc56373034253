"""Kept sets of whole blocks and of whole layers, against lists of positions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perturbkv.configs.selections import PRESETS, Blocks
from perturbkv.errors import BudgetError, ConfigError
from perturbkv.selection import ranking
from perturbkv.selection.grid import configuration, grid
from tests.core.test_selection_equals_the_oracle import POLICIES, PREFIX_SELECTIONS, check, config, statistics
from tests.oracle.blocks import tables
from tests.support.models import HEADS
from tests.support.resolved import select

SHARED = [name for name in POLICIES if name not in ("adakv", "headkv")]
"""Policies that do not share a layer's budget out between its heads."""
GRANULARITIES = [
    "layer", "kv(block=4)", "query(block=4, block_score=max)", "layer(block=4)", "kv(block=5, block_score=max)",
    "layer(block=16)",
]  # fmt: skip


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("selection", PREFIX_SELECTIONS)
def test_every_selection(selection: str, granularity: str, heads: tuple[int, int]) -> None:
    check(config(40, selection=selection, granularity=granularity), *heads, n=70, seed=3)


@pytest.mark.parametrize("product", ["product-of-means", "mean-of-products"])
@pytest.mark.parametrize("score", ["accumulated", "pooled"])
@pytest.mark.parametrize("split", ["prefix", "total"])
@pytest.mark.parametrize("granularity", ["layer", "kv"])
def test_every_choice_of_the_second_stage(granularity: str, split: str, score: str, product: str) -> None:
    for block in (1, 4):
        chosen = config(budget=30, alpha=0.5, granularity=f"{granularity}(product={product}, block={block})",
                        score=score, split=split, epsilon=1e-4)  # fmt: skip
        check(chosen, 4, 2, n=60, seed=5)


@pytest.mark.parametrize("granularity", ["layer", "kv"])
@pytest.mark.parametrize("selection", ["attention", "two-stage"])
def test_the_groups_maximum(selection: str, granularity: str) -> None:
    for block in (1, 4):
        chosen = config(30, selection=selection, granularity=f"{granularity}(reduce=max, block={block})")
        check(chosen, 4, 2, n=60, seed=5)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset(preset: str) -> None:
    for policy in ("snapkv", "pyramidkv"):
        chosen = configuration(110, preset=preset, policy=policy, granularity="layer(block=8)")
        check(chosen, 4, 2, n=200, seed=7)
    check(configuration(110, preset=preset, policy="adakv", granularity="kv(block=8)"), 4, 2, n=200, seed=7)


@pytest.mark.parametrize("sinks", [0, 4, 20])
def test_streaming_llm_keeps_the_blocks_of_its_sinks_and_the_last_ones(sinks: int) -> None:
    chosen = config(40, policy="streaming-llm", selection="position", sinks=sinks, granularity="layer(block=8)")
    check(chosen, 4, 2, n=75, seed=1)
    kept = select(chosen, statistics(4, 2, 75, 6, seed=1), 75).kept
    assert kept[:, :sinks].all() and kept[:, 69:].all()


SIZES = st.sampled_from([1, 2, 3, 4, 7, 16])


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from(["snapkv", *POLICIES]),
    st.sampled_from(["attention", "two-stage", "value"]),
    st.sampled_from(["query", "kv", "layer"]),
    SIZES,
    st.sampled_from(["sum", "max"]),
    st.sampled_from(["prefix", "total"]),
    st.sampled_from(["mixture", "guaranteed"]),
    st.integers(1, 140),
    st.integers(75, 95),
    st.sampled_from([0, 1, 5, 0.1]),
    st.sampled_from([0, 3, 8, 0.25]),
    st.integers(0, 10**6),
)
def test_any_shape_with_ties(
    policy: str, selection: str, granularity: str, size: int, how: str, whole: str, safeguard: str, n: int,
    budget: int, first: float, recent: float, seed: int,
) -> None:  # fmt: skip
    policy = "snapkv" if granularity == "layer" and policy not in SHARED else policy
    chosen = config(budget, policy=policy, selection=selection, granularity=granularity, block=size, block_score=how,
                    split=whole, safeguard=safeguard, line=whole, beta=1.5, protect_first=first,
                    protect_recent=recent, alpha=0.5)  # fmt: skip
    check(chosen, 4, 2, n, seed, ties=True)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 120), st.integers(1, 20), st.integers(70, 110), st.sampled_from([0, 9]),
       st.integers(0, 10**6))  # fmt: skip
def test_at_most_b_entries_are_held_in_whole_blocks_and_no_block_more_would_fit(
    size: int, n: int, window: int, budget: int, first: int, seed: int
) -> None:
    chosen = config(budget, window=window, granularity=f"kv(block={size})", protect_first=first)
    kept = select(chosen, statistics(4, 2, n, window, seed), n).kept
    table = [torch.tensor(block) for block in tables(n, size)]
    for row in kept:
        held = int(row.sum())
        assert held == chosen.kept_entries(n) <= min(budget, n)
        assert held == n or held + size > budget
        assert all(len(set(row[block].tolist())) == 1 for block in table)
        assert row[n - min(window, n) :].all() and row[: min(first, n)].all()


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(0, 200), st.integers(1, 50), st.integers(0, 250))
def test_blocks_are_counted_as_a_list_of_them_is(size: int, n: int, window: int, entries: int) -> None:
    found, table = Blocks.divide(n, window, size), tables(n, size)
    tail = [block for block in table if block[-1] >= n - window]
    assert (found.full, found.tail_blocks, found.tail) == (len(table) - len(tail), len(tail), sum(map(len, tail)))
    assert found.first_blocks(entries) == len(tables(entries, size))
    before = table[: found.full]
    assert min(found.recent_blocks(entries), len(before)) == sum(block[-1] >= n - entries for block in before)


def test_a_blocks_score_is_the_sum_or_the_maximum_of_its_entries() -> None:
    score = torch.tensor([[1.0, 5.0, 2.0, 2.0, 3.0, 9.0, 8.0]])
    assert ranking.block_scores(score, 3, "sum").tolist() == [[8.0, 14.0]]
    assert ranking.block_scores(score, 3, "max").tolist() == [[5.0, 9.0]]
    assert ranking.block_scores(score, 8, "sum").shape == (1, 0)


def test_a_layers_set_is_that_of_each_of_its_heads() -> None:
    for selection in ("random", "two-stage"):
        kept = select(config(selection=selection, granularity="layer"), statistics(4, 2, 50, 6, seed=1), 50).kept
        assert kept.shape[0] == 2 and torch.equal(kept[0], kept[1])
        apart = select(config(selection=selection, granularity="kv"), statistics(4, 2, 50, 6, seed=1), 50).kept
        assert not torch.equal(apart[0], apart[1])


def test_places_without_an_entry_are_in_no_kept_block() -> None:
    """As when a ragged cache of whole blocks is compressed again: sets differ by whole blocks."""
    given_statistics = statistics(4, 2, 50, 6, seed=1)
    valid = torch.arange(44) >= torch.tensor([[0], [8], [24], [40]])
    padded = dataclasses.replace(given_statistics, valid=valid)
    for policy in ("snapkv", "pyramidkv", "adakv"):
        chosen = config(24, policy=policy, protect_first=3, granularity="query(block=4)")
        found = select(chosen, padded, 50).kept
        assert not (found[:, :44] & ~valid).any()
        assert found[:, 44:].all()
        for row, begin in zip(found[:2], (0, 8), strict=True):
            assert row[begin : begin + 4].all(), "the block of what is protected"


def test_a_budget_that_may_not_buy_a_block_is_refused() -> None:
    assert grid(64, granularity="kv(block=16)")
    with pytest.raises(BudgetError, match="budget 62 keeps 62 entries, too few for a block of 16 .*: up to 47 lie"):
        grid(62, granularity="kv(block=16)")
    with pytest.raises(BudgetError, match="raise the budget to 79"):
        grid(70, granularity="kv(block=16)", protect_first=4)
    with pytest.raises(BudgetError, match="budget 0.1 of 400 tokens keeps 40 entries, too few for a block of 16"):
        configuration(0.1, granularity="kv(block=16)").kept_entries(400)


@pytest.mark.parametrize("policy", ["adakv", "headkv"])
def test_one_kept_set_has_nobody_to_share_with(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"policy '{policy}' shares budgets out by head, and granularity 'layer'"):
        grid(64, policy=policy, granularity="layer")
    assert grid(64, policy=policy, granularity="kv(block=16)")


def test_an_option_of_blocks_is_told_where_it_makes_a_difference() -> None:
    one, whole = grid(128, granularity="kv", block=(1, 16))
    assert (str(one.granularity), str(whole.granularity)) == ("kv", "kv(block=16)")
    assert one == grid(128, granularity="kv(block=1)")[0] and "block" not in one.granularity.options
    assert len(grid(128, granularity=("query", "kv", "layer"), block=(1, 16), block_score=("sum", "max"))) == 9
    with pytest.raises(ConfigError, match="block_score of granularity 'kv' has no effect here: it needs a block of"):
        grid(128, granularity="kv(block_score=max)")
    with pytest.raises(ConfigError, match="it needs a selection by score"):
        grid(128, policy="streaming-llm", selection="position", granularity="kv(block=16, block_score=max)")
    with pytest.raises(ConfigError, match="block of granularity 'kv' must be at least 1, got 0"):
        grid(128, granularity="kv(block=0)")
