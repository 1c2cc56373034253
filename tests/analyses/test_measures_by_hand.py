"""Traces in which L1, L2 and 1 − cos say different things, with every answer worked out by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.questions.measures.measure_orders import KINDS
from perturbkv.analyses.questions.measures.measures import ALONE, OPPOSITE, SAME, Measures, measures
from perturbkv.analyses.text import MORE
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made

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


def made(samples: int = SAMPLES, **more: Any) -> Trace:
    """One layer of two heads. Sample i perturbs i + 1 times as much in L1 and L2; KL goes with L2, drift with all."""
    flat = np.ones_like(GROWS)
    each = {"": GROWS * np.array(L1), "_l2": GROWS * np.array(L2), "_cosine": flat * np.array(COSINE)}
    arrays: dict[str, Any] = {}
    for ending, array in each.items():
        floor = np.full((samples, 1, 2), 1e-4 if ending == "_cosine" else 1e-9)
        arrays |= {f"perturbation_isolated{ending}": array[:samples, :, None]}
        arrays |= {f"perturbation_propagated{ending}": 2 * array[:samples, :, None] if ending != "_cosine" else
                   array[:samples, :, None]}  # fmt: skip
        arrays |= {f"noise_floor{ending}": floor, f"noise_floor_isolated{ending}": floor}
        arrays |= {f"hidden_drift{ending or '_l1'}": array[:samples].sum(axis=2)[:, :, None]}
    arrays |= {
        "hidden_noise_floor": np.full((samples, 1), 1e-9),
        "output_norm_l2": np.full((samples, 1, 2), 5.0),
        "logit_kl": each["_l2"][:samples].sum(axis=2) / 100,
        "held_share": np.tile([0.1, 0.1, 0.1, 0.1], (samples, 1)),
    }
    return hand_made(CONFIGS, {**arrays, **more}, heads=2)


def answered() -> Trace:
    """The full cache answers all prompts but the last."""
    full = np.array([1.0] * (SAMPLES - 1) + [0.0])
    return made(score=np.tile(SCORES, (SAMPLES, 1)), score_full=full)


@pytest.fixture(scope="module")
def found() -> Measures:
    return measures(made())


def test_ratios_stand_side_by_side(found: Measures) -> None:
    (setting,) = found.settings
    assert [row.treatment for row in setting.rows] == CONFIGS[1:]
    assert {row.baseline for row in setting.rows} == {CONFIGS[0]}
    expected = {"l1": 16 / 20, "l2": 9 / 8, "cosine": 0.0541 / 0.08}
    for kind in KINDS:
        for distance, ratio in expected.items():
            one = setting.rows[0].kind(kind, distance)
            assert one.sum_ratio == pytest.approx(ratio)
            assert one.sum_ratio_interval is not None
            assert (one.sum_ratio_interval.low, one.sum_ratio_interval.high) == pytest.approx((ratio, ratio))
    assert {one.distance: one.ratio for one in setting.rows[0].drift} == pytest.approx(expected)
    heads = {distance: setting.rows[0].kind("isolated", distance) for distance in expected}
    assert {name: one.better_share for name, one in heads.items()} == {"l1": 1.0, "l2": 0.5, "cosine": 0.5}
    assert {name: one.median_ratio for name, one in heads.items()} == pytest.approx(
        {"l1": 0.8, "l2": (1.5 + 0.75) / 2, "cosine": (1.1025 + 0.25) / 2}
    )


def test_verdicts_that_are_others_are_counted(found: Measures) -> None:
    """In L2 the first head's is the opposite; in cosine it is tied, and decided in L1 alone."""
    shares = {(one.kind, one.distance): (one.opposite, one.alone) for one in found.settings[0].rows[0].against}
    assert shares == {
        ("isolated", "l2"): (0.5, 0.0), ("isolated", "cosine"): (0.0, 0.5),
        ("propagated", "l2"): (0.5, 0.0), ("propagated", "cosine"): (0.0, 0.5),
    }  # fmt: skip
    random = found.settings[0].rows[2].against
    assert {(one.opposite, one.alone) for one in random} == {(0.0, 0.0)}


def test_methods_change_places(found: Measures) -> None:
    """Σ in L1: 20, 16, 18, 40; in L2: 8, 9, 6, 16; as 1 − cos: 0.08, 0.0541, 0.045, 0.18."""
    for order in found.settings[0].orders:
        assert {name: ranks.tolist() for name, ranks in order.ranks.items()} == {
            "l1": [3, 1, 2, 4], "l2": [2, 3, 1, 4], "cosine": [3, 2, 1, 4],
        }  # fmt: skip
        assert (order.rho["l2"].value, order.rho["cosine"].value) == pytest.approx((0.4, 0.8))  # 1 − 6 Σd² / 4·15
        assert [(swap.first, swap.second, swap.decided) for swap in order.exchanges("l2")] == [
            (CONFIGS[1], CONFIGS[2], True),
            (CONFIGS[1], CONFIGS[0], True),
        ]
        assert [(swap.first, swap.second) for swap in order.exchanges("cosine")] == [(CONFIGS[1], CONFIGS[2])]


def test_the_distance_that_kl_goes_with_tells_most(found: Measures) -> None:
    links = {(one.kind, one.distance): one for one in found.settings[0].links}
    assert {one.target for one in links.values()} == {"kl"}
    for kind in KINDS:
        values = [links[kind, distance].value.value for distance in ("l1", "l2", "cosine")]
        assert values == pytest.approx([0.4, 1.0, 0.8])
        less = [links[kind, distance].less_l1 for distance in ("l1", "l2", "cosine")]
        assert less[0] is None
        assert [one.value for one in less[1:] if one] == pytest.approx([0.6, 0.4])


def test_answers_are_held_against_the_first_step_where_the_full_cache_answers() -> None:
    (setting,) = measures(answered()).settings
    links = {(one.target, one.kind, one.distance): one for one in setting.links}
    for kind in KINDS:
        scores = [links["score", kind, distance].value for distance in ("l1", "l2", "cosine")]
        assert [one.value for one in scores] == pytest.approx([-0.4, -1.0, -0.8])
        assert {one.prompts for one in scores} == {SAMPLES - 1}
        less = links["score", kind, "l2"].less_l1
        assert less is not None and less.value == pytest.approx(-0.6)
        assert links["lost", kind, "l1"].value.value == 1.0, "random alone lies below half of the full score"


def test_ungraded_answers_are_none() -> None:
    score = np.tile(SCORES, (SAMPLES, 1))
    score[2, 1] = np.nan
    (setting,) = measures(made(score=score, score_full=np.ones(SAMPLES))).settings
    assert {one.target for one in setting.links} == {"kl"}


def test_l2_norms_stand_over_l1_norms_of_the_same_selection(found: Measures) -> None:
    (row,) = found.settings[0].norms
    assert (row.baseline, row.treatment) == (CONFIGS[1], CONFIGS[2])
    assert [row.kind("propagated", name).sum_ratio for name in ("l1", "l2", "cosine")] == pytest.approx(
        [18 / 16, 6 / 9, 0.045 / 0.0541]
    )


def test_the_conclusion_says_what_turns_round(found: Measures) -> None:
    assert found.outcomes("l2") == {SAME: 4, OPPOSITE: 2} and found.outcomes("cosine") == {SAME: 6}
    assert found.reversed_comparisons("l2") == ["isolated two-stage", "propagated two-stage"]
    assert found.conclusion() == (
        "L2 reverses some of 6 comparisons of L1: L2 agrees in 4, is opposite in 2 (isolated two-stage, propagated "
        "two-stage); cosine agrees in 6 (isolated and propagated, sum over heads; n = 6 samples)."
    )
    (case,) = found.norm_cases()["two-stage"]
    assert (case.verdict, case.ratio) == (MORE, pytest.approx(18 / 16))


def test_rounding_decides_nothing_in_half_precision() -> None:
    """With a floor of L1 above every difference its heads are all tied; L2 alone is decided."""
    floors = {name: np.full((SAMPLES, 1, 2), 1e3) for name in ("noise_floor", "noise_floor_isolated")}
    found = measures(made(**floors), treatments="two-stage(alpha=0.25)")
    assert found.outcomes("l2") == {ALONE: 4}
    assert {(one.opposite, one.alone) for one in found.settings[0].rows[0].against if one.distance == "l2"} == {(0, 1)}


def test_the_same_distance_three_times_changes_nothing() -> None:
    """The control: with L2 and cosine as copies of L1, and their floors alike, no verdict, place or link differs."""
    trace = made()
    names = ("perturbation_isolated", "perturbation_propagated", "noise_floor", "noise_floor_isolated")
    copies = {f"{name}{ending}": trace.arrays[name] for name in names for ending in ("_l2", "_cosine")}
    (setting,) = measures(dataclasses.replace(trace, arrays={**trace.arrays, **copies})).settings
    assert {(one.opposite, one.alone) for row in setting.rows for one in row.against} == {(0.0, 0.0)}
    assert [order.swaps for order in setting.orders] == [(), ()]
    assert {one.less_l1.value for one in setting.links if one.less_l1} == {0.0}


def test_few_samples_decide_nothing() -> None:
    for samples in (1, 3):
        assert measures(made(samples=samples)).conclusion().startswith("Too few samples to decide whether L2")


@pytest.mark.parametrize("samples", [1, 3, SAMPLES])
def test_tables_fit_80_columns_and_numbers_are_json(samples: int) -> None:
    result = measures(made(samples=samples))
    assert max(map(len, repr(result).splitlines())) <= 80
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_trace_of_before_the_distances_is_refused_in_one_line() -> None:
    arrays = {name: array for name, array in made().arrays.items() if not name.endswith(("_l2", "_cosine"))}
    with pytest.raises(TraceError) as told:
        measures(dataclasses.replace(made(), arrays=arrays))
    assert str(told.value) == (
        "measures needs L2 and cosine distances, and made.h5 lacks perturbation_isolated_l2 and 8 more; record them: "
        "perturbkv question measures --model m --dataset d"
    )


def test_sides_that_are_not_there_are_refused() -> None:
    with pytest.raises(TraceError, match="expected configurations to compare 'attention' with 'h2o'"):
        measures(made(), treatments="h2o")
    with pytest.raises(TraceError, match="measures compares two-stage, .* with value; got"):
        measures(made().sel(where=lambda one: one == CONFIGS[0]), "value")
    with pytest.raises(ConfigError, match="expected a step from 0 to 0, got 1"):
        measures(made(), step=1)


def test_two_budgets_are_two_settings_and_fewer_than_three_configurations_are_not_ranked() -> None:
    (setting,) = measures(made().sel(where=lambda one: one in CONFIGS[:2])).settings
    assert (setting.orders, setting.links, setting.norms) == ((), (), ())


def test_a_row_per_comparison_distance_kind_and_head(found: Measures) -> None:
    rows = found.records()
    assert len(rows) == (3 + 1) * 3 * 2 * 2
    one = next(row for row in rows if row["distance"] == "l2" and row["kind"] == "propagated" and row["head"] == 0)
    assert one["treatment_mean"] == pytest.approx(2 * 6 * 3.5)
    assert (one["part"], one["verdict"]) == ("treatment", -1)


def test_the_figure_shows_every_ratio(found: Measures) -> None:
    for width in (84, 174):
        figure = found.plot(width)
        isolated, propagated = (axes for axes in figure.axes if axes.get_visible())
        assert isolated.get_title(loc="left").endswith("isolated")
        rows = [*found.settings[0].rows, *found.settings[0].norms]
        for axes, kind in ((isolated, "isolated"), (propagated, "propagated")):
            for distance in ("l1", "l2", "cosine"):
                boxes = [box for box in axes.containers if box.lines[0].get_gid() == distance]
                drawn = [float(box.lines[0].get_xdata()[0]) for box in boxes]
                assert drawn == pytest.approx([row.kind(kind, distance).sum_ratio for row in rows])
        names = [label.get_text() for label in isolated.get_yticklabels()]
        assert names == ["two-stage", "two-stage(norm=l2)", "random", "two-stage: L2/L1 norms"]
