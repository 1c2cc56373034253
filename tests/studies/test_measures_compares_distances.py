"""`studies/measures.py` on a trace in which L1, L2 and 1 − cos say different things, against loops in float64."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses import sides
from perturbkv.errors import PerturbkvError
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made
from tests.support.scripts import STUDIES, functions, study

NAMES = ("attention", "two-stage", "two-stage(norm=l2)", "random")
CONFIGS = [config(name) for name in NAMES]
L1 = [[10.0, 10.0], [8.0, 8.0], [9.0, 9.0], [20.0, 20.0]]
L2 = [[4.0, 4.0], [6.0, 3.0], [3.0, 3.0], [8.0, 8.0]]
COSINE = [[0.04, 0.04], [0.0441, 0.01], [0.0225, 0.0225], [0.09, 0.09]]
"""(config, head) of the first sample. Two-stage perturbs less in L1 in both heads, in L2 more in the first; of 1 − cos
its roots 0.21 and 0.2 differ by less than two floors of root 0.01 there."""
SAMPLES = 6
GROWS = 1 + np.arange(SAMPLES)[:, None, None]
SCORES = [0.8, 0.6, 1.0, 0.2]
KINDS, DISTANCES = ("isolated", "propagated"), ("l1", "l2", "cosine")
measures = functions("measures", STUDIES)
analyse = measures["analyse"]


def made(samples: int = SAMPLES, **more: Any) -> Trace:
    """One layer of two heads. Sample i perturbs i + 1 times as much in L1 and L2; KL goes with L2, drift with all."""
    each = {"": GROWS * np.array(L1), "_l2": GROWS * np.array(L2), "_cosine": np.ones_like(GROWS) * np.array(COSINE)}
    arrays: dict[str, Any] = {}
    for ending, array in each.items():
        floor = np.full((samples, 1, 2), 1e-4 if ending == "_cosine" else 1e-9)
        arrays |= {f"perturbation_isolated{ending}": array[:samples, :, None]}
        arrays |= {f"perturbation_propagated{ending}": (1 if ending == "_cosine" else 2) * array[:samples, :, None]}
        arrays |= {f"noise_floor{ending}": floor, f"noise_floor_isolated{ending}": floor}
        arrays |= {f"hidden_drift{ending or '_l1'}": array[:samples].sum(axis=2)[:, :, None]}
    arrays |= {
        "hidden_noise_floor": np.full((samples, 1), 1e-9),
        "output_norm_l2": np.full((samples, 1, 2), 5.0),
        "logit_kl": each["_l2"][:samples].sum(axis=2) / 100,
        "held_share": np.tile([0.1, 0.1, 0.1, 0.1], (samples, 1)),
    }
    return hand_made(CONFIGS, {**arrays, **more}, heads=2)


def by(rows: list[dict[str, Any]], *names: str) -> dict[Any, dict[str, Any]]:
    return {tuple(row[name] for name in names): row for row in rows}


def test_ratios_and_verdicts_are_those_of_loops_over_heads() -> None:
    (setting,) = analyse(made())["settings"]
    assert [row["treatment"] for row in setting["comparisons"]] == CONFIGS[1:]
    values = {"l1": L1, "l2": L2, "cosine": COSINE}
    root = {"l1": lambda value: value, "l2": lambda value: value, "cosine": np.sqrt}
    floor = {"l1": 1e-9, "l2": 1e-9, "cosine": 0.01}
    for index, row in enumerate(setting["comparisons"], start=1):
        measured, against = by(row["measured"], "kind", "distance"), by(row["against_l1"], "kind", "distance")
        signs = {}
        for name, table in values.items():
            pairs = [(root[name](first), root[name](second)) for first, second in zip(table[0], table[index])]  # noqa: B905
            signs[name] = [0 if abs(a - b) <= 2 * floor[name] else 1 if b < a else -1 for a, b in pairs]
            ratio = sum(table[index]) / sum(table[0])
            middle = np.median([second / first for first, second in zip(table[0], table[index], strict=True)])
            for kind in KINDS:
                one = measured[kind, name]
                assert (one["sum_ratio"], one["median_ratio"]) == pytest.approx((ratio, middle))
                assert one["better_share"] == sum(sign == 1 for sign in signs[name]) / 2
            assert by(row["drift"], "distance")[(name,)]["ratio"] == pytest.approx(ratio)
        for kind, name in product(KINDS, ("l2", "cosine")):
            both = list(zip(signs["l1"], signs[name], strict=True))
            told = against[kind, name]
            assert told["opposite"] == sum(a * b < 0 for a, b in both) / 2
            assert told["alone"] == sum((a == 0) != (b == 0) for a, b in both) / 2


def test_methods_change_places() -> None:
    """Σ in L1: 20, 16, 18, 40; in L2: 8, 9, 6, 16; as 1 − cos: 0.08, 0.0541, 0.045, 0.18."""
    found = analyse(made())
    for order in found["settings"][0]["orders"]:
        places = {name: [one["ranks"][name] for one in order["methods"]] for name in DISTANCES}
        assert places == {"l1": [3, 1, 2, 4], "l2": [2, 3, 1, 4], "cosine": [3, 2, 1, 4]}
        assert order["rho"]["l2"].value == pytest.approx(1 - 6 * (1 + 4 + 1) / (4 * 15))
        assert order["rho"]["cosine"].value == pytest.approx(1 - 6 * (1 + 1) / (4 * 15))
        swaps = [(one["distance"], one["first"], one["second"], one["decided"]) for one in order["swaps"]]
        assert swaps == [
            ("l2", CONFIGS[1], CONFIGS[2], True), ("cosine", CONFIGS[1], CONFIGS[2], True),
            ("l2", CONFIGS[1], CONFIGS[0], True),
        ]  # fmt: skip
    told = found["together"]["distances"]
    assert {name: [told[name][said] for said in ("same", "opposite", "alone")] for name in told} == {
        "l2": [4, 2, 0], "cosine": [6, 0, 0],
    }  # fmt: skip
    assert (told["l2"]["pairs_of_methods"], told["l2"]["swaps"], told["cosine"]["swaps"]) == (12, 4, 2)
    assert told["l2"]["most_opposite"] == {"isolated": 0.5, "propagated": 0.5}


def test_losses_go_with_the_distance_that_made_them() -> None:
    """KL goes with L2; an answer's score with its order. Of a lost and a kept answer pairs are counted."""
    trace = made(score=np.tile(SCORES, (SAMPLES, 1)), score_full=np.array([1.0] * (SAMPLES - 1) + [0.0]))
    links = by(analyse(trace)["settings"][0]["links"], "target", "kind", "distance")
    for kind in KINDS:
        assert [links["kl", kind, name]["value"].value for name in DISTANCES] == pytest.approx([0.4, 1.0, 0.8])
        assert [links["score", kind, name]["value"].value for name in DISTANCES] == pytest.approx([-0.4, -1.0, -0.8])
        assert links["score", kind, "l2"]["less_l1"].value == pytest.approx(-0.6)
        assert links["kl", kind, "l1"]["less_l1"] is None
        assert {links[target, kind, "l1"]["value"].prompts for target in ("score", "lost")} == {SAMPLES - 1}
        lost = [score < 0.5 for score in SCORES]
        for name, table in (("l1", L1), ("l2", L2), ("cosine", COSINE)):
            sums = [sum(heads) for heads in table]
            pairs = [
                (sums[gone] > sums[kept]) + 0.5 * (sums[gone] == sums[kept])
                for gone, kept in product(range(4), range(4)) if lost[gone] and not lost[kept]
            ]  # fmt: skip
            assert links["lost", kind, name]["value"].value == np.mean(pairs)
    ungraded = np.tile([*SCORES[:3], np.nan], (SAMPLES, 1))
    (setting,) = analyse(made(score=ungraded, score_full=np.ones(SAMPLES)))["settings"]
    assert {one["target"] for one in setting["links"]} == {"kl"}


def test_l2_norms_stand_over_l1_norms_of_the_same_selection() -> None:
    (row,) = analyse(made())["settings"][0]["norms"]
    assert (row["baseline"], row["treatment"]) == (CONFIGS[1], CONFIGS[2])
    measured = by(row["measured"], "kind", "distance")
    assert [measured["propagated", name]["sum_ratio"] for name in DISTANCES] == pytest.approx(
        [18 / 16, 6 / 9, 0.045 / 0.0541]
    )


def test_the_same_distance_three_times_changes_nothing() -> None:
    """The control: with L2 and cosine as copies of L1, and their floors alike, no verdict, place or link differs."""
    trace = made()
    names = ("perturbation_isolated", "perturbation_propagated", "noise_floor", "noise_floor_isolated")
    copies = {f"{name}{ending}": trace.arrays[name] for name in names for ending in ("_l2", "_cosine")}
    (setting,) = analyse(dataclasses.replace(trace, arrays={**trace.arrays, **copies}))["settings"]
    changes = [one for row in setting["comparisons"] for one in row["against_l1"]]
    assert {(one["opposite"], one["alone"], one["conclusion"]) for one in changes} == {(0, 0, "same")}
    assert [order["swaps"] for order in setting["orders"]] == [[], []]
    assert {one["less_l1"].value for one in setting["links"] if one["less_l1"]} == {0.0}


def test_rounding_and_few_samples_decide_nothing() -> None:
    floors = {name: np.full((SAMPLES, 1, 2), 1e3) for name in ("noise_floor", "noise_floor_isolated")}
    told = analyse(made(**floors), treatments=["two-stage(alpha=0.25)"])["together"]["distances"]
    assert [told["l2"][said] for said in ("same", "opposite", "alone")] == [0, 0, 4]
    few = analyse(made(samples=3))["together"]["distances"]
    assert few["l2"]["same"] == few["l2"]["comparisons"], "nothing is decided in either distance"


def test_what_a_trace_lacks_is_one_line() -> None:
    arrays = {name: array for name, array in made().arrays.items() if not name.endswith(("_l2", "_cosine"))}
    with pytest.raises(PerturbkvError, match="expected L2 and cosine distances in made.h5"):
        analyse(dataclasses.replace(made(), arrays=arrays))
    with pytest.raises(PerturbkvError, match="expected configurations to compare 'attention' with 'h2o'"):
        analyse(made(), treatments=["h2o"])
    with pytest.raises(PerturbkvError, match="expected one of two-stage"):
        analyse(made().sel(where=lambda one: one == CONFIGS[0]))


def test_methods_are_ranked_in_the_groups_of_the_package() -> None:
    assert (measures["SHARED"], measures["LEAST_RANKED"]) == (sides.CACHE_SIZE_CHOICES, sides.LEAST_CONFIGS)
    configs = pk.grid([64, 0.5], selection=["attention", "random"], granularity=["kv", "query"], protect_first=4)
    assert [*measures["comparable_groups"](configs).values()] == [*sides.comparable_groups(configs).values()]


def test_the_script_leaves_its_document_and_its_picture(tmp_path: Path) -> None:
    trace = tmp_path / "trace.h5"
    made().save(trace)
    said = study("measures", trace, "--output", tmp_path)
    assert "l2 agrees with L1 in 4 of 6 comparisons, is opposite in 2" in said
    assert {"measures.json", "measures.png"} <= {path.name for path in tmp_path.iterdir()}
