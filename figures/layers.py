"""Drift of the residual stream layer by layer, one selection against another, by budget (paper, figures 3a and 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.layers.drift import LayerDrift
from perturbkv.analyses.layers.layers import DriftSeries
from perturbkv.analyses.naming import counted, sides
from perturbkv.figures import style
from perturbkv.figures.labels import by_held, held_sides

_ROW_MM, _SMALL_MM, _AROUND_MM = 74, 38, 22
_TOGETHER = 2
"""More budgets than this in one panel hide each other: each gets a column of its own."""
_COLUMNS, _NARROW_COLUMNS = 6, 3
_LINES: tuple[Any, Any] = ("--", "-")
"""Of both sides."""


def draw(result: DriftSeries, width_mm: float = style.WIDE_MM) -> Figure:
    """Drift after each layer, and the second side's in percent of the first's; small multiples of many budgets."""
    with style.use():
        ordered = by_held(result.members, lambda one: sum(one.held))
        narrow = width_mm < style.WIDE_MM
        figure = _together(ordered, width_mm) if len(ordered) <= _TOGETHER else _apart(ordered, width_mm, narrow)
        tie = (
            "within 2 noise floors, or the same entries kept"
            if ordered[0].floored
            else "equal (no floor in this trace)"
        )
        held = f"held / full of {', '.join(f'b={one.baseline.budget}: {held_sides(one.held)}' for one in ordered)}"
        said = style.about(result.identity.samples, medians=True)
        style.foot(figure, result.identity, f"drift: medians; percent: of the means over samples · {said} · ×: tied, "
                   f"{tie} · {held}")  # fmt: skip
    return figure


def _together(results: Sequence[LayerDrift], width_mm: float) -> Figure:
    """One or two budgets in one pair of panels, a colour each."""
    narrow = width_mm < style.WIDE_MM
    figure = style.figure(width_mm, _ROW_MM * (2 if narrow else 1))
    absolute, relative = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
    colours = style.ordered_colours(len(results))
    for result, colour in zip(results, colours, strict=True):
        _drift(absolute, result, colour)
        _percent(relative, result, colour)
    for axes in (absolute, relative):
        _finish(axes, percent=axes is relative)
        axes.set_xlabel("decoder layer")
    absolute.set(ylabel=_drift_label(results[0]), title="")
    relative.set_ylabel(_percent_label(results[0]))
    absolute.set_title("Drift after each layer, median of samples", loc="left")
    relative.set_title("Ratio of the means: below 100 % is better", loc="left")
    _note_zeros(absolute, results)
    budgets = [
        Line2D([], [], color=colour, label=f"b={result.baseline.budget}")
        for result, colour in zip(results, colours, strict=True)
    ]
    style.legend_below(absolute, _sides(results[0]), 2)
    style.legend_below(relative, budgets, 3)
    return figure


def _apart(results: Sequence[LayerDrift], width_mm: float, narrow: bool) -> Figure:
    """A column per budget, drift above and percent below, each kind on one scale."""
    columns = min(_NARROW_COLUMNS if narrow else _COLUMNS, len(results))
    chunks = -(-len(results) // columns)
    figure = style.figure(width_mm, 2 * chunks * _SMALL_MM + _AROUND_MM)
    axes = figure.subplots(2 * chunks, columns, squeeze=False, sharex=True)
    colour = style.category_colours(1)[0]
    for place, result in enumerate(results):
        row, column = 2 * (place // columns), place % columns
        pair = (axes[row, column], axes[row + 1, column])
        _drift(pair[0], result, colour)
        _percent(pair[1], result, colour)
        pair[0].set_title(f"b={result.baseline.budget}", loc="left")
        pair[1].set_xlabel("layer" if place + columns >= len(results) else "")
        for panel, label in zip(
            pair, (_drift_label(result, short=True), _percent_label(result, short=True)), strict=True
        ):
            panel.set_ylabel(label if column == 0 else "")
            panel.tick_params(labelleft=column == 0, labelbottom=panel is pair[1] and place + columns >= len(results))
    for place in range(len(results), chunks * columns):
        for row in (0, 1):
            axes[2 * (place // columns) + row, place % columns].set_axis_off()
    _one_scale(axes, len(results))
    _note_zeros(axes[0, 0], results)
    figure.legend(handles=_sides(results[0], colour), loc="outside upper left", ncols=2)
    return figure


def _one_scale(axes: np.ndarray, count: int) -> None:
    """All panels of a kind span the same values."""
    for first in (0, 1):
        panels = list(axes[first::2].flat)[:count]
        for panel in panels:
            _finish(panel, percent=first == 1)
        ends = [panel.get_ylim() for panel in panels]
        for panel in panels:
            panel.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
            panel.xaxis.set_major_locator(MaxNLocator(3, integer=True))


def _sides(result: LayerDrift, colour: Any = "0.3") -> list[Line2D]:
    """What dashed and solid lines are."""
    names = sides(result.baseline, result.treatment)
    return [Line2D([], [], color=colour, linestyle=line, label=name)
            for line, name in zip(_LINES, names, strict=True)]  # fmt: skip


def _drift_label(result: LayerDrift, short: bool = False) -> str:
    return f"{'drift' if short else 'drift of the residual stream'} ({DISTANCES[result.distance]})"


def _percent_label(result: LayerDrift, short: bool = False) -> str:
    """The second side's drift over the first's, on a logarithmic axis."""
    first, _ = sides(result.baseline, result.treatment)
    return f"% of {first}'s, log" if short else f"% of {first}'s drift (log axis)"


def _layers(result: LayerDrift) -> np.ndarray:
    return np.array([result.identity.layer(place) for place in range(len(result.ratio))])


def _drift(axes: Axes, result: LayerDrift, colour: object) -> None:
    layers = _layers(result)
    both = (
        ("baseline", "--", result.baseline_median, result.baseline_median_interval),
        ("treatment", "-", result.treatment_median, result.treatment_median_interval),
    )
    for side, line, median, interval in both:
        axes.plot(layers, style.positive(median), line, color=colour, marker="o" if len(layers) == 1 else None,
                  markersize=3, gid=f"{side} {result.baseline.label()}")  # fmt: skip
        if interval is not None:
            axes.fill_between(
                layers,
                style.positive(interval.low),
                style.positive(interval.high),
                color=colour,
                alpha=0.1,
                linewidth=0,
            )


def _percent(axes: Axes, result: LayerDrift, colour: object) -> None:
    """On a logarithmic axis halving and doubling lie equally far from 100 %."""
    layers, percent = _layers(result), 100 * style.positive(result.ratio)
    axes.plot(layers, percent, color=colour, marker="o" if len(layers) == 1 else None, markersize=3,
              gid=f"percent {result.baseline.label()}")  # fmt: skip
    ends = result.ratio_interval
    if ends is not None:
        axes.fill_between(layers, 100 * style.positive(ends.low), 100 * style.positive(ends.high), color=colour,
                          alpha=0.13, linewidth=0)  # fmt: skip
    tied = result.verdict == 0
    axes.plot(layers[tied], percent[tied], linestyle="", marker="x", markersize=3, color="0.5", gid="ties")


def _finish(axes: Axes, percent: bool) -> None:
    """A logarithmic axis where there is anything to show on it, and the line of equality."""
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    style.log_axes(axes, y=True)
    if percent:
        axes.axhline(100, color="0.55", linewidth=0.8, zorder=1)


def _note_zeros(axes: Axes, results: Sequence[LayerDrift]) -> None:
    """Say how many drifts a log axis cannot show."""
    hidden = sum(
        int((side == 0).sum()) for result in results for side in (result.baseline_median, result.treatment_median)
    )
    if hidden:
        style.note(axes, f"{counted(hidden, 'drift')} of 0 not drawn")
