"""Heat maps of retrieval, levels of perturbation, curves over steps: their artists hold the result's numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from perturbkv.analyses import horizon, needle, retrieval
from perturbkv.analyses.identity import identity
from perturbkv.figures import horizon as horizon_figure
from perturbkv.figures import needle as needle_figure
from perturbkv.figures import retrieval as retrieval_figure
from perturbkv.trace import Trace
from tests.analyses.test_needle_and_horizon_by_hand import MOVED, growing, made, ranked
from tests.analyses.test_needle_and_horizon_by_hand import SCORES as RANKED
from tests.support.artists import artist, artists, render, words

WIDTHS = pytest.mark.parametrize("width", [84, 174])
SCORES = [[1, 0], [1, 1], [0, 0], [0, 1], [0, 0], [0, 0]]
LEVELS = [[0.1, 0.9], [0.2, 0.3], [0.8, 0.7], [0.5, 0.2], [0.4, 0.6], [0.7, 0.8]]


def answered() -> Trace:
    return made(SCORES, [1, 1, 1, 1, 0, 1], LEVELS)


@WIDTHS
def test_a_map_per_method_holds_its_grid(width: int) -> None:
    result = needle.summarise(answered())
    figure = needle_figure.draw(result, width)
    digits = needle_figure.draw(result, width, "digits")
    for panel, method in enumerate((result.full, *result.methods)):
        np.testing.assert_allclose(artist(figure, panel, "map").get_array(), method.grid)
        np.testing.assert_allclose(artist(digits, panel, "map").get_array(), method.digits_grid)
        assert [label.get_text() for label in figure.axes[panel].get_xticklabels()] == ["100", "200"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0", "1"]
    said = words(figure)
    assert "Needle in noise, regular" in said
    assert "full cache\n83 %" in said
    assert "attention\n33 %" in said
    assert "attention\n67 %" in words(digits)
    assert len(render(figure)) > 1000


def test_more_methods_than_a_row_holds_flow_on() -> None:
    trace = made([[1, 0]], [1], [[1, 1]])
    one = needle.summarise(trace)
    many = dataclasses.replace(one, methods=one.methods * 5)
    rows = needle_figure._rows(many, narrow=False)
    assert [len(row) for row in rows] == [5, 5, 5]
    assert [method for row in rows for method in row if method is not None] == [many.full, *many.methods]


@WIDTHS
def test_each_budget_shows_the_rank_correlations_of_its_measures(width: int) -> None:
    trace = ranked(RANKED, [1, 1, 1, 0], MOVED)
    trace.arrays["held_share"] = np.tile([0.48, 0.48, 0.51], (4, 1))  # type: ignore[index]
    result = retrieval.summarise(trace)
    figure = retrieval_figure.draw(result, identity(trace, trace.run.configs), width)
    (link,) = result.budgets
    drawn = {box.lines[0].get_gid(): float(box.lines[0].get_xdata()[0]) for box in figure.axes[0].containers}
    told = {f"{one.measure} {one.outcome}": one.rho for one in (*link.correlations, *link.circular)}
    assert drawn == pytest.approx(told)
    said = words(figure)
    assert "b=64, 3 methods; n = 2 (number), 2 (digits)" in said
    assert "held / full 0.48 to 0.51" in said
    assert "circular: nearly the score" in said
    assert "deciding ones of the 3 prompts that the full cache answers" in " ".join(said.split())


@WIDTHS
def test_curves_and_maps_of_growth(width: int) -> None:
    result = horizon.summarise(growing(7), ["attention", "two-stage"])
    figure = horizon_figure.draw(result, width)
    for kind in horizon.KINDS:
        for line, config in zip(artists(figure, 0, kind), result.configs, strict=True):
            np.testing.assert_allclose(line.get_ydata(), config.curves[kind].relative)
    assert "everything kept: 1.0e-02" in words(figure)
    for line, config in zip(artists(figure, 1, "kl"), result.configs, strict=True):
        np.testing.assert_allclose(line.get_ydata(), config.kl)
    maps = horizon_figure.draw_heads(result, width)
    for panel in range(2):
        np.testing.assert_allclose(artist(maps, panel, "map").get_array(), [[1, -1], [0, 0]])
        np.testing.assert_array_equal(artist(maps, panel, "marks").get_offsets(), [[0.5, 0.5]])
    assert "grows 1, shrinks 1" in words(maps)
    assert "4 heads" in words(maps)


@WIDTHS
def test_odd_runs_are_drawn(width: int) -> None:
    nothing = made([[1, 0]], [0], [[0.1, 0.2]])
    shown = identity(nothing, nothing.run.configs)
    figure = retrieval_figure.draw(retrieval.summarise(nothing), shown, width)
    assert "no budget of three methods or more" in words(figure)
    three = ranked([[1, 1, 1]], [1], [[0.1, 0.2, 0.3]])
    alike = retrieval_figure.draw(retrieval.summarise(three), shown, width)
    assert "no prompt decides: all outcomes are alike" in words(alike)
    zero = made([[1, 0]], [1], [[0.0, 0.0]])
    for trace in (nothing, zero):
        render(needle_figure.draw(needle.summarise(trace), width))
        render(retrieval_figure.draw(retrieval.summarise(trace), shown, width))
    one = growing(1)
    render(horizon_figure.draw(horizon.summarise(one, ["attention"]), width))
    for name in ("perturbation_propagated", "perturbation_isolated", "noise_floor", "logit_kl"):
        one.arrays[name][:] = 0  # type: ignore[index]
    result = horizon.summarise(one, ["attention"])
    render(horizon_figure.draw(result, width))
    render(horizon_figure.draw_heads(result, width))
