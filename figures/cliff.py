"""KL of the next token over budgets, both logarithmic: where each method passes the thresholds."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from perturbkv.analyses.budget.cliff import Cliffs
from perturbkv.analyses.budget.method_cliff import Cliff
from perturbkv.figures import legends, style

_WIDE_MM, _NARROW_MM = 84, 92
_APART, _TOGETHER = 0.022, 0.09
"""Of the panel's height, by which neighbouring methods' marks lie apart, and those of all at most: on the threshold
they would hide."""
_BANDS = 4
"""More bands than these hide one another: of more methods the medians alone are drawn."""


def draw(result: Cliffs, width_mm: float = style.WIDE_MM) -> Figure:
    """Medians, of few methods with bands, a dashed line per threshold, and on it each crossing with its interval."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        figure = style.figure(width_mm, _NARROW_MM if narrow else _WIDE_MM)
        axes = figure.subplots()
        handles = [
            _curve(axes, one, colour, marker, band=len(result) <= _BANDS)
            for one, colour, marker in zip(result, style.category_colours(len(result)), cycle("os^Dv"), strict=False)
        ]
        style.log_axes(axes, x=True, y=True)
        _thresholds(axes, result)
        unit = result[0].configs[0].budget.unit
        axes.set(xlabel=f"budget, {unit}", ylabel="KL of the next token, nat")
        ticks = sorted({float(budget) for one in result for budget in one.budgets})
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        beside = legends.columns([one.name for one in result], width_mm, 2 if narrow else 4)
        figure.legend(handles=handles, loc="outside upper left", ncols=beside)
        said = style.about(result.identity.samples, medians=True)
        style.foot(figure, result.identity, f"medians over samples; on dashed lines: where each passes · {said}")
    return figure


def _curve(axes: Axes, one: Cliff, colour: Any, marker: str, *, band: bool) -> Line2D:
    (line,) = axes.plot(one.budgets, style.positive(one.median), color=colour, marker=marker, markersize=3,
                        markerfacecolor="none", label=one.name, gid=f"median {one.name}")  # fmt: skip
    if band and one.median_interval is not None:
        low, high = (style.positive(end) for end in (one.median_interval.low, one.median_interval.high))
        axes.fill_between(one.budgets, low, high, color=colour, alpha=0.13, linewidth=0, gid=f"band {one.name}")
    return line


def _thresholds(axes: Axes, result: Cliffs) -> None:
    """Lines and crossings; what lies beyond the budgets measured ends at the panel's edge, without a mark."""
    colours, limits = style.category_colours(len(result)), axes.get_xlim()
    low, high = axes.get_ylim()
    apart = min(_APART, _TOGETHER / len(result))
    step = (high / low) ** apart if axes.get_yscale() == "log" else 1.0
    for place, threshold in enumerate(result.thresholds):
        axes.axhline(threshold, color="0.55", linewidth=0.7, linestyle="--", zorder=1, gid="threshold")
        for shift, (one, colour) in enumerate(zip(result, colours, strict=True)):
            height = threshold * step ** ((len(result) - 1) / 2 - shift)
            _crossing(axes, one, place, (height, colour), limits)
    axes.set(xlim=limits, ylim=(min(low, min(result.thresholds) / 2), max(high, max(result.thresholds) * 2)))


def _crossing(axes: Axes, one: Cliff, place: int, look: tuple[float, Any], limits: tuple[float, float]) -> None:
    passed, (height, colour) = one.crossings[place], look
    if passed.interval is not None:
        ends = np.clip([passed.interval.low, passed.interval.high], *limits)
        axes.plot(ends, [height] * 2, color=colour, linewidth=1.8, alpha=0.6, solid_capstyle="butt",
                  gid=f"interval {one.name}")  # fmt: skip
    if passed.told:
        axes.plot([passed.value], [height], color=colour, marker="d", markersize=3.8, linestyle="", zorder=4,
                  gid=f"crossing {one.name}")  # fmt: skip
