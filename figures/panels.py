"""Small multiples of layer × head: one colour scale, marks on the heads that a claim does not hold for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from perturbkv.figures import style

_LAYER_MM, _LEAST_MM, _MOST_MM = 0.9, 24.0, 48.0
_TITLE_MM, _GAP_MM, _AROUND_MM = 3.2, 5.0, 16.0
_BAR_MM, _BAR_THICK_MM, _NARROW_FONT = 20.0, 3.2, 6.2
_DARK = 0.5
"""Marks are white on colours darker than this, black on the others."""


@dataclass(frozen=True)
class Map:
    """One panel: (layer, head) values, NaN left blank, and the heads that carry a mark.

    `row` names what the panels of a row share, at its left.
    """

    title: str
    values: NDArray[np.float64]
    marked: NDArray[np.bool_]
    row: str = ""


@dataclass(frozen=True)
class Scale:
    """Colours of the values from `low` to `high`; signed quantities take a diverging map.

    The bar ends in an arrow where values lie beyond: `extend` is neither, min, max or both.
    """

    low: float
    high: float
    label: str
    colours: Colormap
    extend: str = "neither"

    def shade(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(value,) luminance of each value's colour, from 0 to 1."""
        rgb = self.colours(Normalize(self.low, self.high)(values))[:, :3]
        return np.asarray(rgb @ np.array([0.2126, 0.7152, 0.0722]))


def draw(
    rows: Sequence[Sequence[Map]], width_mm: float, scale: Scale, title: str, named: Callable[[int], int]
) -> Figure:
    """The panels in their rows, with one colour bar beside them; `named` names layers. Call inside `style.use()`."""
    columns = max(len(row) for row in rows)
    panel = float(np.clip(rows[0][0].values.shape[0] * _LAYER_MM, _LEAST_MM, _MOST_MM))
    lines = [max(shown.title.count("\n") + 1 for shown in row) for row in rows]
    heights = [panel + count * _TITLE_MM + _GAP_MM for count in lines]
    figure = style.figure(width_mm, sum(heights) + _AROUND_MM + (_BAR_MM if width_mm < style.WIDE_MM else 0))
    axes = figure.subplots(len(rows), columns, squeeze=False)
    narrow = width_mm < style.WIDE_MM
    for shown, row in zip(rows, axes, strict=True):
        for place, at in enumerate(row):
            if place >= len(shown):
                at.set_axis_off()
                continue
            _panel(at, shown[place], scale)
            at.set_yticklabels([str(named(int(tick.get_text()))) for tick in at.get_yticklabels()])
            at.set_title(shown[place].title, loc="left", fontsize=_NARROW_FONT if narrow else None)
            at.tick_params(labelleft=place == 0)
            at.set_xlabel("head" if shown is rows[-1] else "")
            at.set_ylabel("\n".join(filter(None, (shown[0].row, "layer"))) if place == 0 else "")
    thickness = _BAR_THICK_MM / (panel * len(rows)) if narrow else 0.04
    bar = figure.colorbar(axes.flat[0].collections[0], ax=list(axes.flat), label=scale.label, extend=scale.extend,
                          location="bottom" if narrow else "right", fraction=thickness,
                          pad=0.02, aspect=25)  # fmt: skip
    bar.outline.set_visible(False)
    style.title(figure, title)
    return figure


def _panel(axes: Axes, shown: Map, scale: Scale) -> None:
    layers, heads = shown.values.shape
    sns.heatmap(shown.values, ax=axes, vmin=scale.low, vmax=scale.high, cmap=scale.colours, cbar=False,
                xticklabels=_every(heads), yticklabels=_every(layers), rasterized=layers * heads > 4000)  # fmt: skip
    axes.collections[0].set_gid("map")
    _mark(axes, shown, scale)
    axes.tick_params(length=2, rotation=0)


def _mark(axes: Axes, shown: Map, scale: Scale) -> None:
    """Dots much smaller than a cell, dark on light and light on dark: the cell's colour stays to be seen."""
    layers, heads = shown.values.shape
    places = np.argwhere(shown.marked)
    dark = np.nan_to_num(scale.shade(shown.values[shown.marked]), nan=1.0) < _DARK
    colours: Any = np.where(dark, "white", "black")
    axes.scatter(places[:, 1] + 0.5, places[:, 0] + 0.5, s=0.5 if layers * heads > 400 else 1.0, color=colours,
                 linewidths=0, gid="marks")  # fmt: skip


def _every(count: int) -> int:
    """Distance between tick labels: at most eight of them."""
    return max(1, -(-count // 8))
