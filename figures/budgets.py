"""Drift, KL and top-1 agreement against the kept share of the cache: where it falls off the cliff (paper, fig. 3c)."""

from __future__ import annotations

from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from perturbkv.analyses.budgets import Budgets
from perturbkv.analyses.layers import DISTANCES
from perturbkv.analyses.naming import counted
from perturbkv.figures import style

_ROW_MM = 66


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
        figure.legend(handles=handles, loc="outside upper left", ncols=1 if narrow else 4)
        style.foot(figure, result.identity)
    return figure


def _panel(axes: Axes, result: Budgets, quantity: str, label: str, title: str, *, log: bool) -> None:
    hidden = 0
    colours = style.category_colours(len(result.curves))
    for curve, colour, marker in zip(result.curves, colours, cycle("os^Dv"), strict=False):
        means, interval = curve.means[quantity], curve.intervals[quantity]
        shown = style.positive(means) if log else means
        hidden += int((shown != means).sum())
        percent = 100 * curve.kept
        axes.plot(percent, shown, color=colour, marker=marker, markersize=3, markerfacecolor="none", label=curve.name,
                  gid=f"{quantity} {curve.name}")  # fmt: skip
        if interval is not None:
            ends = style.positive(interval) if log else interval
            axes.fill_between(percent, *ends, color=colour, alpha=0.13, linewidth=0)
    axes.set(xlabel="kept share of the cache (%)", ylabel=label)
    style.log_axes(axes, x=True, y=log)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    ticks = sorted({round(100 * share, 3) for curve in result.curves for share in curve.kept})
    if len(ticks) <= 8:
        axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.set_title(title, loc="left")
    if hidden:
        style.note(axes, f"{counted(hidden, 'value')} of 0 not drawn")
