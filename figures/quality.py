"""Figures of answers: scores against cache shares (paper, figure 1), perplexity, and divergence token by token.

Divergence is the share of free answers still equal to the full cache's, and KL over the full cache's answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from perturbkv.analyses import text
from perturbkv.analyses.names import SIDE, distinct_choices, distinct_names, fold
from perturbkv.analyses.quality.divergence import Divergence
from perturbkv.analyses.quality.divergence_point import DivergencePoint
from perturbkv.analyses.quality.perplexity import Perplexity
from perturbkv.analyses.quality.quality import Quality
from perturbkv.analyses.quality.score_columns import FULL, ScoreColumn, rows
from perturbkv.analyses.quality.score_tables import scores_note
from perturbkv.analyses.stats.intervals import MIN_SAMPLES, Band, median_level
from perturbkv.display import plural
from perturbkv.figures import style
from perturbkv.figures.labels import draw_legend, sort_by_cache_share
from perturbkv.figures.panels import draw_sum_ratio, finish_ratio_panel, panel_grid

_MOST = 6
"""Most panels of data sets; of more data sets, kinds of tasks are drawn."""
_WIDE, _NARROW = 3, 2
_ROW_MM, _AROUND_MM = 46, 20
_TITLE_NARROW, _TITLE_WIDE = 44, 100
"""Letters per line of all titles in a row, in one column and in two."""
Curves = dict[str, list[tuple[int, float]]]
"""Method -> index and budget of each of its configurations."""
_APART, _SPREAD = 2.0, 12.0
"""Points of print between methods at one budget, and between the first and the last of many methods."""
_MARGIN = 0.12
"""Margin of the x axis as a share, for points that are shifted."""
_ALIKE = 1.25
"""Ratio of the largest to the smallest cache below which a panel's caches count as equally large."""
_MARKS, _WHOLE = 6, 5
"""Most cache sizes that have ticks; per cent above which ticks are rounded to whole numbers."""


def draw_quality(result: Quality, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw scores over cache shares, a panel per data set (per kind of task where there are many) and the average."""
    shown, curves, narrow = drawn_columns(result), _curves_by_method(result), width_mm < style.WIDE_MM
    columns = min(_NARROW if narrow else _WIDE, len(shown))
    figure, panels = panel_grid(len(shown), columns, width_mm, _ROW_MM, _AROUND_MM)
    known = not any(np.isnan(method.cache_share) for column in result.datasets for method in column.methods)
    x_label = "cache share (%)" if known else "budget × 100"
    for index, (panel, column) in enumerate(zip(panels, shown, strict=True)):
        _draw_column(panel, column, curves, title_letters=(_TITLE_NARROW if narrow else _TITLE_WIDE) // columns)
        panel.set_ylabel("score × 100" if index % columns == 0 else "")
        panel.set_xlabel(x_label if index + columns >= len(shown) else "")
    full = Line2D([], [], color="0.35", linestyle="--", linewidth=0.9, label=FULL)
    looks = zip(curves, _method_looks(len(curves)), strict=True)
    methods = [
        Line2D([], [], color=colour, marker=marker, markersize=3, markerfacecolor="none", label=name)
        for name, (colour, marker) in looks
    ]
    draw_legend(figure, [full, *methods])
    every = (
        ""
        if min(one.samples for one in result.datasets) >= MIN_SAMPLES
        else f", of fewer than {MIN_SAMPLES} samples ranges"
    )
    bars = f"Bars and bands: 95 % intervals{every} over samples; methods of equal caches are drawn side by side"
    return style.describe_run(figure, result.identity, f"{scores_note(result.datasets)} {bars}")


def drawn_columns(result: Quality) -> list[ScoreColumn]:
    """Return the columns to draw; the average is last if there are several."""
    first = result.datasets if len(result.datasets) <= _MOST else result.kinds
    return [*first, result.average] if len(first) > 1 else list(first)


def _curves_by_method(result: Quality) -> Curves:
    """Return method -> index and budget of its configurations, the smallest cache first."""
    curves: Curves = {}
    for row in rows(result.configs, [result.average]):
        if row.index is not None:
            curves.setdefault(row.method, []).append((row.index, float(row.budget)))
    methods = result.average.methods
    return {name: sort_by_cache_share(some, lambda one: methods[one[0]].cache_share) for name, some in curves.items()}


def _draw_column(axes: Axes, column: ScoreColumn, curves: Curves, title_letters: int) -> None:
    """Draw one data set's scores over cache shares, a curve per method; `title_letters` per line of the title."""
    axes.axhline(100 * column.full, color="0.35", linestyle="--", linewidth=0.9, zorder=1, gid=FULL)
    ends = column.full_interval
    if ends is not None:
        axes.axhspan(100 * ends.low, 100 * ends.high, color="0.5", alpha=0.12, linewidth=0, zorder=0)
    offsets = np.arange(len(curves)) - (len(curves) - 1) / 2
    distance = min(_APART, _SPREAD / max(1, len(curves) - 1))
    looks = zip(curves.items(), _method_looks(len(curves)), distance * offsets, strict=True)
    for (name, members), (colour, marker), points in looks:
        scores = [column.methods[index] for index, _ in members]
        bars = [bar for bar in (style.error_bars(one.score, one.score_interval) for one in scores) if bar is not None]
        curve = axes.errorbar(100 * np.array([_cache_share(column, *one) for one in members]),
                             np.array([100 * one.score for one in scores]),
                             yerr=100 * np.hstack(bars) if len(bars) == len(scores) else None, color=colour,
                             marker=marker, markersize=2.6, markerfacecolor="none", linewidth=0.9, elinewidth=0.6,
                             gid=name)  # fmt: skip
        shift = ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)
        for artist in curve.get_children():
            artist.set_transform(axes.transData + shift)
    axes.set_title(fold(f"{column.name}, n\u00a0=\u00a0{column.samples}", title_letters), loc="left")
    _set_limits(axes, [_cache_share(column, *one) for members in curves.values() for one in members])
    axes.grid(visible=True, axis="y")


def _set_limits(axes: Axes, shares: Sequence[float]) -> None:
    """Set the limits of a panel whose curves have the cache shares `shares`.

    x is logarithmic, and at least a factor of 4 wide where the caches are alike; y begins at 0 or below, and ends at
    100 where all scores are 0.
    """
    axes.margins(x=_MARGIN)
    style.set_log_axes(axes, x=True)
    sizes = sorted({round(100 * share, 1) for share in shares})
    if len(sizes) <= _MARKS and all(after > _ALIKE * before for before, after in pairwise(sizes)):
        axes.set_xticks(sizes, [f"{size:.{0 if size > _WHOLE else 1}f}" for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
    if max(shares) < _ALIKE * min(shares):
        axes.set_xlim(100 * min(shares) / 2, 100 * max(shares) * 2)
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low) if high > 1 else 0.0, high if high > 1 else 100.0)


def _cache_share(column: ScoreColumn, index: int, budget: float) -> float:
    """Return a configuration's cache share in a column; its budget if the share is unknown."""
    share = column.methods[index].cache_share
    return budget if np.isnan(share) else share


def _method_looks(count: int) -> list[tuple[Any, str]]:
    """Return `count` pairs of colour and marker, one per method."""
    markers = cycle("os^Dvp<>hX")
    return [(colour, next(markers)) for colour in style.category_colours(count)]


_PERPLEXITY_LINE_MM, _PERPLEXITY_AROUND_MM = 6, 24


def draw_perplexity(result: Perplexity, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw each configuration's perplexity over the full cache's, with its interval, in a row of its own."""
    names = [fold(name, 24) for name in result.identity.names]
    lines = sum(name.count("\n") + 1 for name in names)
    figure = style.figure(width_mm, lines * _PERPLEXITY_LINE_MM + _PERPLEXITY_AROUND_MM)
    axes = figure.subplots()
    axes.axvline(1, color="0.35", linestyle="--", linewidth=0.9, zorder=1, gid=FULL)
    for row, one in enumerate(result.configs):
        draw_sum_ratio(axes, row, "ratio", one.ratio, one.ratio_interval, {"ratio": ("o", 0.0)})
    finish_ratio_panel(axes, names, result.title())
    axes.set_xlabel("perplexity over the full cache's")
    return style.describe_run(figure, result.identity, style.interval_note(len(result.samples)))


_PANEL_MM, _DIVERGENCE_AROUND_MM = 52, 28
_BANDS = 4
"""More bands than these hide one another: of more configurations the lines alone are drawn."""
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")
_WIDEST, _WIDTH = 2.6, 1.0


def draw_divergence(result: Divergence, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw the share of answers still equal to the full cache's and, where measured, KL, by token, with bands.

    A colour per policy and selection, a dash per other difference between the configurations.
    """
    configs = sort_by_cache_share(result.configs, lambda one: one.cache_share)
    count, columns = 2 if result.noise_floor.size else 1, 1 if width_mm < style.WIDE_MM else 2
    figure, axes = panel_grid(count, columns, width_mm, _PANEL_MM, _DIVERGENCE_AROUND_MM)
    handles = [
        _draw_divergence_config(axes, result, one, name, look, bands=len(configs) <= _BANDS)
        for one, name, look in zip(configs, _divergence_names(result, configs), _divergence_looks(configs), strict=True)
    ]
    axes[0].set(ylim=(-0.03, 1.03), ylabel="share of samples", xlabel="tokens of the answer")
    axes[0].set_title("Own answers: no token differs yet", loc="left")
    if len(axes) > 1:
        axes[1].set(ylim=(0, None), ylabel="KL, nat", xlabel="token of the full cache's answer")
        axes[1].set_title("Next token's distribution", loc="left")
        style.draw_note(axes[1], f"everything kept: {np.nanmax(result.noise_floor):.1e}")
    for panel in axes:
        panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        panel.set_xlim(0, max(1, *result.lengths))
    draw_legend(figure, handles)
    return style.describe_run(figure, result.identity, _foot_text(result, len(configs)))


def _divergence_names(result: Divergence, configs: Sequence[DivergencePoint]) -> list[str]:
    """Return a distinct name of each configuration, with its cache share."""
    names = distinct_names([one.config for one in configs])
    start = " at the start" if result.identity.compressed_again else ""
    return [
        f"{name} (held {text.cache_share(one.cache_share)}{start})" for name, one in zip(names, configs, strict=True)
    ]


def _divergence_looks(configs: Sequence[DivergencePoint]) -> list[dict[str, Any]]:
    """Return the plot options per configuration; the first drawn is the widest, visible under equal lines."""
    distinct = distinct_choices([one.config for one in configs])
    sides, others = (
        [" ".join(word for choice, word in words.items() if (choice in SIDE) == of_side) for words in distinct]
        for of_side in (True, False)
    )
    colours = dict(zip(dict.fromkeys(sides), style.category_colours(len(set(sides))), strict=True))
    dashes = dict(zip(dict.fromkeys(others), cycle(_DASHES), strict=False))
    widths = np.linspace(_WIDEST if 1 < len(configs) <= _BANDS else _WIDTH, _WIDTH, len(configs))
    return [
        {"color": colours[side], "linestyle": dashes[other], "linewidth": float(width)}
        for side, other, width in zip(sides, others, widths, strict=True)
    ]


def _draw_divergence_config(
    axes: Sequence[Axes], result: Divergence, point: DivergencePoint, name: str, look: dict[str, Any], *, bands: bool
) -> Line2D:
    """Draw one configuration's curves with bands where `bands`; return its legend entry."""
    alike, band = point.equal_prefix_shares(max(result.lengths))
    curves: list[tuple[Axes, Any, Any, Band, str]] = [(axes[0], np.arange(len(alike)), alike, band, "alike")]
    if point.forced is not None:
        middles = (np.arange(len(point.forced.curve)) + 0.5) * result.span - 0.5
        curves.append((axes[1], middles, point.forced.curve, point.forced.curve_interval, "kl"))
    for panel, positions, values, ends, kind in curves:
        panel.plot(positions, values, gid=f"{kind} {point.config.label()}",
                   drawstyle="steps-post" if kind == "alike" else "default", **look)  # fmt: skip
        if ends is not None and bands:
            panel.fill_between(positions, ends.low, ends.high, color=look["color"], alpha=0.13, linewidth=0,
                               gid=f"{kind} band", step="post" if kind == "alike" else None)  # fmt: skip
    return Line2D([], [], label=name, **look)


def _foot_text(result: Divergence, configs: int) -> str:
    """Return the foot's text on n, the kind of bands, and the number of tokens per point of KL."""
    samples = len(result.samples)
    means = f", each one's means over {result.span} tokens" if result.span > 1 else ""
    points = f" · KL: medians over samples{means}" if result.noise_floor.size else ""
    if configs > _BANDS or samples < 2:
        return f"n = {plural(samples, 'sample')}{points}"
    level = f"{100 * median_level(samples):.0f} % intervals" if samples >= MIN_SAMPLES else ""
    kind = level or "ranges of single samples"
    return f"bands: shares have exact 95 % intervals, KL {kind}, over n = {samples} samples{points}"
