from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perturbkv import theory
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import CHUNK_BYTES
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.scoring import window_attention
from perturbkv.scoring.compute import layer_scores
from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.scores import h2o
from perturbkv.selection import compatibility
from perturbkv.selection.grid import configuration
from perturbkv.selection.layer_budget import LayerBudget
from perturbkv.selection.policies import registry
from perturbkv.selection.policies.base import apportion
from perturbkv.selection.policies.headkv import head_budgets
from perturbkv.selection.policies.pyramidkv import layer_budgets, total_budgets
from tests.oracle import policies as naive
from tests.support.configs import flat
from tests.support.layers import SCALE, layer_view
from tests.support.models import HEADS

VOTING = ["snapkv", "pyramidkv", "adakv", "headkv", "h2o", "scissorhands", "tova"]


def config(policy: str, budget: int = 20, **fields: object) -> EvictionConfig:
    return configuration(budget, policy=policy, **{"window": 5, **fields})


def scored(chosen: EvictionConfig, seen: LayerView) -> torch.Tensor:
    score = registry.build(chosen.policy).score.unpooled()
    return layer_scores(seen, [score], CHUNK_BYTES)[score]


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("policy", VOTING)
def test_scores(policy: str, heads: tuple[int, int]) -> None:
    seen, chosen = layer_view(*heads, n=30, seed=2), config(policy, history=12)
    expected = naive.accumulate(chosen, seen.queries.numpy(), seen.keys.numpy(), SCALE)
    np.testing.assert_allclose(scored(chosen, seen).numpy(), expected, rtol=1e-10, atol=1e-14)
    assert expected.any()


@pytest.mark.parametrize("policy", [*VOTING, "random"])
def test_a_prompt_inside_the_window_has_nothing_to_score(policy: str) -> None:
    assert scored(config(policy), layer_view(4, 2, n=4, seed=2)).shape == (4, 0)


def test_h2o_makes_no_square_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come in blocks, equal to those in one piece."""
    seen, score = layer_view(4, 2, n=30, seed=2), h2o.H2O()
    whole, made = score.score(seen), []
    original = theory.softmax_with_sinks
    monkeypatch.setattr(window_attention, "block_bytes", lambda device: 8 * 4 * 30)
    monkeypatch.setattr(theory, "softmax_with_sinks", lambda *given: made.append(given[0]) or original(*given))
    torch.testing.assert_close(score.score(seen), whole, rtol=1e-12, atol=1e-15)
    assert max(block.numel() for block in made) <= 4 * 30


def test_random_scores_depend_on_seed_sample_and_layer_alone() -> None:
    def drawn(draw: int, seed: int) -> torch.Tensor:
        return scored(config("random", seed=draw), layer_view(4, 2, 30, seed))

    first, again = (drawn(0, seed) for seed in (1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, drawn(1, 1))
    assert first.unique().numel() == first.numel()


def room(scores: torch.Tensor, kept: int, prefix: int) -> LayerBudget:
    """One layer whose entries are put in order one by one."""
    heads, entries = scores.shape
    order = sorted((-float(scores[head, place]), place, head) for head in range(heads) for place in range(entries))
    return LayerBudget(heads, kept, 5, 0, 1, prefix, lambda: torch.tensor([head for _, _, head in order]))


shares = st.lists(st.integers(0, 400).map(lambda tenth: tenth / 10), min_size=1, max_size=9)


@given(shares, st.integers(0, 60))
def test_apportioning_spends_the_total_exactly_where_there_is_room(given_shares: list[float], most: int) -> None:
    total = round(sum(given_shares))
    counts = apportion(torch.tensor(given_shares, dtype=torch.float64), total, most).tolist()
    assert sum(counts) == max(min(total, most * len(counts)), sum(min(most, int(s + 1e-9)) for s in given_shares))
    assert all(0 <= count <= most for count in counts)
    if most > max(given_shares) + 1:
        assert all(abs(count - share) <= 1 for count, share in zip(counts, given_shares, strict=True))


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 40), st.sampled_from([1.0, 2.0, 7.5, 20.0]))
def test_pyramidkv_spends_the_uniform_total_to_the_entry(mean: int, more: int, layers: int, beta: float) -> None:
    budgets = layer_budgets(mean, mean + more, layers, beta).tolist()
    assert sum(budgets) == layers * mean
    assert sorted(budgets, reverse=True) == budgets
    assert max(budgets) <= mean + more


def test_pyramidkv_with_the_papers_numbers() -> None:
    budgets = layer_budgets(96, 1000, 30, 20.0)
    assert (budgets[0], budgets[-1]) == (187, 5)  # 2 · 96 − 96 / 20 and 96 / 20


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(0, 40), st.integers(0, 10**6), st.floats(0, 1))
def test_adakv_spends_the_layers_total_to_the_entry(mean: int, more: int, seed: int, floor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (5, mean + more), generator=generator).double()
    chosen = config("adakv", mean + 5, floor=floor)
    budgets = registry.build(chosen.policy).allocate(chosen, room(scores, mean + 5, mean + more))
    assert int(budgets.sum()) == 5 * mean
    assert int(budgets.max()) <= mean + more
    assert int(budgets.min()) >= int(floor * mean) - 1


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 10**6), st.sampled_from([1.0, 1.01, 1.2, 10.0]))
def test_headkv_spends_the_models_total_to_the_entry(mean: int, more: int, seed: int, beta: float) -> None:
    scores = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) ** 4
    budgets = head_budgets(scores, mean, mean + more, beta)
    assert int(budgets.sum()) == 12 * mean
    assert int(budgets.max()) <= mean + more
    assert int(budgets.min()) >= min(int(mean * (1 - 1 / beta)), mean + more)


def test_equal_scores_of_two_heads_go_to_the_earlier_position_then_the_earlier_head() -> None:
    scores = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    greedy = registry.build(config("adakv", floor=0.0).policy)
    budgets = greedy.allocate(config("adakv", 7), room(scores, kept=7, prefix=3))
    assert budgets.tolist() == [2, 2, 2]
    assert greedy.allocate(config("adakv", 6), room(scores, 6, 3)).tolist() == [1, 1, 1]
    uneven = room(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), kept=6, prefix=3)
    assert greedy.allocate(config("adakv", 6), uneven).tolist() == [1, 1]


def test_a_policys_defaults_give_way_to_what_is_asked_for() -> None:
    assert flat(config("h2o", selection="attention")).pool == "none"
    assert config("h2o", pool="max").policy["pool"] == "max"
    assert configuration(128, preset="kvpress", policy="scissorhands").window == 10
    assert configuration(128, preset="kvpress", policy="snapkv").window == 64


@pytest.mark.parametrize(
    ("policy", "fields", "cache", "words"),
    [
        ("streaming-llm", {"selection": "two-stage"}, "ragged", "does not combine with selection 'two-stage'"),
        ("snapkv", {"selection": "position"}, "ragged", "does not combine with selection 'position'"),
        ("adakv", {}, "rectangular", "by head, which a rectangular cache cannot hold"),
        ("headkv", {}, "rectangular", "by head, which a rectangular cache cannot hold"),
    ],
)
def test_impossible_pairs_are_refused_with_all_that_works(
    policy: str, fields: dict[str, str], cache: str, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        compatibility.check(config(policy, **fields), cache)
    assert words in str(refused.value)
    for row in compatibility.compatible_choices():
        assert all(cell in str(refused.value) for cell in row)


def test_every_policy_stands_in_one_row_of_the_table() -> None:
    listed = [name for row in compatibility.compatible_choices() for name in row[0].split(", ")]
    assert sorted(listed) == sorted(info.name for info in registry.all_policies())
    with pytest.raises(UnknownNameError, match="known: pyramidkv"):
        registry.policy_class("pyramid")


def test_a_guaranteed_share_comes_first_and_the_layers_largest_fill_the_rest() -> None:
    """Head 0 has the ten largest scores: a mixture leaves head 1 its share of 8 · 0.5, a guarantee 10 · 0.5 − 2."""
    scores = torch.stack([torch.arange(40.0, 20, -1), torch.arange(20.0, 0, -1)])
    given = LayerBudget(2, 10, 2, 0, 1, 20, room(scores, 10, 20).heads_by_score)
    for safeguard, budgets in (("mixture", [12, 4]), ("guaranteed", [13, 3])):
        chosen = config("adakv", 10, window=2, floor=0.5, safeguard=safeguard)
        assert registry.build(chosen.policy).allocate(chosen, given).tolist() == budgets


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(0, 40), st.integers(0, 10**6), st.floats(0, 1))
def test_a_guaranteed_share_spends_the_layers_total_to_the_entry(mean: int, more: int, seed: int, floor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (5, mean + more), generator=generator).double()
    chosen = config("adakv", mean + 5, floor=floor, safeguard="guaranteed")
    budgets = registry.build(chosen.policy).allocate(chosen, room(scores, mean + 5, mean + more))
    assert int(budgets.sum()) == 5 * mean
    assert int(budgets.max()) <= mean + more
    assert int(budgets.min()) >= int(floor * (mean + 5)) - 5


@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.integers(1, 99),
    st.integers(1, 40),
    st.sampled_from([1.0, 3.0, 20.0]),
)
def test_a_line_over_whole_budgets_spends_the_uniform_total_to_the_entry(
    kept: int, more: int, window: int, layers: int, beta: float
) -> None:
    budgets = total_budgets(kept, kept + more - window, window, layers, beta).tolist()
    assert sum(budgets) == layers * kept
    assert sorted(budgets, reverse=True) == budgets
    assert max(budgets) <= max(kept, kept + more - window)


def test_a_line_over_whole_budgets_falls_back_to_equal_ones_below_the_window() -> None:
    assert total_budgets(1280, 4000, 64, 3, 20.0).tolist() == [2496, 1280, 64]
    assert total_budgets(1279, 4000, 64, 3, 20.0).tolist() == [1279] * 3, "the last layer would keep 63.95"
    assert sum(total_budgets(850, 1658, 1, 26, 20.0).tolist()) == 26 * 850, "halves come in pairs"
    assert total_budgets(600, 960, 64, 3, 20.0).tolist() == [960, 600, 240], "the first keeps n − w at most"
