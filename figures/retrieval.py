"""Does perturbation tell whether the needle is found? Rank correlations within a prompt, one budget at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.intervals import LEAST
from perturbkv.analyses.naming import counted
from perturbkv.analyses.needle import OUTCOMES
from perturbkv.analyses.retrieval import CIRCULAR, MEASURES, BudgetLink, Correlation, Retrieval
from perturbkv.figures import style

_ROW_MM, _AROUND_MM = 62, 14
_MARKS = {"score": ("o", "whole number", -0.14), "digits": ("s", "leading digits", 0.14)}


def draw(result: Retrieval, identity: RunIdentity, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per budget: ρ of each measure with both outcomes; below the line those that nearly are the score."""
    with style.use():
        columns = 1 if width_mm < style.WIDE_MM else 2
        rows = max(1, -(-len(result.budgets) // columns))
        figure = style.figure(width_mm, rows * _ROW_MM + _AROUND_MM)
        axes = figure.subplots(rows, columns, squeeze=False)
        for panel, link in zip(axes.flat, result.budgets, strict=False):
            _panel(panel, link)
        for panel in axes.flat[len(result.budgets) :]:
            panel.set_axis_off()
        if not result.budgets:
            style.note(axes.flat[0], "no budget of three methods or more: no ranks")
        figure.legend(handles=_legend(), loc="outside upper left", ncols=2)
        style.foot(figure, identity, _told(result.samples))
    return figure


def _told(answered: int) -> str:
    """What n and the bars are: each point has an n of its own."""
    return (
        f"n: deciding ones of the {counted(answered, 'prompt')} that the full cache answers · bars: 95 % intervals "
        f"over them, ranges where they are fewer than {LEAST}"
    )


def _panel(axes: Axes, link: BudgetLink) -> None:
    names = {**MEASURES, **CIRCULAR}
    places = {name: place + (0.6 if name in CIRCULAR else 0) for place, name in enumerate(names)}
    for one in (*link.correlations, *link.circular):
        _point(axes, places[one.measure], one)
    axes.axvline(0, color="0.55", linewidth=0.8, zorder=1)
    axes.axhline(len(MEASURES) - 0.2, color="0.55", linewidth=0.6, linestyle=":")
    axes.text(0.98, len(MEASURES) - 0.12, "circular: nearly the score", transform=axes.get_yaxis_transform(),
              ha="right", va="top", fontsize=5.5, color="0.35")  # fmt: skip
    axes.set_yticks(list(places.values()), list(names.values()))
    axes.set(
        xlim=(-1.05, 1.05),
        ylim=(max(places.values()) + 0.5, -0.5),
        xlabel="Spearman’s ρ within a prompt",
    )
    deciding = {outcome: link.of(outcome)[0].deciding for outcome in OUTCOMES}
    held = " to ".join(dict.fromkeys(map(style.number, link.held_ends)))
    title = (
        f"b={link.name}, {len(link.configs)} methods; n = {deciding['score']} (number), {deciding['digits']} (digits)"
        f"\nheld / full {held}"
    )
    axes.set_title(title, loc="left", fontsize=6.5)
    if not any(deciding.values()):
        style.note(axes, "no prompt decides: all outcomes are alike")


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
