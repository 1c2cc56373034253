"""Figures of the ablation, the ranking of methods and the restrictions: perturbation over a baseline's, per setting.

Ingredients are compared with plain attention; methods with SnapKV and with random entries under the same protection;
restrictions with one set per key/value head. Perturbation is isolated and propagated; restrictions have the last
layer's drift, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses import text
from perturbkv.analyses.ablation.ablation import Ablation
from perturbkv.analyses.ablation.ingredients import BASELINE, INGREDIENTS, MEAN_OF_PRODUCTS, Setting
from perturbkv.analyses.ablation.methods import MethodRanking, MethodSetting
from perturbkv.analyses.ablation.restriction import RESTRICTION_BASELINE, Restriction, RestrictionSetting
from perturbkv.analyses.heads.head_comparison import HeadKind
from perturbkv.analyses.pairing import short_names
from perturbkv.figures import style
from perturbkv.figures.labels import sort_by_cache_share
from perturbkv.figures.panels import draw_drift, draw_ratio, drift_entry, ratio_entries

_WIDE, _LINE_MM, _AROUND_MM = 2, 4.2, 21


def draw_ablation(result: Ablation, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a panel per setting; left of 1 an ingredient perturbs less than the baseline."""
    with style.use():
        ordered = sort_by_cache_share(result.settings, lambda one: one.cache_share)
        names = _names(ordered)
        columns = 1 if width_mm < style.WIDE_MM else min(_WIDE, len(ordered))
        chunks = [ordered[start : start + columns] for start in range(0, len(ordered), columns)]
        titles = [_titles(chunk) for chunk in chunks]
        heights = [len(rows) * _LINE_MM + _AROUND_MM for rows in titles]
        figure = style.figure(width_mm, sum(heights) + 10)
        axes = figure.subplots(len(chunks), columns, squeeze=False, sharex=True, height_ratios=heights)
        for row, chunk, rows in zip(axes, chunks, titles, strict=True):
            for index, panel in enumerate(row):
                if index < len(chunk):
                    _panel(panel, chunk[index], names.pop(0), rows, named=index == 0)
                else:
                    panel.set_axis_off()
        figure.legend(handles=ratio_entries(), loc="outside upper left", ncols=2 if columns < _WIDE else 3)
        style.draw_foot(figure, result.identity, style.interval_legend(result.identity.samples))
    return figure


def _names(results: Sequence[Setting]) -> list[str]:
    """Return distinct names of settings; the whole name of a single one."""
    if len(results) == 1:
        return [results[0].setting]
    return [name or "alike" for name in short_names([result.baseline for result in results], "alpha")]


def _titles(results: Sequence[Setting]) -> dict[str, str]:
    """Return the common rows of all panels, with their ingredients: the baseline, then each ingredient at each α."""
    named = {row.title: row.name for result in results for row in result.rows}
    order = list(INGREDIENTS)
    return {BASELINE: BASELINE} | dict(sorted(named.items(), key=lambda item: order.index(item[1])))


def _panel(axes: Axes, result: Setting, name: str, titles: dict[str, str], *, named: bool) -> None:
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    rows = {row.title: row for row in result.rows}
    for index, title in enumerate(titles):
        if title in rows:
            for kind, measured in (("isolated", rows[title].isolated), ("propagated", rows[title].propagated)):
                draw_ratio(axes, index, kind, measured, f"{BASELINE} or row is 0")
        elif title != BASELINE:
            grouped = titles[title] == MEAN_OF_PRODUCTS and result.granularity == "query"
            axes.text(1, index, " no group" if grouped else " not measured", fontsize=5.5, color="0.5", va="center")
    shown = [f"{title} (= 1)" if title == BASELINE else title for title in titles]
    axes.set_yticks(range(len(titles)), shown if named else [""] * len(titles))
    axes.set(ylim=(len(titles) - 0.5, -0.5), xlabel=f"Σ L1 over {BASELINE}'s (log axis)")
    style.log_axes(axes, x=True)
    axes.tick_params(labelbottom=True)
    axes.grid(visible=True, axis="x")
    axes.set_title(f"{name}\nheld / full {_cache_shares(result)}", loc="left")


def _cache_shares(result: Setting) -> str:
    """Return the cache share of the rows, once where all have the same."""
    shares = [text.decimal(share) for row in result.rows for share in row.cache_shares]
    return " to ".join(dict.fromkeys((min(shares), max(shares))))


_METHODS_WIDE, _METHODS_LINE_MM, _METHODS_AROUND_MM, _LEAST_MM = 2, 5.2, 19, 66
_MARKS = {"over snapkv": ("o", -0.16), "over random entries with the same protection": ("s", 0.16)}


def draw_methods(result: MethodRanking, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a panel per setting, the method that perturbs least on top; left of 1 it perturbs less."""
    with style.use():
        ordered = sort_by_cache_share(result.settings, lambda one: one.cache_share)
        columns = 1 if width_mm < style.WIDE_MM else min(_METHODS_WIDE, len(ordered))
        rows = -(-len(ordered) // columns)
        longest = max(len(one.rows) for one in ordered)
        figure = style.figure(width_mm, max(_LEAST_MM, rows * (longest * _METHODS_LINE_MM + _METHODS_AROUND_MM) + 10))
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
        for panel, one in zip(panels, ordered, strict=False):
            _methods_panel(panel, one)
        for panel in list(panels)[len(ordered) :]:
            panel.set_axis_off()
        figure.legend(handles=_legend(), loc="outside upper left", ncols=1 if columns < _METHODS_WIDE else 2)
        style.draw_foot(figure, result.identity, style.interval_legend(result.identity.samples))
    return figure


def _methods_panel(axes: Axes, result: MethodSetting) -> None:
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    for index, row in enumerate(result.rows):
        random = row.controls.get("random")
        for name, comparison in zip(_MARKS, (row, random), strict=True):
            if comparison is not None:
                _point(axes, index, name, comparison.propagated)
    axes.set_yticks(range(len(result.rows)), [row.name for row in result.rows])
    axes.set(ylim=(len(result.rows) - 0.5, -0.5), xlabel="propagated Σ L1: ratio (log axis)")
    style.log_axes(axes, x=True)
    axes.tick_params(labelbottom=True)
    axes.grid(visible=True, axis="x")
    axes.set_title(result.setting, loc="left")


def _point(axes: Axes, index: int, name: str, measured: HeadKind) -> None:
    ratio, (marker, offset) = measured.sum_ratio, _MARKS[name]
    if np.isnan(ratio) or ratio <= 0:
        return
    colour = style.category_colours(2)[list(_MARKS).index(name)]
    axes.errorbar([ratio], [index + offset], xerr=style.error_bars(ratio, measured.sum_ratio_interval), color=colour,
                  marker=marker, markersize=3, linewidth=0.9, gid=name)  # fmt: skip


def _legend() -> list[Line2D]:
    colours = style.category_colours(2)
    return [
        Line2D([], [], linestyle="", marker=marker, markersize=3.5, color=colour, label=name)
        for (name, (marker, _)), colour in zip(_MARKS.items(), colours, strict=True)
    ]


_RESTRICTION_WIDE, _RESTRICTION_LINE_MM, _RESTRICTION_AROUND_MM = 2, 6.5, 19


def draw_restriction(result: Restriction, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a panel per setting; right of 1 a restriction perturbs more than the baseline."""
    with style.use():
        ordered = sort_by_cache_share(result.settings, lambda one: one.cache_share)
        columns = 1 if width_mm < style.WIDE_MM else min(_RESTRICTION_WIDE, len(ordered))
        rows = -(-len(ordered) // columns)
        longest = max(len(one.rows) for one in ordered)
        figure = style.figure(width_mm, rows * ((longest + 1) * _RESTRICTION_LINE_MM + _RESTRICTION_AROUND_MM) + 10)
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
        for panel, one, name in zip(panels, ordered, _restriction_names(ordered), strict=False):
            _restriction_panel(panel, one, name)
        for panel in list(panels)[len(ordered) :]:
            panel.set_axis_off()
        entries = [*ratio_entries(), drift_entry()]
        figure.legend(handles=entries, loc="outside upper left", ncols=2 if columns < _RESTRICTION_WIDE else 4)
        style.draw_foot(figure, result.identity, style.interval_legend(result.identity.samples))
    return figure


def _restriction_names(results: Sequence[RestrictionSetting]) -> list[str]:
    """Return distinct names of settings; the whole name of a single one."""
    names = short_names([result.baseline for result in results])
    return [result.setting if len(results) == 1 else name for result, name in zip(results, names, strict=True)]


def _restriction_panel(axes: Axes, result: RestrictionSetting, name: str) -> None:
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    for index, row in enumerate(result.rows, start=1):
        for kind in ("isolated", "propagated"):
            draw_ratio(axes, index, kind, getattr(row, kind), f"{RESTRICTION_BASELINE} or row is 0")
        draw_drift(axes, index, row)
    shares = [result.cache_share, *(row.cache_share for row in result.rows)]
    names = [f"{RESTRICTION_BASELINE} (= 1)", *(row.name for row in result.rows)]
    shown = [f"{name}, held {text.decimal(share)}" for name, share in zip(names, shares, strict=True)]
    axes.set_yticks(range(len(shown)), shown)
    axes.set(ylim=(len(shown) - 0.4, -0.5), xlabel=f"over {RESTRICTION_BASELINE}'s (log axis)")
    style.log_axes(axes, x=True)
    axes.tick_params(labelbottom=True)
    axes.grid(visible=True, axis="x")
    axes.set_title(name, loc="left")
