"""What restricted kept sets cost: perturbation and last-layer drift over those of one set per key/value head."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perturbkv.analyses.ablation.restriction import Restriction
from perturbkv.analyses.ablation.restrictions import BASELINE, Setting
from perturbkv.analyses.naming import short
from perturbkv.figures import style
from perturbkv.figures.labels import by_held
from perturbkv.figures.ratio_points import drift, drift_mark, legend, point

_WIDE, _LINE_MM, _AROUND_MM = 2, 6.5, 19


def draw(result: Restriction, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per setting; right of 1 a restriction perturbs more than the baseline."""
    with style.use():
        ordered = by_held(result.settings, lambda one: one.rows[0].compared.held[0])
        columns = 1 if width_mm < style.WIDE_MM else min(_WIDE, len(ordered))
        rows = -(-len(ordered) // columns)
        longest = max(len(one.rows) for one in ordered)
        figure = style.figure(width_mm, rows * ((longest + 1) * _LINE_MM + _AROUND_MM) + 10)
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
        for panel, one, name in zip(panels, ordered, _names(ordered), strict=False):
            _panel(panel, one, name)
        for panel in list(panels)[len(ordered) :]:
            panel.set_axis_off()
        figure.legend(handles=[*legend(), drift_mark()], loc="outside upper left", ncols=2 if columns < _WIDE else 4)
        style.foot(figure, result.identity, style.about(result.identity.samples))
    return figure


def _names(results: Sequence[Setting]) -> list[str]:
    """What tells a setting from the others; of a single one all of it."""
    told = short([result.baseline for result in results])
    return [result.setting if len(results) == 1 else name for result, name in zip(results, told, strict=True)]


def _panel(axes: Axes, result: Setting, name: str) -> None:
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    for place, row in enumerate(result.rows, start=1):
        for kind in ("isolated", "propagated"):
            point(axes, place, kind, getattr(row.compared, kind), f"{BASELINE} or row is 0")
        drift(axes, place, row)
    held = [result.rows[0].compared.held[0], *(row.compared.held[1] for row in result.rows)]
    names = [f"{BASELINE} (= 1)", *(row.name for row in result.rows)]
    shown = [f"{name}, held {style.number(share)}" for name, share in zip(names, held, strict=True)]
    axes.set_yticks(range(len(shown)), shown)
    axes.set(ylim=(len(shown) - 0.4, -0.5), xlabel=f"over {BASELINE}'s (log axis)")
    style.log_axes(axes, x=True)
    axes.tick_params(labelbottom=True)
    axes.grid(visible=True, axis="x")
    axes.set_title(name, loc="left")
