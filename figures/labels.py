"""Labels of figures: results sorted by cache share, cache shares as text, and legends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from perturbkv.analyses import text
from perturbkv.analyses.names import fold
from perturbkv.figures import style

Result = TypeVar("Result")
_USUAL_ROWS, _ROW_MM = 2, 3.6
"""Rows of a legend for which every figure has room, and the height of one."""


def sort_by_cache_share(results: Sequence[Result], cache_share: Callable[[Result], float]) -> list[Result]:
    """Return the results sorted by cache share, ascending; unchanged where a share is NaN."""
    shares = [cache_share(result) for result in results]
    if np.isnan(shares).any():
        return list(results)
    return [results[index] for index in np.argsort(shares, kind="stable")]


def cache_shares_text(shares: tuple[float, float]) -> str:
    """Return baseline's and treatment's cache shares as text, '0.1 → 0.2', or once where they are equal."""
    return " → ".join(dict.fromkeys(map(text.decimal, shares)))


def draw_legend(figure: Figure, handles: Sequence[Any], most: int = 4) -> None:
    """Draw a legend above the panels, in as many columns, up to `most`, as its longest name lets fit.

    A name that is wider than the figure is folded. The figure grows with more than two rows.
    """
    size = FontProperties(size=rcParams["legend.fontsize"]).get_size_in_points()
    handle = size * (rcParams["legend.handlelength"] + rcParams["legend.handletextpad"])
    between = size * rcParams["legend.columnspacing"]
    around = 2 * size * (rcParams["legend.borderpad"] + rcParams["legend.borderaxespad"])
    room = figure.get_figwidth() * 72 - around
    widest, lines = 0.0, 1
    for one in handles:
        name = str(one.get_label())
        width = float(TextPath((0, 0), name, size=size).get_extents().width)
        if width > room - handle:
            one.set_label(fold(name, int(0.95 * len(name) * (room - handle) / width)))
        widest, lines = max(widest, min(width, room - handle)), max(lines, one.get_label().count("\n") + 1)
    columns = max(1, min(most, len(handles), int((room + between) // (widest + handle + between))))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns)
    style.grow(figure, (lines * -(-len(handles) // columns) - _USUAL_ROWS) * _ROW_MM)
