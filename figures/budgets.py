"""Drift, KL and top-1 agreement against the kept share of the cache: where it falls off the cliff (paper, fig. 3c)."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from numpy.typing import NDArray

from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.layers.budget_curve import BudgetCurve
from perturbkv.analyses.layers.budget_curves import BudgetCurves
from perturbkv.analyses.naming import counted
from perturbkv.figures import legends, style

_ROW_MM = 66


def draw(result: BudgetCurves, width_mm: float = style.WIDE_MM) -> Figure:
    """Three panels, one line per selection."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        figure = style.figure(width_mm, _ROW_MM * (3 if narrow else 1))
        axes = figure.subplots(3, 1) if narrow else figure.subplots(1, 3)
        _panel(axes[0], result, "drift", f"last layer's drift ({DISTANCES[result.distance]})", "Drift", log=True)
        _panel(axes[1], result, "kl", "KL(full ‖ evicted) (nat)", "Next token's distribution", log=True)
        _panel(axes[2], result, "top1", "share of samples", "Same next token", log=False)
        axes[2].set_ylim(-0.03, 1.03)
        axes[1].text(0.03, 0.03, f"everything kept: {result.kl_floor:.0e} nat", transform=axes[1].transAxes, fontsize=6,
                     color="0.35")  # fmt: skip
        handles = [drawn for drawn in axes[0].get_lines() if drawn.get_gid()]  # by label "_my.py:Score" would be lost
        beside = legends.columns([curve.name for curve in result], width_mm, 1 if narrow else 4)
        figure.legend(handles=handles, loc="outside upper left", ncols=beside)
        said = style.about(result.identity.samples, medians=True)
        style.foot(figure, result.identity, f"drift and KL: medians over samples · {said}{_budgets(result)}")
    return figure


def _panel(axes: Axes, result: BudgetCurves, quantity: str, label: str, title: str, *, log: bool) -> None:
    hidden = 0
    colours = style.category_colours(len(result))
    for curve, colour, marker in zip(result, colours, cycle("os^Dv"), strict=False):
        medians, interval = curve.medians[quantity], curve.intervals[quantity]
        shown = style.positive(medians) if log else medians
        hidden += int((shown != medians).sum())
        percent = 100 * _shares(result, curve)
        axes.plot(percent, shown, color=colour, marker=marker, markersize=3, markerfacecolor="none", label=curve.name,
                  gid=f"{quantity} {curve.name}")  # fmt: skip
        if interval is not None:
            low, high = (style.positive(end) if log else end for end in (interval.low, interval.high))
            axes.fill_between(percent, low, high, color=colour, alpha=0.13, linewidth=0)
    axes.set(xlabel=f"{'held / full cache' if _told(result) else 'kept share of a head'} (%)", ylabel=label)
    style.log_axes(axes, x=True, y=log)
    shares = np.concatenate([100 * _shares(result, curve) for curve in result])
    least, most = float(shares.min()), float(shares.max())
    marks = _ticks(least, most)
    axes.xaxis.set_major_locator(FixedLocator(marks))
    axes.set_xlim(min(least, *marks) / 1.15, max(most, *marks) * 1.15)
    axes.set_title(title, loc="left")
    if hidden:
        style.note(axes, f"{counted(hidden, 'value')} of 0 not drawn")


def _ticks(low: float, high: float) -> list[float]:
    """Round percentages, 1, 2.5 and 5 of each power of ten; where two lie between the ends, no others."""
    every = [step * 10.0**power for power in range(-3, 4) for step in (1, 2.5, 5)]
    inside = [tick for tick in every if low / 1.25 <= tick <= high * 1.25]
    fine = [step * 10.0**power for power in range(-3, 4) for step in range(1, 10)]
    return inside if len(inside) >= 2 else [tick for tick in fine if low / 1.6 <= tick <= high * 1.6]


def _budgets(result: BudgetCurves) -> str:
    """What the caches of each budget hold, where all curves have the same; otherwise nothing."""
    found = {tuple(zip(curve.budgets, map(style.number, _shares(result, curve)), strict=True))
             for curve in result}  # fmt: skip
    if len(found) > 1:
        return ""
    return " · held / full of " + ", ".join(f"b={budget}: {share}" for budget, share in found.pop())


def _told(result: BudgetCurves) -> bool:
    """Whether the trace tells what the caches hold, the only share that compares across granularities."""
    return not any(np.isnan(curve.held).any() for curve in result)


def _shares(result: BudgetCurves, curve: BudgetCurve) -> NDArray[Any]:
    return curve.held if _told(result) else curve.kept
