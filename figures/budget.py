"""Figures over budgets: cliffs and safe budgets.

Cliffs: KL of the next token, both axes logarithmic, with the thresholds. Safe budgets: means with one-sided bounds, the
limit, and the smallest safe budget.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from perturbkv.analyses.budget.cliff import Cliff, Cliffs
from perturbkv.analyses.budget.criteria import LOGNORMAL, Verdict
from perturbkv.analyses.budget.safe_budget import SafeBudgets
from perturbkv.figures import style
from perturbkv.figures.labels import draw_legend
from perturbkv.figures.panels import panel_grid

_WIDE_MM, _NARROW_MM = 84, 92
_APART, _TOGETHER = 0.022, 0.09
"""Shares of the panel's height: the distance of neighbouring methods' marks on a threshold, and the most that all marks
take together."""
_BANDS = 4
"""Most methods that have bands; of more, the medians alone are drawn, as bands would hide each other."""


def draw_cliff(result: Cliffs, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw each method's median KL over budgets, and where it crosses each threshold, with its interval."""
    narrow = width_mm < style.WIDE_MM
    figure = style.figure(width_mm, _NARROW_MM if narrow else _WIDE_MM)
    axes = figure.subplots()
    handles = [
        _draw_median(axes, one, colour, marker, band=len(result) <= _BANDS)
        for one, colour, marker in zip(result, style.category_colours(len(result)), cycle("os^Dv"), strict=False)
    ]
    style.set_log_axes(axes, x=True, y=True)
    _draw_thresholds(axes, result)
    unit = result[0].configs[0].budget.unit
    axes.set(xlabel=f"budget, {unit}", ylabel="KL of the next token, nat")
    ticks = sorted({float(budget) for one in result for budget in one.budgets})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    draw_legend(figure, handles)
    note = style.interval_note(result.identity.samples, medians=True)
    return style.describe_run(
        figure, result.identity, f"medians over samples; on dashed lines: where each passes · {note}"
    )


def _draw_median(axes: Axes, cliff: Cliff, colour: Any, marker: str, *, band: bool) -> Line2D:
    """Draw one method's median KL over budgets, with its band where `band`; return the line."""
    (line,) = axes.plot(cliff.budgets, style.mask_nonpositive(cliff.median), color=colour, marker=marker, markersize=3,
                        markerfacecolor="none", label=cliff.name, gid=f"median {cliff.name}")  # fmt: skip
    if band and cliff.median_interval is not None:
        low, high = (style.mask_nonpositive(end) for end in (cliff.median_interval.low, cliff.median_interval.high))
        axes.fill_between(cliff.budgets, low, high, color=colour, alpha=0.13, linewidth=0, gid=f"band {cliff.name}")
    return line


def _draw_thresholds(axes: Axes, result: Cliffs) -> None:
    """Draw the thresholds as dashed lines, with each method's crossing at its own height near the line."""
    colours, limits = style.category_colours(len(result)), axes.get_xlim()
    low, high = axes.get_ylim()
    distance = min(_APART, _TOGETHER / len(result))
    step = (high / low) ** distance if axes.get_yscale() == "log" else 1.0
    for index, threshold in enumerate(result.thresholds):
        axes.axhline(threshold, color="0.55", linewidth=0.7, linestyle="--", zorder=1, gid="threshold")
        for shift, (one, colour) in enumerate(zip(result, colours, strict=True)):
            height = threshold * step ** ((len(result) - 1) / 2 - shift)
            crossing = one.crossings[index]
            if crossing.interval is not None:
                ends = np.clip([crossing.interval.low, crossing.interval.high], *limits)
                axes.plot(ends, [height] * 2, color=colour, linewidth=1.8, alpha=0.6, solid_capstyle="butt",
                          gid=f"interval {one.name}")  # fmt: skip
            if crossing.known:
                axes.plot([crossing.value], [height], color=colour, marker="d", markersize=3.8, linestyle="", zorder=4,
                          gid=f"crossing {one.name}")  # fmt: skip
    axes.set(xlim=limits, ylim=(min(low, min(result.thresholds) / 2), max(high, max(result.thresholds) * 2)))


_SAFE_BUDGET_ROW_MM = 70
_LABELS = {
    "kl": "mean KL (nat)",
    "perplexity": "perplexity over the full cache's",
    "drop": "mean drop of the score (points)",
    "top1": "share of the same token",
}
_SAFE_BUDGET_TITLES = {
    "kl": "Next token's distribution",
    "perplexity": "Perplexity of the text",
    "drop": "Score of the answers",
    "top1": "Same next token",
}
_ASIDE = 1.03
"""Factor between equal selections' budgets, so that each is visible."""
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")


def draw_safe_budget(result: SafeBudgets, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a panel per criterion, a line per selection; filled marks are safe, the ringed one is the smallest."""
    narrow, count = width_mm < style.WIDE_MM, len(result[0].verdicts)
    figure, panels = panel_grid(count, 1 if narrow else count, width_mm, _SAFE_BUDGET_ROW_MM, 0)
    for index, axes in enumerate(panels):
        _draw_criterion(axes, result, index)
    named = zip(result, style.category_colours(len(result)), cycle("os^Dv"), cycle(_DASHES), strict=False)
    entries = [Line2D([], [], color=colour, marker=marker, linestyle=dash, markersize=3, label=one.name)
             for one, colour, marker, dash in named]  # fmt: skip
    draw_legend(figure, [*entries, Line2D([], [], color="#b00020", linewidth=0.9, label="limit")], 5)
    bounds_text = f"whiskers: one-sided 95 % bounds over n = {result.identity.samples} samples"
    return style.describe_run(
        figure,
        result.identity,
        f"full marks: safe, ringed the smallest; side by side at one budget · {bounds_text}",
    )


def _draw_criterion(axes: Axes, result: SafeBudgets, index: int) -> None:
    """Draw one criterion's means and bounds over budgets, a line per selection, and its limit."""
    criterion = result[0].verdicts[index].criterion
    scale = 100 if criterion.name == "drop" else 1
    axes.axhline(scale * criterion.limit, color="#b00020", linewidth=0.9, zorder=1, gid="limit")
    looks = zip(result, style.category_colours(len(result)), cycle("os^Dv"), cycle(_DASHES), strict=False)
    for number, (one, colour, marker, dash) in enumerate(looks):
        shift = float(_ASIDE ** (number - (len(result) - 1) / 2))
        _draw_verdict(axes, one.verdicts[index], {"color": colour, "marker": marker, "linestyle": dash}, scale, shift)
    axes.set_title(_SAFE_BUDGET_TITLES[criterion.name], loc="left")
    unit = result[0].verdicts[index].budgets[0].config.budget.unit
    axes.set(xlabel=f"budget, {unit}", ylabel=_LABELS[criterion.name])
    style.set_log_axes(axes, x=True, y=criterion.name in LOGNORMAL)
    budgets = sorted({tested.config.budget.value for one in result for tested in one.verdicts[index].budgets})
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_verdict(axes: Axes, verdict: Verdict, look: dict[str, Any], scale: float, shift: float) -> None:
    """Draw means with whiskers to their bounds; hollow where safety is not shown, the smallest safe one ringed."""
    budgets = shift * np.array([one.config.budget.value for one in verdict.budgets], dtype=float)
    means, bounds = (scale * np.array([getattr(one, name) for one in verdict.budgets]) for name in ("mean", "bound"))
    known, colour = np.isfinite(bounds), look["color"]
    axes.plot(budgets, means, linewidth=0.9, gid=f"means {verdict.criterion.name}", **{**look, "marker": ""})
    axes.vlines(budgets[known], means[known], bounds[known], color=colour, linewidth=0.7)
    axes.plot(budgets[known], bounds[known], color=colour, linestyle="", marker="_", markersize=4,
              gid=f"bounds {verdict.criterion.name}")  # fmt: skip
    safe = np.array([one.tested and one.holds for one in verdict.budgets])
    for mask, fill in ((safe, colour), (~safe, "white")):
        axes.plot(budgets[mask], means[mask], color=colour, linestyle="", marker=look["marker"], markersize=3,
                  markerfacecolor=fill, gid="safe" if fill is colour else "not safe")  # fmt: skip
    if safe.any():
        last = np.flatnonzero(safe)[-1]
        axes.plot(budgets[last], means[last], color=colour, linestyle="", marker="o", markersize=7,
                  markerfacecolor="none", gid="smallest")  # fmt: skip
