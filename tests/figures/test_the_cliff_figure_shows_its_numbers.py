"""Curves over budgets with their crossings: what artists hold."""

from __future__ import annotations

import numpy as np
import pytest

import perturbkv as pk
from tests.analyses.test_cliffs_by_hand import made as swept
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
