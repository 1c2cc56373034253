"""Kept sets that heads and layers share, with every rule of combining scores, against sets grown by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from perturbkv.configs.alpha_table import AlphaTable
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.selections import GRANULARITIES, shares_layers
from perturbkv.errors import PerturbkvError
from perturbkv.selection import compatibility
from perturbkv.selection.grid import configuration
from perturbkv.selection.kept_sets import rankings, select
from perturbkv.selection.layer_statistics import LayerStatistics, join_layers
from perturbkv.selection.ranking import Scores, rank_union
from perturbkv.selection.resolved_config import resolve
from tests.core.test_selection_equals_the_oracle import statistics
from tests.oracle import shared
from tests.support.models import HEADS

WINDOW, LAYERS = 6, 3
SHARED = [name for name in GRANULARITIES if name != "query"]
RULES = ["mean", "max", "union"]


def config(granularity: str, budget: int = 20, **fields: Any) -> EvictionConfig:
    return configuration(budget, **{"window": WINDOW, "granularity": granularity, **fields})


def layers_of(heads: int, kv_heads: int, n: int, seed: int, ties: bool = False) -> list[LayerStatistics]:
    each = [statistics(heads, kv_heads, n, WINDOW, 10 * seed + layer, ties) for layer in range(LAYERS)]
    return [dataclasses.replace(one, layer=layer) for layer, one in enumerate(each)]


def kept_sets(chosen: EvictionConfig, layers: Sequence[LayerStatistics], n: int) -> list[Any]:
    resolved = resolve(chosen)
    joint = shares_layers(chosen.granularity)
    by_config = {resolved: rankings(resolved, Scores(join_layers(layers)))} if joint else {}
    return [select(resolved, layer, n, by_config) for layer in layers]


def check(chosen: EvictionConfig, heads: int, kv_heads: int, n: int, seed: int, ties: bool = False) -> None:
    layers = layers_of(heads, kv_heads, n, seed, ties)
    l2 = chosen.euclidean
    rows = [
        shared.Layer(one.accumulated.numpy(), np.asarray(one.euclidean if l2 else one.norms), one.hindsight.numpy())
        for one in layers
    ]
    expected = shared.select(chosen, rows, n, kv_heads)
    for layer, sets in enumerate(kept_sets(chosen, layers, n)):
        for head in range(heads):
            row = head * kv_heads // heads
            kept, stage1 = (mask[row].nonzero().flatten().tolist() for mask in (sets.kept, sets.stage1))
            assert (kept, stage1) == expected[layer, head], (layer, head)
            assert len(kept) == chosen.kept_entries(n)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("reduce", RULES)
@pytest.mark.parametrize("granularity", SHARED)
def test_every_granularity_and_rule(granularity: str, reduce: str, heads: tuple[int, int]) -> None:
    sets = f"{granularity}(reduce={reduce})"
    for seed, ties in ((1, False), (2, True)):
        for selection in ("attention", "two-stage", "attention-unpooled"):
            check(config(sets, selection=selection), *heads, 50, seed, ties)
        check(config(sets, selection="two-stage(alpha=0.5, score=pooled, epsilon=1e-4)"), *heads, 50, seed, ties)
        check(config(sets, selection="two-stage(split=total, norm=l2)"), *heads, 50, seed, ties)
        check(config(sets, selection="two-stage", protect_first=3, protect_recent=9), *heads, 50, seed, ties)


@pytest.mark.parametrize("granularity", ["head", "model"])
def test_selections_that_look_at_no_score_and_the_products_mean(granularity: str) -> None:
    for selection in ("value", "hindsight", "hindsight(norm=l2)", "hindsight-attention"):
        check(config(granularity, selection=selection), 4, 2, 50, 3)
    for selection in ("two-stage", "two-stage(score=pooled)"):
        check(config(f"{granularity}(product=mean-of-products)", selection=selection), 4, 2, 50, 3)
        check(config(f"{granularity}(reduce=max, product=mean-of-products)", selection=selection), 4, 2, 50, 3)


@pytest.mark.parametrize("granularity", SHARED)
@pytest.mark.parametrize("reduce", RULES)
@pytest.mark.parametrize("block", [4, 16])
def test_whole_blocks(granularity: str, reduce: str, block: int) -> None:
    sets = f"{granularity}(block={block}, reduce={reduce})"
    for selection in ("attention", "two-stage"):
        check(config(sets, 48, selection=selection), 4, 2, 120, 4)
        check(config(sets[:-1] + ", block_score=max)", 72, selection=selection), 4, 2, 121, 4)
    check(config(sets, 88, selection="two-stage", protect_first=5, protect_recent=9), 4, 2, 120, 5)


@pytest.mark.parametrize("granularity", ["head", "model"])
def test_a_table_of_shares_gives_its_mean_to_those_that_share(granularity: str) -> None:
    shares = ((0.0, 0.3, 1.0, 0.8), (0.6, 0.1, 0.45, 0.95), (0.5, 0.5, 0.25, 0.0))
    by_head, by_layer = (
        AlphaTable("h.json", "head", shares, (0, 1, 2)),
        AlphaTable("l.json", "layer", ((0.1,), (0.9,), (0.4,)), (0, 1, 2)),
    )
    for table in (by_head, by_layer):
        check(config(granularity, selection=Choice("two-stage", {"alpha": table})), 4, 2, 50, 6)


def test_what_shares_a_set_keeps_the_same_in_every_layer() -> None:
    layers = layers_of(4, 2, 50, 7)
    for selection in ("random", "attention", "two-stage"):
        of_model = [sets.kept for sets in kept_sets(config("model", selection=selection), layers, 50)]
        of_heads = [sets.kept for sets in kept_sets(config("head", selection=selection), layers, 50)]
        for found in (of_model, of_heads):
            assert all(torch.equal(found[0], other) for other in found)
        assert torch.equal(of_model[0][0], of_model[0][1])
        assert not torch.equal(of_heads[0][0], of_heads[0][1])


def test_a_union_is_of_the_members_own_best_and_knows_no_scale() -> None:
    score = torch.tensor([[9.0, 8.0, 1.0, 0.0, 2.0], [0.1, 0.2, 0.5, 0.9, 0.3]])
    ranking = rank_union(score, 1)
    assert ranking.order.tolist() == [[0, 3, 1, 2, 4]]  # 0 and 3 are first in one, 1 and 2 second, by mean score
    assert ranking.ranks.tolist() == [[0, 2, 3, 1, 4]]
    alone = rank_union(score, 2)
    assert alone.order.tolist() == [[0, 1, 4, 2, 3], [3, 2, 4, 1, 0]]
    for room in range(6):
        larger = score * torch.tensor([[1e3], [1.0]])
        assert {*rank_union(larger, 1).order[0, :room].tolist()} == {*ranking.order[0, :room].tolist()}
    even = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert rank_union(even, 1).order.tolist() == [[0, 2, 1]]  # equal ranks and means: the earlier position


@pytest.mark.parametrize(
    ("granularity", "fields", "words"),
    [
        ("model", {"policy": "adakv"}, "budgets out by head, and granularity 'model' is .* choose query, kv, or"),
        ("head", {"policy": "adakv"}, "budgets out by head, and granularity 'head' is .* choose query, kv, or"),
        ("layer", {"policy": "lava"}, "by head, and granularity 'layer' is one kept set for all heads of a layer;"),
        ("head", {"policy": "pyramidkv"}, "by layer, and granularity 'head' is .* choose query, kv, layer, or another"),
        ("model", {"policy": "quest", "selection": "attention"}, "granularity 'model' has one set for several heads"),
        ("head", {"policy": "quest", "selection": "attention"}, "granularity 'head' has one set for several heads"),
        ("kv(reduce=union)", {"policy": "quest", "selection": "attention"}, "expected reduce mean or max, got union"),
        ("model", {"policy": "vertical-slash"}, "granularity 'model' has one set for several heads"),
        ("kv(reduce=union)", {"policy": "adakv"}, "compares the scores of kept sets, and reduce=union has ranks alone"),
        ("kv(reduce=union, product=mean-of-products)", {}, "product of granularity 'kv' has no effect here: .* union"),
        ("kv(reduce=union)", {"selection": "value"}, "reduce of granularity 'kv' has no effect here"),
        ("model(reduce=sum)", {}, "unknown reduce 'sum'; known: mean, max, union"),
    ],
)  # fmt: skip
def test_what_cannot_share_is_refused_in_one_line(granularity: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PerturbkvError, match=words) as refused:
        compatibility.check(config(granularity, 64, **fields))
    assert "\n" not in str(refused.value)
