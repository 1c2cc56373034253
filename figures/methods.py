"""Eviction methods by how much they perturb: over SnapKV, and over random entries with the same protection."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.ablation.method_rows import Setting
from perturbkv.analyses.ablation.methods import MethodRanking
from perturbkv.analyses.heads.head_kind import HeadKind
from perturbkv.figures import style
from perturbkv.figures.labels import by_held

_WIDE, _LINE_MM, _AROUND_MM, _LEAST_MM = 2, 5.2, 19, 66
_MARKS = {"over snapkv": ("o", -0.16), "over random entries with the same protection": ("s", 0.16)}


def draw(result: MethodRanking, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per setting, the method that perturbs least on top; left of 1 it perturbs less."""
    with style.use():
        ordered = by_held(result.settings, lambda one: one.rows[0].compared.held[0])
        columns = 1 if width_mm < style.WIDE_MM else min(_WIDE, len(ordered))
        rows = -(-len(ordered) // columns)
        longest = max(len(one.rows) for one in ordered)
        figure = style.figure(width_mm, max(_LEAST_MM, rows * (longest * _LINE_MM + _AROUND_MM) + 10))
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
        for panel, one in zip(panels, ordered, strict=False):
            _panel(panel, one)
        for panel in list(panels)[len(ordered) :]:
            panel.set_axis_off()
        figure.legend(handles=_legend(), loc="outside upper left", ncols=1 if columns < _WIDE else 2)
        style.foot(figure, result.identity, style.about(result.identity.samples))
    return figure


def _panel(axes: Axes, result: Setting) -> None:
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    for place, row in enumerate(result.rows):
        random = row.controls.get("random")
        for name, found in zip(_MARKS, (row.compared, random), strict=True):
            if found is not None:
                _point(axes, place, name, found.propagated)
    axes.set_yticks(range(len(result.rows)), [row.name for row in result.rows])
    axes.set(ylim=(len(result.rows) - 0.5, -0.5), xlabel="propagated Σ L1: ratio (log axis)")
    style.log_axes(axes, x=True)
    axes.tick_params(labelbottom=True)
    axes.grid(visible=True, axis="x")
    axes.set_title(result.setting, loc="left")


def _point(axes: Axes, place: int, name: str, measured: HeadKind) -> None:
    ratio, (marker, offset) = measured.sum_ratio, _MARKS[name]
    if np.isnan(ratio) or ratio <= 0:
        return
    colour = style.category_colours(2)[list(_MARKS).index(name)]
    axes.errorbar([ratio], [place + offset], xerr=style.bars(ratio, measured.sum_ratio_interval), color=colour,
                  marker=marker, markersize=3, linewidth=0.9, gid=name)  # fmt: skip


def _legend() -> list[Line2D]:
    colours = style.category_colours(2)
    return [
        Line2D([], [], linestyle="", marker=marker, markersize=3.5, color=colour, label=name)
        for (name, (marker, _)), colour in zip(_MARKS.items(), colours, strict=True)
    ]
