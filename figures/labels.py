"""Labels of figures: results sorted by cache share, legend columns, and names under an axis with a key.

Names that would overlap under an axis are replaced by numbers with a key below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

from perturbkv.analyses import text
from perturbkv.analyses.names import fold
from perturbkv.figures import style

Result = TypeVar("Result")


def sort_by_cache_share(results: Sequence[Result], cache_share: Callable[[Result], float]) -> list[Result]:
    """Return the results sorted by cache share, ascending; unchanged where a share is NaN."""
    shares = [cache_share(result) for result in results]
    if np.isnan(shares).any():
        return list(results)
    return [results[index] for index in np.argsort(shares, kind="stable")]


def cache_shares_text(shares: tuple[float, float]) -> str:
    """Return baseline's and treatment's cache shares as text, '0.1 → 0.2', or once where they are equal."""
    return " → ".join(dict.fromkeys(map(text.decimal, shares)))


_POINTS_MM = 72 / 25.4


def legend_columns(names: Iterable[str], width_mm: float, most: int) -> int:
    """Return the largest number of legend columns, up to `most`, in which the longest name fits; at least 1."""
    size = FontProperties(size=rcParams["legend.fontsize"]).get_size_in_points()
    widest = max(float(TextPath((0, 0), name, size=size).get_extents().width) for name in names)
    handle = rcParams["legend.handlelength"] + rcParams["legend.handletextpad"]
    between = rcParams["legend.columnspacing"]
    available = width_mm * _POINTS_MM - 2 * size * (rcParams["legend.borderpad"] + rcParams["legend.borderaxespad"])
    return max(1, min(most, int((available + size * between) // (widest + size * (handle + between)))))


_LINE_MM, _ABOVE_MM = 3.0, 4.0
"""Height of a line of the key, and its distance from the panels' own legends."""
_ROOM, _LINES = 34, 2
"""Letters per line and lines that fit under a panel of a third of a page; longer names are replaced by numbers."""
_GAP = 1.5
"""Letters of the gap between two names."""
_LETTER_MM, _HANDLE_LETTERS = 1.15, 8
"""Width of a letter of the key, and letters that a column's handle and gap take."""


@dataclass(frozen=True)
class KeyNames:
    """Tick labels of an axis, and their key where the labels are numbers.

    Attributes:
        ticks: one per configuration, its parts on a line each, or its number.
        key: whole names, where `ticks` are their numbers; else none.
    """

    ticks: list[str]
    key: list[str]


def names_fit(names: Sequence[Sequence[str]]) -> bool:
    """Return whether tick names, each a list of lines, fit under a panel."""
    widths = [max(map(len, parts), default=0) + _GAP for parts in names]
    return sum(widths) <= _ROOM and max(map(len, names), default=0) <= _LINES


def key_names(parts: Sequence[Sequence[str]], numbered: bool) -> KeyNames:
    """Return tick labels with an empty key, or, if `numbered`, numbers from 1 with a key of names."""
    if not numbered:
        return KeyNames(["\n".join(one) for one in parts], [])
    return KeyNames([str(number) for number in range(1, len(parts) + 1)], [" ".join(one) for one in parts])


def key_height_mm(key: Sequence[str], width_mm: float) -> float:
    """Return an upper bound of the key's height, in mm."""
    if not key:
        return 0.0
    entries = _key_entries(key, width_mm)
    rows = -(-len(key) // _key_columns(entries, width_mm))
    return _ABOVE_MM + _LINE_MM * rows * max(entry.count("\n") + 1 for entry in entries)


def draw_key(figure: Figure, key: Sequence[str], colours: Sequence[Any], width_mm: float, foot_mm: float) -> None:
    """Draw the key above the figure's foot, which is `foot_mm` high: number, name and a line in the name's colour.

    `colours` may be fewer than the names: the rest have no line. An empty key draws nothing.
    """
    if not key:
        return
    entries, line_colours = _key_entries(key, width_mm), [*colours, *["none"] * (len(key) - len(colours))]
    handles = [
        Line2D([], [], color=colour, marker="o", markersize=2.4, label=entry)
        for entry, colour in zip(entries, line_colours, strict=True)
    ]
    look: dict[str, Any] = {"fontsize": style.points(6), "ncols": _key_columns(entries, width_mm), "handlelength": 1.4,
                            "columnspacing": 1.2, "labelspacing": 0.25, "borderaxespad": 0.2}  # fmt: skip
    if not style.current_style().notes:  # no foot below it
        figure.legend(handles=handles, loc="outside lower left", **look).set_gid(style.BELOW)
        return
    style.lay_out_above(figure, foot_mm + key_height_mm(key, width_mm))
    anchor = (0, foot_mm / style.height_mm(figure))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=anchor, **look).set_in_layout(False)


def _key_entries(key: Sequence[str], width_mm: float) -> list[str]:
    """Return 'number  name' per entry of the key, folded to the figure's width."""
    letters = int(width_mm / _LETTER_MM) - _HANDLE_LETTERS
    return [fold(f"{number}  {name}", letters) for number, name in enumerate(key, 1)]


def _key_columns(entries: Sequence[str], width_mm: float) -> int:
    """Return the largest number of columns in which the key's entries fit the width; at least 1."""
    longest = max(len(line) for entry in entries for line in entry.splitlines()) + _HANDLE_LETTERS
    return max(1, int(width_mm / _LETTER_MM) // longest)
