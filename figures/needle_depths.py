"""Retrieval by depth: a dot per method and depth, over all lengths, beside the maps of `needle` (paper, figure 8)."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.naming import short
from perturbkv.analyses.needle.needle import Needle
from perturbkv.analyses.needle.needle_grid import Method
from perturbkv.figures import style
from perturbkv.figures.needle import by_budget

_WIDE, _NARROW = 6, 3
_LINE_MM, _AROUND_MM, _BELOW_MM = 3.6, 24, 14
_MARKS = {"score": ("o", "whole number"), "digits": ("s", "leading digits")}


def draw(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per depth, a row per method: the share of numbers found, and of their leading digits."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        columns = min(_NARROW if narrow else _WIDE, len(result.depths))
        chunks = -(-len(result.depths) // columns)
        methods = [result.full, *(method for group in by_budget(result) for method in group)]
        figure = style.figure(width_mm, chunks * (len(methods) * _LINE_MM + _BELOW_MM) + _AROUND_MM)
        axes = figure.subplots(chunks, columns, squeeze=False, sharex=True, sharey=True)
        for place, panel in enumerate(axes.flat):
            if place >= len(result.depths):
                panel.set_axis_off()
                continue
            _panel(panel, methods, place)
            panel.set_title(f"depth {result.depths[place]:g}", loc="left", fontsize=6.5 if narrow else 7.5)
            panel.set_xlabel("share" if place + columns >= len(result.depths) else "")
            panel.tick_params(labelbottom=place + columns >= len(result.depths), labelleft=place % columns == 0)
            panel.tick_params(axis="y", labelsize=5.5 if narrow else 7)
        axes[0, 0].set_yticks(range(len(methods)), _names(result, methods))
        figure.legend(handles=_legend(), loc="outside upper left", ncols=2)
        held = dict.fromkeys(f"b={one.config.budget}: {style.number(one.held)}" for one in result.methods if one.config)
        told = "whole number: exact 95 % intervals over the prompts of a depth · held / full of"
        style.foot(figure, result.identity, f"{told} {', '.join(held)}")
    return figure


def _names(result: Needle, methods: list[Method]) -> list[str]:
    """What tells a method from the others."""
    names = dict(zip(result.identity.configs, short(result.identity.configs), strict=True))
    return [names[method.config] or "evicted" if method.config else "full cache" for method in methods]


def _panel(axes: Axes, methods: list[Method], depth: int) -> None:
    """The number found stands at the right with two decimals."""
    colours = style.category_colours(2)
    for row, method in enumerate(methods):
        ends = None if method.by_depth_interval is None else method.by_depth_interval.at(depth)
        found, digits = float(method.by_depth[depth]), float(method.digits_by_depth[depth])
        if np.isnan(found):
            continue
        bars = None if ends is None or np.isnan(ends.low) else style.bars(found, ends)
        axes.errorbar([found], [row - 0.14], xerr=bars, color=colours[0], marker=_MARKS["score"][0], markersize=3,
                      linewidth=0.7, clip_on=False, gid="score")  # fmt: skip
        axes.plot([digits], [row + 0.2], color=colours[1], marker=_MARKS["digits"][0], markersize=2.4, clip_on=False,
                  gid="digits")  # fmt: skip
        axes.text(1.1, row, f"{found:.2f}", transform=axes.get_yaxis_transform(), fontsize=5, va="center")
    axes.set(xlim=(-0.04, 1.04), ylim=(len(methods) - 0.4, -0.6), xticks=[0, 1])
    axes.grid(visible=True, axis="x")


def _legend() -> list[Line2D]:
    return [
        Line2D([], [], linestyle="", marker=marker, markersize=3.2, color=colour, label=label)
        for (marker, label), colour in zip(_MARKS.values(), style.category_colours(2), strict=True)
    ]
