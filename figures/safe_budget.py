"""Means and their one-sided bounds over budgets, the limit, and the smallest budget that keeps to it."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from perturbkv.analyses.budget.fixed_sequence import Verdict
from perturbkv.analyses.budget.safe_budget import SafeBudgets
from perturbkv.figures import legends, style

_ROW_MM, _LINE_MM = 66, 4
_LABELS = {"kl": "mean KL (nat)", "drop": "mean drop of the score (points)", "top1": "share of the same token"}
_TITLES = {"kl": "Next token's distribution", "drop": "Score of the answers", "top1": "Same next token"}
_ASIDE = 1.03
"""By which equal selections stand aside, so that each is seen."""
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")


def draw(result: SafeBudgets, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per criterion, one line per selection; full marks are safe, the ringed one is the smallest."""
    with style.use():
        narrow, count = width_mm < style.WIDE_MM, len(result[0].verdicts)
        handles = _legend(result)
        columns = legends.columns([str(one.get_label()) for one in handles], width_mm, 1 if narrow else 5)
        legend = _LINE_MM * -(-(len(result) + 1) // columns)
        figure = style.figure(width_mm, _ROW_MM * (count if narrow else 1) + legend)
        panels = figure.subplots(*((count, 1) if narrow else (1, count)), squeeze=False).flat
        for place, axes in enumerate(panels):
            _panel(axes, result, place)
        figure.legend(handles=handles, loc="outside upper left", ncols=columns)
        over = f"whiskers: one-sided 95 % bounds over n = {result.identity.samples} samples"
        style.foot(
            figure, result.identity, f"full marks: safe, ringed the smallest; side by side at one budget · {over}"
        )
    return figure


def _panel(axes: Axes, result: SafeBudgets, place: int) -> None:
    criterion = result[0].verdicts[place].criterion
    scale = 100 if criterion.name == "drop" else 1
    axes.axhline(scale * criterion.limit, color="#b00020", linewidth=0.9, zorder=1, gid="limit")
    looks = zip(result, style.category_colours(len(result)), cycle("os^Dv"), cycle(_DASHES), strict=False)
    for number, (one, colour, marker, dash) in enumerate(looks):
        _line(axes, one.verdicts[place], {"color": colour, "marker": marker, "linestyle": dash}, scale,
              _beside(number, len(result)))  # fmt: skip
    axes.set_title(_TITLES[criterion.name], loc="left")
    unit = result[0].verdicts[place].budgets[0].config.budget.unit
    axes.set(xlabel=f"budget, {unit}", ylabel=_LABELS[criterion.name])
    style.log_axes(axes, x=True, y=criterion.name == "kl")
    budgets = sorted({tested.config.budget.value for one in result for tested in one.verdicts[place].budgets})
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_minor_locator(NullLocator())


def _beside(number: int, count: int) -> float:
    """The factor by which one of several equal things stands aside on the budgets' logarithmic axis."""
    return float(_ASIDE ** (number - (count - 1) / 2))


def _line(axes: Axes, told: Verdict, look: dict[str, Any], scale: float, aside: float) -> None:
    """Means with whiskers to their bounds, beside those of the others; hollow where nothing says that they are safe."""
    budgets = aside * np.array([one.config.budget.value for one in told.budgets], dtype=float)
    means, bounds = (scale * np.array([getattr(one, name) for one in told.budgets]) for name in ("mean", "bound"))
    known, colour = np.isfinite(bounds), look["color"]
    axes.plot(budgets, means, linewidth=0.9, gid=f"means {told.criterion.name}", **{**look, "marker": ""})
    axes.vlines(budgets[known], means[known], bounds[known], color=colour, linewidth=0.7)
    axes.plot(budgets[known], bounds[known], color=colour, linestyle="", marker="_", markersize=4,
              gid=f"bounds {told.criterion.name}")  # fmt: skip
    safe = np.array([one.tested and one.holds for one in told.budgets])
    for held, fill in ((safe, colour), (~safe, "white")):
        axes.plot(budgets[held], means[held], color=colour, linestyle="", marker=look["marker"], markersize=3,
                  markerfacecolor=fill, gid="safe" if fill is colour else "not safe")  # fmt: skip
    if safe.any():
        last = np.flatnonzero(safe)[-1]
        axes.plot(budgets[last], means[last], color=colour, linestyle="", marker="o", markersize=7,
                  markerfacecolor="none", gid="smallest")  # fmt: skip


def _legend(result: SafeBudgets) -> list[Line2D]:
    named = zip(result, style.category_colours(len(result)), cycle("os^Dv"), cycle(_DASHES), strict=False)
    drawn = [Line2D([], [], color=colour, marker=marker, linestyle=dash, markersize=3, label=one.name)
             for one, colour, marker, dash in named]  # fmt: skip
    return [*drawn, Line2D([], [], color="#b00020", linewidth=0.9, label="limit")]
