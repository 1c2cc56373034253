"""Drift of the residual stream layer by layer, baseline against treatment, by budget (paper, figures 3a and 5)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.layers import LayerDrift
from perturbkv.analyses.naming import counted, sides
from perturbkv.figures import style

_ROW_MM = 74
_COARSE = (0.02, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 50)
_FINE = (0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.4, 2)
"""Treatment over baseline, where the axis of reductions has its ticks, by how far it reaches."""


def draw(results: Sequence[LayerDrift], identity: RunIdentity, width_mm: float = style.WIDE_MM) -> Figure:
    """Absolute drift, and its relative reduction, after each layer; one colour per budget."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        figure = style.figure(width_mm, _ROW_MM * (2 if narrow else 1))
        absolute, relative = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
        colours = style.ordered_colours(len(results))
        for result, colour in zip(results, colours, strict=True):
            _drift(absolute, result, colour)
            _reduction(relative, result, colour)
        _finish(absolute, relative, results[0])
        _note_zeros(absolute, results)
        dashed, solid = sides(results[0].baseline, results[0].treatment)
        styles = [
            Line2D([], [], color="0.3", linestyle="--", label=dashed),
            Line2D([], [], color="0.3", linestyle="-", label=solid),
        ]
        style.legend_below(absolute, styles, 2)
        budgets = [Line2D([], [], color=colour, label=_label(result))
                   for result, colour in zip(results, colours, strict=True)]  # fmt: skip
        style.legend_below(relative, budgets, 3)
        tie = (
            "within 2 noise floors, or the same entries kept"
            if results[0].floored
            else "equal (no floor in this trace)"
        )
        style.foot(figure, identity, f"{style.about(identity.samples, medians=True)} · ×: tied, {tie}")
    return figure


def _label(result: LayerDrift) -> str:
    """The budget, and what the caches hold."""
    held = " → ".join(dict.fromkeys(style.number(share) for share in result.held))
    return f"b={result.baseline.budget}, held {held}"


def _drift(axes: Axes, result: LayerDrift, colour: object) -> None:
    layers = np.arange(len(result.baseline_mean))
    sides = (
        ("baseline", "--", result.baseline_median, result.baseline_median_interval),
        ("treatment", "-", result.treatment_median, result.treatment_median_interval),
    )
    for side, line, median, interval in sides:
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


def _reduction(axes: Axes, result: LayerDrift, colour: object) -> None:
    """Drawn as treatment over baseline, so that halving and doubling lie equally far from equal."""
    layers, left = np.arange(len(result.ratio)), style.positive(result.ratio)
    axes.plot(layers, left, color=colour, marker="o" if len(layers) == 1 else None, markersize=3,
              gid=f"reduction {result.baseline.label()}")  # fmt: skip
    ends = result.ratio_interval
    if ends is not None:
        axes.fill_between(layers, style.positive(ends.low), style.positive(ends.high), color=colour, alpha=0.13,
                          linewidth=0)  # fmt: skip
    tied = result.verdict == 0
    axes.plot(layers[tied], left[tied], linestyle="", marker="x", markersize=3, color="0.5", gid="ties")


def _finish(absolute: Axes, relative: Axes, result: LayerDrift) -> None:
    unit = DISTANCES[result.distance]
    for axes in (absolute, relative):
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    absolute.set(xlabel="decoder layer", ylabel=f"drift of the residual stream ({unit})")
    style.log_axes(absolute, y=True)
    absolute.set_title("Drift after each layer, median of samples", loc="left")
    relative.axhline(1, color="0.55", linewidth=0.8, zorder=1)
    relative.set(xlabel="decoder layer", ylabel="reduction of drift (%, log ratio)")
    style.log_axes(relative, y=True)
    low, high = relative.get_ylim()
    relative.yaxis.set_major_locator(FixedLocator(_COARSE if high / low > 2.5 else _FINE))
    relative.yaxis.set_major_formatter(FuncFormatter(lambda left, _: _signed(100 * (1 - left))))
    relative.yaxis.set_minor_locator(NullLocator())
    relative.invert_yaxis()
    relative.set_title("Reduction of the mean: above 0 is better", loc="left")


def _signed(percent: float) -> str:
    return f"{percent:+.0f}".replace("-", "−") if round(percent) else "0"


def _note_zeros(axes: Axes, results: Sequence[LayerDrift]) -> None:
    """Say how many drifts a log axis cannot show."""
    hidden = sum(
        int((side == 0).sum()) for result in results for side in (result.baseline_median, result.treatment_median)
    )
    if hidden:
        style.note(axes, f"{counted(hidden, 'drift')} of 0 not drawn")
