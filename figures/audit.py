"""The figure of an audit: kept share by layer and position, and the decoding's distance from the masked reference."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from perturbkv.analyses.audit.audit import Audit
from perturbkv.analyses.audit.cache_entries import FLOORS
from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.escaping import escape_line
from perturbkv.figures import style
from perturbkv.figures.panels import panel_grid

_BINS, _PANEL_MM, _AROUND_MM = 64, 52, 18
_LEAST = 0.05
"""Least number of noise floors on the log axis; smaller distances are drawn there."""


def draw(result: Audit, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw kept shares by layer and position, and distances by layer in noise floors, as two panels."""
    figure, (kept, far) = panel_grid(2, 1 if width_mm < style.WIDE_MM else 2, width_mm, _PANEL_MM, _AROUND_MM)
    _draw_kept_share(figure, kept, result)
    _draw_distance(far, result)
    style.set_title(figure, f"{escape_line(result.eviction)}: {result.verdict}")
    return style.describe_run(
        figure, result.identity, "floors: of runs of the plain model that keep the same entries, the worst head"
    )


def _draw_kept_share(figure: Figure, axes: Axes, result: Audit) -> None:
    """Draw kept share (layer, position) as an image with a colour bar; a note where no kept sets were found."""
    shares = result.kept_share(_BINS)
    if np.isnan(shares).all():
        style.draw_note(axes, "no kept sets were found", at="middle")
        axes.set_axis_off()
        return
    image = axes.imshow(
        shares, aspect="auto", interpolation="nearest", norm=Normalize(0, 1), cmap="cividis",
        extent=(0, 100, len(shares) - 0.5, -0.5), gid="kept",
    )  # fmt: skip
    axes.set(title="kept share of each place", xlabel="position in the prompt, %", ylabel="layer")
    _number_layers(axes.yaxis, result)
    figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02).outline.set_visible(False)


def _draw_distance(axes: Axes, result: Audit) -> None:
    """Draw the distance from the masked reference by layer, a line per situation, with the limit of a difference."""
    by_situation = {name: floors for name, floors in result.floors_by_layer().items() if not np.isnan(floors).all()}
    if not by_situation:
        style.draw_note(axes, "no layer was seen while it decoded", at="middle")
        axes.set_axis_off()
        return
    for (name, floors), colour in zip(by_situation.items(), style.category_colours(len(by_situation)), strict=True):
        shown = np.fmax(floors, _LEAST)
        axes.plot(np.arange(len(shown)), shown, color=colour, label=name, gid=name, marker="o", markersize=2)
    axes.axhline(FLOORS, color="0.3", linewidth=0.8, linestyle="--", gid="limit")
    axes.annotate(
        f"{FLOORS} floors: a difference", (1, FLOORS), xytext=(-2, 2), textcoords="offset points",
        fontsize=style.points(6), xycoords=("axes fraction", "data"), ha="right",
    )  # fmt: skip
    style.set_log_axes(axes, y=True)
    axes.set_ylim(bottom=_LEAST, top=max(10 * FLOORS, axes.get_ylim()[1]))
    axes.set(title="distance from the masked reference", xlabel="layer", ylabel="noise floors",
             xlim=(-0.5, result.layers - 0.5))  # fmt: skip
    _number_layers(axes.xaxis, result)
    axes.legend(loc="best", fontsize=style.points(6))


def _number_layers(axis: Axis, result: Audit) -> None:
    """Mark the layers on an axis of measured layers, by their numbers in the model."""
    axis.set_major_locator(MaxNLocator("auto", integer=True))
    if result.identity.measured_layers:
        numbers = {index: str(result.identity.layer(index)) for index in range(result.layers)}
        axis.set_major_formatter(FuncFormatter(lambda place, _: numbers.get(round(place), "")))


_LEAST_DISTANCE = 1e-8
"""Least distance on the log axis; smaller ones are drawn there."""
_MOST_DISTANCE = 1e3
"""Largest distance on the axis; that of an infinite entry or NaN is drawn there."""


def draw_dump(result: DumpAudit, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw the distances of keys and of values from the plain model's by layer, beside the limit and noise floor."""
    columns = 1 if width_mm < style.WIDE_MM else 2
    figure, panels = panel_grid(2, columns, width_mm, _PANEL_MM, _AROUND_MM + 12, sharey=True)
    for kind, (axes, name) in enumerate(zip(panels, ("keys", "values"), strict=True)):
        _draw_entries(axes, result, kind)
        axes.set(title=name, xlabel="layer", ylabel="distance / norm")
        axes.label_outer()
    shown = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    style.draw_legend_below(panels[-1], list(shown.values()), 2)
    style.set_title(figure, f"{escape_line(result.engine or result.dump)}: {result.verdict}")
    return style.describe_run(figure, result.identity, "floor: between two ways of reading the same tokens")


def _draw_entries(axes: Axes, result: DumpAudit, kind: int) -> None:
    """Draw the distances of keys (0) or values (1) by layer; a note where nothing was compared."""
    requests = result.requests
    if not requests:
        style.draw_note(axes, "nothing was compared", at="middle")
        return
    floors = result.floors[:, kind]
    differing = np.fmax.reduce([request.differing_distances[:, kind] for request in requests])
    lines = {
        "farthest that differs": (differing, ("", "x", 4)),
        "limit of an entry": (result.limits[:, kind], ("--", "", 0)),
        "farthest that does not differ": (np.fmax.reduce([one.distances[:, kind] for one in requests]), ("-", "o", 2)),
        "noise floor": (floors, ("-", "o", 2)),
        "typical": (result.typical[:, kind], ("-", "o", 2)),
    }
    for (name, (values, how)), colour in zip(lines.items(), style.category_colours(len(lines)), strict=True):
        if not np.isnan(values).all():
            shown, (line, marker, size) = np.clip(values, _LEAST_DISTANCE, _MOST_DISTANCE), how
            axes.plot(np.arange(len(shown)), shown, color=colour, label=name, gid=name, linestyle=line, marker=marker,
                      markersize=size)  # fmt: skip
    style.set_log_axes(axes, y=True)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.set_xlim(-0.5, len(floors) - 0.5)
