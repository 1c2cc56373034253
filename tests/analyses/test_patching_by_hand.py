"""Shapley values, greedy paths and mixtures by name, of games whose answers are known."""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Callable
from math import factorial

import numpy as np
import pytest

from perturbkv.analyses.patching import patching_values
from perturbkv.analyses.patching.patching import Patching, patching_result
from perturbkv.analyses.patching.patching_values import sampling_error
from perturbkv.analyses.stats import coalition as greedy
from perturbkv.analyses.stats import coalition as shapley
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.coalition import GreedyPath
from perturbkv.analyses.verdicts import FEW, interval_side
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.patching import Coalition, Game, Mixture, PatchingConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError
from perturbkv.storage.patching_file import PER_STEP, PatchingBatch, PatchingRow, PatchingStore

ATTENTION, TWO_STAGE = (EvictionConfig(64, selection=name) for name in ("attention", "two-stage"))
WORTH = np.array([[3.0, 1.0], [-2.0, -4.0], [0.5, 0.5], [0.0, 2.0]])
"""(player, sample)."""


def additive(coalition: Coalition) -> np.ndarray:
    return 10 + WORTH[sorted(coalition)].sum(axis=0)


def tangled(coalition: Coalition) -> np.ndarray:
    """Players that help and hinder each other, differently in two samples."""
    held = [float(player in coalition) for player in range(4)]
    first = 20 + 3 * held[0] - 2 * held[1] + 4 * held[0] * held[1] * held[2] - 5 * held[2] * held[3]
    return np.array([first, 9 - first / 3 + held[1] * held[3]])


def by_all_orders(value: Callable[[Coalition], np.ndarray], players: int) -> np.ndarray:
    """The definition: the mean over all orders of what each player adds to those before it."""
    found = np.zeros((players, 2))
    for order in itertools.permutations(range(players)):
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            found[player] += (value(before | {player}) - value(before)) / factorial(players)
    return found


def test_values_of_an_additive_game_are_what_players_are_worth() -> None:
    values = {one: additive(one) for one in shapley.subsets(4)}
    np.testing.assert_allclose(shapley.exact_values(values, 4), WORTH, atol=1e-12)
    drawn = shapley.draw_orders(4, 4, seed=7)
    each = shapley.marginal_contributions(values, drawn)
    np.testing.assert_allclose(each, np.broadcast_to(WORTH, each.shape), atol=1e-12)


def test_all_subsets_give_what_all_orders_give() -> None:
    values = {one: tangled(one) for one in shapley.subsets(4)}
    found = shapley.exact_values(values, 4)
    np.testing.assert_allclose(found, by_all_orders(tangled, 4), rtol=1e-9)
    np.testing.assert_allclose(found.sum(axis=0), tangled(frozenset(range(4))) - tangled(frozenset()), rtol=1e-9)


def test_orders_are_seeded_and_each_is_followed_by_its_reverse() -> None:
    drawn = shapley.draw_orders(6, 8, seed=3)
    np.testing.assert_array_equal(drawn[0::2], drawn[1::2, ::-1])
    np.testing.assert_array_equal(drawn, shapley.draw_orders(6, 8, seed=3))
    assert not np.array_equal(drawn, shapley.draw_orders(6, 8, seed=4))
    assert {frozenset(order.tolist()) for order in drawn} == {frozenset(range(6))}
    passed = shapley.coalitions_along(drawn[:2])
    assert len(passed) == len(set(passed)) == 12  # 6 + 1 along each order, nobody and everybody shared


def test_examples_run() -> None:
    assert doctest.testmod(shapley).attempted > 0
    assert doctest.testmod(shapley).failed == 0


def store_of(
    value: Callable[[Coalition], np.ndarray], game: Game, same: bool = False, samples: int = 2
) -> PatchingStore:
    """As if every coalition had been measured: drift is the value, the one layer-head's perturbation too."""
    run = RunConfig("m", "d", (ATTENTION, TWO_STAGE), samples=samples)
    store = PatchingStore(run, 1)
    mixtures = {game.mixture(one): value(one) for one in shapley.subsets(len(game.players))}
    for place in range(samples):
        rows = tuple(row(mixture, outcome[place]) for mixture, outcome in mixtures.items())
        floors = {name: (0.0,) for name in PER_STEP}
        told = [[[0.1]] * len(game.layers)], [[[100.0]] * len(game.layers)]
        store.add(PatchingBatch(f"s{place}", rows, floors, np.nan, *told), np.full((len(game.layers), 1), same))
    return store


def row(mixture: Mixture, value: float) -> PatchingRow:
    told = {name: (float(value),) for name in PER_STEP}
    heads = [[[float(value) + layer] for layer in range(len(mixture.layers))]]
    return PatchingRow(mixture, 0.25, told, value / 100, heads)


def game_of(asked: PatchingConfig, layers: int = 4) -> Game:
    return Game.from_config(asked, range(layers), 1, "query")


def concluded(
    asked: PatchingConfig, value: Callable[[Coalition], np.ndarray], paths: list[GreedyPath] | None = None
) -> Patching:
    game = game_of(asked)
    drawn = asked.permutations
    orders = None if drawn is None else shapley.draw_orders(4, drawn, asked.seed)
    return patching_result(store_of(value, game), game, asked, orders, paths or [])


def test_changes_are_told_over_the_baseline_and_add_up() -> None:
    found = concluded(PatchingConfig(), additive).shapley
    assert found is not None
    np.testing.assert_allclose(found.value, WORTH.sum(axis=1) / 20)  # Σ over both samples of the baseline's 10
    assert found.value.sum() == pytest.approx(found.total) == pytest.approx(1.0 / 20)
    np.testing.assert_array_equal(found.sampling, 0)
    np.testing.assert_allclose(found.per_sample, WORTH, atol=1e-12)
    assert found.interval is not None and found.interval.kind == "range"
    np.testing.assert_allclose([found.interval.low[0], found.interval.high[0]], [0.1, 0.3])


def pairs_alone(coalition: Coalition) -> np.ndarray:
    """Players 0 and 1 undo each other: 4 and 3 alone, −8 together; the second sample is half the first."""
    zero, one = 0 in coalition, 1 in coalition
    return np.array([20.0, 10.0]) + np.array([2.0, 1.0]) * (4 * zero + 3 * one - 8 * (zero and one))


def test_what_drawing_orders_does_not_see_is_seen_alone_and_last() -> None:
    """Worth 4 and 3 alone, −4 and −5 last, 0 and −1 on average of both: ± of orders is 0, as of an additive game."""
    found = concluded(PatchingConfig(permutations=8), pairs_alone).shapley
    assert found is not None
    np.testing.assert_allclose(found.sampling, 0, atol=1e-12)
    share = 3 / 30  # a unit is 2 and 1 in the samples, of which the baseline has 20 and 10
    np.testing.assert_allclose(found.alone.value, share * np.array([4, 3, 0, 0]), atol=1e-12)
    np.testing.assert_allclose(found.last.value, share * np.array([-4, -5, 0, 0]), atol=1e-12)
    np.testing.assert_allclose(found.value, (found.alone.value + found.last.value) / 2, atol=1e-12)
    np.testing.assert_allclose(found.last.per_sample[1], [-10, -5])
    assert found.alone.interval is not None and found.alone.interval.kind == "range"


def test_alone_and_last_are_told_in_table_json_and_rows() -> None:
    result = concluded(PatchingConfig(permutations=8), pairs_alone)
    first = result.to_dict()["shapley"]["players"][0]
    assert (first["alone"], first["last"]) == pytest.approx((0.4, -0.4))
    assert first["last_interval"]["low"] == pytest.approx(-0.4) and "alone_interval" in first
    assert [(one["alone"], one["last"]) for one in result.records()[:2]] == [(8, -8), (4, -4)]
    assert len(result.table().columns) == 5 and result.table().rows[0][2:4] == ["40\n(40 … 40)", "−40\n(−40 … −40)"]
    assert result.shapley is not None and result.shapley.players[0].order_error == 0
    exact = concluded(PatchingConfig(), pairs_alone)
    assert len(exact.table().columns) == 4, "all subsets have no such error"
    assert len(exact.caveats()) == len(result.caveats()) - 1


def test_a_table_of_wide_intervals_fits_80_columns() -> None:
    game = game_of(PatchingConfig(permutations=8))

    def wide(coalition: Coalition) -> np.ndarray:
        each = np.random.default_rng(3).normal(-4, 5, (4, 6))
        return 20 + each[sorted(coalition)].sum(axis=0) * (1 + len(coalition)) / 5

    result = patching_result(
        store_of(wide, game, samples=6), game, PatchingConfig(permutations=8), shapley.draw_orders(4, 8, 0), []
    )
    lines = repr(result).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.strip().startswith("[") and line.count("[") == 3 for line in lines) == 4, "no interval is broken"


def test_every_order_needs_each_player_alone_and_last() -> None:
    drawn = shapley.draw_orders(6, 8, seed=3)
    found = shapley.required_coalitions(6, drawn)
    assert len(found) == len(set(found)) and {*shapley.coalitions_along(drawn), *shapley.extreme_coalitions(6)} == set(
        found
    )
    assert {frozenset({player}) for player in range(6)} | {frozenset(range(6)) - {one} for one in range(6)} < set(found)
    assert shapley.required_coalitions(6, shapley.draw_orders(6, 0, seed=3)) == []
    assert len(shapley.required_coalitions(6, None)) == 64


def test_drawn_values_lie_within_their_own_error_and_add_up() -> None:
    """Of 60 draws 95 % should hold each value; fewer than 80 % would be no 95 %."""
    right = by_all_orders(tangled, 4).sum(axis=1) / tangled(frozenset()).sum()
    held = []
    for seed in range(60):
        found = concluded(PatchingConfig(permutations=16, seed=seed), tangled).shapley
        assert found is not None and found.permutations == 16
        assert found.value.sum() == pytest.approx(found.total)
        held.append(np.abs(found.value - right) <= found.sampling + 1e-12)
    assert 0.8 <= np.mean(held) < 1
    wide, narrow = (concluded(PatchingConfig(permutations=count), tangled).shapley for count in (8, 400))
    assert wide is not None and narrow is not None
    np.testing.assert_allclose(narrow.value, right, atol=0.01)
    assert narrow.sampling.max() < wide.sampling.max()


@pytest.mark.parametrize("count", [8, 16])
def test_the_error_of_drawing_orders_covers_as_often_as_it_says(count: int) -> None:
    """A drawn game of eight players with pairs and triples that matter; 100 draws of so many orders."""
    drawn, players = np.random.default_rng(0), 8
    pairs, triples = drawn.normal(0, 1, (players, players)), drawn.normal(0, 1, (players, players, players))

    def value(coalition: Coalition) -> np.ndarray:
        held = sorted(coalition)
        return np.array([20 + pairs[np.ix_(held, held)].sum() + triples[np.ix_(held, held, held)].sum()])

    every = {one: value(one) for one in shapley.subsets(players)}
    right = shapley.exact_values(every, players)[:, 0]
    held = []
    for seed in range(100):
        each = shapley.marginal_contributions(every, shapley.draw_orders(players, count, seed))
        held.append(np.abs(each.mean(axis=0)[:, 0] - right) <= sampling_error(each, 1.0))
    assert 0.88 <= np.mean(held) <= 0.99


def test_the_interval_is_that_of_a_ratio_of_sums() -> None:
    rng = np.random.default_rng(0)
    baseline, moved = rng.uniform(5, 9, 8), rng.normal(0, 1, 8)
    value, found = patching_values.change(moved[None], baseline, "drift")
    assert value[0] == pytest.approx(moved.sum() / baseline.sum())

    def statistic(weights: np.ndarray) -> np.ndarray:
        return np.asarray((weights @ (baseline + moved)) / (weights @ baseline))

    wanted = intervals.of_statistic(statistic, 8, intervals.RATIO)
    assert found is not None and wanted is not None
    assert (found.low[0], found.high[0]) == pytest.approx((wanted.low - 1, wanted.high - 1))
    value, found = patching_values.change(np.full((1, 8), 0.25), rng.uniform(0, 1, 8), "score")
    assert value[0] == 0.25 and found is not None and found.low[0] <= 0.25 <= found.high[0]


def test_a_greedy_path_is_chosen_on_one_half_and_judged_on_the_other() -> None:
    """Four samples; in the first two player 0 helps (and hurts the others), in the others player 1 does."""

    def value(coalition: Coalition) -> np.ndarray:
        zero, one = 0 in coalition, 1 in coalition
        return np.array([10.0 - 4 * zero + 2 * one] * 2 + [10.0 + 3 * zero - 5 * one] * 2)

    halves = (np.array([0, 1]), np.array([2, 3]))
    paths = [GreedyPath(*halves), GreedyPath(*halves[::-1])]
    for _ in range(2):
        for path in paths:
            path.choose({one: value(one)[path.choosing] for one in path.candidates(2)}, better=-1)
    assert [path.chosen for path in paths] == [[0, 1], [1, 0]]
    chosen, judged = greedy.greedy_curves(paths, lambda coalition, places: value(coalition)[places], 4)
    np.testing.assert_array_equal(chosen, [[10, 10, 10, 10], [6, 6, 5, 5], [8, 8, 8, 8]])
    np.testing.assert_array_equal(judged, [[10, 10, 10, 10], [12, 12, 13, 13], [8, 8, 8, 8]])
    game = game_of(PatchingConfig(), 2)
    found = patching_result(store_of(value, game, samples=4), game, PatchingConfig(), None, paths).greedy
    assert found is not None and found.paths == ((0, 1), (1, 0))
    np.testing.assert_allclose(found.chosen, [0, 22 / 40 - 1, 32 / 40 - 1])
    np.testing.assert_allclose(found.judged, [0, 50 / 40 - 1, 32 / 40 - 1])
    assert [(step.first, step.second) for step in found.steps()] == [("", ""), ("0", "1"), ("1", "0")]
    assert [step.judged for step in found.steps()] == found.judged.tolist()


def test_of_a_score_more_is_better() -> None:
    path = GreedyPath(np.array([0]), np.array([1]))
    path.choose({frozenset({0}): np.array([0.2]), frozenset({1}): np.array([0.9])}, better=1)
    assert path.chosen == [1]


def test_halves_are_drawn_and_hold_every_sample_once() -> None:
    first, second = greedy.draw_halves(7, seed=1)
    assert (len(first), len(second)) == (4, 3)
    assert sorted([*first, *second]) == list(range(7))
    assert [list(half) for half in greedy.draw_halves(7, seed=1)] == [list(first), list(second)]


def test_mixtures_by_name_are_held_against_the_baseline() -> None:
    asked = PatchingConfig(baseline_in=((0, 2),), treatment_in=((1,), (0, 1, 2, 3)), permutations=0)
    found = concluded(asked, additive)
    assert found.shapley is None
    assert [(one.name, str(one.mixture)) for one in found.named] == [
        ("treatment everywhere", "tttt"),
        ("baseline in 0, 2", "btbt"),
        ("treatment in 1", "btbb"),
    ]
    whole, _, single = found.named
    assert (whole.drift_ratio, single.drift_ratio) == pytest.approx((21 / 20, 14 / 20))
    # two samples of values 10 and 10 everywhere, 11.5 and 9.5 with all players; layer l adds l to its head
    assert whole.heads.sum_ratio == pytest.approx((4 * 21 + 2 * 6) / (4 * 20 + 2 * 6))
    np.testing.assert_array_equal(whole.heads.verdict[:, 0], -1)
    assert whole.heads.better_share == pytest.approx(0.5)  # all heads of the second sample, none of the first
    # players 1 alone: the first layer comes before, keeps what the baseline keeps, and is tied
    np.testing.assert_array_equal(single.heads.verdict[:, 0], [0, 1, 1, 1])
    assert single.heads.better_share == pytest.approx(0.75)
    assert (whole.score, whole.score_change) == pytest.approx((0.105, 0.005))
    assert found.kl_median == 10 and found.cache_share == 0.25


def test_equal_kept_sets_are_ties_and_are_said_to_be_equal() -> None:
    game = game_of(PatchingConfig(permutations=0))
    found = patching_result(
        store_of(additive, game, same=True), game, PatchingConfig(permutations=0), shapley.draw_orders(4, 0, 0), []
    )
    assert found.named[0].heads.tied == 4
    assert found.same == 1
    assert "keeps the same entries as attention in every head" in found.conclusion()


def test_few_samples_decide_nothing_and_many_intervals_are_said_to_err() -> None:
    few = concluded(PatchingConfig(), additive)
    assert few.shapley is not None
    assert {interval_side(player.value_interval, 0) for player in few.shapley.players} == {None}
    assert {case.verdict for claim in few.claims() for case in claim.cases} == {FEW}
    game = game_of(PatchingConfig())

    def clear(coalition: Coalition) -> np.ndarray:
        return (
            10 - np.array([3.0, 3.2, 2.8, 3.1, 2.9, 3.0]) * (0 in coalition) + np.array([1, -1] * 3) * (3 in coalition)
        )

    result = patching_result(store_of(clear, game, samples=6), game, PatchingConfig(), None, [])
    assert result.shapley is not None
    assert [interval_side(player.value_interval, 0) for player in result.shapley.players] == [-1, 0, 0, 0]
    assert result.conclusion() == (
        "Whether two-stage's kept sets instead of attention's make the last layer's drift lower is undecided: −30 % "
        "[−58, 18]; whether a single layer makes it lower is undecided in 3 of 4 layers (lower: 1): −30 % [−34, −26] "
        "at layer 0 to 0 % [−28, 39] at layer 3 (by chance alone up to 0.3 of 4 intervals leave out 0; budget 64; n = "
        "6 samples)."
    )


def test_mixtures_are_written_and_read() -> None:
    for text in ("bbt", "(01)tb", "tt"):
        assert str(Mixture.parse(text, 2)) == text
    for text in ("bx", "(011)b", "b(", "(01"):
        with pytest.raises(ValueError, match="expected a letter or 2 bits"):
            Mixture.parse(text, 2)
    assert Mixture.parse("(00)(11)", 2) == Mixture.parse("bt", 2)


def test_players_are_layers_or_their_heads() -> None:
    heads = Game.from_config(PatchingConfig(by="heads", layers=(5,)), (5, 11), 3, "query")
    assert list(map(str, heads.players)) == ["5-0", "5-1", "5-2"]
    assert str(heads.mixture({1})) == "(010)b"
    assert str(heads.mixture(heads.all_players)) == "tb"
    assert str(heads.treatment_everywhere) == "tt"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"layers": (4,)}, "expected layers of 0-3, which are measured, got 4"),
        ({"baseline_in": ((0, 9),)}, "expected layers of 0-3, which are measured, got 9"),
        ({"layers": (1,)}, "expected at least 2 layers to tell apart, got 1; give more, or --by heads"),
        ({"permutations": 3}, r"an even number from 8 on, or 0 for none; got 3"),
        ({"permutations": 8, "exact": True}, "give one of them"),
        ({"greedy": -1}, r"greedy \(--greedy\) must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        game_of(PatchingConfig(**asked))  # type: ignore[arg-type]
