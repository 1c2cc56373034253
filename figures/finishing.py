"""The layout of figures for paper and talk: words folded to their room, notes in the caption, low rows of panels."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import Any

from matplotlib.axes import Axes
from matplotlib.text import Text

from perturbkv.analyses.names import fold
from perturbkv.captions import CaptionedFigure, keep_together
from perturbkv.errors import NarrowFigureError
from perturbkv.figures import style

MOST_ROW_MM, MOST_FIGURE_MM = 80, 150
"""Most height of a figure per row of panels, and of one of up to three rows, which leaves room for its caption on a
page, unless more names than that stand at its panels."""
_FOOT_MM, _SLIDE, _LEAST_PANEL_MM = 12.0, 9 / 16, 14.0
"""Height that a figure has for the foot of a screen; height of a slide over its width; least width of a panel."""
_TITLE_LINES, _NAMES_SHARE, _SAFE = 2, 0.36, 0.95
"""Lines of a title in the picture; most of a row's width for names at its left; of a measured room, what is used."""


def finish(figure: CaptionedFigure, width_mm: float) -> None:
    """Give a drawn figure without notes its height, and fold its words to their room.

    Args:
        figure: as its module drew it, inside `style.use()`.
        width_mm: the printed width.

    Raises:
        NarrowFigureError: a panel has no room at this width; the message says which width has.
    """
    if style.current_style().slide:
        style.write_on_top(figure, figure.headline, fontsize=style.points(9))
    panels, bars = (
        [axes for axes in figure.axes if axes.axison and hasattr(axes, "_colorbar") is of_bar]
        for of_bar in (False, True)
    )
    rows = Counter(_first_row(axes) for axes in panels)
    _set_height(figure, panels, len(rows))
    named = [axes for axes in panels if _has_row_names(axes)]
    for axes in named:
        beside = sum(_first_row(other) == _first_row(axes) for other in named)
        _fold_row_names(axes, _NAMES_SHARE * figure.bbox.width / beside)
    _lay_out(figure)
    narrowest = min((axes.get_position().width * width_mm for axes in panels), default=width_mm)
    if narrowest < _LEAST_PANEL_MM:
        raise NarrowFigureError(width_mm, ceil(width_mm + max(rows.values()) * (_LEAST_PANEL_MM - narrowest)))
    for axes in panels:
        _fold_title(figure, axes, panels)
    for axes in (*panels, *bars):
        box = axes.get_window_extent()
        _fold(axes.xaxis.label, box.width)
        _fold(axes.yaxis.label, box.height)


def _first_row(axes: Axes) -> int:
    """Return the row of the figure's grid in which a panel begins."""
    place: Any = axes.get_subplotspec()
    return int(place.get_topmost_subplotspec().rowspan.start)


def _lay_out(figure: CaptionedFigure) -> None:
    """Give every panel its place, without drawing."""
    engine: Any = figure.get_layout_engine()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "constrained_layout not applied")  # panels without room are refused
        engine.execute(figure)


def _set_height(figure: CaptionedFigure, panels: Sequence[Axes], rows: int) -> None:
    """Make a figure lower by the foot that it does not have, and as low as a paper needs, or as high as a slide.

    One with names of rows keeps its height.
    """
    height = figure.get_figheight() * style.INCH_MM
    if not any(map(_has_row_names, panels)):
        height = min(height - _FOOT_MM, MOST_ROW_MM * max(1, rows), MOST_FIGURE_MM if rows <= 3 else height)
    if style.current_style().slide:
        height = max(height, _SLIDE * figure.get_figwidth() * style.INCH_MM)
    figure.set_figheight(height / style.INCH_MM)


def _fold_title(figure: CaptionedFigure, axes: Axes, panels: Sequence[Axes]) -> None:
    """Fold the first lines of a panel's title to the room up to its neighbour; the caption has it whole."""
    title: Text = axes._left_title if axes.get_title(loc="left") else axes.title  # type: ignore[attr-defined]
    whole, left = title.get_text(), axes.get_window_extent().x0
    ends = [other.get_window_extent().x0 for other in panels if _first_row(other) == _first_row(axes)]
    lines = whole.split("\n")
    if len(lines) > _TITLE_LINES:
        figure.remarks.append((axes, ""))
    figure.titles[axes] = whole
    title.set_text("\n".join(lines[:_TITLE_LINES]))
    _fold(title, min((end for end in ends if end > left + 1), default=figure.bbox.width) - left)


def _fold(text: Text, room: float) -> None:
    """Fold a text that is wider than a room in pixels, by the width of its own letters; typeset symbols stay whole."""
    words, box = text.get_text(), text.get_window_extent()
    width = box.height if text.get_rotation() == 90 else box.width
    if width > _SAFE * room and not (text.get_parse_math() and "$" in words):
        letters = int(_SAFE * room / width * max(map(len, words.split("\n"))))
        text.set_text("\n".join(fold(keep_together(line), letters) for line in words.split("\n")))


def _has_row_names(axes: Axes) -> bool:
    """Return whether a panel's rows have names: ticks that are no numbers, and visible."""
    letters = "".join(label.get_text() for label in axes.get_yticklabels())
    return any(map(str.isalpha, letters)) and axes.yaxis.get_tick_params().get("labelleft", True)


def _fold_row_names(axes: Axes, room: float) -> None:
    """Fold the names of a panel's rows to a room in pixels; typeset symbols stay whole."""
    labels = axes.get_yticklabels()
    if not any("$" in label.get_text() for label in labels):
        for label in labels:
            _fold(label, room)
        axes.set_yticks(axes.get_yticks(), [label.get_text() for label in labels])
