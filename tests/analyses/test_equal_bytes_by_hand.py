"""Evicting against quantising: what is held against what, ratios and differences of whole numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from perturbkv.analyses.budget.equal_bytes import EqualBytes, RowBuilder, equal_byte_settings, equal_bytes
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.selection.grid import configuration
from perturbkv.trace import Trace
from tests.support.measured import hand_made

SAMPLES = 6


def config(budget: float, precision: str = "full", selection: str = "attention") -> EvictionConfig:
    return configuration(budget, precision=precision, selection=selection, granularity="kv")


FILLING = {bits: f"quantise(bits={bits}, fill=64)" for bits in (8, 4, 2)}
CONFIGS = (
    config(0.4, FILLING[2]),
    config(0.2),
    config(0.2, FILLING[4]),
    config(0.2, FILLING[2]),
    config(0.4),
    config(1.0, "quantise(bits=4)"),
    config(0.2, "quantise(bits=8)"),
    config(0.2, FILLING[4], "two-stage"),
)
MOVED = (9.0, 4.0, 2.0, 8.0, 1.0, 3.0, 5.0, 6.0)
SCORES = (0.0, 0.5, 0.7, 0.3, 0.9, 0.8, 0.6, 0.4)
BYTES = (0.4, 0.2, 0.2, 0.2, 0.4, 0.3, 0.1, 0.2)


def made(samples: int = SAMPLES, configs: tuple[EvictionConfig, ...] = CONFIGS, answers: bool = True) -> Trace:
    """Two layers; the last one's heads perturb sample i by (i + 1) × MOVED, of norms of 10 × 2 heads."""
    places = [CONFIGS.index(one) for one in configs]
    each = (1.0 + np.arange(samples))[:, None] * np.array(MOVED)[places]
    moved = np.stack([100 * each, each], axis=-1)[..., None] * np.array([0.25, 0.75])
    arrays = {
        "perturbation_propagated": moved,
        "logit_kl": each / 10,
        "evicted": np.tile([one.budget.value != 1 for one in configs], (samples, 1)),
        "held_bytes": np.tile(1000 * np.array(BYTES)[places], (samples, 1)),
        "full_bytes": np.full(samples, 1000.0),
        "held_share": np.full((samples, len(configs)), 0.5),
    }
    if answers:
        tilted = np.linspace(-0.1, 0.1, samples)[:, None] * np.array([1, 1, 2, 0.5, -1, 1, 1, 1])[places]
        arrays |= {"score": np.array(SCORES)[places] + tilted, "score_full": np.ones(samples)}
    return hand_made(list(configs), arrays, layers=2, heads=2)


@pytest.fixture(scope="module")
def found() -> EqualBytes:
    return equal_bytes(made())


def test_what_is_alike_but_for_bits_is_held_against_evicting_alone(found: EqualBytes) -> None:
    assert [[row.config for row in one.rows] for one in found.settings] == [
        [CONFIGS[1], CONFIGS[2], CONFIGS[3]],
        [CONFIGS[4], CONFIGS[0]],
    ]
    assert [row.config for row in found.everything] == [CONFIGS[5]]
    assert found.left_out == (CONFIGS[6], CONFIGS[7]), "few bits of fewer bytes, and one with nothing of its own kind"


def test_the_last_layers_perturbation_is_over_evicting_alones(found: EqualBytes) -> None:
    first, second = found.settings
    assert [row.ratio for row in first.rows] == pytest.approx([1, 0.5, 2])
    assert [row.ratio for row in second.rows] == pytest.approx([1, 9])
    assert [row.perturbation for row in first.rows] == pytest.approx([3.5 * moved / 20 for moved in (4, 2, 8)])
    assert found.everything[0].ratio is None
    assert first.rows[1].ratio_interval == Interval(pytest.approx(0.5), pytest.approx(0.5))
    assert [row.kl_median for row in first.rows] == pytest.approx([0.35 * moved for moved in (4, 2, 8)])


def test_scores_are_compared_sample_by_sample(found: EqualBytes) -> None:
    (_, four, two), (_, low) = (one.rows for one in found.settings)
    assert [four.score, four.gain, two.gain] == pytest.approx([0.7, 0.2, -0.2])
    ends = [(row.gain_interval.low, row.gain_interval.high) for row in (four, two, low) if row.gain_interval]
    assert [round(sum(both) / 2, 6) for both in ends[:2]] == [0.2, -0.2]
    assert 0 < ends[0][0] < 0.2 and ends[1][1] < 0 and ends[2][0] < -0.9 < ends[2][1]
    assert ends[1][1] - ends[1][0] == pytest.approx((ends[0][1] - ends[0][0]) / 2), "half of the differences' spread"


def test_bytes_and_kinds_are_told(found: EqualBytes) -> None:
    kinds = [(row.config.bits, row.kind) for row in found.rows]
    assert kinds == [(16, "evicted"), (4, "both"), (2, "both"), (16, "evicted"), (2, "both"), (4, "quantised")]
    assert [row.byte_share for row in found.rows] == pytest.approx([0.2, 0.2, 0.2, 0.4, 0.4, 0.3])
    frame = found.to_frame()
    assert frame.bytes.tolist() == [row.byte_share for row in found.rows] and frame.over.isna().sum() == 1
    assert CONFIGS[6].label() in str(found.details())
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_conclusion_says_what_is_decided(found: EqualBytes) -> None:
    assert found.conclusion() == (
        "At equal bytes storing 4 bits perturbs 50 % [50, 50] less than evicting alone; storing 2 "
        "bits perturbs more than evicting alone in both cases: 100 % [100, 100] more at b=0.2 to 800 % [800, 800] more "
        "at b=0.4 (last layer, n = 6 samples); answers from 4 bits score higher, by 20.0 [8.2, 31.8] points of 100; "
        "answers from 2 bits score lower in both cases, by −90.0 [−100.0, −66.3] at b=0.4 to −20.0 [−25.9, −14.1] at "
        "b=0.2 points of 100."
    )


def test_of_few_samples_nothing_is_decided() -> None:
    said = equal_bytes(made(3)).conclusion()
    assert "n = 3 samples: ranges, too few for intervals" in said
    assert "(50 … 50)" in said and "[" not in said
    assert "perturbs more than evicting alone in both cases" not in said


def test_without_answers_perturbation_alone_is_told() -> None:
    found = equal_bytes(made(answers=False))
    assert found.full_score is None and found.rows[1].gain is None
    assert "answers" not in found.conclusion() and "score" not in str(found.table())


def test_tables_fit_80_columns() -> None:
    for samples in (1, 3, 6):
        assert max(map(len, repr(equal_bytes(made(samples))).splitlines())) <= 80


def test_without_equal_bytes_there_is_nothing_to_compare() -> None:
    trace = made(configs=(CONFIGS[1], CONFIGS[5], CONFIGS[6]))
    with pytest.raises(TraceError, match=r"in 16 bits that evicts something and one like it.* got a trace"):
        equal_byte_settings(RowBuilder(Measurements(trace, "bytes")))
    older = made()
    del older.arrays["held_bytes"]  # type: ignore[attr-defined]
    with pytest.raises(TraceError, match="bytes needs the variable 'held_bytes'"):
        equal_bytes(older)


def test_what_takes_less_than_its_budget_is_told(found: EqualBytes) -> None:
    """Once everything fits more bytes buy nothing: such rows are of fewer bytes than evicting alone."""
    trace = made()
    for sample in trace.arrays["evicted"]:
        sample[CONFIGS.index(CONFIGS[0])] = 0
    assert (len(equal_bytes(trace).caveats()), len(found.caveats())) == (1, 0)


def test_a_budget_that_holds_everything_is_no_setting() -> None:
    """What evicts nothing in 16 bits perturbs by rounding alone: a ratio over that says nothing of eviction."""
    trace = made()
    for sample in trace.arrays["evicted"]:
        sample[[CONFIGS.index(config) for config in (CONFIGS[0], CONFIGS[4])]] = 0
    found = equal_bytes(trace)
    assert [one.baseline for one in found.settings] == [CONFIGS[1]]
    assert [row.config for row in found.everything] == [CONFIGS[5]], "in few bits once, not once per budget"
    assert {CONFIGS[0], CONFIGS[4]} <= set(found.left_out) and "b=0.4" not in found.conclusion()


@pytest.mark.parametrize("width", [84, 174])
def test_the_figure_has_a_line_per_number_of_bits(found: EqualBytes, width: int) -> None:
    figure = found.plot(width_mm=width)
    moved, scored = figure.axes
    names = [one.get_label() for one in figure.legends[0].get_lines()]
    assert names == ["16 bits: evicting alone", "4 bits", "2 bits", "everything kept", "full cache"]
    drawn = {container.lines[0].get_gid(): container.lines[0].get_xydata() for container in moved.containers}
    assert {"16 bits", "4 bits", "2 bits", "4 bits, everything"} == set(drawn)
    np.testing.assert_allclose(drawn["16 bits"][:, 1], [3.5 * 4 / 20, 3.5 * 1 / 20])
    np.testing.assert_allclose(drawn["2 bits"][:, 0], [20, 40], rtol=0.05)
    scores = {container.lines[0].get_gid(): container.lines[0].get_xydata() for container in scored.containers}
    np.testing.assert_allclose(scores["4 bits"][:, 1], [70])
    assert "bytes / full cache" in scored.get_xlabel()
