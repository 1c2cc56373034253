"""Figure of `patching`: Shapley values of layers or heads with both errors, greedy curves, and mixtures by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.names import fold
from perturbkv.analyses.stats.intervals import Band
from perturbkv.figures import style
from perturbkv.figures.labels import draw_legend

if TYPE_CHECKING:
    from perturbkv.analyses.patching.patching import Patching

_PANEL_MM, _NARROW_PANEL_MM, _LINE_MM, _AROUND_MM = 52, 38, 5.5, 22
_ORDERS, _SAMPLES = 2.6, 0.7
"""Widths of the lines of both errors: of sampled permutations, and over samples."""
_NARROW, _WIDE = 13, 24
"""Letters of a mixture's name per line, in one column and in two."""
_OFFSET, _ROUNDING = 0.16, 1e-6
"""Offset of a mark in its row; distance from a whole per cent that counts as none."""
_SHORT = {"drift": "change of drift", "kl": "change of KL", "score": "change of score"}
_ZERO: dict[str, Any] = {"color": "0.55", "linewidth": 0.8, "zorder": 1}


def draw(result: Patching, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw Shapley values and greedy curves, if measured, and named mixtures of kept sets."""
    narrow = width_mm < style.WIDE_MM
    kinds = [kind for kind in ("shapley", "greedy") if getattr(result, kind) is not None]
    heights = [_NARROW_PANEL_MM] * len(kinds) if narrow else [_PANEL_MM] * bool(kinds)
    named_mm = (len(result.named) + 1) * _LINE_MM + 8
    figure = style.figure(width_mm, sum(heights) + named_mm + _AROUND_MM)
    grid = figure.add_gridspec(len(heights) + 1, 1, height_ratios=[*heights, named_mm])
    for kind, axes in zip(kinds, _outcome_panels(figure, grid, kinds, narrow), strict=True):
        {"shapley": _draw_shapley, "greedy": _draw_greedy}[kind](axes, result)
    _draw_mixtures(figure.add_subplot(grid[-1, 0]), result, _NARROW if narrow else _WIDE)
    draw_legend(figure, _legend(result), 3)
    return style.describe_run(figure, result.identity, style.interval_note(len(result.sample_ids)))


def _outcome_panels(figure: Figure, grid: Any, kinds: list[str], narrow: bool) -> list[Axes]:
    """Return the panels of the given kinds ("shapley", "greedy"), stacked if narrow, else side by side."""
    if narrow or len(kinds) < 2:
        return [figure.add_subplot(grid[index, 0]) for index in range(len(kinds))]
    inner = grid[0, 0].subgridspec(1, 2, width_ratios=[3, 2])
    return [figure.add_subplot(inner[0, index]) for index in range(2)]


def _draw_shapley(axes: Axes, result: Patching) -> None:
    """Draw a Shapley value per player; thick: error of the sampled permutations, thin: interval over samples."""
    values = result.shapley
    if values is None:
        return
    colour, players = style.category_colours(1)[0], np.arange(len(values.value))
    axes.axhline(0, **_ZERO)
    if values.interval is not None:
        axes.vlines(players, values.interval.low, values.interval.high, color=colour, linewidth=_SAMPLES, gid="samples")
    axes.vlines(players, values.value - values.sampling, values.value + values.sampling, color=colour, alpha=0.45,
                linewidth=_ORDERS, gid="orders")  # fmt: skip
    axes.plot(players, values.value, "o", color=colour, markersize=2.4, gid="values")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda at, _: result.names[round(at)] if 0 <= round(at) < len(result.names) else "")
    )
    axes.set(xlabel="layer" if result.by == "layers" else "layer-head", ylabel=_SHORT[result.outcome],
             xlim=(-0.5, len(players) - 0.5))  # fmt: skip
    _set_percent_ticks(axes)
    axes.set_title(f"Shapley values, together {_signed_percent(values.total)}", loc="left")


def _draw_greedy(axes: Axes, result: Patching) -> None:
    """Draw the greedy curves over the number of switched players, on choosing and on judging samples."""
    curves = result.greedy
    if curves is None:
        return
    chosen, judged = style.category_colours(2)
    axes.axhline(0, **_ZERO)
    _draw_curve(axes, curves.chosen, None, chosen, "--", "chosen")
    _draw_curve(axes, curves.judged, curves.judged_interval, judged, "-", "judged")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.set(xlabel=f"{result.by} switched", ylabel=_SHORT[result.outcome])
    _set_percent_ticks(axes)
    axes.set_title("best first (greedy)", loc="left")


def _draw_curve(axes: Axes, values: Floats, band: Band, colour: Any, line: str, name: str) -> None:
    """Draw a greedy curve with its band, if any."""
    counts = np.arange(len(values))
    axes.plot(counts, values, line, color=colour, marker="o", markersize=2.4, gid=name)
    if band is not None:
        axes.fill_between(counts, band.low, band.high, color=colour, alpha=0.15, linewidth=0, gid=f"{name} band")


def _draw_mixtures(axes: Axes, result: Patching, letters: int) -> None:
    """Draw each named mixture's propagated sum and drift, over the baseline's; `letters`: per line of a name."""
    axes.axvline(1, **_ZERO)
    for index, one in enumerate(result.named):
        for name, value, interval, marker, offset in (
            ("propagated", one.heads.sum_ratio, one.heads.sum_ratio_interval, "s", -_OFFSET),
            ("drift", one.drift_ratio, one.drift_ratio_interval, "D", _OFFSET),
        ):
            colour = style.category_colours(4)[2 if name == "propagated" else 3]
            axes.errorbar([value], [index + offset], xerr=style.error_bars(value, interval), color=colour,
                          marker=marker, markersize=3, linewidth=0.9, gid=f"{name} {one.name}")  # fmt: skip
    axes.set_yticks(range(len(result.named)), [fold(one.name, letters) for one in result.named])
    axes.set(ylim=(len(result.named) - 0.5, -0.5), xlabel=f"over {result.sides[0]}'s everywhere (log axis)")
    style.set_log_axes(axes, x=True)
    axes.grid(visible=True, axis="x")


def _legend(result: Patching) -> list[Line2D]:
    """Return the legend entries for the drawn values, curves and mixtures."""
    value, colours = style.category_colours(1)[0], style.category_colours(4)
    handles = []
    if result.shapley is not None:
        drawn = f"orders: ± {100 * result.shapley.sampling.max():.1f} % at most"
        error = drawn if result.shapley.permutations else "all subsets: no error"
        handles += [
            Line2D([], [], color=value, linewidth=_SAMPLES, marker="o", markersize=2.4, label="value, over samples"),
            Line2D([], [], color=value, linewidth=_ORDERS, alpha=0.45, label=error),
        ]
    if result.greedy is not None:
        handles += [
            Line2D([], [], color=colours[0], linestyle="--", marker="o", markersize=2.4, label="chosen (flatters)"),
            Line2D([], [], color=colours[1], marker="o", markersize=2.4, label="judged on other samples"),
        ]
    mark: dict[str, Any] = {"linestyle": "", "markersize": 3}
    return [
        *handles,
        Line2D([], [], color=colours[2], marker="s", label="propagated, all heads", **mark),
        Line2D([], [], color=colours[3], marker="D", label="last layer's drift", **mark),
    ]


def _set_percent_ticks(axes: Axes) -> None:
    """Label the y axis in signed per cent."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: _signed_percent(share)))


def _signed_percent(share: float) -> str:
    """Return a share as signed per cent, '+9 %' for 0.09; with a decimal below 10 % where it is no whole per cent."""
    size = abs(100 * share)
    digits = 0 if size >= 10 or abs(size - round(size)) < _ROUNDING else 1
    return f"{100 * share:+z.{digits}f} %".replace("-", "−").replace("+0 %", "0 %")
