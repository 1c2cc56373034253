"""Perturbation and scores of caches of equal bytes: a line per number of bits, a column per method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from perturbkv.analyses.budget.byte_rows import Row, Setting
from perturbkv.analyses.budget.equal_bytes import EqualBytes
from perturbkv.analyses.naming import common, folded, short
from perturbkv.analyses.quality.score_columns import Mean
from perturbkv.configs.precision import FULL_BITS
from perturbkv.figures import style

_PANEL_MM, _AROUND_MM = 52, 24
_LETTERS = 34
_APART = 0.012
"""Of the x axis' decade, between lines of one budget."""
_ALL = "everything"
Reading = Callable[[Row], Mean | None]


def draw(result: EqualBytes, width_mm: float = style.WIDE_MM) -> Figure:
    """Columns: what shares all but budget and bits. Rows: perturbation, and below it the answers' scores."""
    with style.use():
        columns = _columns(result.settings)
        readings: list[tuple[str, Reading]] = [("last layer's L1 / ‖o‖₁", lambda row: row.moved)]
        readings += [("score × 100", lambda row: row.score)] if result.full is not None else []
        figure = style.figure(width_mm, len(readings) * _PANEL_MM + _AROUND_MM)
        panels = figure.subplots(len(readings), len(columns), squeeze=False, sharey="row", sharex=True)
        for line, (name, reading) in zip(panels, readings, strict=True):
            for place, (axes, some) in enumerate(zip(line, columns.values(), strict=True)):
                _panel(axes, some, result, reading, scored=name.startswith("score"))
                axes.set_ylabel("" if place else name)
        for axes, name in zip(panels[0], columns, strict=True):
            axes.set_title(folded(name, _LETTERS), loc="left")
        for axes in panels[-1]:
            axes.set_xlabel("bytes / full cache in 16 bits (%)")
        figure.legend(handles=_legend(result), loc="outside upper left", ncols=3 if width_mm < style.WIDE_MM else 6)
        style.foot(figure, result.identity, style.about(result.identity.samples))
    return figure


def _columns(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    """Settings that differ in budget alone, by what tells them from the others."""
    names = short([one.baseline for one in settings], "budget")
    found: dict[str, list[Setting]] = {}
    for one, name in zip(settings, names, strict=True):
        found.setdefault(name or common([one.baseline], "budget"), []).append(one)
    return found


def _panel(axes: Axes, some: Sequence[Setting], result: EqualBytes, reading: Reading, scored: bool) -> None:
    looks, factor = _looks(result), 100 if scored else 1
    for place, bits in enumerate(looks):
        rows = [row for one in some for row in one.rows if row.config.bits == bits]
        rows.sort(key=lambda row: row.stored)
        aside = 10 ** (_APART * (place - (len(looks) - 1) / 2))
        _line(axes, rows, reading, factor, aside, gid=f"{bits} bits", **looks[bits])
        alone = [row for row in result.everything if row.config.bits == bits]
        _line(axes, alone, reading, factor, aside, gid=f"{bits} bits, {_ALL}", **{**looks[bits], "marker": "*",
              "markersize": 6, "linestyle": ""})  # fmt: skip
    if scored and result.full is not None:
        axes.axhline(factor * result.full.value, color="0.35", linestyle="--", linewidth=0.9, zorder=1, gid="full")
    style.log_axes(axes, x=True, y=not scored)
    if scored:
        axes.set_ylim(bottom=0)
    shares = sorted({round(100 * one.rows[0].stored, 1) for one in some})
    axes.set_xticks(shares, [f"{share:g}" for share in shares])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, axis="y")


def _line(axes: Axes, rows: Sequence[Row], reading: Reading, factor: float, aside: float, **look: Any) -> None:
    found = [(row.stored, mean) for row in rows if (mean := reading(row)) is not None]
    if not found:
        return
    bars = [bar for bar in (style.bars(mean.value, mean.interval) for _, mean in found) if bar is not None]
    axes.errorbar(
        [100 * share * aside for share, _ in found], [factor * mean.value for _, mean in found],
        yerr=factor * np.hstack(bars) if len(bars) == len(found) else None, linewidth=0.9, elinewidth=0.6,
        markerfacecolor="none", **{"markersize": 3.2, **look},
    )  # fmt: skip


def _looks(result: EqualBytes) -> dict[int, dict[str, Any]]:
    """Colour and marker of each number of bits, most bits first."""
    bits = sorted({row.config.bits for row in result.rows}, reverse=True)
    colours = style.ordered_colours(len(bits))
    return {
        count: {"color": colour, "marker": marker}
        for count, colour, marker in zip(bits, colours, "os^Dvp"[: len(bits)], strict=True)
    }


def _legend(result: EqualBytes) -> list[Line2D]:
    marks = [
        Line2D([], [], markersize=3.2, markerfacecolor="none", label=_named(count), **look)
        for count, look in _looks(result).items()
    ]
    if result.everything:
        marks.append(Line2D([], [], linestyle="", marker="*", markersize=6, markerfacecolor="none", color="0.3",
                            label="everything kept"))  # fmt: skip
    if result.full is not None:
        marks.append(Line2D([], [], color="0.35", linestyle="--", linewidth=0.9, label="full cache"))
    return marks


def _named(bits: int) -> str:
    return f"{bits} bits" + (": evicting alone" if bits == FULL_BITS else "")
