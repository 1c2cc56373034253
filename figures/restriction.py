"""What restricted kept sets cost: perturbation and last-layer drift over those of one set per key/value head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.naming import short
from perturbkv.analyses.restrictions import BASELINE, Row, Setting
from perturbkv.figures import style
from perturbkv.figures.labels import by_held
from perturbkv.figures.ratio_points import legend, point

_WIDE, _LINE_MM, _AROUND_MM = 2, 6.5, 19
_DRIFT, _DRIFT_COLOUR = 0.36, "0.25"


def draw(results: Sequence[Setting], identity: RunIdentity, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per setting; right of 1 a restriction perturbs more than the baseline."""
    with style.use():
        ordered = by_held(results, lambda result: result.rows[0].compared.held[0])
        columns = 1 if width_mm < style.WIDE_MM else min(_WIDE, len(ordered))
        rows = -(-len(ordered) // columns)
        longest = max(len(result.rows) for result in ordered)
        figure = style.figure(width_mm, rows * ((longest + 1) * _LINE_MM + _AROUND_MM) + 10)
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
        for panel, result, name in zip(panels, ordered, _names(ordered), strict=False):
            _panel(panel, result, name)
        for panel in list(panels)[len(ordered) :]:
            panel.set_axis_off()
        figure.legend(handles=[*legend(), _drift_mark()], loc="outside upper left", ncols=2 if columns < _WIDE else 4)
        style.foot(figure, identity, style.about(identity.samples))
    return figure


def _names(results: Sequence[Setting]) -> list[str]:
    """What tells a setting from the others; of a single one all of it."""
    told = short([result.baseline for result in results])
    return [result.setting if len(results) == 1 else name for result, name in zip(results, told, strict=True)]


def _panel(axes: Axes, result: Setting, name: str) -> None:
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    for place, row in enumerate(result.rows, start=1):
        for kind in ("isolated", "propagated"):
            point(axes, place, kind, getattr(row.compared, kind), f"{BASELINE} or row is 0")
        _drift(axes, place, row)
    held = [result.rows[0].compared.held[0], *(row.compared.held[1] for row in result.rows)]
    names = [f"{BASELINE} (= 1)", *(row.name for row in result.rows)]
    shown = [f"{name}, held {style.number(share)}" for name, share in zip(names, held, strict=True)]
    axes.set_yticks(range(len(shown)), shown)
    axes.set(ylim=(len(shown) - 0.4, -0.5), xlabel=f"over {BASELINE}'s (log axis)")
    style.log_axes(axes, x=True)
    axes.tick_params(labelbottom=True)
    axes.grid(visible=True, axis="x")
    axes.set_title(name, loc="left")


def _drift(axes: Axes, place: int, row: Row) -> None:
    if np.isnan(row.drift_ratio) or row.drift_ratio <= 0:
        return
    axes.errorbar([row.drift_ratio], [place + _DRIFT], xerr=style.bars(row.drift_ratio, row.drift_ratio_interval),
                  color=_DRIFT_COLOUR, marker="D", markersize=2.6, linewidth=0.9, gid="drift")  # fmt: skip


def _drift_mark() -> Line2D:
    return Line2D([], [], linestyle="", marker="D", markersize=3, color=_DRIFT_COLOUR, label="last layer's drift")
