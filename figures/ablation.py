"""Figures of the ablation, the ranking of methods, the restrictions, and caches at equal bytes.

Ingredients are compared with plain attention; methods with SnapKV and with random entries under the same protection;
restrictions with one set per key/value head. Perturbation is isolated and propagated; restrictions have the last
layer's drift, too. At equal bytes loss is drawn over bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from perturbkv.analyses import text
from perturbkv.analyses.ablation.ablation import Ablation
from perturbkv.analyses.ablation.equal_bytes import (
    BOTH,
    CURVES,
    DOMINATED,
    EVICTED,
    OWN,
    ROUNDED,
    WHOLE,
    EqualBytes,
)
from perturbkv.analyses.ablation.ingredients import BASELINE, INGREDIENTS, MEAN_OF_PRODUCTS, Setting
from perturbkv.analyses.ablation.methods import MethodRanking, MethodSetting, Row
from perturbkv.analyses.ablation.restriction import RESTRICTION_BASELINE, Restriction, RestrictionSetting
from perturbkv.analyses.names import common_text, short_names
from perturbkv.analyses.stats.equivalence import margin_text
from perturbkv.figures import style
from perturbkv.figures.labels import draw_legend, sort_by_cache_share
from perturbkv.figures.panels import (
    draw_drift,
    draw_ratio,
    draw_sum_ratio,
    drift_entry,
    finish_ratio_panel,
    label_outer,
    marker_entries,
    panel_grid,
    ratio_entries,
)

_COLUMNS, _LINE_MM, _AROUND_MM, _LOWEST_MM = 2, 4.2, 21, 40


def draw_ablation(result: Ablation, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a panel per setting; left of 1 an ingredient perturbs less than the baseline."""
    ordered = sort_by_cache_share(result.settings, lambda one: one.cache_share)
    named = {row.title: row.name for result in ordered for row in result.rows}
    order = list(INGREDIENTS)
    titles = {BASELINE: BASELINE} | dict(sorted(named.items(), key=lambda item: order.index(item[1])))
    height = max(_LOWEST_MM, len(titles) * _LINE_MM + _AROUND_MM)
    figure, panels = panel_grid(len(ordered), _columns(width_mm), width_mm, height, 10, sharex=True)
    names = short_names([result.baseline for result in ordered], "alpha")
    for panel, one, name in zip(panels, ordered, names, strict=True):
        _draw_setting(panel, one, name or one.setting, titles)
    label_outer(panels, f"Σ L1 over {BASELINE}'s (log axis)", "")
    draw_legend(figure, ratio_entries())
    return style.describe_run(figure, result.identity, style.interval_note(result.identity.samples))


def _columns(width_mm: float) -> int:
    """Return the most panels per row."""
    return 1 if width_mm < style.WIDE_MM else _COLUMNS


def _draw_setting(axes: Axes, result: Setting, name: str, titles: dict[str, str]) -> None:
    """Draw an ingredient per row of a setting; without a ratio the row says "no group" or "not measured"."""
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    rows = {row.title: row for row in result.rows}
    for index, title in enumerate(titles):
        if title in rows:
            for kind, measured in (("isolated", rows[title].isolated), ("propagated", rows[title].propagated)):
                draw_ratio(axes, index, kind, measured, f"{BASELINE} or row is 0")
        elif title != BASELINE:
            grouped = titles[title] == MEAN_OF_PRODUCTS and result.granularity == "query"
            said = " no group" if grouped else " not measured"
            axes.text(1, index, said, fontsize=style.points(5.5), color="0.5", va="center")
    names = [f"{title} (= 1)" if title == BASELINE else title for title in titles]
    finish_ratio_panel(axes, names, f"{name}\ncache share {_cache_share_range(result)}")


def _cache_share_range(result: Setting) -> str:
    """Return the cache shares of the setting's rows as 'least to most', once where they are equal."""
    shares = [text.decimal(share) for row in result.rows for share in row.cache_shares]
    return " to ".join(dict.fromkeys((min(shares), max(shares))))


_METHODS_LINE_MM, _METHODS_AROUND_MM, _LEAST_MM = 5.2, 19, 56
_MARKS = {"over snapkv": ("o", -0.16), "over random, same ends": ("s", 0.16)}


def draw_methods(result: MethodRanking, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a panel per setting, the method that perturbs least on top; left of 1 it perturbs less."""
    ordered = sort_by_cache_share(result.settings, lambda one: one.cache_share)
    height = max(_LEAST_MM, max(len(one.rows) for one in ordered) * _METHODS_LINE_MM + _METHODS_AROUND_MM)
    figure, panels = panel_grid(len(ordered), _columns(width_mm), width_mm, height, 10, sharex=True)
    for panel, one in zip(panels, ordered, strict=True):
        _draw_methods_setting(panel, one, result.margin)
        panel.set_xlabel("propagated Σ L1: ratio (log axis)")
    handles = marker_entries((marker, name) for name, (marker, _) in _MARKS.items())
    band = Patch(color="0.9", label=f"within {margin_text(result.margin)}")
    draw_legend(figure, [*handles, band])
    return style.describe_run(figure, result.identity, style.interval_note(result.identity.samples))


def _draw_methods_setting(axes: Axes, result: MethodSetting, margin: float) -> None:
    """Draw a method per row: its ratio to SnapKV and to random entries of the same protection; the margin as a band."""
    axes.axvspan(1 / (1 + margin), 1 + margin, color="0.9", linewidth=0, zorder=0, gid="margin")
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    for index, row in enumerate(result.rows):
        for name, comparison in zip(_MARKS, (row, row.controls.get("random")), strict=True):
            if comparison is not None:
                measured = comparison.propagated
                draw_sum_ratio(axes, index, name, measured.sum_ratio, measured.sum_ratio_interval, _MARKS)
    finish_ratio_panel(axes, [row.name for row in result.rows], result.setting)


_BUDGETS_ROW_MM = 76


def draw_methods_over_budgets(result: MethodRanking, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw how far all outputs move, over the cache share: a curve per method, SnapKV's first; a panel per setting.

    With more than eight curves rows are twice as high, and only SnapKV's has a band.
    """
    groups = _group_over_budgets(result)
    names = list(dict.fromkeys(row.name for one in result.settings for row in one.rows))
    colours = dict(zip([_SNAPKV, *sorted(names)], style.category_colours(1 + len(names)), strict=True))
    few = len(colours) <= _MOST_BANDS
    height = _BUDGETS_ROW_MM * (1 if few else 2)
    figure, panels = panel_grid(len(groups), _columns(width_mm), width_mm, height, 10)
    for panel, (name, settings) in zip(panels, groups.items(), strict=True):
        _draw_method_curves(panel, settings, colours, colours if few else (_SNAPKV,))
        panel.set_title(name, loc="left")
    handles = [
        Line2D([], [], color=colour, marker=_marker(index), markersize=3.5, markerfacecolor="none",
               linewidth=_line_width(name), label=name)
        for index, (name, colour) in enumerate(colours.items())
    ]  # fmt: skip
    draw_legend(figure, handles)
    bands = style.interval_note(result.identity.samples)
    return style.describe_run(figure, result.identity, bands if few else f"only snapkv's band is drawn; {bands}")


def _group_over_budgets(result: MethodRanking) -> dict[str, list[MethodSetting]]:
    """Return name of a setting without its budget -> its settings, which differ in budget alone, by cache share."""
    groups: dict[str, list[MethodSetting]] = {}
    for one in sort_by_cache_share(result.settings, lambda one: one.cache_share):
        groups.setdefault(
            common_text((one.baseline,), *("policy", "selection", "window", "alpha", "pool", "budget")), []
        ).append(one)
    return groups


_MOST_BANDS = 8
"""Most curves that each have a band."""
_SNAPKV = "snapkv"


def _marker(index: int) -> str:
    """Return a curve's marker by its number: one of seven, so that with ten colours none repeats before 70 curves."""
    return "os^DvPX"[index % 7]


def _line_width(name: str) -> float:
    """Return the width of a method's line: SnapKV's is wider."""
    return 1.8 if name == _SNAPKV else 1.0


def _draw_method_curves(
    axes: Axes, settings: Sequence[MethodSetting], colours: dict[str, Any], banded: Collection[str]
) -> None:
    """Draw a curve per method through the settings, which differ in budget alone; those `banded` with their band."""
    for index, (name, colour) in enumerate(colours.items()):
        rows = (row for one in settings for row in one.rows if row.name == name)
        points: list[MethodSetting | Row] = list(settings if name == _SNAPKV else rows)
        percent = [100 * point.cache_share for point in points]
        moved = style.mask_nonpositive(np.array([100 * point.relative for point in points]))
        axes.plot(percent, moved, color=colour, marker=_marker(index), markersize=3.5, markerfacecolor="none",
                  linewidth=_line_width(name), gid=name)  # fmt: skip
        ends = [point.relative_interval for point in points]
        if name in banded and len(points) > 1 and all(ends):
            low, high = (
                style.mask_nonpositive(np.array([100 * getattr(end, side) for end in ends])) for side in ("low", "high")
            )
            axes.fill_between(percent, low, high, color=colour, alpha=0.13, linewidth=0)
    axes.set(xlabel="cache share (%), and budget", ylabel="outputs move, % of their norm\n(propagated, all heads)")
    style.set_log_axes(axes, x=True, y=True)
    shares = [100 * one.cache_share for one in settings]
    names = [f"{share:.0f}\nb={one.baseline.budget}" for share, one in zip(shares, settings, strict=True)]
    axes.xaxis.set_major_locator(FixedLocator(shares))
    axes.xaxis.set_major_formatter(FixedFormatter(names))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(min(shares) / 1.15, max(shares) * 1.15)
    axes.grid(visible=True, axis="y")


_RESTRICTION_LINE_MM, _RESTRICTION_AROUND_MM = 6.5, 19


def draw_restriction(result: Restriction, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a panel per setting; right of 1 a restriction perturbs more than the baseline."""
    ordered = sort_by_cache_share(result.settings, lambda one: one.cache_share)
    longest = max(len(one.rows) for one in ordered)
    height = (longest + 1) * _RESTRICTION_LINE_MM + _RESTRICTION_AROUND_MM
    figure, panels = panel_grid(len(ordered), _columns(width_mm), width_mm, height, 10, sharex=True)
    names = short_names([one.baseline for one in ordered]) if len(ordered) > 1 else [ordered[0].setting]
    for panel, one, name in zip(panels, ordered, names, strict=True):
        _draw_restriction_setting(panel, one, name)
        panel.set_xlabel(f"over {RESTRICTION_BASELINE}'s (log axis)")
    draw_legend(figure, [*ratio_entries(), drift_entry()])
    return style.describe_run(figure, result.identity, style.interval_note(result.identity.samples))


def _draw_restriction_setting(axes: Axes, result: RestrictionSetting, name: str) -> None:
    """Draw a restriction per row: its ratios to the baseline, and its cache share in the row's name."""
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    for index, row in enumerate(result.rows, start=1):
        for kind in ("isolated", "propagated"):
            draw_ratio(axes, index, kind, getattr(row, kind), f"{RESTRICTION_BASELINE} or row is 0")
        draw_drift(axes, index, row)
    shares = [result.cache_share, *(row.cache_share for row in result.rows)]
    names = [f"{RESTRICTION_BASELINE} (= 1)", *(row.name for row in result.rows)]
    shown = [f"{name}, held {text.decimal(share)}" for name, share in zip(names, shares, strict=True)]
    finish_ratio_panel(axes, shown, name)


_BYTES_ROW_MM, _GREY = 78, "0.75"
_KIND_MARKS = {EVICTED: "o", ROUNDED: "s", BOTH: "D", OWN: "^", WHOLE: "*"}
_NEAR = np.array([0.06, 0.08])
"""Shares of a panel's width and height within which points share a label."""


def draw_equal_bytes(result: EqualBytes, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw each configuration's loss over its packed and its resident bytes; a line joins the least losses.

    Points are numbered as in the result, with a key below.
    """
    figure, panels = panel_grid(len(CURVES), _columns(width_mm), width_mm, _BYTES_ROW_MM, 10, sharey=True)
    policies = list(dict.fromkeys(one.config.policy.name for one in result.points))
    colours = dict(zip(policies, style.category_colours(len(policies)), strict=True))
    for axes, curve in zip(panels, CURVES, strict=True):
        _draw_curve(axes, result, curve, colours)
    for axes, curve in zip(panels, CURVES, strict=True):  # once the axes that they share have their ends
        _number_points(axes, result, curve)
    present = {one.kind for one in result.points}
    mark: dict[str, Any] = {"linestyle": "", "markersize": 4}
    handles = [
        *(Line2D([], [], marker="o", color=colour, label=name, **mark) for name, colour in colours.items()),
        *(
            Line2D([], [], marker=marker, color="0.3", label=kind, **mark)
            for kind, marker in _KIND_MARKS.items()
            if kind in present
        ),
        Line2D([], [], marker="o", color=_GREY, label="dominated", **mark),
    ]
    draw_legend(figure, handles, len(handles))
    key = [result.identity.name_of(one.config) for one in result.points]
    note = f"line: the least loss at no more bytes; {style.interval_note(result.identity.samples)}"
    return style.describe_run(figure, result.identity, note, key=key)


def _draw_curve(axes: Axes, result: EqualBytes, curve: str, colours: dict[str, Any]) -> None:
    """Draw the points on one curve whose bytes are told, dominated ones grey, and the line of the least losses."""
    least = result.least_losses(curve)
    axes.plot([100 * one.standing(curve).share for one in least],
              style.mask_nonpositive(np.array([100 * one.relative for one in least])), color="0.35",
              linewidth=0.8, zorder=1, gid="least")  # fmt: skip
    told = [one for one in result.points if one.standing(curve).is_told]
    for one in told:
        is_grey = one.standing(curve).verdict == DOMINATED
        ends = style.error_bars(one.relative, one.relative_interval)
        axes.errorbar([100 * one.standing(curve).share], style.mask_nonpositive(np.array([100 * one.relative])),
                      yerr=ends and [[100 * end for end in side] for side in ends], marker=_KIND_MARKS[one.kind],
                      color=_GREY if is_grey else colours[one.config.policy.name], markersize=4, linewidth=0.8,
                      zorder=2 if is_grey else 3, gid=one.standing(curve).verdict)  # fmt: skip
    axes.set(xlabel=f"{curve} bytes, % of the full cache's", ylabel=style.symbols_to_tex("loss, % of ‖o_h‖₁"))
    style.typeset([axes.yaxis.label])
    if not told:
        style.draw_note(axes, "bytes are not told", "middle")
    style.set_log_axes(axes, x=True, y=True)
    axes.margins(x=0.09, y=0.09)
    axes.grid(visible=True)


def _number_points(axes: Axes, result: EqualBytes, curve: str) -> None:
    """Write each point's number, from 1: below those on the line, above the others; near ones share a label, '2, 3'."""
    least = result.least_losses(curve)
    shown = {
        number: (one in least, np.array([100 * one.standing(curve).share, 100 * one.relative]))
        for number, one in enumerate(result.points, 1)
        if one.standing(curve).is_told and one.relative > 0
    }
    if not shown:
        return
    size = np.abs(np.diff(np.log([axes.get_xlim(), axes.get_ylim()]), axis=1)[:, 0])  # of the panel, on its log axes
    groups: list[list[int]] = []
    for number, (below, point) in shown.items():
        near = (
            numbers
            for numbers in groups
            if shown[numbers[0]][0] == below and (np.abs(np.log(point / shown[numbers[0]][1])) < _NEAR * size).all()
        )
        if numbers := next(near, None):
            numbers.append(number)
        else:
            groups.append([number])
    for numbers in groups:
        below, point = shown[numbers[0]]
        offset, across, up = ((-3, -3), "right", "top") if below else ((3, 3), "left", "bottom")
        axes.annotate(", ".join(map(str, numbers)), (point[0], point[1]), offset, textcoords="offset points",
                      ha=across, va=up, fontsize=style.points(6))  # fmt: skip
