"""Evicted mass against the difference of evicted and kept entries, per head, and the loss left after corrections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.pairing import fold, plural, short_names
from perturbkv.analyses.questions.split.mass_and_distance import Contest, LogFactors, Setting, Spread
from perturbkv.figures import style
from perturbkv.figures.panels import draw_drift, draw_ratio, drift_entry, finish_ratio_panel, ratio_entries

if TYPE_CHECKING:
    from perturbkv.analyses.questions.split.split import Split

_WIDE, _SCATTER_MM, _ROW_MM, _AROUND_MM = 2, 58, 8, 19
_LINES = 7
_LEAST = 0.01
"""Share of heads that may be left of the axis, which a few heads of tiny evicted mass would stretch."""
_CENTRES = "D^vsP*pX"
_Clouds = list[tuple[Spread, LogFactors]]


def draw(result: Split, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw evicted mass against distance, a scatter per budget, and a panel of ratios per corrected configuration."""
    with style.use():
        clouds, corrections = _clouds_by_panel(result), result.corrections
        columns = _WIDE if width_mm >= style.WIDE_MM else 1
        rows = [-(-len(panels) // columns) for panels in (clouds, corrections)]
        longest = max((len(one.rows) for one in corrections), default=0)
        heights = [_SCATTER_MM] * rows[0] + [longest * _ROW_MM + _AROUND_MM] * rows[1]
        figure = style.figure(width_mm, sum(heights) + 22)
        grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
        for index, (name, cloud) in enumerate(clouds):
            _draw_scatter(figure.add_subplot(grid[index // columns, index % columns]), name, cloud)
        first = None
        for index, (one, name) in enumerate(zip(corrections, _correction_names(corrections), strict=True)):
            axes = figure.add_subplot(grid[rows[0] + index // columns, index % columns], sharex=first)
            _draw_corrections(axes, one, name)
            first = first or axes
        handles = [
            *_cloud_entries([one for one, _ in clouds[0][1]]),
            *([*ratio_entries(), drift_entry()] if corrections else []),
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=2 * columns)
        note = f"{_marks_text([one for one, _ in clouds[0][1]])} · {style.interval_legend(result.identity.samples)}"
        style.draw_foot(figure, result.identity, note)
    return figure


def _clouds_by_panel(result: Split) -> list[tuple[str, _Clouds]]:
    """Return (panel's name, clouds of heads): per baseline with its treatments, else per configuration."""
    every = {one.config: (one, parts) for one, parts in zip(result.spreads, result.log_factors, strict=True)}
    contests: dict[Any, list[Contest]] = {}
    for one in result.contests:
        contests.setdefault(one.baseline, []).append(one)
    if not contests:
        return [(one.config.selection.name, [(one, parts)]) for one, parts in every.values()]
    names = short_names(list(contests))
    return [
        (name, [every[base], *(every[one.treatment] for one in own)])
        for name, (base, own) in zip(names, contests.items(), strict=True)
    ]


def _correction_names(corrections: Sequence[Setting]) -> list[str]:
    """Return a distinct name per corrected configuration."""
    names = short_names([one.baseline for one in corrections])
    return [name or one.baseline.selection.name for name, one in zip(names, corrections, strict=True)]


def _draw_scatter(axes: Axes, name: str, cloud: _Clouds) -> None:
    """Draw the heads of the first two configurations, and the geometric mean over each configuration's heads."""
    colours = _cloud_colours(len(cloud))
    for index, (_, parts) in enumerate(cloud):
        mass, distance = (_geometric_mean(logs) for logs in (parts.mass, parts.difference))
        if index < _WIDE:
            axes.plot(mass, distance, linestyle="", marker=".", markersize=2.2, alpha=0.45, color=colours[index],
                      gid=f"heads {index}", zorder=2)  # fmt: skip
        centre = [np.exp(np.nanmean(np.log(part))) if np.isfinite(part).any() else np.nan for part in (mass, distance)]
        axes.plot(*([number] for number in centre), linestyle="", marker=_CENTRES[index % len(_CENTRES)], markersize=6,
                  markerfacecolor="none", markeredgecolor=colours[index], markeredgewidth=1, gid=f"centre {index}",
                  zorder=4)  # fmt: skip
    style.log_axes(axes, x=True, y=True)
    _trim_axis(axes, [_geometric_mean(parts.mass) for _, parts in cloud[:_WIDE]])
    _draw_equal_loss(axes)
    axes.set(xlabel="1 − S: attention that goes", ylabel="D = ‖μ_gone − μ_kept‖₁")
    axes.set_title(f"{name}; lines: equal L" if name else "lines: equal L", loc="left")


def _cloud_colours(count: int) -> list[Any]:
    """Return `count` colours for clouds, none of which the panels below use."""
    return style.category_colours(count + 2)[2:]


def _geometric_mean(logs: Floats) -> Floats:
    """Return each head's geometric mean over samples, (layer × head,), from logarithms; NaN for no sample."""
    flat = logs.reshape(len(logs), -1)
    known = ~np.isnan(flat)
    means = np.nansum(flat, axis=0) / np.maximum(known.sum(axis=0), 1)
    return np.where(known.any(axis=0), np.exp(means), np.nan)


def _trim_axis(axes: Axes, masses: Sequence[Floats]) -> None:
    """Begin the x axis near the heads' masses, and note how many heads are further left."""
    every = np.concatenate(masses)
    every = every[np.isfinite(every)]
    if axes.get_xscale() != "log" or not len(every):
        return
    begin = float(np.quantile(every, _LEAST)) / 2
    if left := int((every < begin).sum()):
        axes.set_xlim(left=begin)
        style.draw_note(axes, f"{plural(left, 'head')} further left", at="above")


def _draw_equal_loss(axes: Axes) -> None:
    """Draw lines along which the loss (1 − S) · D is constant, a whole power of ten each."""
    if axes.get_xscale() != "log" or axes.get_yscale() != "log":
        return
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    least, most = np.floor(np.log10(left * low)), np.ceil(np.log10(right * high))
    ends = np.array([left, right])
    for power in np.arange(least, most + 1, max(1, np.ceil((most - least) / _LINES))):
        axes.plot(ends, 10**power / ends, color="0.75", linewidth=0.5, zorder=1, gid="equal L")
    axes.set(xlim=(left, right), ylim=(low, high))


def _cloud_entries(cloud: Sequence[Spread]) -> list[Line2D]:
    """Return a legend entry per cloud's mean."""
    return [
        Line2D([], [], linestyle="", marker=_CENTRES[index % len(_CENTRES)], markersize=5,
               markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1, label=name)
        for index, (name, colour) in enumerate(zip(_cloud_names(cloud), _cloud_colours(len(cloud)), strict=True))
    ]  # fmt: skip


def _marks_text(cloud: Sequence[Spread]) -> str:
    """Return the foot's text on the meaning of dots and hollow marks."""
    return f"dots: heads of {' and '.join(_cloud_names(cloud)[:_WIDE])}; hollow marks: the geometric mean of all heads"


def _cloud_names(cloud: Sequence[Spread]) -> list[str]:
    """Return a distinct name per configuration of a cloud."""
    names = short_names([one.config for one in cloud])
    return [name or one.config.selection.name for name, one in zip(names, cloud, strict=True)]


def _draw_corrections(axes: Axes, one: Setting, name: str) -> None:
    """Draw a correction per row: its ratios to the uncorrected cache."""
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    for index, row in enumerate(one.rows):
        for kind in ("isolated", "propagated"):
            draw_ratio(axes, index, kind, getattr(row, kind), "uncorrected or corrected is 0")
        draw_drift(axes, index, row)
    finish_ratio_panel(axes, [fold(row.name) for row in one.rows], name, "over uncorrected (log axis)",
                       ylim=(len(one.rows) - 0.4, -0.5))  # fmt: skip
