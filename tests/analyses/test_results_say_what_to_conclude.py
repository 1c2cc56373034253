"""Traces with known answers: treatment over baseline is a given factor per sample, for each kind of perturbation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses import text
from perturbkv.analyses.verdicts import ALIKE, FEW, LESS, MORE, UNDECIDED
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


def verdicts(trace: Trace, **sides: Any) -> dict[str, list[str]]:
    """What each kind of perturbation says of each pair."""
    pairs = pk.compare_heads(trace, **sides)
    return {kind: [getattr(pair, kind).case().verdict for pair in pairs] for kind in ("isolated", "propagated")}


@pytest.mark.parametrize(
    ("propagated", "isolated", "expected"),
    [
        (LOWER, LOWER, (LESS, LESS)),
        (HIGHER, HIGHER, (MORE, MORE)),
        (MIXED, MIXED, (UNDECIDED, UNDECIDED)),
        (HIGHER, LOWER, (MORE, LESS)),
        (MIXED, LOWER, (UNDECIDED, LESS)),
        (LOWER[:1], LOWER[:1], (FEW, FEW)),
        (LOWER[:4], LOWER[:4], (FEW, FEW)),
    ],
)
def test_heads_are_judged_by_the_interval_of_the_sum(
    propagated: Sequence[float], isolated: Sequence[float], expected: tuple[str, str]
) -> None:
    found = verdicts(moved(propagated, isolated))
    assert (*found["propagated"], *found["isolated"]) == expected
    sums = pk.compare_heads(moved(propagated, isolated))[0]
    assert (sums.propagated.sum_ratio, sums.isolated.sum_ratio) == pytest.approx(
        (np.mean(propagated), np.mean(isolated))
    )


@pytest.mark.parametrize(
    ("propagated", "isolated", "caveats"),
    [(LOWER, LOWER, 0), (MIXED, MIXED, 0), (HIGHER, LOWER, 1), (MIXED, LOWER, 1), (LOWER[:5], LOWER[:5], 1)],
)
def test_what_is_decided_isolated_is_not_hidden_nor_that_no_head_can_be_significant(
    propagated: Sequence[float], isolated: Sequence[float], caveats: int
) -> None:
    told = pk.compare_heads(moved(propagated, isolated)).caveats()
    assert len([caveat for caveat in told if not caveat.startswith("Heads by layer-head")]) == caveats


def test_the_heads_that_gain_and_lose_most_are_named() -> None:
    """Head 1-0 gains 60, 0-0 gains 50; 0-2 loses 30, 1-1 less than rounding; all others are equal."""
    arrays = np.full((8, 2, LAYERS, HEADS), 100.0)
    for (layer, head), treated in {(1, 0): 40, (0, 0): 50, (0, 2): 130, (1, 1): 101}.items():
        arrays[:, 1, layer, head] = treated
    floors = np.full((8, LAYERS, HEADS), 1.0)
    result = pk.compare_heads(moved(LOWER, perturbation_propagated=arrays, noise_floor=floors))
    assert (result[0].gain_most, result[0].lose_most) == (["1-0", "0-0"], ["0-2"])
    assert "Heads by layer-head, propagated: gain most 1-0, 0-0; lose most 0-2." in result.caveats()
    assert not any(note.startswith("Heads by layer-head") for note in pk.compare_heads(many([LOWER, LOWER])).caveats())


def test_what_rounding_explains_is_no_difference() -> None:
    floors = {name: np.full((8, LAYERS, HEADS), 10.0) for name in ("noise_floor", "noise_floor_isolated")}
    assert verdicts(moved(LOWER, **floors)) == {"isolated": [ALIKE], "propagated": [ALIKE]}


def test_the_conclusion_of_heads_is_one_sentence_with_both_names_its_interval_and_n() -> None:
    result = pk.compare_heads(moved(LOWER))
    less = text.relative_difference(result[0].propagated.sum_ratio, result[0].propagated.sum_ratio_interval)
    share = text.percent(result[0].propagated.better_share, result[0].propagated.better_share_interval)
    assert result.conclusion() == (
        f"two-stage perturbs {less} than attention (propagated, sum over heads; {share} of the heads better; "
        "n = 8 samples)."
    )
    back = pk.compare_heads(moved(HIGHER, treatment="hindsight"), baseline="hindsight", treatments="attention")
    assert back.conclusion().startswith("attention perturbs 26 % [")


def test_a_sum_that_few_heads_carry_stands_beside_the_share_of_the_many() -> None:
    """One head of six falls from 100 to 50, the others rise from 1 to 2: the sum falls, most heads do not."""
    shape = (8, 2, LAYERS, HEADS)
    arrays = np.ones(shape) * np.array([1.0, 2.0])[:, None, None]
    arrays[:, :, 0, 0] = [100.0, 50.0]
    arrays *= np.linspace(0.9, 1.1, 8)[:, None, None, None]
    result = pk.compare_heads(moved(LOWER, perturbation_propagated=arrays))
    kind = result[0].propagated
    assert kind.case().verdict == LESS
    assert (kind.sum_ratio, kind.better_share) == pytest.approx((60 / 105, 1 / 6))
    table = result.table()
    row = dict(zip(table.columns, table.rows[1], strict=True))
    assert row["kind"] == "propagated"
    assert row["#heads\nbetter"].startswith("17 %\n[")
    assert row["#sum over\nbaseline's"].startswith("0.57\n[")


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
    assert verdicts(many([LOWER, HIGHER, MIXED, LOWER]))["propagated"] == [LESS, MORE, UNDECIDED, LESS]
    (claim,) = pk.compare_heads(many([LOWER, HIGHER, MIXED, LOWER])).claims()
    assert [case.name for case in claim.cases] == ["b=64", "b=128", "b=192", "b=256"]
    assert claim.clause().startswith(
        "two-stage perturbs less than attention in 2 of 4 cases (more: 1, undecided: 1): 34 % ["
    )


@pytest.mark.parametrize(
    ("factors", "verdict", "samples"),
    [(LOWER, LESS, (8, 0, 0)), (HIGHER, MORE, (0, 0, 8)), (MIXED, UNDECIDED, (4, 0, 4)), (LOWER[:3], FEW, (3, 0, 0)),
     ((1.0,) * 8, ALIKE, (0, 8, 0))],
)  # fmt: skip
def test_drift_is_judged_by_the_last_layer_and_samples_one_by_one(
    factors: Sequence[float], verdict: str, samples: tuple[int, int, int]
) -> None:
    (drift,) = pk.layer_drift(drifted(factors)).drifts
    assert drift.case().verdict == verdict
    assert drift.case().value == pytest.approx(np.mean(factors))
    (each,) = pk.last_layer(drifted(factors)).per_sample
    assert each.sample_counts == "/".join(map(str, samples))
    assert each.improved_share == samples[0] / len(factors)


def test_the_conclusion_of_drift_is_of_the_last_layer() -> None:
    result = pk.layer_drift(drifted(LOWER))
    (drift,) = result.drifts
    less = text.relative_difference(float(drift.ratio[-1]), text.interval_at(drift.ratio_interval, -1))
    assert result.conclusion() == (
        f"two-stage drifts {less} than attention by the last layer (mean over samples; n = 8 samples)."
    )


@pytest.mark.parametrize(
    ("factors", "verdict", "number"),
    [
        (LOWER, MORE, "100 % [63, 100]"),
        (HIGHER, LESS, "0 % [0, 37]"),
        (MIXED, UNDECIDED, "50 % [16, 84]"),
        (LOWER[:4], FEW, "100 % [40, 100]"),
        (LOWER[:1], FEW, "100 %"),
    ],
)
def test_samples_are_concluded_from_their_exact_share(factors: Sequence[float], verdict: str, number: str) -> None:
    (claim,) = pk.last_layer(drifted(factors)).claims()
    assert (claim.subject, claim.verb) == ("two-stage", "drifts less than attention")
    assert [(case.verdict, case.text) for case in claim.cases] == [(verdict, number)]


def test_curves_are_told_by_how_often_the_next_token_stays() -> None:
    names = ("attention", "two-stage", "random")
    configs = [config(name, budget) for budget in (64, 128) for name in names]
    same = np.array([[0, 0, 0, 1, 0, 0]] * 3 + [[0, 1, 0, 1, 1, 1]] * 5)
    kept = np.broadcast_to(np.repeat([16, 32], 3)[:, None, None], (8, 6, 1, 1))
    found = hand_made(configs, {"top1_agreement": same, "kept_count": kept})
    result = pk.budget_curves(found, "attention", "two-stage")
    assert [curve.medians.top1.tolist() for curve in result] == [[0, 1], [0.625, 0.625]]
    assert result.conclusion() == (
        "The next token is the full run's in 0 % [0, 37] at attention b=64 to 100 % [63, 100] at attention b=128 "
        "(share of samples; n = 8 samples)."
    )
    three = pk.budget_curves(found, names[0], names[1:])
    assert [[point.top1 for point in map(curve.at, range(2))] for curve in three][2] == [0, 0.625]
    assert [case.value for case in three.claims()[0].cases] == [0, 1, 0.625, 0.625, 0, 0.625]
    assert [row[0] for row in three.table().rows][:2] == ["attention b=64", "attention b=128"]
