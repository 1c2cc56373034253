"""Treatments over their baseline in three distances, isolated and propagated; below, L2 norms over L1 norms."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perturbkv.analyses.questions.measures.measure_orders import KINDS
from perturbkv.analyses.questions.measures.measures import SHORT, Measures, Setting
from perturbkv.figures import style
from perturbkv.figures.panels import draw_sum_ratio, finish_ratio_panel, marker_entries

_LINE_MM, _AROUND_MM = 5.2, 17
_MARKS = {"l1": ("o", -0.22), "l2": ("s", 0.0), "cosine": ("^", 0.22)}


def draw(result: Measures, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a panel per setting and kind, a row per treatment; left of 1 the treatment perturbs less."""
    with style.use():
        columns = 1 if width_mm < style.WIDE_MM else len(KINDS)
        panels = [(setting, kind) for setting in result.settings for kind in KINDS]
        rows = -(-len(panels) // columns)
        longest = max(len(setting.rows) + len(setting.norms) for setting in result.settings)
        figure = style.figure(width_mm, rows * (longest * _LINE_MM + _AROUND_MM) + 10)
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey="row" if columns > 1 else False).flat
        for panel, (setting, kind) in zip(axes, panels, strict=True):
            _draw_setting(panel, setting, kind)
        handles = marker_entries((marker, SHORT[distance]) for distance, (marker, _) in _MARKS.items())
        figure.legend(handles=handles, loc="outside upper left", ncols=len(_MARKS))
        style.draw_foot(figure, result.identity, style.interval_legend(result.identity.samples))
    return figure


def _draw_setting(axes: Axes, setting: Setting, kind: str) -> None:
    """Draw one kind ("isolated" or "propagated") of a setting: treatments, then L2 norms over L1 norms."""
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    rows = [*setting.rows, *setting.norms]
    for index, row in enumerate(rows):
        for distance in _MARKS:
            draw_sum_ratio(axes, index, distance, row.kind(kind, distance), _MARKS)
    if setting.norms:
        axes.axhline(len(setting.rows) - 0.5, color="0.55", linewidth=0.6, linestyle=":")
    finish_ratio_panel(axes, _row_names(setting), f"b={setting.name}, {kind}",
                       f"Σ of all heads, over {setting.baseline_name()} (log axis)",
                       ylim=(len(rows) - 0.4, -0.6))  # fmt: skip


def _row_names(setting: Setting) -> list[str]:
    """Return the rows' names: every treatment, then every selection whose L2 norms are compared with L1 norms."""
    treatments = [setting.side(row.treatment) for row in setting.rows]
    return treatments + [f"{setting.side(row.baseline)}: L2/L1 norms" for row in setting.norms]
