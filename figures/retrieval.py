"""Perturbation of prompts that were still answered against that of prompts that were not."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.retrieval import MEASURES, Correlation, Retrieval
from perturbkv.figures import style

_ROW_MM, _AROUND_MM = 44, 12
_FOUND, _LOST = "#0173b2", "#de8f05"
_BINS = 18


def draw(result: Retrieval, identity: RunIdentity, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per measure: how many prompts × configurations were found and lost at each level of it."""
    with style.use():
        columns = 2 if width_mm < style.WIDE_MM else 3
        rows = -(-len(MEASURES) // columns)
        figure = style.figure(width_mm, rows * _ROW_MM + _AROUND_MM)
        axes = figure.subplots(rows, columns, squeeze=False)
        for panel, correlation, measured in zip(axes.flat, result.of("score"), result.perturbation, strict=True):
            _panel(panel, correlation, measured, result.score)
        for row in axes:
            row[0].set_ylabel("prompts × configurations")
        if result.samples:
            axes.flat[0].legend(loc="upper left")
        style.title(figure, "Perturbation and retrieval")
        style.foot(figure, identity)
    return figure


def _panel(axes: Axes, correlation: Correlation, measured: np.ndarray, score: np.ndarray) -> None:
    if measured.size == 0:
        style.note(axes, "the full cache answers no prompt")
    else:
        edges = _edges(measured)
        kinds = [measured[score == 1], measured[score == 0]]
        colours = [_FOUND, _LOST]
        axes.hist(kinds, bins=edges.tolist(), stacked=True, color=colours, label=["found", "lost"], gid="counts")
        if edges[0] > 0:
            axes.set_xscale("log")
            axes.set_xticks(np.geomspace(edges[0], edges[-1], 3), minor=False)
            axes.xaxis.set_major_formatter(lambda value, place: f"{value:.2g}")
            axes.xaxis.set_minor_locator(NullLocator())
    rho = style.number(correlation.rho).replace("-", "−")
    axes.set_title(f"{MEASURES[correlation.measure]}\nρ = {rho}{_ends(correlation)}", loc="left", fontsize=6.5)


def _edges(measured: np.ndarray) -> np.ndarray:
    """Equal steps of the logarithm where all are positive; equal steps otherwise."""
    low, high = float(measured.min()), float(measured.max())
    if low <= 0:
        return np.linspace(low, high if high > low else low + 1, _BINS + 1)
    return np.geomspace(low, high if high > low else low * 2, _BINS + 1)


def _ends(correlation: Correlation) -> str:
    if correlation.interval is None or np.isnan(correlation.rho):
        return ""
    return f" [{correlation.interval[0]:.2f}, {correlation.interval[1]:.2f}]".replace("-", "−")
