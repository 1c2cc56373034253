"""Scores against what the caches hold, a line per method, beside the full cache's (paper, figure 1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from matplotlib.transforms import ScaledTranslation

from perturbkv.analyses.naming import folded
from perturbkv.analyses.quality.quality import Quality
from perturbkv.analyses.quality.quality_layout import FULL, lines
from perturbkv.analyses.quality.quality_told import about_scores
from perturbkv.analyses.quality.score_columns import Column, Mean
from perturbkv.analyses.stats.intervals import LEAST
from perturbkv.figures import legends, style
from perturbkv.figures.labels import by_held

_MOST = 6
"""Panels of data sets; of more of them, kinds are shown."""
_WIDE, _NARROW = 3, 2
_ROW_MM, _AROUND_MM, _LEGEND_MM = 46, 12, 4
_TITLE = {style.COLUMN_MM: 44, style.WIDE_MM: 100}
"""Letters of a line of titles, by width."""
Curves = dict[str, list[tuple[int, float]]]
"""Method -> place and budget of each of its configurations."""
_APART, _SPREAD = 2.0, 12.0
"""Points between methods of one budget, and between the first and the last of many: drawn apart, where they are."""
_MARGIN = 0.12
"""Of the x axis beside its ends, so that what is drawn aside has room."""
_ALIKE = 1.25
"""Largest cache over the smallest of a panel whose caches are of one size."""
_MARKS, _WHOLE = 6, 5
"""Sizes of caches that are marked, each by itself; per cent above which they are marked as whole numbers."""


def draw(result: Quality, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per data set, or per kind of task where there are many, and one of the average."""
    with style.use():
        shown, curves, narrow = panels(result), _curves(result), width_mm < style.WIDE_MM
        columns = min(_NARROW if narrow else _WIDE, len(shown))
        rows = -(-len(shown) // columns)
        beside = legends.columns([FULL, *curves], width_mm, 2 if narrow else 4)
        legend_mm = -(-(len(curves) + 1) // beside) * _LEGEND_MM
        said = f"{about_scores(result.datasets)} {_bars(result)}"
        foot_mm = style.long_foot_mm(result.identity, said, width_mm)
        figure = style.figure(width_mm, rows * _ROW_MM + _AROUND_MM + legend_mm + foot_mm)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for place, panel in enumerate(axes[: len(shown)]):
            _panel(panel, shown[place], curves, title=_TITLE[style.COLUMN_MM if narrow else style.WIDE_MM] // columns)
            panel.set_ylabel("score × 100" if place % columns == 0 else "")
            panel.set_xlabel(_axis(result) if place + columns >= len(shown) else "")
        for panel in axes[len(shown) :]:
            panel.set_axis_off()
        figure.legend(handles=_legend(curves), loc="outside upper left", ncols=beside)
        style.foot(figure, result.identity, said)
    return figure


def panels(result: Quality) -> list[Column]:
    """What is drawn: the average last, where it is not the only one."""
    first = result.datasets if len(result.datasets) <= _MOST else result.kinds
    return [*first, result.average] if len(first) > 1 else list(first)


def _curves(result: Quality) -> Curves:
    """Method -> its configurations, that which holds least first."""
    found: Curves = {}
    for line in lines(result.configs, [result.average]):
        if line.place is not None:
            found.setdefault(line.method, []).append((line.place, float(line.budget)))
    return {name: by_held(some, lambda one: float(result.average.held[one[0]])) for name, some in found.items()}


def _panel(axes: Axes, column: Column, curves: Curves, title: int) -> None:
    _full(axes, column.full)
    places = np.arange(len(curves)) - (len(curves) - 1) / 2
    apart = min(_APART, _SPREAD / max(1, len(curves) - 1))
    drawn = zip(curves.items(), _looks(len(curves)), apart * places, strict=True)
    for (name, some), (colour, marker), points in drawn:
        means = [column.evicted[place] for place, _ in some]
        made = axes.errorbar(100 * np.array([_share(column, *one) for one in some]),
                             np.array([100 * mean.value for mean in means]),
                             yerr=_reach(means), color=colour, marker=marker, markersize=2.6, markerfacecolor="none",
                             linewidth=0.9, elinewidth=0.6, gid=name)  # fmt: skip
        _aside(axes, made, points)
    axes.set_title(folded(f"{column.name}, n\u00a0=\u00a0{column.samples}", title), loc="left")
    _ends(axes, [_share(column, *one) for some in curves.values() for one in some])
    axes.grid(visible=True, axis="y")


def _aside(axes: Axes, made: ErrorbarContainer, points: float) -> None:
    """Draw a curve beside its place: its numbers stay what they are."""
    shift = ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)
    for artist in made.get_children():
        artist.set_transform(axes.transData + shift)


def _ends(axes: Axes, shares: Sequence[float]) -> None:
    """A logarithmic x axis, wide where caches are of one size; scores from 0, to 100 where there is nothing else."""
    axes.margins(x=_MARGIN)
    style.log_axes(axes, x=True)
    _marks(axes, sorted({round(100 * share, 1) for share in shares}))
    if max(shares) < _ALIKE * min(shares):
        axes.set_xlim(100 * min(shares) / 2, 100 * max(shares) * 2)
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low) if high > 1 else 0.0, high if high > 1 else 100.0)


def _marks(axes: Axes, sizes: Sequence[float]) -> None:
    """Mark the caches' own sizes on the x axis where they are few and lie apart."""
    if len(sizes) <= _MARKS and all(after > _ALIKE * before for before, after in pairwise(sizes)):
        axes.set_xticks(sizes, [f"{size:.{0 if size > _WHOLE else 1}f}" for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())


def _share(column: Column, place: int, budget: float) -> float:
    """What a cache of this data set holds over the full one; where a trace does not tell, its budget."""
    return budget if np.isnan(column.held[place]) else float(column.held[place])


def _full(axes: Axes, full: Mean) -> None:
    """The full cache's score as a line, its interval as a band."""
    axes.axhline(100 * full.value, color="0.35", linestyle="--", linewidth=0.9, zorder=1, gid=FULL)
    if full.interval is not None:
        axes.axhspan(100 * full.interval.low, 100 * full.interval.high, color="0.5", alpha=0.12, linewidth=0, zorder=0)


def _reach(means: Sequence[Mean]) -> Any:
    """(2, budget) from each score to the ends of its interval; None where there are none."""
    bars = [bar for bar in (style.bars(mean.value, mean.interval) for mean in means) if bar is not None]
    return 100 * np.hstack(bars) if len(bars) == len(means) else None


def _looks(count: int) -> list[tuple[Any, str]]:
    """Colour and marker of each method."""
    markers = cycle("os^Dvp<>hX")
    return [(colour, next(markers)) for colour in style.category_colours(count)]


def _axis(result: Quality) -> str:
    """What stands below the panels."""
    told = not any(np.isnan(column.held).any() for column in result.datasets)
    return "held / full cache (%)" if told else "budget × 100"


def _legend(curves: Curves) -> list[Line2D]:
    full = Line2D([], [], color="0.35", linestyle="--", linewidth=0.9, label=FULL)
    looks = zip(curves, _looks(len(curves)), strict=True)
    return [full, *(Line2D([], [], color=colour, marker=marker, markersize=3, markerfacecolor="none", label=name)
                    for name, (colour, marker) in looks)]  # fmt: skip


def _bars(result: Quality) -> str:
    """What bars and bands are; methods of one budget stand apart to be seen."""
    sizes = [one.samples for one in result.datasets]
    kind = "95 % intervals" if min(sizes) >= LEAST else f"95 % intervals, of fewer than {LEAST} samples ranges"
    return f"Bars and bands: {kind} over samples; methods of equal caches are drawn side by side"
