"""Two curves over their budgets, an arrow from each of the treatment's to the baseline's equal (paper, figure 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.budget.losses import MEASURES
from perturbkv.analyses.budget.saved_budget import Level, MeasuredSavings, Point
from perturbkv.analyses.budget.savings import PairSavings
from perturbkv.analyses.naming import sides
from perturbkv.figures import style
from perturbkv.figures.placing import Label, place

_ROW_MM = 66
_PERCENT = 100
_TITLES = {
    "score": "Score of the answers",
    "propagated": "Propagated perturbation",
    "kl": "Next token's distribution",
}
_LOOKS = (("0.45", "s", "--"), (None, "o", "-"))
"""Colour, marker and line of baseline and treatment."""


def draw(result: PairSavings, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per measure."""
    with style.use():
        narrow, count = width_mm < style.WIDE_MM, len(result.measures)
        figure = style.figure(width_mm, _ROW_MM * (count if narrow else 1) + 6)
        shape = (count, 1) if narrow else (1, count)
        panels = list(zip(figure.subplots(*shape, squeeze=False).flat, result.measures, strict=True))
        for axes, one in panels:
            _panel(axes, one, result.along)
        figure.legend(handles=_legend(result.measures[0]), loc="outside upper left", ncols=1 if narrow else 3)
        kl = any(one.measure == "kl" for one in result.measures)
        said = style.about(result.identity.samples, medians=kl)
        style.foot(figure, result.identity, f"bars on arrows: intervals of b* · {said}")
        for axes, one in panels:  # when all else has its place
            place(axes, [_label(axes, point, one) for point in one.points if point.reached.told])
    return figure


def _panel(axes: Axes, one: MeasuredSavings, along: str) -> None:
    for levels, look, name in ((one.baseline, _looks(0), "baseline"), (one.points, _looks(1), "treatment")):
        _curve(axes, levels, one.measure, look, name)
    if one.measure == "score":
        axes.axhline(_PERCENT * one.full, color="0.7", linewidth=0.8, zorder=1, gid="full cache")
    axes.set_title(_TITLES[one.measure], loc="left")
    axes.set(xlabel=_about_budget(one, along), ylabel=MEASURES[one.measure])
    style.log_axes(axes, x=True, y=one.measure != "score")
    low, high = axes.get_xlim()
    for point in one.points:
        if not point.reached.flat:
            _arrow(axes, point, one, (low, high))
    axes.set_xlim(low, high)


def _looks(side: int) -> dict[str, Any]:
    colour, marker, line = _LOOKS[side]
    return {"color": colour or style.category_colours(1)[0], "marker": marker, "linestyle": line}


def _about_budget(one: MeasuredSavings, along: str) -> str:
    if along == "held":
        return "held / full cache"
    return f"budget, {one.points[0].config.budget.unit}"


def _curve(axes: Axes, levels: Sequence[Level], measure: str, look: dict[str, Any], name: str) -> None:
    places = [level.at for level in levels]
    values = _scaled(np.array([level.level for level in levels]), measure)
    axes.plot(places, values, markersize=3, markerfacecolor="none", linewidth=0.9, gid=f"{name} {measure}", **look)
    ends = [level.level_interval for level in levels]
    if all(end is not None for end in ends):
        low, high = (_scaled(np.array([getattr(end, side) for end in ends]), measure) for side in ("low", "high"))
        axes.fill_between(places, low, high, color=look["color"], alpha=0.12, linewidth=0)


def _scaled(values: np.ndarray, measure: str) -> np.ndarray:
    return _PERCENT * values if measure == "score" else style.positive(values)


def _arrow(axes: Axes, point: Point, one: MeasuredSavings, limits: tuple[float, float]) -> None:
    """From the treatment's budget to the baseline's for the same; to the panel's edge where that lies beyond it."""
    level = float(_scaled(np.array([point.level]), one.measure)[0])
    end = point.reached.value if point.reached.told else limits[point.reached.value > 0]
    colour, interval = _looks(1)["color"], point.reached.interval
    style_of = {"arrowstyle": "-|>", "color": colour, "linewidth": 0.8, "shrinkA": 2, "shrinkB": 0, "mutation_scale": 6}
    drawn = axes.annotate("", (end, level), (point.at, level), arrowprops=style_of)
    drawn.set_gid(f"arrow {one.measure}")
    if interval is not None and point.reached.told:
        ends = np.clip([interval.low, interval.high], *limits)
        axes.plot(ends, [level, level], color=colour, linewidth=2.4, alpha=0.3, solid_capstyle="butt", zorder=1,
                  gid=f"interval {one.measure}")  # fmt: skip


def _label(axes: Axes, point: Point, one: MeasuredSavings) -> Label:
    """The saving, beside the arrow's head and its interval."""
    interval, limits = point.reached.interval, axes.get_xlim()
    ends = [point.reached.value] if interval is None else [point.reached.value, interval.low, interval.high]
    left, right = np.clip([min(ends), max(ends)], *limits)
    said = f"{_PERCENT * point.saving:z.0f} %".replace("-", "−")
    height = float(_scaled(np.array([point.level]), one.measure)[0])
    return Label(said, float(left), float(right), height, forward=point.reached.value >= point.at)


def _legend(one: MeasuredSavings) -> list[Line2D]:
    names = sides(one.baseline[0].config, one.points[0].config)
    drawn = [Line2D([], [], markersize=3.5, markerfacecolor="none", label=name, **_looks(side))
             for side, name in enumerate(names)]  # fmt: skip
    arrow = Line2D([], [], color=_looks(1)["color"], marker=">", markersize=3.5, label="budget saved: 1 − b / b*")
    return [*drawn, arrow]
