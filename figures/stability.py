"""Rank correlations between traces, with reliability on the diagonal, and relative perturbation over depth."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.pairing import plural
from perturbkv.analyses.questions.stability.head_profiles import StableTrace
from perturbkv.analyses.questions.stability.rank_reliability import GRID
from perturbkv.analyses.questions.stability.stability import Stability
from perturbkv.figures import labels, style

_KINDS = ("isolated", "propagated")
_ROW_MM, _DEPTH_MM, _AROUND_MM, _CELL_MM = 58, 46, 20, 5.5
_MOST_WRITTEN, _FEW = 10, 7
"""Most traces whose matrix has its numbers written in cells, and most whose numbers are large and fit one column."""
_LINES: tuple[Any, ...] = ("-", "--", ":", "-.")


def draw(result: Stability, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw, for isolated and propagated L1, rank correlations between traces and profiles over relative depth."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        matrix = 48 if narrow else max(_ROW_MM, _CELL_MM * len(result.traces))
        columns = labels.legend_columns(_trace_names(result), width_mm, 1 if narrow else 3)
        legend = 3.6 * -(-len(result.traces) // columns)
        height = (matrix + _DEPTH_MM) * (2 if narrow else 1) + _AROUND_MM + legend
        figure = style.figure(width_mm, height)
        ratios = [matrix, _DEPTH_MM]
        axes = (figure.subplots(4, 1, height_ratios=ratios * 2).reshape(2, 2) if narrow
                else figure.subplots(2, 2, height_ratios=ratios).T)  # fmt: skip
        for (above, below), kind in zip(axes, _KINDS, strict=True):
            _draw_matrix(above, result, kind, not narrow)
            lines = _draw_profiles(below, result.traces, kind)
        figure.legend(handles=lines, loc="outside upper left", ncols=columns)
        samples = sorted({one.samples for one in result.traces})
        note = (
            style.interval_legend(samples[0])
            if len(samples) == 1
            else f"n = {samples[0]} to {samples[-1]} samples a trace"
        )
        style.draw_foot(figure, result.identity, f"diagonal: split-half reliability · {note}")
    return figure


def _trace_names(result: Stability) -> list[str]:
    """Return a name per trace, which includes the model if the traces are of several models."""
    several = len({one.model for one in result.traces}) > 1
    return [_trace_name(one, several) for one in result.traces]


def _trace_name(one: StableTrace, of_models: bool) -> str:
    """Return a trace's number, data set, length, seed and samples, and its model where `of_models`."""
    model = f"{one.model}, " if of_models else ""
    return f"{one.number}: {model}{one.dataset}, {one.tokens:,.0f} tokens, seed {one.seed}, n = {one.samples}"


def _draw_matrix(axes: Axes, result: Stability, kind: str, wide: bool) -> None:
    """Draw ρ of every two traces of one model, blank between models."""
    values, numbers = correlations(result, kind), [one.number for one in result.traces]
    few = len(numbers) <= _FEW
    written = few or (wide and len(numbers) <= _MOST_WRITTEN)
    import seaborn as sns

    sns.heatmap(values, ax=axes, vmin=0, vmax=1, cmap=style.layer_colours(), annot=written, fmt=".2f", square=True,
                annot_kws={"size": style.points(5.5 if few else 4.3)}, xticklabels=numbers, yticklabels=numbers,
                cbar_kws={"label": "Spearman's ρ", "shrink": 0.9})  # fmt: skip
    axes.collections[0].set_gid(f"matrix {kind}")
    for number in axes.texts:
        number.set_gid(style.NUMBERS)
    axes.tick_params(length=0, rotation=0)
    axes.set_title(f"{kind.capitalize()} L1: ranks of heads", loc="left")
    axes.set(xlabel="trace", ylabel="trace")
    if below := int((values < 0).sum()) // 2:
        style.draw_note(axes, f"{plural(below, 'pair')} below 0")


def correlations(result: Stability, kind: str) -> Floats:
    """Return (trace, trace) ρ, with split-half reliability on the diagonal; NaN between different models."""
    values = np.diag([one.perturbation[kind].split_half.value for one in result.traces])
    values[~np.eye(len(values), dtype=bool)] = np.nan
    for pair in result.pairs:
        if pair.perturbation:
            first, second = pair.first - 1, pair.second - 1
            values[first, second] = values[second, first] = pair.perturbation[kind].rho.value
    return np.asarray(values)


def _draw_profiles(axes: Axes, traces: tuple[StableTrace, ...], kind: str) -> list[Any]:
    """Draw each trace's relative perturbation over relative depth, with its band; return the lines."""
    colours, several = style.category_colours(len(traces)), len({one.model for one in traces}) > 1
    lines = []
    for index, (one, colour) in enumerate(zip(traces, colours, strict=True)):
        depth = one.depth[kind]
        dash = _LINES[index // 10 % len(_LINES)]  # colours come round again after ten
        lines += axes.plot(GRID, depth.profile, dash, color=colour, linewidth=0.9, label=_trace_name(one, several),
                           gid=f"profile {kind} {one.number}")  # fmt: skip
        if depth.profile_interval is not None:
            band = depth.profile_interval
            axes.fill_between(GRID, band.low, band.high, color=colour, alpha=0.1, linewidth=0)
    axes.axhline(1, color="0.55", linewidth=0.7, zorder=1)
    axes.set(xlabel="relative depth: layer / (layers − 1)", ylabel="over the mean head's (log)")
    style.log_axes(axes, y=True)
    axes.set_title(f"{kind.capitalize()} L1 / ‖o‖₁ over depth", loc="left")
    return lines
