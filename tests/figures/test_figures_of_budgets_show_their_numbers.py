"""Curves over budgets, with crossings and against limits: their artists hold the results' numbers."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

import perturbkv as pk
from perturbkv.analyses.budget.safe_budget import SafeBudgets
from tests.analyses.test_cliffs_by_hand import made
from tests.analyses.test_safe_budgets_by_hand import levels
from tests.support.artists import artist, artists, overlapping, render, words
from tests.support.swept import swept

WIDTHS = pytest.mark.parametrize("width", [84, 174])


def limited(width: int, count: int = 2) -> tuple[SafeBudgets, Figure]:
    selections = ("attention", "two-stage", "value", "random")[:count]
    kl = np.stack([levels(0.5, 0.2, 0.03, 0.02, 0.01, seed=place) for place in range(count)], axis=1)
    kl[:, 1] *= 40
    score = np.ones((40, count, 5))
    found = pk.safe_budget(swept(kl, score=score, selections=selections), max_kl=0.1, max_drop=20)
    return found, found.plot(width)


@WIDTHS
def test_means_stand_with_their_bounds_and_the_smallest_safe_budget_is_ringed(width: int) -> None:
    result, figure = limited(width)
    for panel, scale in ((0, 1), (1, 100)):
        verdicts = [one.verdicts[panel] for one in result]
        assert artist(figure, panel, "limit").get_ydata()[0] == pytest.approx(scale * verdicts[0].criterion.limit)
        for name in ("mean", "bound"):
            drawn = artists(figure, panel, f"{name}s {verdicts[0].criterion.name}")
            for line, told in zip(drawn, verdicts, strict=True):
                np.testing.assert_allclose(line.get_ydata(), [scale * getattr(one, name) for one in told.budgets])
        ringed = [float(one.get_xdata()[0]) for one in artists(figure, panel, "smallest")]
        known = [float(told.safe.config.budget.value) for told in verdicts if told.safe is not None]
        assert ringed == pytest.approx(known, rel=0.02)
    assert len(artists(figure, 0, "smallest")) == 1
    safe = artists(figure, 0, "safe")[0]
    assert list(safe.get_xdata()) == pytest.approx([0.8, 0.6, 0.4], rel=0.02)
    assert "whiskers: one-sided 95 % bounds over n = 40 samples" in words(figure).replace("\n", " ")


@pytest.mark.slow
@WIDTHS
def test_nothing_lies_on_anything_else(width: int) -> None:
    assert overlapping(limited(width, count=4)[1]) == []


def test_equal_selections_are_seen_side_by_side() -> None:
    same = np.repeat(levels(0.5, 0.2, 0.03, 0.02, 0.01)[:, None], 3, axis=1)
    figure = pk.safe_budget(swept(same, selections=("attention", "two-stage", "value")), max_kl=0.1).plot()
    for name in ("means kl", "bounds kl", "smallest"):
        places = np.array([line.get_xdata() for line in artists(figure, 0, name)])
        assert (np.diff(np.log(places), axis=0) > 0.02).all(), name
    dashes = {line.get_linestyle() for line in artists(figure, 0, "means kl")}
    assert len(dashes) == 3


def test_bounds_that_no_samples_give_are_left_out() -> None:
    kl = np.stack([levels(0.5, 0.2, 0.03, 0.02, 0.01, samples=4)] * 2, axis=1)
    figure = pk.safe_budget(swept(kl), max_kl=0.1).plot()
    assert all(len(line.get_xdata()) == 0 for line in artists(figure, 0, "bounds kl"))
    assert len(render(figure)) > 1000


@WIDTHS
def test_a_cliff_shows_medians_bands_thresholds_and_crossings(width: int) -> None:
    result = pk.cliff(made(8))
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
    result = pk.cliff(made(), kl=(1e-3, 100.0))
    figure = result.plot()
    assert artists(figure, 0, "crossing attention") == []
    assert len(artists(figure, 0, "threshold")) == 2
    low, high = figure.axes[0].get_ylim()
    assert low < 1e-3 < 100 < high
