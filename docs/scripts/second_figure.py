"""The figure of docs/results/second_model.md: two models' ablation on the same prompts, beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perturbkv.figures import style


def draw(names: Sequence[str], rows: Sequence[Sequence[dict[str, Any]]], foot: str) -> Figure:
    """Isolated and propagated sums over attention's: `rows` are summary.json's of each model's ablation."""
    with style.use():
        figure = style.figure(style.WIDE_MM, 92)
        panels = figure.subplots(1, 2, sharey=True)
        for panel, kind in zip(panels, ("isolated", "propagated"), strict=True):
            for place, (name, own) in enumerate(zip(names, rows, strict=True)):
                _points(panel, name, [row[kind] for row in own], place)
            _axes(panel, kind, [_title(row) for row in rows[0]])
        panels[0].legend(loc="lower right")
        style.lay_out_above(figure, 5)
        figure.text(0.008, 0.006, foot, fontsize=5, color="0.35")
    return figure


def _title(row: dict[str, Any]) -> str:
    return row["name"] if row["alpha"] is None else f"{row['name']}, α = {row['alpha']:g}"


def _points(axes: Axes, name: str, kinds: Sequence[dict[str, Any]], place: int) -> None:
    """One model's row of points, each with its interval."""
    colour, ratios = style.category_colours(2)[place], [kind["sum_ratio"] for kind in kinds]
    ends = [kind["sum_ratio_interval"] or dict.fromkeys(("low", "high"), kind["sum_ratio"]) for kind in kinds]
    bars = [[ratio - end["low"] for ratio, end in zip(ratios, ends, strict=True)],
            [end["high"] - ratio for ratio, end in zip(ratios, ends, strict=True)]]  # fmt: skip
    heights = np.arange(len(kinds)) + (-0.15, 0.15)[place]
    axes.errorbar(ratios, heights, xerr=bars, linestyle="", color=colour, marker="os"[place], markersize=3.2,
                  linewidth=0.9, label=name)  # fmt: skip


def _axes(axes: Axes, kind: str, titles: Sequence[str]) -> None:
    axes.axvline(1, color="0.55", linewidth=0.8, zorder=1)
    axes.set_yticks(range(len(titles)), titles)
    axes.set(ylim=(len(titles) - 0.5, -0.5), xlabel="Σ L1 over attention's (log axis)")
    axes.set_title(kind, loc="left")
    style.log_axes(axes, x=True)
    axes.grid(visible=True, axis="x")
