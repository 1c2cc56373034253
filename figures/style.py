"""The style of every figure: a journal's column widths, colours safe for colour-blind readers, ticks, and foot.

Logarithmic axes have plain numbers, and always enough ticks to read a scale. The package's symbols are typeset;
other text is plain, also with dollar signs and backslashes. The foot identifies the run.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from perturbkv.analyses.pairing import fold
from perturbkv.analyses.stats.intervals import MIN_SAMPLES, OptionalInterval, median_level
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
            if len(inside) >= _LEAST:
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


_SYMBOLS = {
    "θ̂_relax": r"$\hat{\mathrm{θ}}_{\mathrm{relax}}$",
    "θ̂": r"$\hat{\mathrm{θ}}$",
    "‖o_h‖₁": r"$\Vert o_h\Vert_1$",
}


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


COLUMN_MM, WIDE_MM = 84, 174
_INCH_MM = 25.4
_SCREEN_DPI = 100
_FOOT_POINTS = 5.0
_LINE_MM, _USUAL_LINES = 2.4, 5
_TITLE_LETTER_MM, _TITLE_MM = 1.8, 3.4
_COLOURBLIND = (
    "#0173B2", "#DE8F05", "#029E73", "#D55E00", "#CC78BC", "#CA9161", "#FBAFE4", "#949494", "#ECE133", "#56B4E9",
)  # fmt: skip
_RANDOM, _WARNING_MM = "random weights", 4


@contextmanager
def use() -> Iterator[None]:
    """Apply the style of the package's figures within a `with` block."""
    with as_file(files("perturbkv.figures") / "perturbkv.mplstyle") as path, mpl.rc_context(fname=path):
        yield


class NotebookFigure(Figure):
    """A figure that a notebook displays without pyplot."""

    def _repr_png_(self) -> bytes:
        """Return the figure as a PNG file for a notebook."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=_SCREEN_DPI)
        return buffer.getvalue()


def figure(width_mm: float, height_mm: float) -> Figure:
    """Return an empty figure of a printed size, laid out so that nothing is clipped. Call inside `use()`."""
    return NotebookFigure(figsize=(width_mm / _INCH_MM, height_mm / _INCH_MM), layout="constrained")


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


def interval_legend(samples: int, medians: bool = False) -> str:
    """Return the foot's text on bars, bands and brackets; `medians`: whether it covers intervals of medians."""
    if samples < 2:
        return "1 sample: no intervals"
    median = f" (medians: {100 * median_level(samples):.0f} %)" if medians and samples >= MIN_SAMPLES else ""
    kind = f"95 % intervals{median}" if samples >= MIN_SAMPLES else "ranges of single samples"
    return f"bars, bands and brackets: {kind} over n = {samples} samples"


def error_bars(value: float, interval: OptionalInterval) -> list[list[float]] | None:
    """Return an interval as matplotlib's yerr/xerr: distances from `value` to both ends; None for None."""
    return None if interval is None else [[max(0.0, value - interval.low)], [max(0.0, interval.high - value)]]


def positive(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values for a log axis: NaN where they are not positive."""
    return np.where(values > 0, values, np.nan)


def log_axes(axes: Axes, x: bool = False, y: bool = False) -> None:
    """Make the x and y axes logarithmic as requested, with plain numbers; linear without positive values."""
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
    scale = ScalarMappable(norm, layer_colours())
    bar = figure.colorbar(scale, ax=list(axes), label="layer", location=location, fraction=0.035, pad=0.02)
    ticks_at = [int(tick) for tick in np.unique(np.linspace(0, layers - 1, min(layers, 7)).round())]
    bar.set_ticks(ticks_at, labels=[str(layer_name(tick)) for tick in ticks_at])
    bar.ax.minorticks_off()


def set_title(figure: Figure, text: str) -> None:
    """Set the figure's title at its upper left, broken into as many lines as needed."""
    figure.suptitle(
        _fold_title(text, figure.get_figwidth() * _INCH_MM), x=0.008, ha="left", fontsize=8, fontweight="bold"
    )


def long_title_mm(text: str, width_mm: float) -> float:
    """Return a title's height beyond two lines, in mm."""
    return max(0, _fold_title(text, width_mm).count("\n") - 1) * _TITLE_MM


def _fold_title(text: str, width_mm: float) -> str:
    """Return the title broken into lines that fit the figure's width."""
    return fold(text, int(width_mm / _TITLE_LETTER_MM))


def draw_note(axes: Axes, text: str, middle: bool = False) -> None:
    """Write a small remark in the panel's lower right corner, or in the middle of an empty panel."""
    x, y, at = (0.5, 0.5, "center") if middle else (0.98, 0.02, "right")
    axes.text(x, y, text, transform=axes.transAxes, ha=at, va="center" if middle else "bottom", fontsize=6,
              color="0.35")  # fmt: skip


def draw_legend_below(axes: Axes, handles: Sequence[Any], columns: int) -> None:
    """Draw a legend with `columns` columns under the panel, where it hides nothing."""
    if handles:
        legend = axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.27), ncols=columns,
                           handlelength=1.6, columnspacing=1.0, handletextpad=0.4, borderaxespad=0.0)  # fmt: skip
        typeset(legend.get_texts())


def draw_legend_right(axes: Axes, handles: Sequence[Any], columns: int) -> None:
    """Draw a legend to the right of the panel, in one column whatever `columns` is."""
    if handles:
        legend = axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.05), fontsize=6,
                             handlelength=1.4, handletextpad=0.4, borderaxespad=0.0, labelspacing=0.3)  # fmt: skip
        typeset(legend.get_texts())


def draw_foot(figure: Figure, identity: RunIdentity, note: str = "") -> None:
    """Write a note and the run's identity at the figure's foot; warn at the top where weights are random.

    Args:
        figure: the figure with its panels.
        identity: of the run.
        note: n, the kind of intervals, the definition of a tie.
    """
    if identity.random_weights:
        _warn_random_weights(figure)
    lines = _foot_lines(identity, note, figure.get_figwidth() * _INCH_MM)
    lay_out_above(figure, _lines_mm(lines))
    figure.text(0.008, 0.006, "\n".join(lines), fontsize=_FOOT_POINTS, color="0.35", va="bottom", ha="left")


def _warn_random_weights(figure: Figure) -> None:
    """Write at the top that the weights are random: above an existing legend, else in the figure's title."""
    look = {"color": "#b00020", "fontweight": "bold"}
    if not figure.legends:
        title = figure.get_suptitle()
        figure.suptitle(f"{_RANDOM} · {title}" if title else _RANDOM, **look)
        return
    legend = figure.legends[0]
    legend.set_title(_RANDOM)
    legend.get_title().set(**look)
    legend.set_alignment("left")
    figure.set_figheight(figure.get_figheight() + _WARNING_MM / _INCH_MM)


def lay_out_above(figure: Figure, foot_mm: float) -> None:
    """Lay out the panels above the lowest `foot_mm` of the figure."""
    share, engine = foot_mm / height_mm(figure), figure.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0, share, 1, 1 - share))  # type: ignore[call-arg]


def height_mm(figure: Figure) -> float:
    """Return the printed height of a figure, in mm."""
    return float(figure.get_figheight() * _INCH_MM)


def long_foot_mm(identity: RunIdentity, note: str, width_mm: float) -> float:
    """Return the foot's height beyond its usual five lines, in mm."""
    return max(0.0, foot_mm(identity, note, width_mm) - _USUAL_LINES * _LINE_MM)


def foot_mm(identity: RunIdentity, note: str, width_mm: float) -> float:
    """Return the height of `draw_foot`'s foot, in mm."""
    return _lines_mm(_foot_lines(identity, note, width_mm))


def _foot_lines(identity: RunIdentity, note: str, width_mm: float) -> list[str]:
    """Return the lines of the foot, note first, broken to the figure's width."""
    notes = [note] if note else []
    return [part for line in [*notes, *identity.lines()] for part in _wrap(line, width_mm / _INCH_MM)]


def _lines_mm(lines: Sequence[str]) -> float:
    """Return the height of the foot's lines with its margin, in mm."""
    return len(lines) * _LINE_MM + 1.5


def _wrap(line: str, width_inches: float) -> list[str]:
    """Return a line broken into lines of a width, at dots or bars, else between words."""
    width = int(width_inches * 72 / (_FOOT_POINTS * 0.56))
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
    """Return the run's identity as file metadata, under keys that matplotlib accepts for png, svg or pdf."""
    description = escape_line("; ".join([identity.lines()[0], *(config.label() for config in identity.configs)]))
    title, made_with = escape_line(f"{identity.model} on {identity.dataset}"), escape_line(identity.made_with)
    if suffix == "pdf":
        return {"Title": title, "Subject": description, "Creator": made_with}
    if suffix == "svg":
        return {"Title": title, "Description": description, "Creator": made_with}
    return {"Title": title, "Description": description, "Software": made_with}
