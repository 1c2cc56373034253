"""The layout of figures for paper and talk: words folded to their room, notes in the caption, low rows of panels.

What a figure's module drew is measured and moved here; its numbers stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from string import ascii_lowercase
from typing import Any, NoReturn

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import Collection, PathCollection, QuadMesh
from matplotlib.gridspec import GridSpec
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Annotation, Text

from perturbkv.analyses.names import fold
from perturbkv.captions import CaptionedFigure, keep_together
from perturbkv.errors import NarrowFigureError
from perturbkv.figures import style

MOST_ROW_MM, MOST_FIGURE_MM, _LEAST_ROW_MM = 80, 150, 22.0
"""Most height of a figure per row of panels, and of a figure, which leaves room for its caption on a page, unless more
names than that stand at its panels; least height to which a row is made lower for that."""
_INCH_MM = 25.4
_PANEL_MM, _SQUARE_MM, _MAP_MM = 36.0, 44.0, (18.0, 32.0)
"""Heights of panels: of curves, of squares, and least and most of a map."""
_NAMED_MM, _LINE_MM, _MARK_MM, _LEAST_MM = 4.2, 3.2, 1.9, 16.0
"""Height of a row with a name, of each line of a longer name, of each mark in a row, and of a panel with few rows."""
_LEAST_PANEL_MM, _LEGEND_MM, _TITLE_LINES = 14.0, 45.0, 2
"""Least width of a panel, and of one that has room for a legend on it; most lines of a panel's title."""
_NAMES_SHARE, _SAFE, _GAP_MM, _LETTER_MM = 0.36, 0.97, 1.0, 2.6
"""Most of a column's width for names at its left; of a measured room, what is used; distance between neighbours;
room of a letter before a title."""
_SLIDE, _TRIES, _LEAST_LETTERS, _HANDLE = 9 / 16, 5, 6, 4.8
"""Height of a slide over its width; rounds of folding, fewest letters of a line; width of a legend's handle, in em."""


def finish(figure: CaptionedFigure, width_mm: float) -> None:
    """Finish a drawn figure: one without notes gets its words, rows and height fitted; then the last steps.

    Args:
        figure: as its module drew it, inside `style.use()`.
        width_mm: the printed width, for the message where it is too small.

    Raises:
        NarrowFigureError: a panel has no room at this width; the message says which width has.
    """
    if not style.current_style().notes:
        _fit(figure, width_mm)
    for step in figure.last_steps:
        step()


def _fit(figure: CaptionedFigure, width_mm: float) -> None:
    """Fold words to their room, and give every row of panels its height, and the figure the sum."""
    panels, bars = (
        [axes for axes in figure.axes if axes.axison and hasattr(axes, "_colorbar") is of_bar]
        for of_bar in (False, True)
    )
    _magnify(figure)
    _fold_words(figure, panels, bars)
    _set_height(figure, panels)
    if not _lay_out(figure):
        _refuse(width_mm, width_mm + _LEAST_PANEL_MM * style.scale() * max(map(len, _rows(panels))))
    _clear_overlaps(figure, panels, bars)
    _refuse_narrow(panels, width_mm)


def _fold_words(figure: CaptionedFigure, panels: Sequence[Axes], bars: Sequence[Axes]) -> None:
    """Fold the names of axes and rows, legends and titles to their room, titles after a first layout."""
    for axes in panels:
        _fold_axis_texts(figure, axes, panels)
    for bar in bars:
        _fold_label(bar.yaxis.label, bar.get_window_extent().height)
        _fold_label(bar.xaxis.label, bar.get_window_extent().width)
    _lift_legends(figure, panels)
    for legend in list(figure.legends):
        _fit_legend(figure, legend)
    _write_title(figure)
    _lay_out(figure)
    for axes in panels:
        _fold_label(axes.xaxis.label, _label_room(figure, axes, panels))
        _fold_title(figure, axes, [*panels, *bars])
    _letter_titles(figure, panels)


def _clear_overlaps(figure: CaptionedFigure, panels: Sequence[Axes], bars: Sequence[Axes]) -> None:
    """Cut, leave out or move what lies on something else, now that the panels have their places."""
    thinned: set[int] = set()
    for axes in panels:
        _trim_title(figure, axes)
        _thin_ticks(axes, thinned)
        _drop_numbers(axes)
    for bar in bars:
        _thin_ticks(bar, thinned)
    _lower_legends(figure, panels)


def _lay_out(figure: CaptionedFigure) -> bool:
    """Give every panel its place, without drawing; return whether there is room for it."""
    engine = figure.get_layout_engine()
    assert engine is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.execute(figure)
    for axes in figure.axes:  # squares and colour bars fill a part of their place
        locator = axes.get_axes_locator()
        axes.apply_aspect(locator(axes, None) if locator else None)  # type: ignore[arg-type,truthy-function]
    return not any("collapsed" in str(one.message) for one in caught)


def _pixels_per_mm(figure: CaptionedFigure) -> float:
    """Return how many pixels of the figure a millimetre has, as lengths are before they are magnified."""
    return figure.dpi / _INCH_MM * style.scale()


def _magnify(figure: CaptionedFigure) -> None:
    """Magnify lines and marks as the style magnifies text."""
    factor = style.scale()
    if factor == 1:
        return
    holders: list[Any] = [*figure.axes, *figure.legends, *(axes.get_legend() for axes in figure.axes)]
    for holder in filter(None, holders):
        children = holder.legend_handles if isinstance(holder, Legend) else [
            *holder.lines, *holder.collections, *holder.patches
        ]  # fmt: skip
        for artist in children:
            _magnify_artist(artist, factor)
        for text in getattr(holder, "texts", ()) if isinstance(holder, Axes) else ():
            if isinstance(text, Annotation) and text.arrow_patch is not None:
                text.arrow_patch.set_linewidth(factor * text.arrow_patch.get_linewidth())
                text.arrow_patch.set_mutation_scale(factor * text.arrow_patch.get_mutation_scale())


def _magnify_artist(artist: Any, factor: float) -> None:
    """Magnify a line's width and marks, a collection's, or a patch's edge."""
    if isinstance(artist, Line2D):
        artist.set_linewidth(factor * artist.get_linewidth())
        artist.set_markersize(factor * artist.get_markersize())
        artist.set_markeredgewidth(factor * artist.get_markeredgewidth())
    elif isinstance(artist, Collection):
        artist.set_linewidth((factor * np.atleast_1d(artist.get_linewidth())).tolist())
        if isinstance(artist, PathCollection):
            artist.set_sizes(factor**2 * np.asarray(artist.get_sizes()))
    elif isinstance(artist, Patch):
        artist.set_linewidth(factor * artist.get_linewidth())


def _write_title(figure: CaptionedFigure) -> None:
    """Write a slide's headline: at its top, or above the legend that is there; a warning that stands there stays."""
    look: dict[str, Any] = {"fontsize": style.points(9), "fontweight": "bold"}
    if not style.current_style().magnified or figure.get_suptitle():
        return
    above = [legend for legend in figure.legends if legend.get_gid() != style.BELOW]
    if not above:
        figure.suptitle(figure.headline, x=0.008, ha="left", **look)
    elif not above[0].get_title().get_text():
        above[0].set_title(figure.headline)
        above[0].get_title().set(**look)
        above[0].set_alignment("left")


def _fold_title(figure: CaptionedFigure, axes: Axes, others: Sequence[Axes]) -> None:
    """Fold a panel's title to its room, at most two lines; the caption has it whole where it has more."""
    for title in (axes.title, axes._left_title):  # type: ignore[attr-defined]
        whole = title.get_text()
        if not whole:
            continue
        figure.titles[axes] = whole
        is_centred = title is axes.title
        room = _SAFE * (axes.get_window_extent().width if is_centred else _left_title_room(figure, axes, others))
        folded = [_fold(title, line, room).split("\n") for line in whole.split("\n")]
        if sum(map(len, folded)) <= _TITLE_LINES:
            title.set_text("\n".join(line for lines in folded for line in lines))
        else:
            title.set_text("\n".join(_cut(title, line, room) for line in _first_lines(folded)))
            figure.remarks.append((axes, ""))  # so that the caption has the whole title


def _left_title_room(figure: CaptionedFigure, axes: Axes, others: Sequence[Axes]) -> float:
    """Return the room of a panel's title in pixels: to the next panel or bar at its right, or to the figure's edge."""
    left = axes.get_window_extent().x0
    ends = [other.get_window_extent().x0 for other in others if _same_row(axes, other)]
    end = min((x for x in ends if x > left + 1), default=figure.bbox.width)
    return float(end - left - (_GAP_MM + _LETTER_MM) * _pixels_per_mm(figure))


def _first_lines(folded: Sequence[list[str]]) -> list[str]:
    """Return the lines of a title that is too long: whole lines of it while they fit, or the first with an ellipsis.

    `folded`: the lines into which each line of the title is folded.
    """
    shown = folded[0]
    for lines in folded[1:]:
        if len(shown) + len(lines) > _TITLE_LINES:
            break
        shown = [*shown, *lines]
    if len(shown) > _TITLE_LINES:
        return [*shown[: _TITLE_LINES - 1], f"{shown[_TITLE_LINES - 1]} …"]
    return shown


def _cut(text: Text, line: str, room: float) -> str:
    """Return a line that ends with an ellipsis where it is wider than a room in pixels."""
    width = _width(text, line)
    return line if width <= room else f"{line[: max(1, int(len(line) * room / width) - 1)]}…"


def _trim_title(figure: CaptionedFigure, axes: Axes) -> None:
    """Cut a title that goes beyond the figure's edge, as its panel moved after it was folded."""
    title = axes._left_title  # type: ignore[attr-defined]
    box, whole = title.get_window_extent(), title.get_text()
    if whole and box.x1 > figure.bbox.width:
        title.set_text("\n".join([_cut(title, line, figure.bbox.width - box.x0) for line in whole.split("\n")]))
        figure.remarks.append((axes, ""))  # so that the caption has the whole title


def _letter_titles(figure: CaptionedFigure, panels: Sequence[Axes]) -> None:
    """Put a letter before shortened titles of which several are alike."""
    shortened = [axes for axes, _ in figure.remarks if axes in panels]
    titles = [axes.get_title(loc="left") for axes in shortened]
    if len(set(titles)) == len(set(shortened)):
        return
    for letter, axes in zip(ascii_lowercase, dict.fromkeys(shortened), strict=False):
        axes.set_title(f"{letter}  {axes.get_title(loc='left')}", loc="left", fontsize=axes._left_title.get_fontsize())  # type: ignore[attr-defined]
        figure.titles[axes] = f"({letter}) {figure.titles[axes]}"


def _same_row(one: Axes, other: Axes) -> bool:
    """Return whether panels, or a panel and a colour bar, stand side by side."""
    first, second = one.get_window_extent(), other.get_window_extent()
    return bool(min(first.y1, second.y1) - max(first.y0, second.y0) > 0.4 * min(first.height, second.height))


def _fold(text: Text, words: str, room: float) -> str:
    """Return words folded to a room in pixels, by the width of the text's own letters.

    Unchanged where they fit, or hold typeset symbols; a long word may be wider than the room.
    """
    if (text.get_parse_math() and "$" in words) or not words.strip() or _width(text, words) <= room:
        return words
    words = keep_together(words)
    letters = int(len(words) * room / _width(text, words))
    for fewer in range(_TRIES):
        folded = fold(words, max(_LEAST_LETTERS, letters - fewer))
        if _width(text, folded) <= room:
            break
    return folded


def _width(text: Text, words: str) -> float:
    """Return the width in pixels, along its line, that a text would have with these words; the text stays as it is."""
    old = text.get_text()
    text.set_text(words)
    box = text.get_window_extent()
    text.set_text(old)
    return float(box.height if text.get_rotation() == 90 else box.width)


def _fold_label(name: Text, room: float) -> None:
    """Fold the name of an axis to a room in pixels."""
    if name.get_text() and name.get_visible():
        name.set_text("\n".join(_fold(name, line, room) for line in name.get_text().split("\n")))


def _fold_axis_texts(figure: CaptionedFigure, axes: Axes, panels: Sequence[Axes]) -> None:
    """Fold the names of a panel's axes to its size, and the names of its rows to a part of its column."""
    _fold_label(axes.xaxis.label, _label_room(figure, axes, panels))
    _fold_label(axes.yaxis.label, max(axes.get_window_extent().height, _PANEL_MM * _pixels_per_mm(figure)) * _SAFE)
    if _row_names(axes):
        row = [other.yaxis.get_tick_params() for other in panels if _same_row(axes, other)]
        named = [one for one in row if one.get("labelleft", True)]
        _fold_row_names(axes, _NAMES_SHARE * figure.bbox.width / max(1, len(named)))


def _fold_row_names(axes: Axes, room: float) -> None:
    """Fold the names of a panel's rows to a room in pixels; typeset ones stay typeset."""
    labels = [tick.label1 for tick in axes.yaxis.get_major_ticks()]
    folded = [_fold(label, label.get_text(), room) for label in labels]
    if folded == [label.get_text() for label in labels]:
        return
    math = [label.get_parse_math() for label in labels]
    axes.set_yticks(axes.get_yticks(), folded)
    for tick, parse in zip(axes.yaxis.get_major_ticks(), math, strict=True):
        tick.label1.set_parse_math(parse)


def _label_room(figure: CaptionedFigure, axes: Axes, panels: Sequence[Axes]) -> float:
    """Return the room of the name of a panel's x axis, in pixels: to its neighbours', or to the figure's edge."""
    boxes = [other.get_window_extent() for other in panels if _same_row(axes, other) and other is not axes]
    middle = (axes.get_window_extent().x0 + axes.get_window_extent().x1) / 2
    pitch = min((abs((box.x0 + box.x1) / 2 - middle) for box in boxes), default=figure.bbox.width)
    edge = 2 * min(middle, figure.bbox.width - middle)
    return float(min(pitch, edge) - 2 * _GAP_MM * _pixels_per_mm(figure))


def _row_names(axes: Axes) -> list[str]:
    """Return the names of a panel's rows; none where its ticks are numbers or invisible."""
    labels = [label.get_text() for label in axes.get_yticklabels()]
    return labels if any(any(map(str.isalpha, label)) for label in labels) else []


def _lift_legends(figure: CaptionedFigure, panels: Sequence[Axes]) -> None:
    """Move a legend that stands on a small panel's numbers above the figure."""
    for axes in panels:
        legend, box = axes.get_legend(), axes.get_window_extent()
        large = axes.get_aspect() == "auto" and box.width > _LEGEND_MM * _pixels_per_mm(figure)
        if legend is None or legend.get_gid() or large or legend.get_window_extent().x0 > box.x1:
            continue
        handles, words = legend.legend_handles, [text.get_text() for text in legend.get_texts()]
        legend.remove()
        figure.legend(handles=handles, labels=words, loc="outside upper left", ncols=len(words))


def _fit_legend(figure: CaptionedFigure, legend: Legend) -> None:
    """Draw a figure's legend again with fewer columns, and with folded names, where it is wider than the figure.

    Names are folded where even the widest of them does not fit its column.
    """
    room, width = figure.bbox.width, legend.get_window_extent().width
    if width <= room:
        return
    columns = max(1, int(legend._ncols * room / width))  # type: ignore[attr-defined]
    texts = legend.get_texts()
    widest = max(text.get_window_extent().width for text in texts)
    handle = _HANDLE * float(texts[0].get_fontsize()) / 72 * figure.dpi
    fits = widest + handle <= room / columns
    words = [text.get_text() if fits else _fold(text, text.get_text(), room / columns - handle) for text in texts]
    title, math = legend.get_title(), [text.get_parse_math() for text in texts]
    options: dict[str, Any] = {"loc": "outside upper left", "fontsize": texts[0].get_fontsize(), "ncols": columns}
    if legend.get_gid() == style.BELOW:
        options["loc"] = "outside lower left"
    legend.remove()
    redrawn = figure.legend(handles=legend.legend_handles, labels=words, **options)
    for text, parse in zip(redrawn.get_texts(), math, strict=True):
        text.set_parse_math(parse)
    if title.get_text():
        redrawn.set_title(title.get_text())
        redrawn.get_title().set(color=title.get_color(), fontweight=title.get_fontweight())
        redrawn.set_alignment("left")


def _rows(panels: Sequence[Axes]) -> list[list[Axes]]:
    """Return the panels by rows, from top to bottom."""
    rows: list[list[Axes]] = []
    for axes in sorted(panels, key=lambda one: -one.get_position(original=True).y1):
        box = axes.get_position(original=True)
        last = rows[-1][0].get_position(original=True) if rows else None
        if last is not None and (box.y0 + box.y1) / 2 > last.y0:
            rows[-1].append(axes)
        else:
            rows.append([axes])
    return rows


def _wanted_height_mm(axes: Axes, figure: CaptionedFigure) -> float:
    """Return the height that a panel should have, in mm: for its names, for a square, for a map, or for curves."""
    width = axes.get_window_extent().width / _pixels_per_mm(figure)
    if names := _row_names(axes):
        lines = [name.count("\n") + 1 for name in names]
        apart = max(((first + second) / 2 for first, second in pairwise(lines)), default=lines[0])
        marks = _MARK_MM * ceil(len(axes.containers) / len(names))
        return max(_LEAST_MM, max(_NAMED_MM, _LINE_MM * apart, marks) * len(names) + _NAMED_MM / 2)
    if axes.get_aspect() != "auto":
        high = (
            abs(np.subtract(*axes.get_ylim()) / np.subtract(*axes.get_xlim())) if axes.get_xscale() == "linear" else 1
        )
        cell = axes.get_position(original=True).width * figure.bbox.width / _pixels_per_mm(figure)
        return float(min(_SQUARE_MM, cell * high))
    meshes = [mesh for mesh in axes.collections if isinstance(mesh, QuadMesh) and mesh.get_gid() == "map"]
    if meshes:
        return float(np.clip(width, *_MAP_MM))
    return _PANEL_MM


def _set_height(figure: CaptionedFigure, panels: Sequence[Axes]) -> None:
    """Set the figure's height so that every row of panels has the height that it should have.

    A slide is 16:9, or higher where its rows need it.
    """
    rows, pixels = _rows(panels), _pixels_per_mm(figure)
    if not rows:  # one panel that says why there is nothing
        share = _SLIDE if style.current_style().magnified else _PANEL_MM * pixels / figure.bbox.width
        figure.set_figheight(share * figure.get_figwidth())
        return
    wanted = _lower_rows([max(_wanted_height_mm(axes, figure) for axes in row) for row in rows], rows, figure)
    got = [float(np.mean([axes.get_position(original=True).height for axes in row])) * figure.bbox.height / pixels
           for row in rows]  # fmt: skip
    grids = {id(axes.get_gridspec()): axes.get_gridspec() for axes in panels if axes.get_subplotspec() is not None}
    grid = next(iter(grids.values()), None)
    if len(grids) == 1 and isinstance(grid, GridSpec) and grid.nrows == len(rows):
        grid.set_height_ratios(wanted)
        needed = sum(wanted)
    else:  # all rows grow by the factor that the one needs that wants most
        needed = max(want / have for want, have in zip(wanted, got, strict=True)) * sum(got)
    height = figure.bbox.height / pixels + needed - sum(got)
    if style.current_style().magnified:
        height = max(height, _SLIDE * figure.bbox.width / pixels)
    elif not any(_row_names(axes) for axes in panels):
        height = min(height, MOST_ROW_MM * len(rows))
    figure.set_figheight(height * style.scale() / _INCH_MM)


def _lower_rows(heights: Sequence[float], rows: Sequence[Sequence[Axes]], figure: CaptionedFigure) -> list[float]:
    """Return the rows' heights in mm, lowered so that the figure leaves room for its caption.

    Rows with names keep their height, and all rows of a slide do.
    """
    taken = sum(float(np.mean([axes.get_position(original=True).height for axes in row])) for row in rows)
    around = (1 - taken) * figure.bbox.height / _pixels_per_mm(figure)
    free = [not any(_row_names(axes) for axes in row) for row in rows]
    room = MOST_FIGURE_MM - around - sum(height for height, is_free in zip(heights, free, strict=True) if not is_free)
    total = sum(height for height, is_free in zip(heights, free, strict=True) if is_free)
    if style.current_style().magnified or total <= room or not total:
        return list(heights)
    return [max(_LEAST_ROW_MM, height * room / total) if is_free else height
            for height, is_free in zip(heights, free, strict=True)]  # fmt: skip


def _thin_ticks(axes: Axes, thinned: set[int]) -> None:
    """Leave out tick labels that lie on their neighbours: every second one, or more.

    `thinned`: ids of the ticks that are thinned already, as panels may share them; it grows by this panel's. Names of
    rows all stay.
    """
    for axis, (low, high) in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
        if id(axis.major) in thinned:
            continue
        ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        ticks = [tick for tick in ticks if tick.label1.get_visible() and tick.label1.get_text()]
        if axis is axes.yaxis and _row_names(axes):
            continue
        boxes = [tick.label1.get_window_extent().padded(2.0) for tick in ticks]
        step = 1
        while any(one.overlaps(two) for one, two in zip(boxes[::step], boxes[step::step], strict=False)):
            step += 1
        if step == 1:
            continue
        kept = [tick.get_loc() for tick in ticks[::step]]
        thinned.add(id(axis.major))
        axis.set_ticks(kept, labels=[tick.label1.get_text() for tick in ticks[::step]])


def _drop_numbers(axes: Axes) -> None:
    """Leave out a panel's numbers where they lie on one another."""
    texts = [text for text in axes.texts if text.get_gid() == style.NUMBERS]
    boxes = [text.get_window_extent() for text in texts]
    crowded = any(one.overlaps(two) for place, one in enumerate(boxes) for two in boxes[place + 1 :])
    for text in texts if crowded else ():
        text.remove()


def _lower_legends(figure: CaptionedFigure, panels: Sequence[Axes]) -> None:
    """Put the legends that stand under panels below the names of the axes."""
    for axes in panels:
        legend = axes.get_legend()
        if legend is None or legend.get_gid() != style.BELOW:
            continue
        box = axes.get_window_extent()
        lowest = axes.xaxis.get_tightbbox()
        bottom = box.y0 if lowest is None else lowest.y0
        legend.set_bbox_to_anchor(
            (0.5, (bottom - _GAP_MM * _pixels_per_mm(figure) - box.y0) / box.height), axes.transAxes
        )


def _refuse_narrow(panels: Sequence[Axes], width_mm: float) -> None:
    """Raise NarrowFigureError where a panel is too narrow, with a width at which none is."""
    for row in _rows(panels):
        narrowest = min(axes.get_position(original=True).width * width_mm for axes in row)
        if narrowest < (least := _LEAST_PANEL_MM * style.scale()):
            _refuse(width_mm, width_mm + len(row) * (least - narrowest))


def _refuse(width_mm: float, smallest: float) -> NoReturn:
    """Raise NarrowFigureError: the figure needs another width."""
    raise NarrowFigureError(width_mm, ceil(smallest))
