"""Treatments over their baseline in three distances, isolated and propagated; below, L2 norms over L1 norms."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.heads.head_comparison import HeadKind
from perturbkv.analyses.questions.measures.measure_orders import KINDS
from perturbkv.analyses.questions.measures.measures import SHORT, Measures, Setting
from perturbkv.figures import style

_LINE_MM, _AROUND_MM = 5.2, 17
_MARKS = {"l1": ("o", -0.22), "l2": ("s", 0.0), "cosine": ("^", 0.22)}


def draw(result: Measures, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a row of panels per setting, one per kind; left of 1 the treatment perturbs less."""
    with style.use():
        columns = 1 if width_mm < style.WIDE_MM else len(KINDS)
        panels = [(setting, kind) for setting in result.settings for kind in KINDS]
        rows = -(-len(panels) // columns)
        longest = max(len(setting.rows) + len(setting.norms) for setting in result.settings)
        figure = style.figure(width_mm, rows * (longest * _LINE_MM + _AROUND_MM) + 10)
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey="row" if columns > 1 else False).flat
        for panel, (setting, kind) in zip(axes, panels, strict=True):
            _panel(panel, setting, kind)
        figure.legend(handles=_legend(), loc="outside upper left", ncols=len(_MARKS))
        style.draw_foot(figure, result.identity, style.interval_legend(result.identity.samples))
    return figure


def _panel(axes: Axes, setting: Setting, kind: str) -> None:
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    rows = [*setting.rows, *setting.norms]
    for index, row in enumerate(rows):
        for distance in _MARKS:
            _point(axes, index, distance, row.kind(kind, distance))
    if setting.norms:
        axes.axhline(len(setting.rows) - 0.5, color="0.55", linewidth=0.6, linestyle=":")
    axes.set_yticks(range(len(rows)), _names(setting))
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel=f"Σ of all heads, over {setting.baseline_name()} (log axis)")
    style.log_axes(axes, x=True)
    axes.tick_params(labelbottom=True)
    axes.grid(visible=True, axis="x")
    axes.set_title(f"b={setting.name}, {kind}", loc="left")


def _names(setting: Setting) -> list[str]:
    """Return every treatment, then every selection whose L2 norms are compared with L1 norms."""
    treatments = [setting.side(row.treatment) for row in setting.rows]
    return treatments + [f"{setting.side(row.baseline)}: L2/L1 norms" for row in setting.norms]


def _point(axes: Axes, index: int, distance: str, measured: HeadKind) -> None:
    ratio, (marker, offset) = measured.sum_ratio, _MARKS[distance]
    if np.isnan(ratio) or ratio <= 0:
        return
    colour = style.category_colours(len(_MARKS))[list(_MARKS).index(distance)]
    axes.errorbar([ratio], [index + offset], xerr=style.error_bars(ratio, measured.sum_ratio_interval), color=colour,
                  marker=marker, markersize=3.0, linewidth=0.9, gid=distance)  # fmt: skip


def _legend() -> list[Line2D]:
    colours = style.category_colours(len(_MARKS))
    return [
        Line2D([], [], linestyle="", marker=marker, markersize=3.5, color=colour, label=SHORT[distance])
        for (distance, (marker, _)), colour in zip(_MARKS.items(), colours, strict=True)
    ]
