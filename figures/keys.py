"""Names of configurations under an axis; where they would run into each other, numbers, and their key below it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.naming import folded
from perturbkv.figures import style

_LINE_MM, _ABOVE_MM = 3.0, 4.0
"""Height of a line of the key, and what parts it from the panels' own legends."""
_ROOM, _LINES = 34, 2
"""Letters beside each other under a panel of a third of a page, and lines of them, before numbers stand there."""
_GAP = 1.5
_LETTER_MM, _HANDLE_LETTERS = 1.15, 8


@dataclass(frozen=True)
class Names:
    """What stands under an axis.

    Attributes:
        ticks: one per configuration, its parts on a line each, or its number.
        key: whole names, where `ticks` are their numbers; else none.
    """

    ticks: list[str]
    key: list[str]


def fits(names: Sequence[Sequence[str]]) -> bool:
    """Whether names, in parts, have room under one panel."""
    widths = [max(map(len, parts), default=0) + _GAP for parts in names]
    return sum(widths) <= _ROOM and max(map(len, names), default=0) <= _LINES


def names(parts: Sequence[Sequence[str]], numbered: bool) -> Names:
    """The names themselves, or numbers from 1 and a key."""
    if not numbered:
        return Names(["\n".join(one) for one in parts], [])
    return Names([str(place + 1) for place in range(len(parts))], [" ".join(one) for one in parts])


def height_mm(key: Sequence[str], width_mm: float) -> float:
    """What the key takes of a figure's height, at most."""
    if not key:
        return 0.0
    entries = _entries(key, width_mm)
    rows = -(-len(key) // _columns(entries, width_mm))
    return _ABOVE_MM + _LINE_MM * rows * max(entry.count("\n") + 1 for entry in entries)


def draw(figure: Figure, key: Sequence[str], colours: Sequence[Any], width_mm: float, foot_mm: float) -> None:
    """The key above the figure's foot: number, name, and the line that has its colour, where it has one."""
    if not key:
        return
    entries, drawn = _entries(key, width_mm), [*colours, *["none"] * (len(key) - len(colours))]
    handles = [
        Line2D([], [], color=colour, marker="o", markersize=2.4, label=entry)
        for entry, colour in zip(entries, drawn, strict=True)
    ]
    style.lay_out_above(figure, foot_mm + height_mm(key, width_mm))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, foot_mm / style.height_mm(figure)), fontsize=6,
                  ncols=_columns(entries, width_mm), handlelength=1.4, columnspacing=1.2, labelspacing=0.25,
                  borderaxespad=0.2).set_in_layout(False)  # fmt: skip


def _entries(key: Sequence[str], width_mm: float) -> list[str]:
    """Number and name, folded where the figure is too narrow for it."""
    room = int(width_mm / _LETTER_MM) - _HANDLE_LETTERS
    return [folded(f"{place}  {name}", room) for place, name in enumerate(key, 1)]


def _columns(entries: Sequence[str], width_mm: float) -> int:
    """How many entries of the key stand beside each other."""
    longest = max(len(line) for entry in entries for line in entry.splitlines()) + _HANDLE_LETTERS
    return max(1, int(width_mm / _LETTER_MM) // longest)
