"""Traces with known answers: treatment over baseline is a given factor per sample, for each kind of perturbation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses import text
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made

LAYERS, HEADS = 2, 3
LOWER = (0.6, 0.65, 0.7, 0.62, 0.68, 0.66, 0.64, 0.7)
HIGHER = tuple(2 - factor for factor in LOWER)
MIXED = (0.5, 1.6, 0.7, 1.4, 0.9, 1.2, 0.6, 1.5)


def moved(
    propagated: Sequence[float], isolated: Sequence[float] | None = None, *, treatment: str = "two-stage", **more: Any
) -> Trace:
    """A sample per factor; every head of the baseline moves by 1, every head of the treatment by the factor."""
    configs = [config("attention"), config(treatment)]
    factors = {"propagated": propagated, "isolated": propagated if isolated is None else isolated}
    shape = (len(propagated), LAYERS, HEADS)
    arrays: dict[str, Any] = {
        f"perturbation_{kind}": np.stack([np.ones(shape), np.ones(shape) * np.array(of)[:, None, None]], axis=1)
        for kind, of in factors.items()
    }
    arrays |= {name: np.full(shape, 1e-6) for name in ("noise_floor", "noise_floor_isolated")}
    return hand_made(configs, arrays | more, layers=LAYERS, heads=HEADS)


def drifted(factors: Sequence[float]) -> Trace:
    """A sample per factor; the baseline drifts by 1 after each layer, the treatment by the factor."""
    both = np.stack([np.ones((len(factors), LAYERS)), np.tile(np.array(factors)[:, None], LAYERS)], axis=1)
    floor = np.full((len(factors), LAYERS), 1e-6)
    return moved(factors, hidden_drift_l1=both, hidden_noise_floor=floor)


def said(trace: Trace, **sides: Any) -> str:
    return pk.compare_heads(trace, **sides).conclusion()


def test_a_treatment_that_moves_less_in_both_kinds_is_said_to() -> None:
    told = said(moved(LOWER))
    mean = f"{np.mean(LOWER):.2f}"
    assert told.startswith(f"two-stage moves the output less than attention: the propagated sum falls to {mean} [0.6")
    assert "of attention's, and 100 % [" in told
    assert "(8 samples, budget 64). Isolated, each layer cut on its own, less too: 0.66 [" in told


def test_a_treatment_that_moves_more_is_said_to() -> None:
    told = said(moved(HIGHER))
    assert told.startswith("two-stage moves the output more than attention: the propagated sum rises to 1.34 [1.2")
    assert "and 0 % [" in told
    assert "more too: " in told


def test_an_interval_that_holds_1_decides_nothing() -> None:
    told = said(moved(MIXED))
    assert told.startswith("It is not decided whether two-stage moves the output less or more than attention: ")
    assert "falls" not in told
    assert "not decided either" in told


def test_what_is_decided_isolated_is_not_hidden_nor_taken_for_the_whole() -> None:
    told = said(moved(HIGHER, LOWER))
    assert told.startswith("two-stage moves the output more than attention")
    assert "But isolated, each layer cut on its own, less: 0.66 [" in told
    open_ended = said(moved(MIXED, LOWER))
    assert open_ended.startswith("It is not decided")
    assert "But isolated, each layer cut on its own, less: " in open_ended


@pytest.mark.parametrize(("count", "who"), [(1, "One sample is"), (4, "4 samples are")])
def test_fewer_than_five_samples_decide_nothing_however_clear_they_look(count: int, who: str) -> None:
    told = said(moved(LOWER[:count]))
    assert told.startswith(f"{who} too few to decide whether two-stage moves the output less or more than attention")
    assert "less:" not in told
    assert "too:" not in told
    assert ("0.60 … 0.70" in told) == (count > 1)


def test_what_rounding_explains_is_no_difference() -> None:
    floors = {name: np.full((8, LAYERS, HEADS), 10.0) for name in ("noise_floor", "noise_floor_isolated")}
    told = said(moved(LOWER, **floors))
    assert told.startswith("two-stage and attention differ in no head beyond rounding")


def test_other_treatments_are_called_by_their_names() -> None:
    told = said(moved(HIGHER, treatment="random"), treatments="random")
    assert told.startswith("random moves the output more than attention")
    back = said(moved(HIGHER, treatment="hindsight"), baseline="hindsight", treatments="attention")
    assert back.startswith("attention moves the output less than hindsight: the propagated sum falls to 0.74 [")


def test_a_sum_that_few_heads_carry_is_told_beside_the_many() -> None:
    """One head of six falls from 100 to 50, the others rise from 1 to 2: the sum falls, most heads do not."""
    shape = (8, 2, LAYERS, HEADS)
    arrays = np.ones(shape) * np.array([1.0, 2.0])[:, None, None]
    arrays[:, :, 0, 0] = [100.0, 50.0]
    arrays *= np.linspace(0.9, 1.1, 8)[:, None, None, None]
    told = said(moved(LOWER, perturbation_propagated=arrays))
    assert "falls to 0.57 [" in told
    assert "though only 17 % [" in told
    half = arrays.copy()
    half[:, 1, 0] = half[:, 0, 0] / 2
    assert "though whether most heads move it less is not decided: 50 % [" in said(
        moved(LOWER, perturbation_propagated=half)
    )


def many(factors: Sequence[Sequence[float]]) -> Trace:
    """A budget per row of factors, 64, 128, …."""
    configs = [config(name, 64 * (1 + place)) for place in range(len(factors)) for name in ("attention", "two-stage")]
    sides = [np.array(row)[:, None, None] for pair in factors for row in (np.ones(len(pair)), pair)]
    moves = np.stack([side * np.ones((1, LAYERS, HEADS)) for side in sides], axis=1)
    arrays: dict[str, Any] = {"perturbation_propagated": moves, "perturbation_isolated": moves[:, :, ::-1]}
    arrays |= {name: np.full(moves[:, 0].shape, 1e-6) for name in ("noise_floor", "noise_floor_isolated")}
    arrays |= {"hidden_drift_l1": moves[..., 0], "hidden_noise_floor": np.full(moves[:, 0, :, 0].shape, 1e-6)}
    return hand_made(configs, arrays, layers=LAYERS, heads=HEADS)


def test_many_pairs_are_counted_with_their_least_and_largest() -> None:
    told = said(many([LOWER, HIGHER, MIXED, LOWER]))
    assert told.startswith(
        "two-stage moves the output less than attention in 2 of 4 comparisons, more in 1, not decided in 1 "
    )
    assert "in 1 (8 samples, each comparison at 95 %): the" in told
    assert "the propagated sum over attention's goes from 0.66 [" in told
    assert " at budget 64 to 1.34 [" in told
    assert " at budget 128. Isolated, each layer cut on its own: less in 2 of 4 comparisons" in told
    told = said(many([MIXED] * 2))
    assert told.startswith(
        "In none of 2 comparisons is it decided whether two-stage moves the output less than attention"
    )
    assert said(many([LOWER[:3]] * 2)).startswith("3 samples are too few to decide in any of 2 comparisons")


def test_drift_is_concluded_from_the_last_layer() -> None:
    for factors, start in (
        (LOWER, "By the last layer two-stage drifts less than attention: 0.66 ["),
        (HIGHER, "By the last layer two-stage drifts more than attention: 1.34 ["),
        (MIXED, "It is not decided whether by the last layer two-stage drifts less or more than attention: "),
        (LOWER[:3], "3 samples are too few to decide whether by the last layer"),
        ((1.0,) * 8, "By the last layer two-stage and attention drift alike, within rounding: 1.00"),
    ):
        assert pk.layer_drift(drifted(factors)).conclusion().startswith(start)
    told = pk.layer_drift(many([LOWER, MIXED])).conclusion()
    assert told.startswith(
        "By the last layer two-stage drifts less than attention in 1 of 2 comparisons, not decided in 1"
    )


def test_samples_are_concluded_from_their_exact_share() -> None:
    for factors, start in (
        (LOWER, "two-stage drifts less than attention in most samples: in 100 % [63, 100] (8 samples, budget 64)"),
        (HIGHER, "two-stage drifts less than attention in fewer than half of the samples: in 0 % [0, 37]"),
        (MIXED, "It is not decided whether two-stage drifts less than attention in most samples: in 50 % [16, 84]"),
        (LOWER[:4], "It is not decided whether"),
        (LOWER[:1], "One sample is too few to decide whether two-stage drifts less than attention in most"),
    ):
        assert pk.last_layer(drifted(factors)).conclusion().startswith(start)


def test_curves_are_told_by_how_often_the_next_token_stays() -> None:
    names = ("attention", "two-stage", "random")
    configs = [config(name, budget) for budget in (64, 128) for name in names]
    same = np.array([[0, 0, 0, 1, 0, 0]] * 3 + [[0, 1, 0, 1, 1, 1]] * 5)
    kept = np.broadcast_to(np.repeat([16, 32], 3)[:, None, None], (8, 6, 1, 1))
    found = hand_made(configs, {"top1_agreement": same, "kept_count": kept})
    told = pk.budget_curves(found, "attention", "two-stage").conclusion()
    assert (
        "full run's with attention in 0 % [0, 37] of samples at budget 64, 100 % [63, 100] at 128; two-stage in" in told
    )
    assert "two-stage in 62 % [24, 91] of samples at budget 64, 62 % [24, 91] at 128 (8 samples)." in told
    told = pk.budget_curves(found, names[0], names[1:]).conclusion()
    assert "goes from 0 % [0, 37] with attention at budget 64 to 100 % [63, 100] with attention at budget 128" in told


def test_sides_of_an_interval() -> None:
    found = [text.by_ratio("", 1.0, Interval(low, high), False, 8).verdict
             for low, high in ((0.5, 0.99), (0.5, 1.0), (1.0, 2.0), (1.01, 2.0))]  # fmt: skip
    assert found == ["less", "undecided", "undecided", "more"]
    assert text.by_ratio("", 1.0, None, False, 8).verdict == "undecided"
    assert text.by_ratio("", 0.5, Interval(0.4, 0.6, "range"), False, 4).verdict == "few"
