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
    """Ticks of a logarithmic axis: the coarsest steps that give at least three; evenly spaced on a short axis."""

    def __call__(self) -> list[float]:
        """Return the ticks of the axis's current view."""
        low, high = sorted(self.axis.get_view_interval())  # type: ignore[union-attr]
        return self.tick_values(float(low), float(high))

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


COLUMN_MM, WIDE_MM, SLIDE_MM, _MOST_MM = 84, 174, 338.7, 2000
"""Printed widths of figures: of one column and of two columns of a journal, of a slide, and the largest."""
_INCH_MM = 25.4
_FOOT_POINTS, _FOOT_LETTER = 5.0, 0.56
"""Size of the foot's text, and the width of its letters as a share of it."""
_LINE_MM, _USUAL_LINES = 2.4, 5
"""Height of a line of the foot, and lines for which every figure has room."""
_TITLE_LETTER_MM, _TITLE_MM = 1.8, 3.4
"""Width of a letter and height of a line of a title."""
_COLOURBLIND = (
    "#0173B2", "#DE8F05", "#029E73", "#D55E00", "#CC78BC", "#CA9161", "#FBAFE4", "#949494", "#ECE133", "#56B4E9",
)  # fmt: skip
_RANDOM, _WARNING_MM = "random weights", 4


@dataclass(frozen=True)
class FigureStyle:
    """A style of figures: widths, sizes of text, and whether the picture holds its own notes.

    Attributes:
        usual_mm: the printed width where none is asked for.
        least_mm: the smallest printed width.
        notes: whether title, notes and the run stand in the picture; else they are its caption.
        points: smallest and largest size of text; of a magnified style before it is magnified. Else each figure's own.
        magnified: whether a figure is drawn as for two columns of a journal and enlarged to its width.
    """

    usual_mm: float
    least_mm: float
    notes: bool = False
    points: tuple[float, float] | None = None
    magnified: bool = False

    def scale(self, width_mm: float) -> float:
        """Return the factor of all text, lines and lengths at a printed width."""
        return width_mm / WIDE_MM if self.magnified else 1.0


STYLES = {
    "screen": FigureStyle(WIDE_MM, 60, notes=True),
    "paper": FigureStyle(WIDE_MM, 76, points=(7.0, 8.0)),
    "talk": FigureStyle(SLIDE_MM, SLIDE_MM, points=(7.2, 8.5), magnified=True),
}
"""Styles by name: with notes in the picture, for a journal's columns, and for a slide of 13.3 inches."""


@dataclass(frozen=True)
class _Use:
    """The style in use, and its factor of all lengths."""

    style: FigureStyle
    scale: float


def check_style(name: str, width_mm: float | None = None) -> tuple[FigureStyle, float]:
    """Return the style of a name, and a figure's width in mm, which is the style's usual one where None.

    Raises UnknownNameError for an unknown style, ConfigError for a width below the style's least.
    """
    if name not in STYLES:
        raise UnknownNameError(name, "style", STYLES)
    look = STYLES[name]
    width = look.usual_mm if width_mm is None else width_mm
    if not look.least_mm <= width <= _MOST_MM:
        raise ConfigError(f"width_mm of style {name} must be {look.least_mm:g} to {_MOST_MM:g}, got {width:g}")
    return look, float(width)


_SCREEN = _Use(STYLES["screen"], 1.0)
_IN_USE: ContextVar[_Use] = ContextVar("style of figures")
_TEXTS = (
    "font.size", "axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize",
)  # fmt: skip
_LENGTHS = (
    "axes.linewidth", "axes.titlepad", "axes.labelpad", "grid.linewidth",
    *(f"{axis}tick.major.{length}" for axis in "xy" for length in ("width", "size", "pad")),
    *(f"{axis}tick.minor.{length}" for axis in "xy" for length in ("width", "size", "pad")),
)  # fmt: skip


@contextmanager
def use(style: FigureStyle | None = None, width_mm: float = WIDE_MM) -> Iterator[None]:
    """Apply the style of the package's figures within a `with` block.

    Args:
        style: one of `STYLES`; None: the one in use around the block, which is "screen" where there is none.
        width_mm: the figure's printed width, on which the size of a magnified style's text depends.
    """
    token = _IN_USE.set(_Use(style, style.scale(width_mm)) if style else _IN_USE.get(_SCREEN))
    try:
        with as_file(files("perturbkv.figures") / "perturbkv.mplstyle") as path, mpl.rc_context(fname=path):
            settings: dict[str, Any] = mpl.rcParams  # type: ignore[assignment]
            settings |= {name: points(settings[name]) for name in _TEXTS}
            settings |= {name: scale() * settings[name] for name in _LENGTHS}
            yield
    finally:
        _IN_USE.reset(token)


def current_style() -> FigureStyle:
    """Return the style in use, "screen" outside of `use()`."""
    return _IN_USE.get(_SCREEN).style


def scale() -> float:
    """Return the factor of all lengths of the style in use."""
    return _IN_USE.get(_SCREEN).scale


def points(size: float) -> float:
    """Return the size of text in the style in use, in points: moved into the style's range and magnified.

    A style without a range leaves `size` as it is.
    """
    ends = current_style().points
    return size if ends is None else scale() * min(max(size, ends[0]), ends[1])


def figure(width_mm: float, height_mm: float) -> CaptionedFigure:
    """Return an empty figure of a printed size, laid out so that nothing is clipped. Call inside `use()`."""
    inches = scale() / _INCH_MM
    return CaptionedFigure(figsize=(width_mm * inches, height_mm * inches), layout="constrained")


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
    """Set the figure's title at its upper left, broken into as many lines as needed.

    A style without notes has it in the caption alone. `caption` replaces it there; None: the title itself.
    """
    assert isinstance(figure, CaptionedFigure)
    figure.subtitle = text if caption is None else caption
    if not current_style().notes:
        return
    figure.suptitle(
        _fold_title(text, figure.get_figwidth() * _INCH_MM), x=0.008, ha="left", fontsize=8, fontweight="bold"
    )


def extra_title_mm(text: str, width_mm: float) -> float:
    """Return a title's height beyond two lines, in mm."""
    return 0.0 if not current_style().notes else max(0, _fold_title(text, width_mm).count("\n") - 1) * _TITLE_MM


def _fold_title(text: str, width_mm: float) -> str:
    """Return the title broken into lines that fit the figure's width."""
    return fold(text, int(width_mm / _TITLE_LETTER_MM))


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


BELOW, NUMBERS = "below", "numbers"
"""Names of a legend under its panel, and of a panel's texts of which all are drawn or, without room, none."""


def draw_legend_below(axes: Axes, handles: Sequence[Any], columns: int) -> None:
    """Draw a legend with `columns` columns under the panel, where it hides nothing."""
    if handles:
        legend = axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.27), ncols=columns,
                           handlelength=1.6, columnspacing=1.0, handletextpad=0.4, borderaxespad=0.0)  # fmt: skip
        legend.set_gid(BELOW)
        typeset(legend.get_texts())


def draw_legend_right(axes: Axes, handles: Sequence[Any], columns: int) -> None:
    """Draw a legend to the right of the panel, in one column whatever `columns` is."""
    if handles:
        legend = axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.05), fontsize=points(6),
                             handlelength=1.4, handletextpad=0.4, borderaxespad=0.0, labelspacing=0.3)  # fmt: skip
        typeset(legend.get_texts())


def describe_run(
    figure: Figure, identity: RunIdentity, note: str = "", caption: Sequence[str] = (), sides: bool = True
) -> None:
    """Describe a figure's run after a note: in its caption and, in a style with notes, at its foot.

    Random weights are told at the top in every style.

    Args:
        figure: the figure with its panels.
        identity: of the run.
        note: n, the kind of intervals, the definition of a tie.
        caption: sentences that the caption has in place of the note.
        sides: whether the caption names policies and selections that differ.
    """
    assert isinstance(figure, CaptionedFigure)
    if identity.random_weights:
        _warn_random_weights(figure)
    _fill_caption(figure, identity, [*(caption or [note]), *identity.caption_lines(sides)])
    if current_style().notes:
        _draw_foot(figure, _foot_lines(identity, note, figure.get_figwidth() * _INCH_MM))


def _fill_caption(figure: CaptionedFigure, identity: RunIdentity, notes: list[str]) -> None:
    """Give a figure's caption its notes, the names of policies and selections in them, and the provenance."""
    figure.notes = notes
    figure.names = [name for config in identity.configs for name in (config.policy.name, config.selection.name)]
    figure.provenance = identity.provenance()


def _draw_foot(figure: Figure, lines: Sequence[str]) -> None:
    """Write lines of small text at the figure's foot, and lay out the panels above them."""
    lay_out_above(figure, _lines_mm(lines))
    figure.text(0.008, 0.006, "\n".join(lines), fontsize=_FOOT_POINTS, color="0.35", va="bottom", ha="left")


def _warn_random_weights(figure: Figure) -> None:
    """Write at the top that the weights are random: above an existing legend, else in the figure's title."""
    look: dict[str, Any] = {"color": "#b00020", "fontweight": "bold"}
    if not figure.legends:
        title = figure.get_suptitle()
        figure.suptitle(f"{_RANDOM} · {title}" if title else _RANDOM, fontsize=points(9), **look)
        return
    legend = figure.legends[0]
    legend.set_title(_RANDOM)
    legend.get_title().set(**look)
    legend.set_alignment("left")
    figure.set_figheight(figure.get_figheight() + scale() * _WARNING_MM / _INCH_MM)


def lay_out_above(figure: Figure, foot_mm: float) -> None:
    """Lay out the panels above the lowest `foot_mm` of the figure."""
    share, engine = foot_mm / height_mm(figure), figure.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0, share, 1, 1 - share))  # type: ignore[call-arg]


def height_mm(figure: Figure) -> float:
    """Return the printed height of a figure, in mm."""
    return float(figure.get_figheight() * _INCH_MM)


def extra_foot_mm(identity: RunIdentity, note: str, width_mm: float) -> float:
    """Return the foot's height beyond its usual five lines, in mm."""
    return max(0.0, foot_mm(identity, note, width_mm) - _USUAL_LINES * _LINE_MM)


def foot_mm(identity: RunIdentity, note: str, width_mm: float) -> float:
    """Return the height of `describe_run`'s foot, in mm; 0 in a style without notes."""
    return 0.0 if not current_style().notes else _lines_mm(_foot_lines(identity, note, width_mm))


def _foot_lines(identity: RunIdentity, note: str, width_mm: float) -> list[str]:
    """Return the lines of the foot, note first, broken to the figure's width."""
    notes = [note] if note else []
    return [part for line in [*notes, *identity.lines()] for part in _wrap(line, width_mm / _INCH_MM)]


def _lines_mm(lines: Sequence[str]) -> float:
    """Return the height of the foot's lines with its margin, in mm."""
    return len(lines) * _LINE_MM + 1.5


def _wrap(line: str, width_inches: float) -> list[str]:
    """Return a line broken into lines of a width, at dots or bars, else between words."""
    width = int(width_inches * 72 / (_FOOT_POINTS * _FOOT_LETTER))
    if len(line) <= width:
        return [line]
    mark = next((mark for mark in (" · ", " | ") if mark in line), " ")
    rows = [""]
    for part in line.split(mark):
        longer = f"{rows[-1]}{mark}{part}" if rows[-1] else part
        if len(longer) <= width or not rows[-1]:
            rows[-1] = longer
        else:
            rows.append(part)
    return rows if mark == " " else [piece for row in rows for piece in _wrap(row, width_inches)]


def metadata(identity: RunIdentity, suffix: str) -> dict[str, str]:
    """Return the run's identity as file metadata, under keys that matplotlib accepts for a suffix: png, svg or pdf."""
    description = escape_line("; ".join([identity.lines()[0], *(config.label() for config in identity.configs)]))
    title, made_with = escape_line(f"{identity.model} on {identity.dataset}"), escape_line(identity.made_with)
    if suffix == "pdf":
        return {"Title": title, "Subject": description, "Creator": made_with}
    if suffix == "svg":
        return {"Title": title, "Description": description, "Creator": made_with}
    return {"Title": title, "Description": description, "Software": made_with}
