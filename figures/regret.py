"""The optimality gap of kept sets: the share of heads within a factor of the best known set, a curve per method."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.pairing import plural
from perturbkv.analyses.questions.regret.optimality_gap import Heads, SearchedPart
from perturbkv.analyses.questions.regret.regret import Regret
from perturbkv.figures import style
from perturbkv.optimum.chain import KNOWN_QUERY_SELECTIONS

_PANEL_MM, _AROUND_MM, _LEGEND_MM = 48, 22, 3.6
_FARTHEST = 1000.0
"""Largest factor of the x axis; greater ones are drawn there."""


def draw(result: Regret, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw the share of heads within a factor of the best known set, a panel per part and a curve per method."""
    with style.use():
        columns = 1 if width_mm < style.WIDE_MM else min(2, len(result.parts))
        rows = -(-len(result.parts) // columns)
        names = result.parts[0].names
        entries = 2 if width_mm < style.WIDE_MM else 3
        legend = _LEGEND_MM * -(-len(names) // entries)
        figure = style.figure(width_mm, rows * _PANEL_MM + _AROUND_MM + legend)
        panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
        looks = _method_looks(result.parts[0])
        for panel, part in zip(panels, result.parts, strict=False):
            _draw_part(panel, part, looks)
        for panel in panels[len(result.parts) :]:
            panel.set_axis_off()
        for panel in panels[::columns]:
            panel.set_ylabel("share of heads within")
        handles = [Line2D([], [], label=name, **look) for name, look in zip(names, looks, strict=True)]
        figure.legend(handles=handles, loc="outside upper left", ncols=entries)
        style.draw_foot(
            figure, result.identity, f"n = {plural(result.identity.samples, 'sample')}, heads of all together"
        )
    return figure


def _method_looks(part: SearchedPart) -> list[dict[str, Any]]:
    """Return the plot options per method; methods that know the query are dashed, in two widths."""
    colours = style.category_colours(len(part.configs))
    knowing = cycle((2.4, 1.0))
    return [
        {"color": colour, "linestyle": "--", "linewidth": next(knowing)}
        if config.selection.name in KNOWN_QUERY_SELECTIONS
        else {"color": colour, "linestyle": "-", "linewidth": 1.1}
        for colour, config in zip(colours, part.configs, strict=True)
    ]


def _draw_part(axes: Axes, part: SearchedPart, looks: list[dict[str, Any]]) -> None:
    """Draw one part's cumulative shares of heads over the factor to the best known set."""
    rows = [row for sample in part.rows for row in sample]
    heads = Heads.from_rows(rows, len(part.configs))
    for config, values, look in zip(part.configs, heads.methods, looks, strict=True):
        factors = np.sort(np.minimum(values / heads.best, _FARTHEST))
        share = np.arange(1, len(factors) + 1) / max(1, len(factors))
        axes.plot(np.r_[1, factors], np.r_[0, share], drawstyle="steps-post", gid=config.selection.name, **look)
    style.log_axes(axes, x=True)
    axes.set(ylim=(0, 1.02), xlabel="L over that of the best set known (log axis)")
    if part.tried:
        style.draw_note(axes, f"proven best in {part.closed} of {part.tried} heads")
    axes.set_title(f"{part.name}: n = {plural(len(heads.best), 'head')}", loc="left")
    axes.grid(visible=True)
