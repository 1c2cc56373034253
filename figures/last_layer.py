"""Drift after the last layer, sample by sample, baseline against treatment (paper, figures 3b and 6)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.last_layer import LastLayer
from perturbkv.analyses.naming import counted, sides
from perturbkv.figures import style

_WIDE, _ROW_MM, _AROUND_MM = 3, 48, 14
_BETTER, _WORSE, _TIED = "#0173b2", "#de8f05", "0.6"


def draw(results: Sequence[LastLayer], identity: RunIdentity, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per budget; each sample is a line from the baseline's drift (hollow) to the treatment's (filled)."""
    with style.use():
        columns = 1 if width_mm < style.WIDE_MM else min(_WIDE, len(results))
        rows = -(-len(results) // columns)
        figure = style.figure(width_mm, rows * _ROW_MM + _AROUND_MM)
        axes = figure.subplots(rows, columns, squeeze=False)
        for place, panel in enumerate(axes.flat):
            if place >= len(results):
                panel.set_axis_off()
                continue
            _panel(panel, results[place])
            panel.set_xlabel("sample, sorted by the baseline" if place + columns >= len(results) else "")
            if place % columns == 0:
                panel.set_ylabel(f"last layer's drift ({DISTANCES[results[place].distance]})")
        figure.legend(handles=_legend(results[0]), loc="outside upper left", ncols=2 if columns == 1 else 4)
        style.foot(
            figure, identity, f"in brackets: exact 95 % intervals of the share of n = {identity.samples} samples"
        )
    return figure


def _panel(axes: Axes, result: LastLayer) -> None:
    places = np.arange(1, len(result.sample_ids) + 1)
    colours = [{1: _BETTER, 0: _TIED, -1: _WORSE}[int(verdict)] for verdict in result.verdict]
    first, second = style.positive(result.baseline_drift), style.positive(result.treatment_drift)
    axes.vlines(places, np.fmin(first, second), np.fmax(first, second), colors=colours, linewidth=1.2)
    size = 11 if len(places) <= 60 else 4
    axes.scatter(
        places, first, s=size, facecolors="white", edgecolors=colours, linewidths=0.8, zorder=3, gid="baseline"
    )
    axes.scatter(places, second, s=size, c=colours, linewidths=0, zorder=4, gid="treatment")
    style.log_axes(axes, y=True)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    share = style.percent(result.improved_share, result.improved_share_interval)
    held = " → ".join(dict.fromkeys(map(style.number, result.held)))
    axes.set_title(f"b={result.baseline.budget}: {share} improved\nheld / full {held}", loc="left")
    hidden = int(np.isnan(np.stack([first, second])).sum())
    if hidden:
        style.note(axes, f"{counted(hidden, 'drift')} of 0 not drawn")


def _legend(result: LastLayer) -> list[Line2D]:
    hollow, filled = sides(result.baseline, result.treatment)
    return [
        Line2D([], [], linestyle="", marker="o", markersize=3.5, markerfacecolor="white", color="0.3", label=hollow),
        Line2D([], [], linestyle="", marker="o", markersize=3.5, color="0.3", label=filled),
        Line2D([], [], color=_BETTER, label=f"{filled} drifts less"),
        Line2D([], [], color=_WORSE, label="more"),
    ]
