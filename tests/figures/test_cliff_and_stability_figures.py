"""Curves over budgets with their crossings, matrices of rank correlations, profiles over depth: what artists hold."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses.questions.stability.rank_reliability import GRID
from perturbkv.analyses.questions.stability.stability import Stability
from tests.analyses.test_cliffs_by_hand import made as swept
from tests.analyses.test_stability_by_hand import made
from tests.support.artists import artist, artists, overlapping, render, words

WIDTHS = pytest.mark.parametrize("width", [84, 174])


@WIDTHS
def test_a_cliff_shows_medians_bands_thresholds_and_crossings(width: int) -> None:
    result = pk.cliff(swept(8))
    figure = result.plot(width)
    for one in result:
        line = artist(figure, 0, f"median {one.name}")
        np.testing.assert_allclose(line.get_xdata(), one.budgets)
        np.testing.assert_allclose(line.get_ydata(), one.median)
        assert len(artists(figure, 0, f"band {one.name}")) == 1
        marks = artists(figure, 0, f"crossing {one.name}")
        assert [mark.get_xdata()[0] for mark in marks] == pytest.approx([at.value for at in one.crossings])
        bars = artists(figure, 0, f"interval {one.name}")
        ends = [tuple(bar.get_xdata()) for bar in bars]
        expected = [(at.interval.low, at.interval.high) for at in one.crossings if at.interval is not None]
        low, high = figure.axes[0].get_xlim()
        assert ends == [pytest.approx((max(first, low), min(last, high))) for first, last in expected]
    assert [line.get_ydata()[0] for line in artists(figure, 0, "threshold")] == [0.1, 1.0]
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"
    assert "share of the prompt" in words(figure)
    assert overlapping(figure) == []
    assert len(render(figure)) > 1000


def test_a_crossing_beyond_the_budgets_has_no_mark() -> None:
    result = pk.cliff(swept(), kl=(1e-3, 100.0))
    figure = result.plot()
    assert artists(figure, 0, "crossing attention") == []
    assert len(artists(figure, 0, "threshold")) == 2
    low, high = figure.axes[0].get_ylim()
    assert low < 1e-3 < 100 < high


@cache
def several(count: int = 3, samples: int = 5) -> Stability:
    source = np.random.default_rng(3)
    traces = [made(source.lognormal(size=(samples, 5, 3)), dataset=f"data {place}") for place in range(count)]
    return pk.stability([*traces, made(source.lognormal(size=(samples, 7, 2)), model="another", dataset="data 0")])


@pytest.mark.slow
@WIDTHS
@pytest.mark.parametrize("count", [0, 3, 11])
def test_a_matrix_holds_reliability_and_correlations_and_is_blank_between_models(width: int, count: int) -> None:
    result = several(count)
    figure = result.plot(width)
    for kind in ("isolated", "propagated"):
        matrix = next(axes for axes in figure.axes if artists(figure, figure.axes.index(axes), f"matrix {kind}"))
        held = np.ma.filled(artist(figure, figure.axes.index(matrix), f"matrix {kind}").get_array(), np.nan)
        held = held.reshape(count + 1, count + 1)
        expected = [one.perturbation[kind].split_half.value for one in result.traces]
        np.testing.assert_allclose(np.diag(held), expected)
        for pair in result.pairs:
            shown = held[pair.first - 1, pair.second - 1]
            assert shown == held[pair.second - 1, pair.first - 1] or np.isnan(shown)
            assert np.isnan(shown) if pair.depth else shown == pair.perturbation[kind].rho.value
    assert len(render(figure)) > 1000


@pytest.mark.slow
@WIDTHS
def test_profiles_lie_over_relative_depth(width: int) -> None:
    result = several()
    figure = result.plot(width)
    for kind in ("isolated", "propagated"):
        place = next(at for at in range(len(figure.axes)) if artists(figure, at, f"profile {kind} 1"))
        for one in result.traces:
            line = artist(figure, place, f"profile {kind} {one.number}")
            np.testing.assert_allclose(line.get_xdata(), GRID)
            np.testing.assert_allclose(line.get_ydata(), one.depth[kind].profile)
    assert overlapping(figure) == []
