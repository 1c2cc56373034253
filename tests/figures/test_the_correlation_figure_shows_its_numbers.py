"""The link's figure holds each measure's ρ and area with its interval, and the curves, at both widths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from perturbkv.analyses.correlation.correlation import Correlation, correlation
from perturbkv.analyses.measures import OWN_TEXT
from tests.support.linked import answered, methods

WIDTHS = pytest.mark.parametrize("width", [84, 174])


@pytest.fixture(scope="module")
def result() -> Correlation:
    draw = np.random.default_rng(0)
    moved, noise = draw.lognormal(size=(9, 8)), draw.lognormal(size=(9, 8))
    scores = (moved * draw.lognormal(size=(9, 8)) < 1).astype(float)
    configs = [*methods(4, 0.4), *methods(4, 0.1)]
    made = answered(configs, scores, np.ones(9), {"propagated": moved, "isolated": noise})
    made.arrays["held_share"] = np.tile(np.repeat([0.4, 0.1], 4), (9, 1))  # type: ignore[index]
    return correlation(made)


def points(axes: Axes) -> dict[str, tuple[float, Any]]:
    """gid -> value, and from where to where its bar goes."""
    found = {}
    for one in axes.containers:
        if isinstance(one, ErrorbarContainer):
            line, _, (bars,) = one.lines
            found[str(line.get_gid())] = (line.get_xdata()[0], tuple(bars.get_segments()[0][:, 0]))
    return found


def drawn(result: Correlation, width: float) -> Figure:
    return result.plot(width)


@WIDTHS
def test_every_point_is_its_estimate(result: Correlation, width: float) -> None:
    figure = drawn(result, width)
    for axes, kind, field in ((figure.axes[0], "rho", "rho"), (figure.axes[1], "auc", "auc")):
        found = points(axes)
        for setting in result.settings:
            for measure in OWN_TEXT.names:
                estimate = getattr(setting.strength(measure), field)
                value, bar = found[f"{kind} {setting.name} {measure}"]
                assert value == pytest.approx(estimate.value)
                assert bar == pytest.approx((estimate.interval.low, estimate.interval.high))
        assert len(found) == len(OWN_TEXT.names) * len(result.settings)


@WIDTHS
def test_curves_are_the_bins_and_come_in_the_order_of_what_is_held(result: Correlation, width: float) -> None:
    figure = drawn(result, width)
    for axes, measure in zip(figure.axes[2:4], ("propagated", "lost"), strict=True):
        lines = {str(line.get_gid()): line for line in axes.get_lines() if str(line.get_gid()).startswith("curve")}
        assert list(lines) == [f"curve {name} {measure}" for name in ("0.1", "0.4")]
        for setting in result.settings:
            bins = setting.curves[measure]
            line = lines[f"curve {setting.name} {measure}"]
            np.testing.assert_allclose(line.get_xdata(), [one.middle for one in bins])
            np.testing.assert_allclose(line.get_ydata(), [one.lost for one in bins])
            assert line.get_linestyle() == "None"  # nothing is drawn between bins, where there are no answers
        bars = [line.get_xdata() for line in axes.get_lines() if line.get_gid() == "bin"]
        ends = [(one.low, one.high) for name in lines for one in setting_of(result, name).curves[measure]]
        np.testing.assert_allclose(bars, ends)


def setting_of(result: Correlation, gid: str) -> Any:
    return next(one for one in result.settings if one.name == gid.split()[1])


@WIDTHS
def test_behind_each_point_stands_what_the_names_alone_show(result: Correlation, width: float) -> None:
    for axes, field in zip(drawn(result, width).axes[:2], ("rho", "auc"), strict=True):
        grey = [tuple(line.get_xdata()) for line in axes.get_lines() if line.get_color() == "0.82"]
        shown = [
            getattr(one.identity_baselines(name), field).exchanged for one in result.settings for name in OWN_TEXT.names
        ]
        np.testing.assert_allclose(sorted(grey), sorted((one.low, one.high) for one in shown))


@WIDTHS
def test_the_legend_says_why_a_budget_decides_nothing(width: float) -> None:
    scores = np.array([[1, 0, 0, 0], [0, 1, 0, 1]] * 3, dtype=float)
    moved = np.random.default_rng(1).lognormal(size=(6, 8))
    both = np.concatenate([scores, np.zeros_like(scores)], axis=1)
    found = correlation(answered([*methods(4, 0.4), *methods(4, 0.1)], both, np.ones(6), {"propagated": moved}))
    (legend,) = drawn(found, width).legends
    said = [entry.get_text() for entry in legend.get_texts()]
    assert any(one.startswith("b=0.1: 4 methods") and one.endswith("every answer is lost") for one in said)
    assert not any("n = 0" in one for one in said)


@WIDTHS
def test_what_is_circular_stands_below_a_line_that_says_so(result: Correlation, width: float) -> None:
    axes = drawn(result, width).axes[0]
    (said,) = [text for text in axes.texts if "circular" in text.get_text()]
    ticks = {label.get_text(): place for label, place in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)}
    assert max(place for name, place in ticks.items() if name[:2] not in ("KL", "la")) < said.get_position()[1]
    assert min(place for name, place in ticks.items() if name[:2] in ("KL", "la")) > said.get_position()[1]


@WIDTHS
def test_nothing_leaves_the_figure(result: Correlation, width: float) -> None:
    figure = drawn(result, width)
    figure.draw_without_rendering()
    edge = figure.bbox.width
    for axes in figure.axes:
        for one in (axes.xaxis.label, axes.yaxis.label, axes.title, axes._left_title):  # type: ignore[attr-defined]
            box = one.get_window_extent()
            assert one.get_text() == "" or (box.x0 >= -1 and box.x1 <= edge + 1), one.get_text()
