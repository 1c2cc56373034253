"""The style of every figure: a journal's column widths, colours safe for colour-blind readers, ticks, and foot.

Logarithmic axes have plain numbers, and always enough ticks to read a scale. The package's symbols are typeset;
other text is plain, also with dollar signs and backslashes. The foot identifies the run. A figure for a screen has
title, notes and foot in its picture; one for a paper or a talk has them in its caption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import Formatter, Locator, MaxNLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray

from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.names import fold
from perturbkv.analyses.stats.intervals import MIN_SAMPLES, OptionalInterval, median_level
from perturbkv.captions import INTERVAL_MARKS, SYMBOLS, CaptionedFigure
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.escaping import escape_line

_STEPS: tuple[tuple[float, ...], ...] = (
    (1,),
    (1, 3),
    (1, 2, 5),
    (1, 1.5, 2, 3, 5, 7),
    (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9),
)
"""Ticks per power of ten, as its multiples, from coarse to fine."""
_LEAST, _MOST = 3, 8
"""Fewest and most ticks of a logarithmic axis."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class PlainLogLocator(Locator):
    """Ticks of a logarithmic axis: the coarsest steps that give at least three, as many as there is room for."""

    def __call__(self) -> list[float]:
        """Return the ticks of the axis's current view."""
        axis: Any = self.axis
        ticks = self.tick_values(*map(float, axis.get_view_interval()))
        return ticks[:: max(1, -(-len(ticks) // max(1, axis.get_tick_space())))]

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        """Return the ticks between two ends of a logarithmic axis; none where an end is not positive."""
        low, high = sorted((vmin, vmax))
        if low <= 0:
            return []
        powers = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
        for steps in _STEPS:
            ticks = [step * 10.0**power for power in powers for step in steps]
            inside = [tick for tick in ticks if low <= tick <= high]
            if len(inside) >= _LEAST:  # every second one, or fewer, where there are too many
                return inside[:: -(-len(inside) // _MOST)]
        return [float(tick) for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]


class PlainFormatter(Formatter):
    """Labels of ticks: '0.05', '2', '4,000'; powers of ten where a number would have many zeros."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return a tick's label; empty where the value is not positive."""
        if x <= 0:
            return ""
        if 1e-3 <= x < 1e5:
            return f"{x:,.10g}" if x < 1000 else f"{x:,.0f}"
        power = int(np.floor(np.log10(x) + 1e-9))
        times = f"{x / 10.0**power:.3g}"
        raised = str(power).translate(_RAISED)  # letters, as nothing in a figure is read as TeX but our symbols
        return f"10{raised}" if times == "1" else f"{times}×10{raised}"


def set_plain_ticks(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers instead of powers of ten."""
    axis.set_major_locator(PlainLogLocator())
    axis.set_major_formatter(PlainFormatter())
    axis.set_minor_formatter(NullFormatter())
    # by the size of its labels an axis knows its room, also where a figure is saved outside of `use()`
    axis.set_tick_params(labelsize=mpl.rcParams["xtick.labelsize"])


_SYMBOLS = {written: tex.replace(r"\theta", r"\mathrm{θ}") for written, tex in SYMBOLS.items()}
"""The package's symbols in matplotlib's TeX, upright as the text around them."""


def symbols_to_tex(text: str) -> str:
    """Return the text with the package's symbols (θ̂, ‖o_h‖₁) in TeX notation, for `typeset`."""
    for written, tex in _SYMBOLS.items():
        text = text.replace(written, tex)
    return text


def typeset(texts: Iterable[Text]) -> None:
    """Let matplotlib parse texts as TeX if their only dollar signs enclose the package's symbols."""
    for text in texts:
        rest = text.get_text()
        for tex in _SYMBOLS.values():
            rest = rest.replace(tex, "")
        text.set_parse_math("$" not in rest)


COLUMN_MM, WIDE_MM, _MOST_MM = 84, 174, 2000
"""Printed widths of figures: of one column and of two columns of a journal, and the largest."""
INCH_MM = 25.4
_FOOT_POINTS, _FOOT_LETTER = 5.0, 0.56
"""Size of the foot's text, and the width of its letters as a share of it."""
_LINE_HEIGHT, _USUAL_FOOT_MM = 0.48, 12.0
"""Height of a line of the foot in mm per point of its size; height of the foot for which every figure has room."""
_TITLE_LETTER_MM, _TITLE_MM = 1.8, 3.4
"""Width of a letter and height of a line of a title."""
_COLOURBLIND = (
    "#0173B2", "#DE8F05", "#029E73", "#D55E00", "#CC78BC", "#CA9161", "#FBAFE4", "#949494", "#ECE133", "#56B4E9",
)  # fmt: skip


@dataclass(frozen=True)
class FigureStyle:
    """A style of figures: widths, sizes of text, and whether the picture holds its own notes.

    Attributes:
        least_mm: the smallest printed width.
        notes: whether title, notes and the run stand in the picture; else they are its caption.
        points: smallest and largest size of text; None: each figure's own.
        slide: whether a figure is a slide, 16:9 and with a headline.
    """

    least_mm: float
    notes: bool = False
    points: tuple[float, float] | None = None
    slide: bool = False


STYLES = {
    "screen": FigureStyle(60, notes=True),
    "paper": FigureStyle(76, points=(7.0, 8.0)),
    "talk": FigureStyle(WIDE_MM, points=(7.2, 8.5), slide=True),
}
"""Styles by name: with notes in the picture, for a journal's columns, and for a slide.

A slide of 174 mm that fills one of 13.3 inches has text of 14 points and more.
"""


def check_style(name: str, width_mm: float | None = None) -> tuple[FigureStyle, float]:
    """Return the style of a name, and a figure's width in mm, by default that of two columns of a journal.

    Raises UnknownNameError for an unknown style, ConfigError for a width below the style's least.
    """
    if name not in STYLES:
        raise UnknownNameError(name, "style", STYLES)
    look, width = STYLES[name], WIDE_MM if width_mm is None else width_mm
    if not look.least_mm <= width <= _MOST_MM:
        raise ConfigError(f"width_mm of style {name} must be {look.least_mm:g} to {_MOST_MM:g}, got {width:g}")
    return look, float(width)


_IN_USE: ContextVar[FigureStyle] = ContextVar("style of figures", default=STYLES["screen"])
_TEXTS = (
    "font.size", "axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize",
)  # fmt: skip


@contextmanager
def use(style: FigureStyle | None = None) -> Iterator[None]:
    """Apply a style of the package's figures within a `with` block; None: the one in use around the block."""
    token = _IN_USE.set(style or current_style())
    try:
        with as_file(files("perturbkv.figures") / "perturbkv.mplstyle") as path, mpl.rc_context(fname=path):
            settings: dict[str, Any] = mpl.rcParams  # type: ignore[assignment]
            settings |= {name: points(settings[name]) for name in _TEXTS}
            yield
    finally:
        _IN_USE.reset(token)


def current_style() -> FigureStyle:
    """Return the style in use, "screen" outside of `use()`."""
    return _IN_USE.get()


def points(size: float) -> float:
    """Return a size of text in points, moved into the range of the style in use, if it has one."""
    ends = current_style().points
    return size if ends is None else min(max(size, ends[0]), ends[1])


def figure(width_mm: float, height_mm: float) -> CaptionedFigure:
    """Return an empty figure of a printed size, laid out so that nothing is clipped. Call inside `use()`."""
    return CaptionedFigure(figsize=(width_mm / INCH_MM, height_mm / INCH_MM), layout="constrained")


def grow(figure: Figure, more_mm: float) -> None:
    """Make a figure higher; nothing for a negative height."""
    figure.set_figheight(figure.get_figheight() + max(0.0, more_mm) / INCH_MM)


def layer_colours() -> Colormap:
    """Return the colour map of layers, dark for the first to light for the last, safe for colour-blind readers."""
    return mpl.colormaps["cividis"]


def signed_colours() -> Colormap:
    """Return the colour map of signed quantities: orange below the centre, purple above it."""
    return mpl.colormaps["PuOr"]


def ordered_colours(count: int) -> list[Any]:
    """Return `count` colours for ordered categories, such as budgets: dark to light, all readable on white."""
    return [mpl.colormaps["viridis"](shade) for shade in np.linspace(0.0, 0.82, count)]


def category_colours(count: int) -> list[Any]:
    """Return `count` colours for unordered categories, safe for colour-blind readers (seaborn's "colorblind")."""
    return [to_rgb(_COLOURBLIND[index % len(_COLOURBLIND)]) for index in range(count)]


def interval_note(samples: int, medians: bool = False) -> str:
    """Return the foot's text on bars, bands and brackets: which intervals over how many samples they are.

    `medians`: whether some are intervals of medians, whose exact level is then told.
    """
    if samples < 2:
        return "1 sample: no intervals"
    median = f" (medians: {100 * median_level(samples):.0f} %)" if medians and samples >= MIN_SAMPLES else ""
    kind = f"95 % intervals{median}" if samples >= MIN_SAMPLES else "ranges of single samples"
    return f"{INTERVAL_MARKS}: {kind} over n = {samples} samples"


def error_bars(value: float, interval: OptionalInterval) -> list[list[float]] | None:
    """Return an interval as matplotlib's yerr/xerr: distances from `value` to both ends; None for None."""
    return None if interval is None else [[max(0.0, value - interval.low)], [max(0.0, interval.high - value)]]


def mask_nonpositive(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values for a log axis: NaN where they are not positive."""
    return np.where(values > 0, values, np.nan)


def set_log_axes(axes: Axes, x: bool = False, y: bool = False) -> None:
    """Make the x axis, the y axis or both logarithmic, with plain numbers; one without positive values stays linear."""
    if x and np.isfinite(axes.dataLim.minposx):
        axes.set_xscale("log")
        set_plain_ticks(axes.xaxis)
    if y and np.isfinite(axes.dataLim.minposy):
        axes.set_yscale("log")
        set_plain_ticks(axes.yaxis)


def draw_layer_bar(
    figure: Figure, axes: Sequence[Axes], layers: int, location: str, layer_name: Callable[[int], int]
) -> None:
    """Draw the colour bar of points that are coloured by layer, with a tick at up to seven layers."""
    norm = BoundaryNorm(np.arange(layers + 1) - 0.5, 256)
    mappable = ScalarMappable(norm, layer_colours())
    bar = figure.colorbar(mappable, ax=list(axes), label="layer", location=location, fraction=0.035, pad=0.02)
    ticks_at = [int(tick) for tick in np.unique(np.linspace(0, layers - 1, min(layers, 7)).round())]
    bar.set_ticks(ticks_at, labels=[str(layer_name(tick)) for tick in ticks_at])
    bar.ax.minorticks_off()


def set_title(figure: Figure, text: str, caption: str | None = None) -> None:
    """Set the figure's title at its upper left, broken into as many lines as needed; of more than two it grows.

    A style without notes has it in the caption alone. `caption` replaces it there; None: the title itself.
    """
    assert isinstance(figure, CaptionedFigure)
    figure.subtitle = text if caption is None else caption
    if not current_style().notes:
        return
    folded = fold(text, int(figure.get_figwidth() * INCH_MM / _TITLE_LETTER_MM))
    write_on_top(figure, folded, fontsize=8)


def write_on_top(figure: Figure, words: str, **look: Any) -> None:
    """Write words at the figure's top, before what is there: above its legend, or as its title. The figure grows."""
    legend = figure.legends[0] if figure.legends else None
    there = legend.get_title().get_text() if legend else figure.get_suptitle()
    whole = " · ".join(filter(None, (words, there)))
    if legend:
        legend.set_title(whole)
        legend.set_alignment("left")
        legend.get_title().set(fontweight="bold", **look)
    else:
        figure.suptitle(whole, x=0.008, ha="left", fontweight="bold", **look)
    grow(figure, (words.count("\n") + 1) * _TITLE_MM)


_NAMES_POINTS = 30
"""Height of the names of ticks and of an axis under a panel."""
_LINE_POINTS = 9
"""Height of one more line of names at an axis."""
_CORNERS = {
    "lower right": (0.98, 0.02, "right", "bottom"),
    "lower left": (0.03, 0.03, "left", "bottom"),
    "middle": (0.5, 0.5, "center", "center"),
}


def draw_note(axes: Axes, text: str, at: str = "lower right") -> None:
    """Write a small remark into a corner of the panel, above its right end, or into the middle of an empty panel.

    A style without notes has it in its caption; an empty panel says why it is empty in every style. `at` is "lower
    right", "lower left", "above" or "middle".
    """
    figure = axes.get_figure()
    assert isinstance(figure, CaptionedFigure)
    figure.remarks.append((axes, text))
    if at != "middle" and not current_style().notes:
        return
    if at == "above":
        axes.set_title(text, loc="right", fontsize=6, color="0.35")
        return
    x, y, across, up = _CORNERS[at]
    axes.text(x, y, text, transform=axes.transAxes, ha=across, va=up, fontsize=points(6), color="0.35")


def draw_legend_below(axes: Axes, handles: Sequence[Any], columns: int) -> None:
    """Draw a legend with `columns` columns under the panel and the names of its axis."""
    more = max((label.get_text().count("\n") for label in axes.get_xticklabels()), default=0)
    names = ScaledTranslation(0, -(_NAMES_POINTS + more * points(_LINE_POINTS)) / 72, axes.get_figure().dpi_scale_trans)  # type: ignore[union-attr]
    legend = axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=columns, handlelength=1.6,
                         bbox_transform=axes.transAxes + names, columnspacing=1.0, handletextpad=0.4,
                         borderaxespad=0.0)  # fmt: skip
    typeset(legend.get_texts())


def describe_run(
    figure: Figure,
    identity: RunIdentity,
    note: str = "",
    caption: Sequence[str] = (),
    sides: bool = True,
    key: Sequence[str] = (),
) -> Figure:
    """Return the figure, its run described after a note: in its caption and, in a style with notes, at its foot.

    Random weights are told at the top in every style, and a key at the foot.

    Args:
        figure: the figure with its panels.
        identity: of the run.
        note: n, the kind of intervals, the definition of a tie.
        caption: sentences that the caption has in place of the note.
        sides: whether the caption names policies and selections that differ.
        key: names of what the figure numbers from 1.
    """
    assert isinstance(figure, CaptionedFigure)
    if identity.random_weights:
        write_on_top(figure, "random weights", color="#b00020", fontsize=points(8))
    figure.notes = [*(caption or [note]), *identity.caption_lines(sides)]
    figure.names = [name for config in identity.configs for name in (config.policy.name, config.selection.name)]
    figure.provenance = identity.provenance()
    numbered = " · ".join(f"{number}  {name}" for number, name in enumerate(key, 1))
    texts = [numbered, *([note, *identity.lines()] if current_style().notes else [])]
    size, width = points(_FOOT_POINTS), figure.get_figwidth() * 72
    lines = [line for text in texts if text for line in _wrap(text, int(width / (size * _FOOT_LETTER)))]
    if lines:  # broken to the figure's width, the panels above them
        foot_mm = len(lines) * _LINE_HEIGHT * size + 1.5
        grow(figure, foot_mm - _USUAL_FOOT_MM)
        share, engine = foot_mm / INCH_MM / figure.get_figheight(), figure.get_layout_engine()
        assert engine is not None
        engine.set(rect=(0, share, 1, 1 - share))  # type: ignore[call-arg]
        figure.text(0.008, 0.006, "\n".join(lines), fontsize=size, color="0.35", va="bottom", ha="left")
    return figure


def _wrap(line: str, letters: int) -> list[str]:
    """Return a line broken into lines of at most so many letters, at dots or bars, else between words."""
    if len(line) <= letters:
        return [line]
    mark = next((mark for mark in (" · ", " | ") if mark in line), " ")
    rows = [""]
    for part in line.split(mark):
        longer = f"{rows[-1]}{mark}{part}" if rows[-1] else part
        if len(longer) <= letters or not rows[-1]:
            rows[-1] = longer
        else:
            rows.append(part)
    return rows if mark == " " else [piece for row in rows for piece in _wrap(row, letters)]


def metadata(identity: RunIdentity, suffix: str) -> dict[str, str]:
    """Return the run's identity as file metadata, under keys that matplotlib accepts for a suffix: png, svg or pdf."""
    description = escape_line("; ".join([identity.lines()[0], *(config.label() for config in identity.configs)]))
    title, made_with = escape_line(f"{identity.model} on {identity.dataset}"), escape_line(identity.made_with)
    if suffix == "pdf":
        return {"Title": title, "Subject": description, "Creator": made_with}
    if suffix == "svg":
        return {"Title": title, "Description": description, "Creator": made_with}
    return {"Title": title, "Description": description, "Software": made_with}
