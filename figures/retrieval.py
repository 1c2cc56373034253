"""Does perturbation tell whether the needle is found? Rank correlations within a prompt, one budget at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.first_step import MEASURES
from perturbkv.analyses.naming import counted
from perturbkv.analyses.needle.needle import Needle
from perturbkv.analyses.needle.needle_grid import OUTCOMES
from perturbkv.analyses.needle.retrieval import CIRCULAR, BudgetLink, Correlation
from perturbkv.analyses.stats.intervals import LEAST
from perturbkv.figures import style

_ROW_MM, _AROUND_MM = 66, 14
_GAP = 0.9
"""Room, in rows, for the words above what is circular."""
_MARKS = {"score": ("o", "whole number", -0.14), "digits": ("s", "leading digits", 0.14)}


def draw(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per budget: ρ of each measure with both outcomes; below the line those that nearly are the score."""
    budgets = result.link.budgets
    with style.use():
        columns = 1 if width_mm < style.WIDE_MM else 2
        rows = max(1, -(-len(budgets) // columns))
        figure = style.figure(width_mm, rows * _ROW_MM + _AROUND_MM)
        axes = figure.subplots(rows, columns, squeeze=False)
        for panel, link in zip(axes.flat, budgets, strict=False):
            _panel(panel, link)
        for panel in axes.flat[len(budgets) :]:
            panel.set_axis_off()
        for place, panel in enumerate(axes.flat[: len(budgets)]):
            panel.tick_params(labelleft=place % columns == 0)
        if not budgets:
            axes.flat[0].set(xticks=[], yticks=[])
            style.note(axes.flat[0], "no budget of three methods or more: no ranks", middle=True)
        figure.legend(handles=_legend(), loc="outside upper left", ncols=2)
        style.foot(figure, result.identity, _told(result.link.samples))
    return figure


def _told(answered: int) -> str:
    """What n and the bars are: each point has an n of its own."""
    return (
        f"n: deciding ones of the {counted(answered, 'prompt')} that the full cache answers · bars: 95 % intervals "
        f"over them, ranges where they are fewer than {LEAST}"
    )


def _panel(axes: Axes, link: BudgetLink) -> None:
    names = {**MEASURES, **CIRCULAR}
    places = {name: place + (_GAP if name in CIRCULAR else 0) for place, name in enumerate(names)}
    for one in (*link.correlations, *link.circular):
        _point(axes, places[one.measure], one)
    axes.axvline(0, color="0.55", linewidth=0.8, zorder=1)
    axes.axhline(len(MEASURES) - 0.45, color="0.55", linewidth=0.6, linestyle=":")
    axes.text(0.98, len(MEASURES) - 0.37, "circular: nearly the score", transform=axes.get_yaxis_transform(),
              ha="right", va="top", fontsize=5.5, color="0.35",
              bbox={"facecolor": "white", "linewidth": 0, "pad": 0.8})  # fmt: skip
    axes.set_yticks(list(places.values()), list(names.values()))
    axes.set(
        xlim=(-1.05, 1.05),
        ylim=(max(places.values()) + 0.5, -0.5),
        xticks=[-1, -0.5, 0, 0.5, 1],
        xlabel="Spearman’s ρ within a prompt",
    )
    deciding = {outcome: link.of(outcome)[0].deciding for outcome in OUTCOMES}
    held = " to ".join(dict.fromkeys(map(style.number, link.held_ends)))
    title = (
        f"b={link.name}, {len(link.configs)} methods; held / full {held}"
        f"\nn = {deciding['score']} (number), {deciding['digits']} (digits)"
    )
    reasons = [f"{label}: {_why(link, name)}" for name, (_, label, _) in _MARKS.items() if not deciding[name]]
    if len(reasons) == len(_MARKS):
        axes.text(0, (len(MEASURES) - 1) / 2, "\n".join(reasons), ha="center", va="center", fontsize=6.5, color="0.35",
                  backgroundcolor="white")  # fmt: skip
    elif reasons:
        title += f"\n{reasons[0]}"
    axes.set_title(title, loc="left", fontsize=6.5)


def _why(link: BudgetLink, outcome: str) -> str:
    """Why no prompt has ranks in an outcome: there is nothing to tell apart within a prompt."""
    found = getattr(link, outcome)
    if not len(found):
        return "the full cache finds none"
    if not found.any():
        return "every method lost all"
    if (found == 1).all():
        return "no method lost any"
    return "all methods alike"


def _point(axes: Axes, place: float, one: Correlation) -> None:
    if np.isnan(one.rho):
        return
    marker, _, offset = _MARKS[one.outcome]
    axes.errorbar([one.rho], [place + offset], xerr=style.bars(one.rho, one.interval), color=_colours()[one.outcome],
                  marker=marker, markersize=3.2, linewidth=0.9, gid=f"{one.measure} {one.outcome}")  # fmt: skip


def _colours() -> dict[str, Any]:
    return dict(zip(_MARKS, style.category_colours(2), strict=True))


def _legend() -> list[Line2D]:
    return [
        Line2D([], [], linestyle="", marker=marker, markersize=3.5, color=_colours()[outcome], label=label)
        for outcome, (marker, label, _) in _MARKS.items()
    ]
