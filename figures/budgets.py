"""Drift, KL and top-1 agreement against the kept share of the cache: where it falls off the cliff (paper, fig. 3c)."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from perturbkv.analyses.budgets import BudgetCurve, Budgets
from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.naming import counted
from perturbkv.figures import style

_ROW_MM, _LONG = 66, 22


def draw(result: Budgets, width_mm: float = style.WIDE_MM) -> Figure:
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
        handles, _ = axes[0].get_legend_handles_labels()
        longest = max(len(curve.name) for curve in result.curves)
        figure.legend(handles=handles, loc="outside upper left", ncols=1 if narrow else 2 if longest > _LONG else 4)
        said = style.about(result.identity.samples, medians=True)
        style.foot(figure, result.identity, f"drift and KL: medians over samples · {said}")
    return figure


def _panel(axes: Axes, result: Budgets, quantity: str, label: str, title: str, *, log: bool) -> None:
    hidden = 0
    colours = style.category_colours(len(result.curves))
    for curve, colour, marker in zip(result.curves, colours, cycle("os^Dv"), strict=False):
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
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    ticks = sorted({round(100 * share, 3) for curve in result.curves for share in _shares(result, curve)})
    if len(ticks) <= 8:
        axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.set_title(title, loc="left")
    if hidden:
        style.note(axes, f"{counted(hidden, 'value')} of 0 not drawn")


def _told(result: Budgets) -> bool:
    """Whether the trace tells what the caches hold, the only share that compares across granularities."""
    return not any(np.isnan(curve.held).any() for curve in result.curves)


def _shares(result: Budgets, curve: BudgetCurve) -> NDArray[Any]:
    return curve.held if _told(result) else curve.kept
