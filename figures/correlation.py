"""Figure of the score correlation: ranks and areas by measure, and how often answers are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses import text
from perturbkv.analyses.correlation.correlation import Correlation
from perturbkv.analyses.correlation.correlation_settings import Setting
from perturbkv.analyses.measures import REFERENCE, Measures
from perturbkv.analyses.stats.intervals import MIN_SAMPLES
from perturbkv.display import plural
from perturbkv.figures import style
from perturbkv.figures.labels import draw_legend, sort_by_cache_share
from perturbkv.figures.style import symbols_to_tex, typeset

_ROW_MM, _CURVES_MM, _AROUND_MM = 62, 48, 18
_SPREAD = 0.56
"""Share of a row's height over which the settings' points of one measure are spread."""
_GAP = 0.9
"""Height, in rows, of the words above the circular measures."""
_NULL_COLOUR = "0.82"
_FRAMES = {
    "rho": (0, (-1.05, 1.05), "Spearman’s ρ with the score"),
    "auc": (0.5, (-0.025, 1.025), "share of pairs (AUC)"),
}
"""Statistic of a panel -> value without association, limits and label of its x axis."""


def draw(result: Correlation, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a point per measure and setting, and below it the share of lost answers over two measures."""
    narrow = width_mm < style.WIDE_MM
    settings = sort_by_cache_share(result.settings, lambda one: float(one.cache_shares.mean()))
    figure = style.figure(width_mm, (_ROW_MM + _CURVES_MM) * (2 if narrow else 1) + _AROUND_MM)
    ratios = [_ROW_MM] * (2 if narrow else 1) + [_CURVES_MM] * (2 if narrow else 1)
    axes = figure.subplots(4 if narrow else 2, 1 if narrow else 2, height_ratios=ratios).flat
    colours = style.ordered_colours(len(settings))
    _draw_measures(axes[0], settings, colours, "rho")
    axes[0].set_xticks([-1, -0.5, 0, 0.5, 1])
    axes[0].set_title("Ranks within a prompt", loc="left")
    _draw_measures(axes[1], settings, colours, "auc")
    axes[1].set_title("Lost above kept within a prompt", loc="left")
    axes[1].tick_params(labelleft=narrow)
    for panel, measure in zip(axes[2:], (result.measures.headline, REFERENCE), strict=True):
        _draw_lost_shares(panel, settings, colours, measure)
    named = [
        Line2D([], [], color=colour, marker="o", markersize=3, label=_setting_label(one))
        for colour, one in zip(colours, settings, strict=True)
    ]
    draw_legend(
        figure,
        [
            *named,
            Line2D([], [], color=_NULL_COLOUR, linewidth=4.2, label="what methods’ names alone tell: middle 95 %"),
        ],
        2,
    )
    for panel in axes[:2]:
        typeset(panel.get_yticklabels())
    answered = sum(part.answered for part in result.parts)
    return style.describe_run(
        figure,
        result.identity,
        (
            f"of the {plural(answered, 'prompt')} that the full cache answers those count in which the methods differ "
            f"· bars: 95 % intervals over prompts, ranges where they are fewer than {MIN_SAMPLES} · names alone: "
            f"measures permuted among prompts · a lost answer: below {result.rule.lost:g} of the full cache's score"
        ),
    )


def _draw_measures(axes: Axes, settings: Sequence[Setting], colours: Sequence[Any], statistic: str) -> None:
    """Draw a statistic ("rho" or "auc") per measure and setting; into an empty panel, why no prompt decides."""
    measures = settings[0].measures
    heights = _row_heights(measures)
    shifts = [0.0] if len(settings) == 1 else np.linspace(-_SPREAD / 2, _SPREAD / 2, len(settings)).tolist()
    for shift, colour, setting in zip(shifts, colours, settings, strict=True):
        for name in heights:
            measured = getattr(setting.strength(name), statistic)
            null = getattr(setting.identity_baselines(name), statistic).exchanged
            height, gid = heights[name] + shift, f"{statistic} {setting.name} {name}"
            if not np.isnan(measured.value):
                axes.errorbar([measured.value], [height], xerr=style.error_bars(measured.value, measured.interval),
                              color=colour, marker="o", markersize=2.8, linewidth=0.9, gid=gid)  # fmt: skip
            if not np.isnan(null.low):
                axes.plot([null.low, null.high], [height, height], color=_NULL_COLOUR, linewidth=4.2,
                          solid_capstyle="butt", zorder=0.5)  # fmt: skip
    _frame(axes, measures, *_FRAMES[statistic])
    values = [getattr(setting.strength(name), statistic).value for setting in settings for name in heights]
    if np.isnan(values).all():
        reasons = dict.fromkeys(setting.undecided_reason for setting in settings)
        style.draw_note(axes, "\n".join(filter(None, reasons)) or "no prompt has lost and kept answers", at="middle")


def _row_heights(measures: Measures) -> dict[str, float]:
    """Return the height of each measure's row; a gap is above the circular ones."""
    return {name: row + (_GAP if name in measures.circular else 0) for row, name in enumerate(measures.names)}


def _frame(axes: Axes, measures: Measures, middle: float, limits: tuple[float, float], label: str) -> None:
    """Draw the line of no association and the border above circular measures; label the axes."""
    axes.axvline(middle, color="0.55", linewidth=0.8, zorder=1)
    heights, rows = list(_row_heights(measures).values()), len(measures.predictors)
    axes.axhline(rows - 0.45, color="0.55", linewidth=0.6, linestyle=":")
    axes.text(0.98, rows - 0.37, "circular: nearly the score", transform=axes.get_yaxis_transform(),
              ha="right", va="top", fontsize=style.points(5.5), color="0.35")  # fmt: skip
    axes.set_yticks(heights, list(map(symbols_to_tex, measures.names.values())))
    axes.set(xlim=limits, ylim=(max(heights) + 0.5, -0.5), xlabel=label)


def _draw_lost_shares(axes: Axes, settings: Sequence[Setting], colours: Sequence[Any], measure: str) -> None:
    """Draw the share of lost answers per bin of a measure, a colour per setting."""
    for colour, one in zip(colours, settings, strict=True):
        bins = one.curves[measure]
        if bins:
            axes.plot([each.middle for each in bins], [each.lost for each in bins], color=colour, linestyle="",
                      marker="o", markersize=2.8, gid=f"curve {one.name} {measure}")  # fmt: skip
        for each in bins:  # from its least to its largest answer: between bins there is nothing
            axes.plot([each.low, each.high], [each.lost, each.lost], color=colour, linewidth=1.1, gid="bin")
            axes.errorbar([each.middle], [each.lost], yerr=style.error_bars(each.lost, each.lost_interval),
                          color=colour, linewidth=0.7, alpha=0.6)  # fmt: skip
    unit = "" if measure == REFERENCE else ", relative"
    name = settings[0].measures.names[measure]
    axes.set(xlabel=f"{name}{unit} (log axis)", ylabel="share of answers lost", ylim=(-0.03, 1.03))
    style.set_log_axes(axes, x=True)
    axes.set_title(f"Lost by {name}, all prompts", loc="left")


def _setting_label(one: Setting) -> str:
    """Return a setting's legend label: budget, methods, cache share, deciding prompts or why none decides."""
    shares = " to ".join(dict.fromkeys(map(text.cache_share, one.cache_share_ends)))
    deciding = one.strength(one.measures.headline)
    n = (
        f"n = {deciding.rho.prompts} (ρ), {deciding.auc.prompts} (AUC)"
        if one.decides
        else one.undecided_reason.split(";")[0]
    )
    return f"b={one.name}: {len(one.configs)} methods, cache share {shares}, {n}"
