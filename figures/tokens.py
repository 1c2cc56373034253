"""A prompt as a strip of rows, a cell per token: who keeps it, and which evicted ones add most to the output."""

from __future__ import annotations

from math import ceil, sqrt

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from perturbkv.analyses.tokens.fates import BASELINE, BOTH, NEITHER, QUESTION, TREATMENT
from perturbkv.analyses.tokens.tokens import Tokens
from perturbkv.escaping import escape_line
from perturbkv.figures import style
from perturbkv.figures.labels import cache_shares_text, draw_legend

_COLOURS = {BOTH: "0.3", BASELINE: "#de8f05", TREATMENT: "#0173b2", NEITHER: "0.9", QUESTION: "#cde8d5"}
_ROW_MM, _AROUND_MM, _LOWEST_MM = 3.2, 32, 55
_PER_ROW = {True: 50, False: 100}
"""Tokens per row of a figure, by whether it is narrow."""
_LOSSES = (("v", "#b35c00", 0.3), ("^", "#003f6b", 0.7))
"""Marker, colour and offset in the cell per side's losses; those of both sides are one above the other."""


def draw(result: Tokens, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw the prompt's tokens in rows, coloured by who keeps them; ▼ and ▲ mark baseline's and treatment's losses."""
    narrow = width_mm < style.WIDE_MM
    per_row = max(_PER_ROW[narrow], ceil(sqrt(len(result.fates))))
    rows = -(-len(result.fates) // per_row)
    figure = style.figure(width_mm, max(_LOWEST_MM, _AROUND_MM + rows * _ROW_MM))
    axes = figure.subplots()
    _draw_cells(axes, result, per_row, rows)
    for lost, (marker, colour, lift) in zip(result.losses or (), _LOSSES, strict=False):
        for loss in lost:
            x, y = loss.position % per_row + 0.5, loss.position // per_row + lift
            axes.plot(x, y, marker=marker, color=colour, markersize=2.6, markeredgecolor="white", markeredgewidth=0.3)
    first, second = result.sides
    head, budget = result.shown, result.baseline.budget
    axes.set_title(
        f"{escape_line(result.prompt.sample)}, head {head.layer}-{head.head}, b = {budget}: {first} against {second}",
        loc="left",
    )
    draw_legend(figure, _legend(result))
    losses = " · triangles: evicted, the largest A ν" if any(result.losses or ()) else ""
    shares = f"cache share {cache_shares_text(result.cache_shares)}"
    return style.describe_run(figure, result.identity, f"{shares}{losses}")


def _draw_cells(axes: Axes, result: Tokens, per_row: int, rows: int) -> None:
    """Draw a coloured cell per token, in rows of `per_row`."""
    names = list(_COLOURS)
    cells = np.full(rows * per_row, np.nan)
    cells[: len(result.fates)] = [names.index(fate) for fate in result.fates]
    norm = BoundaryNorm(np.arange(len(names) + 1) - 0.5, len(names))
    colours, edges = ListedColormap(list(_COLOURS.values())), (np.arange(per_row + 1), np.arange(rows + 1))
    axes.pcolormesh(*edges, cells.reshape(rows, per_row), cmap=colours, norm=norm, edgecolors="white", linewidth=0.3)
    axes.set_ylim(rows, 0)
    step = max(1, rows // 12)
    axes.set_yticks(np.arange(0, rows, step) + 0.5, [f"{row * per_row:,}" for row in range(0, rows, step)])
    axes.set_xlabel(f"position in its row of {per_row}")
    axes.set_ylabel("row from")  # short, as few rows are low
    axes.tick_params(length=0)


def _legend(result: Tokens) -> list[Patch | Line2D]:
    """Return the legend entries of the fates that occur, with their counts, and of both sides' losses."""
    first, second = result.sides
    words = {BOTH: "both keep", BASELINE: f"{first} alone", TREATMENT: f"{second} alone", NEITHER: "both evict",
            QUESTION: "question, not compressed"}  # fmt: skip
    handles: list[Patch | Line2D] = [
        Patch(color=_COLOURS[fate], label=f"{word} ({result.fates.count(fate):,})")
        for fate, word in words.items()
        if fate in result.fates
    ]
    if result.losses is not None:
        handles += [
            Line2D([], [], linestyle="", marker=marker, color=colour, markersize=4, label=f"lost by {name}")
            for name, (marker, colour, _) in zip((first, second), _LOSSES, strict=True)
        ]
    return handles
