"""Drift after the last layer, sample by sample, one selection against another (paper, figures 3b and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.layers.last_layer import LastLayer
from perturbkv.analyses.layers.sample_drifts import SampleSeries
from perturbkv.analyses.naming import counted, sides
from perturbkv.figures import style
from perturbkv.figures.labels import by_held, held_sides

_WIDE, _NARROW, _ROW_MM, _AROUND_MM = 3, 2, 50, 14
_BETTER, _WORSE, _TIED = "#0173b2", "#de8f05", "0.5"


def draw(result: SampleSeries, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per budget, all on one scale; each sample is a line from the first side (hollow) to the second (filled).

    A tie is a grey cross.
    """
    with style.use():
        ordered = by_held(result.members, lambda one: sum(one.held))
        narrow = width_mm < style.WIDE_MM
        columns = min(_NARROW if narrow else _WIDE, len(ordered))
        rows = -(-len(ordered) // columns)
        figure = style.figure(width_mm, rows * _ROW_MM + _AROUND_MM)
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for panel, one in zip(axes.flat, ordered, strict=False):
            _panel(panel, one, 6.5 if narrow else 7.5)
        for panel in axes.flat[len(ordered) :]:
            panel.set_axis_off()
        _name_axes(list(axes.flat), ordered, columns)
        figure.legend(handles=_legend(ordered), loc="outside upper left", ncols=2 if narrow else 5)
        style.foot(figure, result.identity, _told(ordered[0]))
    return figure


def _told(result: LastLayer) -> str:
    """What brackets and ties are."""
    first, _ = sides(result.baseline, result.treatment)
    return (
        f"better: exact 95 % intervals of the share of n = {result.identity.samples} samples · mean ×: drift over "
        f"{first}'s, {style.about(result.identity.samples)}"
    )


def _name_axes(axes: Sequence[Axes], results: Sequence[LastLayer], columns: int) -> None:
    """Axes are named on the left and below alone."""
    first, _ = sides(results[0].baseline, results[0].treatment)
    for place, panel in enumerate(axes[: len(results)]):
        panel.set_xlabel(f"sample, by {first}" if place + columns >= len(results) else "")
        panel.set_ylabel(f"last layer's drift ({DISTANCES[results[0].distance]})" if place % columns == 0 else "")
        panel.tick_params(labelleft=place % columns == 0)


def _panel(axes: Axes, result: LastLayer, font: float) -> None:
    places, tied = np.arange(1, len(result.sample_ids) + 1), result.verdict == 0
    colours: Any = np.array([{1: _BETTER, 0: _TIED, -1: _WORSE}[int(verdict)] for verdict in result.verdict])
    first, second = style.positive(result.baseline_drift), style.positive(result.treatment_drift)
    axes.vlines(places, np.fmin(first, second), np.fmax(first, second), colors=colours, linewidth=1.2)
    size = 11 if len(places) <= 60 else 4
    axes.scatter(places[~tied], first[~tied], s=size, facecolors="white", edgecolors=colours[~tied], linewidths=0.8,
                 zorder=3, gid="baseline")  # fmt: skip
    axes.scatter(places[~tied], second[~tied], s=size, c=colours[~tied], linewidths=0, zorder=4, gid="treatment")
    axes.scatter(places[tied], second[tied], s=size, c=_TIED, marker="x", linewidths=0.8, zorder=4, gid="ties")
    style.log_axes(axes, y=True)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    share = style.percent(result.improved_share, result.improved_share_interval)
    ratio = style.ratio(result.mean_ratio, result.mean_ratio_interval)
    held = f"b={result.baseline.budget}, held / full {held_sides(result.held)}"
    axes.set_title(f"{held}\n{share} better\nmean × {ratio}", loc="left", fontsize=font)
    hidden = int(np.isnan(np.stack([first, second])).sum())
    if hidden:
        style.note(axes, f"{counted(hidden, 'drift')} of 0 not drawn")


def _legend(results: Sequence[LastLayer]) -> list[Line2D]:
    hollow, filled = sides(results[0].baseline, results[0].treatment)
    entries = [
        Line2D([], [], linestyle="", marker="o", markersize=3.5, markerfacecolor="white", color="0.3", label=hollow),
        Line2D([], [], linestyle="", marker="o", markersize=3.5, color="0.3", label=filled),
        Line2D([], [], color=_BETTER, label=f"{filled} drifts less"),
        Line2D([], [], color=_WORSE, label="more"),
    ]
    if any((result.verdict == 0).any() for result in results):
        entries.append(Line2D([], [], linestyle="", marker="x", markersize=3.5, color=_TIED, label="tied"))
    return entries
