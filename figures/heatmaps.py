"""Small multiples of layer × head: one colour scale, marks on the heads that a claim does not hold for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from perturbkv.figures import style

_MARK_COLOUR = "#ffffff"
_LAYER_MM, _LEAST_MM, _MOST_MM = 0.9, 24.0, 48.0
_TITLE_MM, _AROUND_MM = 3.2, 16.0
"""Of each line of a panel's title; three of them stand above a panel without more."""


@dataclass(frozen=True)
class Map:
    """One panel: (layer, head) values, NaN left blank, and the heads that carry a mark."""

    title: str
    values: NDArray[np.float64]
    marked: NDArray[np.bool_]


def draw(rows: Sequence[Sequence[Map]], width_mm: float, limits: tuple[float, float], title: str, label: str) -> Figure:
    """The panels in their rows, with one colour bar beside them. Call inside `style.use()`."""
    columns = max(len(row) for row in rows)
    height = np.clip(rows[0][0].values.shape[0] * _LAYER_MM, _LEAST_MM, _MOST_MM)
    lines = max(3, *(shown.title.count("\n") + 1 for row in rows for shown in row))
    figure = style.figure(width_mm, len(rows) * (height + lines * _TITLE_MM) + _AROUND_MM)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for shown, row in zip(rows, axes, strict=True):
        for place, panel in enumerate(row):
            if place >= len(shown):
                panel.set_axis_off()
                continue
            _panel(panel, shown[place], limits)
            panel.set_xlabel("head" if shown is rows[-1] else "")
            panel.set_ylabel("layer" if place == 0 else "")
    bar = figure.colorbar(axes.flat[0].collections[0], ax=list(axes.flat), label=label, fraction=0.04, pad=0.02)
    bar.outline.set_visible(False)
    style.title(figure, title)
    return figure


def _panel(axes: Axes, shown: Map, limits: tuple[float, float]) -> None:
    layers, heads = shown.values.shape
    sns.heatmap(shown.values, ax=axes, vmin=limits[0], vmax=limits[1], cmap=style.layer_colours(), cbar=False,
                xticklabels=_every(heads), yticklabels=_every(layers), rasterized=layers * heads > 4000)  # fmt: skip
    axes.collections[0].set_gid("map")
    places = np.argwhere(shown.marked)
    axes.scatter(places[:, 1] + 0.5, places[:, 0] + 0.5, s=2.2 if layers * heads > 400 else 4.5, color=_MARK_COLOUR,
                 edgecolors="black", linewidths=0.3, gid="marks")  # fmt: skip
    axes.set_title(shown.title, loc="left")
    axes.tick_params(length=2, rotation=0)


def _every(count: int) -> int:
    """Distance between tick labels: at most eight of them."""
    return max(1, -(-count // 8))
