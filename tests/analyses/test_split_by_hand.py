"""L = (1 − S) · D with every number worked out by hand: three heads, and one of which nothing goes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from perturbkv.analyses.bounds.bound_tightness import bound_tightness
from perturbkv.analyses.questions.split.split import split
from perturbkv.analyses.text import LESS, UNDECIDED
from perturbkv.analyses.verdicts import equal_isolated
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made

BASELINE, TREATMENT = config("attention"), config("two-stage")
CORRECTED = [config("attention", correction=one) for one in ("corrected-oracle", "corrected", "corrected(mass=linear)")]
LEFT = {"corrected-oracle": 0.25, "corrected(mass=stored)": 0.75, "corrected(mass=linear)": 0.5}
"""What corrections leave of every L and of KL."""
MASS = np.array([0.1, 0.2, 0.4])
ODD, EVEN = np.array([8.0, 4.0, 1.0]), np.ones(3)
"""D of the samples 0, 2, 4 and of the others."""
FEWER, LIKER = np.array([0.5, 2.0, 1.0]), np.array([1.0, 0.25, 0.5])
"""The treatment's 1 − S and D over the baseline's, in the samples 0, 2, 4; in the others nothing differs."""


def made(samples: int = 6, configs: Sequence[EvictionConfig] = (BASELINE, TREATMENT, *CORRECTED)) -> Trace:
    """Odd samples differ from even ones; the fourth head keeps all but rounding, and its L is noise."""
    found: dict[str, list[Any]] = {"retained_mass": [], "perturbation_isolated": [], "logit_kl": []}
    for place in range(samples):
        turned = place % 2 == 0
        rows = [_row(one, ODD if turned else EVEN, turned, 1 + place) for one in configs]
        for name in found:
            found[name].append([row[name] for row in rows])
    arrays: dict[str, Any] = {name: np.array(rows) for name, rows in found.items()}
    arrays["perturbation_propagated"] = 2 * arrays["perturbation_isolated"]
    arrays["hidden_drift_l1"] = arrays["logit_kl"][:, :, None]
    arrays |= {name: np.full((samples, 1, 4), 1e-9) for name in ("noise_floor", "noise_floor_isolated")}
    arrays["sigma_stage1"] = np.full((samples, len(configs), 1, 4), 0.9)
    arrays["logit_kl_noise_floor"] = np.array([1.0, *[1e-9] * (samples - 1)])
    arrays["hidden_noise_floor"] = np.full((samples, 1), 1e-12)
    return _same_kept(hand_made(list(configs), arrays, heads=4), configs)


def _row(one: EvictionConfig, distance: np.ndarray, turned: bool, scale: float) -> dict[str, Any]:
    fewer, liker = (FEWER, LIKER) if turned and one.selection.name == "two-stage" else (1.0, 1.0)
    mass, left = MASS * fewer, LEFT.get(str(one.correction), 1.0)
    loss = left * scale * mass * distance * liker
    return {
        "retained_mass": [[*(1 - mass), 1 - 1e-14]],
        "perturbation_isolated": [[*loss, 1e-12]],
        "logit_kl": left * scale / 100,
    }


def _same_kept(trace: Trace, configs: Sequence[EvictionConfig]) -> Trace:
    """Corrected configurations keep what the uncorrected one keeps."""
    source = [0 if one.corrected else place for place, one in enumerate(configs)]
    kept = {name: trace.arrays[name][:, source] for name in ("kept_offset", "kept_length", "kept_count")}
    return dataclasses.replace(trace, arrays={**trace.arrays, **kept})


def test_the_parts_of_the_variance() -> None:
    """In units of log 2: log(1 − S) is 0, 1, 2, and log D 3, 2, 0 in even samples, 0 in odd ones; log L 3, 3, 2."""
    one = split(made()).spreads[0]
    assert one.config == BASELINE
    assert one.mass == pytest.approx((3 + 1) / 2)  # 2/3 over 2/9, and 2/3 over 2/3
    assert one.difference == pytest.approx((7 + 0) / 2)  # 14/9 over 2/9
    assert one.both == pytest.approx((-9 + 0) / 2)
    assert one.mass + one.difference + one.both == pytest.approx(1)
    assert one.by_mass == pytest.approx((-1.5 + 1) / 2)
    assert one.correlation == pytest.approx(-1 / math.sqrt(28 / 27))  # of the samples in which D differs
    assert one.deviation == pytest.approx(math.log(2) * (math.sqrt(2 / 9) + math.sqrt(2 / 3)) / 2)
    assert (one.heads, one.left_out) == (18, 6)


def test_a_contest_s_two_factors() -> None:
    """1 − S × (1/2 · 2 · 1)^(1/3) = 1, D × (1 · 1/4 · 1/2)^(1/3) = 1/2 in half of the samples, 1 in the others."""
    (one,) = split(made()).contests
    assert (one.baseline, one.treatment) == (BASELINE, TREATMENT)
    assert one.mass == pytest.approx(1)
    assert one.difference == pytest.approx(math.sqrt(0.5))
    assert one.loss == pytest.approx(one.mass * one.difference)
    assert one.mass_falls == pytest.approx(1 / 6)
    assert one.difference_falls == pytest.approx(2 / 6)
    assert (one.heads, one.left_out) == (18, 6)
    interval = one.difference_interval
    assert interval is not None and interval.low < math.sqrt(0.5) < interval.high


def test_what_corrections_leave() -> None:
    (setting,) = split(made()).corrections
    assert setting.baseline == BASELINE
    assert [row.name for row in setting.rows] == [
        "corrected(mass=stored)",
        "corrected(mass=linear)",
        "corrected-oracle",
    ]
    for row in setting.rows:
        left = LEFT[row.name]
        assert row.isolated.sum_ratio == pytest.approx(left, rel=1e-6)
        assert row.propagated.sum_ratio == pytest.approx(left, rel=1e-6)
        assert row.propagated.better_share == pytest.approx(3 / 4), "the head of noise is a tie"
        assert row.kl_ratio == pytest.approx(left) and row.drift_ratio == pytest.approx(left)
        assert row.kl_falls == (5 / 6), "of the first sample it differs by less than two floors"
        assert row.kl_median == pytest.approx(left * 3.5 / 100)
        assert (row.name == "corrected-oracle") == (row.prediction is None)
        if row.prediction is not None:
            assert row.prediction.isolated_cost == pytest.approx(left / 0.25, rel=1e-6)
            assert row.prediction.propagated_cost == pytest.approx(left / 0.25, rel=1e-6)


def test_equal_kept_sets_with_different_corrections_are_no_tie() -> None:
    found = made()
    assert found.same_kept(0, 3).all()
    assert not equal_isolated(found, 0, 3).any()
    assert equal_isolated(found, 0, 0).all()
    nothing = {**found.arrays, "evicted": np.zeros_like(found.arrays["evicted"])}
    assert equal_isolated(dataclasses.replace(found, arrays=nothing), 0, 3).all()


def test_what_is_said() -> None:
    result = split(made())
    assert result.verdicts() == [UNDECIDED, UNDECIDED]
    assert {name: [case.verdict for case in cases] for name, cases in result.correction_cases().items()} == {
        name: [LESS] for name in ("corrected(mass=stored)", "corrected(mass=linear)", "corrected-oracle")
    }
    assert list(result.contests_by_sides()) == [("attention", "two-stage")]
    said = result.conclusion()
    assert said.startswith("Whether heads differ by how much or by what goes is undecided in both configurations: how ")
    assert said.endswith(
        "; corrected(mass=stored) perturbs 25 % [25, 25] less than no correction (propagated) (n = 6 samples)."
    )
    (contest,) = result.contest_texts()
    assert contest.startswith("two-stage's L is 0.71 × [")
    assert "Left out: 12 of 48 heads" in result.notes()
    json.dumps(result.to_dict(), allow_nan=False)


def test_the_control_stands_apart() -> None:
    """random is no end of the range of methods, it is told behind them; by itself it is what there is to tell."""
    control = config("random")
    said = split(made(3, (BASELINE, TREATMENT, control))).conclusion()
    share = "−67 % (−150 … 100)"  # of every configuration: all rows are the baseline's but for scale
    assert said.startswith(
        f"How much goes explains {share} of what makes heads differ, {share} with random (control) (n"
    )
    assert "(control)" not in split(made(3, (control,))).conclusion()


def test_each_heading_of_what_comes_out_has_its_unit() -> None:
    """The median of KL is in nat, its mean a ratio over none: beside each other they looked alike."""
    table = next(one for one in split(made()).details() if isinstance(one, Table) and "drift and KL" in one.title)
    assert [" ".join(one.removeprefix("#").split()) for one in table.columns[1:4]] == [
        "last layer's drift", "KL of the next token, nat", "mean KL over none",
    ]  # fmt: skip
    assert [table.rows[0][index].split("\n")[0] for index in (1, 2, 3)] == ["", "0.035", ""]


@pytest.mark.parametrize("samples", [1, 3, 6])
def test_tables_fit_80_columns(samples: int) -> None:
    assert max(map(len, repr(split(made(samples))).splitlines())) <= 80


def test_a_row_per_head_of_what_is_uncorrected() -> None:
    rows = split(made(2)).records()
    assert len(rows) == 2 * 4
    assert rows[0]["gone_mass"] == pytest.approx(0.1)
    assert rows[0]["gone_distance"] == pytest.approx(math.sqrt(8 * (1 * 2)))  # D 8 in one, 1 in the other, scaled
    assert rows[0]["isolated"] == pytest.approx(0.1 * math.sqrt(8 * 2))
    assert (rows[3]["samples"], rows[3]["isolated"]) == (0, None)


def test_sides_are_chosen_and_the_first_is_held_against() -> None:
    swapped = split(made(), ["two-stage", "attention"]).contests[0]
    assert swapped.difference == pytest.approx(math.sqrt(2))
    assert split(made(), ["two-stage"]).contests == ()
    assert split(made(), ["two-stage"]).corrections == ()
    with pytest.raises(TraceError, match="expected uncorrected configurations of 'value', got a trace of snapkv"):
        split(made(), ["attention", "value"])


def test_a_trace_of_corrected_configurations_alone_is_refused() -> None:
    with pytest.raises(TraceError, match="split needs an uncorrected configuration in full precision"):
        split(made(6, CORRECTED))
    with pytest.raises(TraceError, match="expected a configuration that only evicts, as bounds speak"):
        bound_tightness(made(6, CORRECTED))


def _legend(figure: Figure) -> tuple[list[Any], list[Any]]:
    (legend,) = figure.legends
    return list(legend.get_texts()), list(legend.legend_handles)


@pytest.mark.parametrize("width", [84, 174])
def test_the_figure_shows_heads_middles_and_corrections(width: int) -> None:
    result = split(made())
    figure = result.plot(width)
    scatter, panel = figure.axes
    drawn = {line.get_gid(): line for line in scatter.lines if line.get_gid() != "equal L"}
    assert set(drawn) == {"heads 0", "centre 0", "heads 1", "centre 1"}
    mass = np.asarray(drawn["heads 0"].get_xdata(), dtype=float)
    np.testing.assert_allclose(mass, [0.1, 0.2, 0.4, np.nan], rtol=1e-9)
    marks = {one.get_text(): line for one, line in zip(*_legend(figure), strict=True)}
    for place, name in enumerate(
        ("attention", "two-stage")
    ):  # hollow here as in the panel, and said to be what they are
        assert [one.get_markerfacecolor() for one in (drawn[f"centre {place}"], marks[name])] == ["none", "none"]
        assert drawn[f"centre {place}"].get_markeredgecolor() == marks[name].get_markeredgecolor()
    said = " ".join(figure.texts[-1].get_text().split())
    assert "dots: heads of attention and two-stage; hollow marks: the geometric mean of all heads" in said
    equal = [np.asarray(line.get_xdata()) * np.asarray(line.get_ydata())
             for line in scatter.lines if line.get_gid() == "equal L"]  # fmt: skip
    assert equal and all(one[0] == pytest.approx(one[1]) for one in equal)
    points = [box for box in panel.containers if box.lines[0].get_gid() == "isolated"]
    assert [float(box.lines[0].get_xdata()[0]) for box in points] == pytest.approx([0.75, 0.5, 0.25], rel=1e-6)
    assert "corrected-oracle" in [label.get_text() for label in panel.get_yticklabels()]


def test_a_trace_without_corrections_has_the_scatter_alone() -> None:
    result = split(made(6, (BASELINE, TREATMENT)))
    assert result.corrections == () and len(result.plot().axes) == 1
    alone = split(made(6, (TREATMENT,)))
    assert alone.contests == () and len(alone.plot().axes) == 1


def test_where_nothing_goes_words_say_so() -> None:
    found = made()
    whole = {**found.arrays, "retained_mass": np.ones_like(found.arrays["retained_mass"])}
    said = split(dataclasses.replace(found, arrays=whole)).conclusion()
    assert said == "No configuration loses anything in any head: nothing goes, or too little (n = 6 samples)."


def test_a_contest_in_which_one_side_loses_nothing_says_so() -> None:
    found = made(configs=(BASELINE, TREATMENT))
    mass = found.arrays["retained_mass"].copy()
    mass[:, 1] = 1
    result = split(dataclasses.replace(found, arrays={**found.arrays, "retained_mass": mass}))
    assert result.contest_texts() == ["no head loses anything under both two-stage and attention"]
    assert "–" not in result.conclusion()
