"""Caches that are compressed again along a text: every number of the table and the figure, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.horizon import horizon
from perturbkv.analyses.measurements import Measurements
from perturbkv.errors import ConfigError, TraceError
from perturbkv.figures import horizon as figure_of
from perturbkv.schema import AT_CHOSEN_STEPS, PLACES, TOKEN_KINDS, VARIABLES
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import SampleTrace, Trace
from tests.support.artists import artist, artists, render, words
from tests.support.measured import config
from tests.support.traces import sample_trace, trace

STEPS, CUTS, NORM = 9, (0, 3, 6), 10.0
RISING = np.array([1, 1, 2, 4, 3, 2, 6, 6, 3.0])
"""Propagated level of each step: it doubles and trebles at the compressions after the first step, and then falls."""


def cut_trace(samples: int = 2, ended: int = STEPS) -> Trace:
    """Two layers of two heads; head (1, 0) attends to what is gone of the own text at the last step."""
    made = []
    for place in range(samples):
        arrays: dict[str, Any] = dict(sample_trace(f"s{place}", steps=STEPS, seed=place).arrays)
        steps = ended if place else STEPS
        level = np.broadcast_to(RISING[:, None, None], (2, STEPS, 2, 2)) * (1 + place)
        at_cut = np.isin(np.arange(STEPS), CUTS)[:, None, None]
        arrays["perturbation_propagated"] = level
        arrays["output_norm"] = np.full((STEPS, 2, 2), NORM)
        arrays["noise_floor"] = arrays["noise_floor_isolated"] = np.full((STEPS, 2, 2), 1e-6)
        arrays["perturbation_carried"] = np.where(at_cut, 2.0, np.nan) * np.ones((2, 1, 2, 2))
        arrays["perturbation_added"] = np.where(at_cut, 5.0, np.nan) * np.ones((2, 1, 2, 2))
        arrays["held_entries"] = np.full((2, STEPS, 2, 2), 20, dtype=np.int32) + np.arange(STEPS)[:, None, None] % 3
        gone = np.zeros((2, STEPS, 2, 2, len(PLACES)), dtype=np.float32)
        gone[:, STEPS - 1, 1, 0, PLACES.index("own text")] = 0.9
        arrays["gone_attention"] = gone
        went = np.zeros((2, STEPS, 2, 2, len(PLACES)), dtype=np.int32)
        went[:, list(CUTS), :, :, PLACES.index("prompt")] = 3
        went[:, CUTS[-1], :, :, PLACES.index("sink")] = 3
        arrays |= {"went_entries": went, "went_output": went / 30, "missed_attention": np.zeros((2, STEPS))}
        arrays["steps_measured"] = np.asarray(steps)
        for name in ("token_id",):
            arrays[name] = np.arange(STEPS)
        made.append(SampleTrace(f"s{place}", arrays))
    return trace(*made, configs=(config("attention"), config("two-stage")), compress_every=3)


def test_jumps_growth_and_what_comes_back_by_hand() -> None:
    result = horizon.horizon(cut_trace())
    found = result.configs[0].compressions
    assert found is not None
    assert found.times == 2
    assert found.most_held == 22
    assert found.jump == pytest.approx((4 + 6) / (2 + 2))  # after the compressions over before them
    assert found.between == pytest.approx((2 + 2 + 3) / (1 + 4 + 6))  # the last steps of spans over the first
    assert (found.added, found.carried) == pytest.approx((0.5, 0.2))
    assert found.gone == pytest.approx(0.9 / STEPS / 4)
    np.testing.assert_allclose(found.gone_by_place, [0, 0, 0.9 / STEPS / 4, 0])
    np.testing.assert_allclose(found.went_by_place, [3 / 12, 9 / 12, 0, 0])
    assert np.unravel_index(found.gone_by_head.argmax(), (2, 2)) == (1, 0)
    np.testing.assert_allclose(found.held, 20 + np.arange(STEPS) % 3)
    assert np.flatnonzero(found.share).tolist() == list(CUTS)
    shown = repr(result)
    assert "caches compressed again every 3 tokens" in shown
    assert "own text" in str(result.details())


def test_a_text_that_ends_before_is_left_out_of_what_comes_after() -> None:
    result = horizon.horizon(cut_trace(ended=3))
    found = result.configs[0].compressions
    assert found is not None
    assert found.times == 1  # two of one text, none of the other
    assert found.jump == pytest.approx((4 + 6) / (2 + 2))
    assert "Never compressed after the first step" not in repr(result)
    none = horizon.horizon(cut_trace(samples=1, ended=STEPS)).configs[0].compressions
    assert none is not None and none.jump_interval is None


def test_texts_that_end_before_the_first_cut_are_told() -> None:
    made = cut_trace(samples=2)
    early = {**{name: made.arrays[name] for name in made.arrays}, "steps_measured": np.array([3, 3])}
    short = type(made)(**{**vars(made), "arrays": early})
    result = horizon.horizon(short)
    found = result.configs[0].compressions
    assert found is not None and found.times == 0 and np.isnan(found.jump)
    assert "Never compressed after the first step" in repr(result)


def test_a_run_that_compresses_once_has_none() -> None:
    plain = cut_trace()
    once = type(plain)(**{**vars(plain), "run": type(plain.run)(**{**vars(plain.run), "compress_every": 0})})
    result = horizon.horizon(once)
    assert result.configs[0].compressions is None
    assert "compressed again" not in repr(result)


def chosen_trace(every: int = 4) -> Trace:
    """The trace with isolated quantities at compressions, every fourth step and the last alone."""
    made = cut_trace()
    arrays = {name: np.array(array) for name, array in made.arrays.items()}
    arrays["perturbation_isolated"] = np.broadcast_to(RISING[:, None, None], (2, 2, STEPS, 2, 2)).copy()
    arrays["retained_mass"] = np.broadcast_to(np.arange(STEPS)[:, None, None] / 10, (2, 2, STEPS, 2, 2)).copy()
    for name in AT_CHOSEN_STEPS:
        if name in arrays:
            by_step = np.moveaxis(arrays[name], VARIABLES[name].axes.index("step"), -1)
            by_step[..., [step for step in range(STEPS) if step not in MEASURED]] = np.nan
    return Trace(replace(made.run, isolated_every=every), made.sample_ids, arrays)


MEASURED = (0, 3, 4, 6, 8)


def test_isolated_numbers_are_means_over_the_steps_that_were_measured() -> None:
    made = chosen_trace()
    measured = Measurements(made, "test")
    assert measured["perturbation_isolated"] == pytest.approx(RISING[list(MEASURED)].mean())
    assert measured["perturbation_propagated"][0] == pytest.approx(RISING.mean())
    assert measured.least("retained_mass") == pytest.approx(0.0)
    assert measured.share_above("retained_mass", 0.35) == pytest.approx(3 / 5)
    assert np.isfinite(measured["noise_floor_isolated"]).all()
    assert Measurements(made, "test", 3)["perturbation_isolated"] == pytest.approx(RISING[3])
    with pytest.raises(ConfigError, match="a step at which isolated numbers are measured"):
        Measurements(made, "test", 1)["perturbation_isolated"]
    with pytest.raises(TraceError, match="got NaN in 'perturbation_isolated'"):
        Measurements(Trace(replace(made.run, isolated_every=1), made.sample_ids, made.arrays), "test")[
            "perturbation_isolated"
        ]


def test_steps_of_one_kind_count_where_isolated_numbers_were_measured() -> None:
    made = chosen_trace()
    kinds = np.full((2, STEPS), TOKEN_KINDS.index("word"), dtype=np.uint8)
    kinds[0, [4, 5]] = kinds[1, [1, 2]] = TOKEN_KINDS.index("name")
    arrays = {**made.arrays, "token_kind": kinds}
    measured = Measurements(Trace(made.run, made.sample_ids, arrays), "test", kinds=("name",))
    assert measured.sample_ids == ("s0",)  # the other has no such step that is measured
    assert measured["perturbation_isolated"] == pytest.approx(RISING[4])
    assert measured["perturbation_propagated"] == pytest.approx(RISING[[4, 5]].mean())


def test_a_curve_of_isolated_numbers_stands_where_they_were_measured() -> None:
    result = horizon.horizon(chosen_trace())
    curve = result.configs[0].curves["isolated"]
    assert np.flatnonzero(~np.isnan(curve.relative)).tolist() == list(MEASURED)
    np.testing.assert_allclose(curve.relative[list(MEASURED)], RISING[list(MEASURED)] / NORM)
    assert curve.first == pytest.approx(RISING[0] / NORM)
    assert curve.last == pytest.approx(RISING[[6, 8]].mean() / NORM)
    assert np.isfinite(result.configs[0].curves["propagated"].relative).all()
    assert "compressions, every 4 steps and at the last: 5 of 9 steps" in " ".join(repr(result).split())
    for line in artists(figure_of.draw(result), 1, "isolated"):
        np.testing.assert_array_equal(line.get_xdata(), MEASURED)


def test_a_file_lacks_isolated_numbers_at_no_chosen_step(tmp_path: Path) -> None:
    made = chosen_trace()
    path = made.save(tmp_path / "t.h5")
    assert np.isnan(read_trace(path).arrays["theta"][:, :, 1]).all()
    made.arrays["theta"][:, :, 4] = np.nan  # type: ignore[index]
    with pytest.raises(TraceError, match="a number everywhere in theta"):
        read_trace(made.save(tmp_path / "other.h5"))


@pytest.mark.parametrize("width", [84, 174])
def test_the_figure_of_the_whole_text_holds_layers_steps_and_compressions(width: int) -> None:
    result = horizon.horizon(cut_trace())
    figure = figure_of.draw_steps(result, width)
    for panel, one in enumerate(result.configs):
        np.testing.assert_allclose(artist(figure, panel, "map").get_array().reshape(2, STEPS), one.by_layer)
        np.testing.assert_allclose(one.by_layer, np.broadcast_to(RISING * 1.5 / NORM, (2, STEPS)))
        places = artist(figure, panel, "compressions").get_offsets()[:, 0]
        assert places.tolist() == [cut + 0.5 for cut in CUTS]
    assert "the cache is compressed" in words(figure)
    assert len(render(figure)) > 1000
