"""Shared panels: maps of layer × head on one colour scale, and ratios of two configurations with intervals.

Maps mark the heads for which a claim fails. Ratios are of perturbation, summed and of the median head, and of drift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from perturbkv.analyses.heads.head_comparison import HeadKind
from perturbkv.analyses.outcomes import Outcome
from perturbkv.analyses.stats.intervals import OptionalInterval
from perturbkv.figures import style

_LAYER_MM, _LEAST_MM, _MOST_MM = 0.9, 24.0, 48.0
"""Height of a map per layer, and the least and the most of a map."""
_TITLE_MM, _GAP_MM, _AROUND_MM = 3.2, 5.0, 16.0
"""Heights of a line of a map's title, between rows of maps, and around them."""
_BAR_MM, _BAR_THICK_MM, _NARROW_FONT = 20.0, 3.2, 6.2
"""In one column: room for the colour bar below, its thickness, and the size of a map's title."""


def panel_grid(
    count: int, columns: int, width_mm: float, row_mm: float, around_mm: float, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, row by row in at most `columns`; `shared`: as of `Figure.subplots`."""
    columns = max(1, min(columns, count))
    rows = max(1, -(-count // columns))
    figure = style.figure(width_mm, rows * row_mm + around_mm)
    panels = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]


def label_outer(panels: Sequence[Axes], x: str, y: str) -> None:
    """Name the x axis of the lowest panel of each column and the y axis of the left one; others have no tick labels."""
    for index, axes in enumerate(panels):
        columns = axes.get_gridspec().ncols  # type: ignore[union-attr]
        is_lowest, is_left = index + columns >= len(panels), index % columns == 0
        axes.set(xlabel=x if is_lowest else "", ylabel=y if is_left else "")
        axes.tick_params(labelbottom=is_lowest, labelleft=is_left)


@dataclass(frozen=True)
class Map:
    """A panel of (layer, head) values, NaN left blank, and the heads that carry a mark.

    `row` is the label of the row of panels.
    """

    title: str
    values: NDArray[np.float64]
    marked: NDArray[np.bool_]
    row: str = ""


@dataclass(frozen=True)
class Scale:
    """The colour scale of a map, from `low` to `high`.

    The bar ends in an arrow where values are beyond it: `extend` is neither, min, max or both.
    """

    low: float
    high: float
    label: str
    colours: Colormap
    extend: str = "neither"


def draw_maps(
    rows: Sequence[Sequence[Map]], width_mm: float, scale: Scale, title: str, layer_name: Callable[[int], int]
) -> Figure:
    """Draw rows of maps with one colour bar; `layer_name`: index -> layer's number. Call inside `style.use()`."""
    narrow, columns = width_mm < style.WIDE_MM, max(len(row) for row in rows)
    map_mm = float(np.clip(rows[0][0].values.shape[0] * _LAYER_MM, _LEAST_MM, _MOST_MM))
    lines = [max(shown.title.count("\n") + 1 for shown in row) for row in rows]
    heights = [map_mm + count * _TITLE_MM + _GAP_MM for count in lines]
    figure = style.figure(width_mm, sum(heights) + _AROUND_MM + (_BAR_MM if narrow else 0))
    axes = figure.subplots(len(rows), columns, squeeze=False)
    title_font = style.points(_NARROW_FONT) if narrow else None
    for maps, panels in zip(rows, axes, strict=True):
        for panel in panels[len(maps) :]:
            panel.set_axis_off()
        for shown, panel in zip(maps, panels, strict=False):
            first = shown is maps[0]
            _draw_map(panel, shown, scale)
            panel.set_yticklabels([str(layer_name(int(tick.get_text()))) for tick in panel.get_yticklabels()])
            panel.set_title(shown.title, loc="left", fontsize=title_font)
            panel.tick_params(labelleft=first)
            panel.set_xlabel("head" if maps is rows[-1] else "")
            panel.set_ylabel("\n".join(filter(None, (shown.row, "layer"))) if first else "")
    thickness = _BAR_THICK_MM / (map_mm * len(rows)) if narrow else 0.04
    bar = figure.colorbar(axes.flat[0].collections[0], ax=list(axes.flat), label=scale.label, extend=scale.extend,
                          location="bottom" if narrow else "right", fraction=thickness,
                          pad=0.02, aspect=25)  # fmt: skip
    bar.outline.set_visible(False)
    style.set_title(figure, title)
    return figure


def draw_heatmap(axes: Axes, values: NDArray[Any], low: float | None, high: float | None, colours: Any) -> None:
    """Draw a (layer, head) matrix as cells without lines, with at most eight labels per axis."""
    layers, heads = values.shape
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.pcolormesh(np.ma.masked_invalid(values), vmin=low, vmax=high, cmap=colours, linewidth=0, edgecolor="white",
                    gid="map", rasterized=layers * heads > 4000)  # fmt: skip
    axes.set(xlim=(0, heads), ylim=(layers, 0), xlabel="", ylabel="")
    for axis, count in ((axes.xaxis, heads), (axes.yaxis, layers)):
        shown = range(0, count, max(1, -(-count // 8)))  # at most eight labels
        axis.set_ticks([index + 0.5 for index in shown], labels=[str(index) for index in shown])
    for label in axes.get_yticklabels():
        label.set_verticalalignment("center")


def _draw_map(axes: Axes, shown: Map, scale: Scale) -> None:
    """Draw one map, with a black dot in a white ring on marked cells."""
    draw_heatmap(axes, shown.values, scale.low, scale.high, scale.colours)
    indices = np.argwhere(shown.marked)
    axes.scatter(indices[:, 1] + 0.5, indices[:, 0] + 0.5, s=0.5 if shown.marked.size > 400 else 1.0, color="black",
                 edgecolors="white", linewidths=0.2, gid="marks")  # fmt: skip
    axes.tick_params(length=2, rotation=0)


_DRIFT, _DRIFT_COLOUR = 0.36, "0.25"
"""Offset in the row and colour of the drift's mark."""
Markers = Mapping[str, tuple[str, float]]
"""Name of a ratio -> its marker and its offset in the row."""
KIND_MARKERS: Markers = {"isolated": ("o", -0.16), "propagated": ("s", 0.16)}


def draw_ratio(axes: Axes, index: int, kind: str, measured: HeadKind, reason: str) -> None:
    """Draw an isolated or propagated ratio, of sums and of the median head, in row `index`.

    Where the ratio is NaN or not positive, `reason` is written instead.
    """
    _, offset = KIND_MARKERS[kind]
    ratio = measured.sum_ratio
    if np.isnan(ratio) or ratio <= 0:
        axes.text(1, index + offset, f" {kind}: {reason}", fontsize=style.points(5.5), color="0.5", va="center")
        return
    colour = style.category_colours(2)[list(KIND_MARKERS).index(kind)]
    axes.plot([measured.median_ratio], [index + offset], linestyle="", color=colour, marker="|", markersize=4.5,
              markeredgewidth=0.9, gid=f"median {kind}")  # fmt: skip
    draw_sum_ratio(axes, index, kind, ratio, measured.sum_ratio_interval)


def draw_drift(axes: Axes, index: int, row: Outcome) -> None:
    """Draw the ratio of the last layer's drift in row `index`, below the heads' ratios.

    Nothing is drawn where the ratio is NaN or not positive.
    """
    if np.isnan(row.drift_ratio) or row.drift_ratio <= 0:
        return
    axes.errorbar([row.drift_ratio], [index + _DRIFT], xerr=style.error_bars(row.drift_ratio, row.drift_ratio_interval),
                  color=_DRIFT_COLOUR, marker="D", markersize=2.6, linewidth=0.9, gid="drift")  # fmt: skip


def drift_entry() -> Line2D:
    """Return the legend entry for `draw_drift`: the last layer's drift."""
    return Line2D([], [], linestyle="", marker="D", markersize=3, color=_DRIFT_COLOUR, label="last layer's drift")


def ratio_entries() -> list[Line2D]:
    """Return the legend entries for `draw_ratio`: sums over heads by kind, and the median head."""
    sums = marker_entries((marker, f"{kind}, sum of heads") for kind, (marker, _) in KIND_MARKERS.items())
    return [*sums, Line2D([], [], linestyle="", marker="|", markersize=5, color="0.3", label="the median head")]


def draw_sum_ratio(
    axes: Axes, row: int, name: str, ratio: float, interval: OptionalInterval, markers: Markers = KIND_MARKERS
) -> None:
    """Draw a ratio of sums over heads with its interval in a row; nothing where it is NaN or not positive."""
    marker, offset = markers[name]
    if np.isnan(ratio) or ratio <= 0:
        return
    colour = style.category_colours(len(markers))[list(markers).index(name)]
    axes.errorbar([ratio], [row + offset], xerr=style.error_bars(ratio, interval), color=colour, marker=marker,
                  markersize=3, linewidth=0.9, gid=name)  # fmt: skip


def marker_entries(labelled_markers: Iterable[tuple[str, str]], size: float = 3.5) -> list[Line2D]:
    """Return a legend entry per (marker, label), in the colours of categories."""
    pairs = list(labelled_markers)
    return [
        Line2D([], [], linestyle="", marker=marker, markersize=size, color=colour, label=label)
        for (marker, label), colour in zip(pairs, style.category_colours(len(pairs)), strict=True)
    ]


def finish_ratio_panel(axes: Axes, names: Sequence[str], title: str) -> None:
    """Set the rows, the logarithmic x axis and the title of a panel of ratios."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.5)
    style.set_log_axes(axes, x=True)
    axes.tick_params(labelbottom=True)
    axes.grid(visible=True, axis="x")
    axes.set_title(title, loc="left")
