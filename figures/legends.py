"""How many columns of a legend fit into a figure's width."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib import rcParams
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

_POINTS_MM = 72 / 25.4


def columns(names: Iterable[str], width_mm: float, most: int) -> int:
    """At most `most`, and so few that the longest of the names is whole in each; one where even that does not fit."""
    size = FontProperties(size=rcParams["legend.fontsize"]).get_size_in_points()
    widest = max(float(TextPath((0, 0), name, size=size).get_extents().width) for name in names)
    handle, between = (
        (rcParams["legend.handlelength"] + rcParams["legend.handletextpad"]),
        rcParams["legend.columnspacing"],
    )
    room = width_mm * _POINTS_MM - 2 * size * (rcParams["legend.borderpad"] + rcParams["legend.borderaxespad"])
    return max(1, min(most, int((room + size * between) // (widest + size * (handle + between)))))
