"""Curves over budgets, arrows of what is saved, bounds against a limit: their artists hold the results' numbers."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.figure import Figure

import perturbkv as pk
from perturbkv.analyses.budget.safe_budget import SafeBudgets
from perturbkv.analyses.budget.savings import PairSavings
from tests.analyses.test_safe_budgets_by_hand import levels
from tests.analyses.test_savings_by_hand import measured
from tests.support.artists import artist, artists, overlapping, render, words
from tests.support.swept import BUDGETS, swept

WIDTHS = pytest.mark.parametrize("width", [84, 174])


@pytest.mark.slow
@WIDTHS
def test_arrows_lead_from_the_treatments_budget_to_the_baselines_for_the_same(width: int) -> None:
    result = measured()
    figure = result.plot(width)
    for panel, one in enumerate(result.measures):
        scale = 100 if one.measure == "score" else 1
        for name, levels_of in (("baseline", one.baseline), ("treatment", one.points)):
            line = artist(figure, panel, f"{name} {one.measure}")
            np.testing.assert_allclose(line.get_xdata(), BUDGETS)
            np.testing.assert_allclose(line.get_ydata(), [scale * level.level for level in levels_of])
        arrows = artists(figure, panel, f"arrow {one.measure}")
        assert len(arrows) == 5
        for arrow, point in zip(arrows, one.points, strict=True):
            assert arrow.xyann == pytest.approx((point.at, scale * point.level))
            end = point.equivalent.value if point.equivalent.known else figure.axes[panel].get_xlim()[1]
            assert arrow.xy == pytest.approx((end, scale * point.level))
        bars = artists(figure, panel, f"interval {one.measure}")
        told = [point for point in one.points if point.equivalent.known]
        assert len(bars) == len(told)
        assert [text.get_text() for text in figure.axes[panel].texts if "%" in text.get_text()] == [
            f"{100 * point.saving:z.0f} %".replace("-", "−") for point in told
        ]
    assert artist(figure, 0, "full cache").get_ydata()[0] == 100
    assert "1 − b / b*" in "".join(text.get_text() for text in figure.legends[0].get_texts())
    assert "bars on arrows: intervals of b*" in words(figure)
    assert len(render(figure)) > 1000


def crowded(samples: int = 8) -> PairSavings:
    """Equal noise on both sides: wide intervals, arrows to either side, answers that are all wrong at small budgets."""
    source = np.random.default_rng(3)
    moved = source.lognormal(sigma=0.8, size=(samples, 2, 5)) * np.array(BUDGETS) ** -1.0
    score = (source.random((samples, 2, 5)) < [0, 0, 0.2, 0.4, 0.8]).astype(float)
    (found,) = pk.savings(swept(kl=moved / 100, moved=moved, score=score))
    return found


@pytest.mark.slow
@WIDTHS
def test_what_is_saved_stands_inside_its_panel_and_on_no_other(width: int) -> None:
    result = crowded()
    figure = result.plot(width)
    render(figure)
    written = 0
    for axes, one in zip(figure.axes, result.measures, strict=True):
        panel = axes.get_window_extent()
        boxes = [text.get_window_extent() for text in axes.texts if "%" in text.get_text()]
        written += len(boxes)
        for box in boxes:
            assert panel.x0 < box.x0
            assert box.x1 < panel.x1
            assert panel.y0 < box.y0
            assert box.y1 < panel.y1
        assert not any(first.overlaps(second) for first, second in combinations(boxes, 2))
        known = [point for point in one.points if not point.equivalent.flat]
        assert len(artists(figure, figure.axes.index(axes), f"arrow {one.measure}")) == len(known)
    assert any(point.equivalent.flat for point in result.measures[0].points)
    assert any(text.get_text().startswith("−") for axes in figure.axes for text in axes.texts)
    assert written >= 6


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
    assert overlapping(measured().plot(width)) == []
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
