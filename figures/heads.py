"""Head-wise scatter: one point per head, baseline against treatment, below the diagonal is better (paper, fig. 2)."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.head_kind import HeadKind
from perturbkv.analyses.heads import HeadComparison
from perturbkv.analyses.naming import counted
from perturbkv.figures import style

_HEIGHT_MM = 99
_FLAG_COLOUR = "#c1272d"
_DECADES_BELOW = 1000.0


def draw(result: HeadComparison, width_mm: float = style.WIDE_MM) -> Figure:
    """Two log-log panels, isolated and propagated; points coloured by layer, heads with σ ≤ 0.5 ringed."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        figure = style.figure(width_mm, _HEIGHT_MM * (2 if narrow else 1))
        axes = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
        points = [
            _panel(panel, kind, result.flagged, name, DISTANCES[result.distance].unit)
            for panel, kind, name in zip(
                axes, (result.isolated, result.propagated), ("isolated", "propagated"), strict=True
            )
        ]
        layers = result.flagged.shape[0]
        side = "bottom" if narrow else "right"
        bar = figure.colorbar(points[-1], ax=list(axes), label="layer", location=side, fraction=0.035, pad=0.02)
        bar.set_ticks([int(tick) for tick in np.unique(np.linspace(0, layers - 1, min(layers, 7)).round())])
        bar.ax.minorticks_off()
        axes[1].legend(handles=_legend(result), loc="upper left", handletextpad=0.3, borderaxespad=0.2)
        flips = result.propagated.decided.flips
        style.foot(figure, result.identity, f"share: mean of samples; counts: by heads' means; "
                   f"tied: within 2 noise floors, or the same "
                   f"entries kept · beyond chance: {flips:,} flips of samples' signs, Benjamini–Hochberg at 5 % · "
                   f"held / full {_held(result)} · {style.about(result.identity.samples)}")  # fmt: skip
    return figure


def _panel(axes: Axes, kind: HeadKind, flagged: NDArray[np.bool_], name: str, unit: str) -> PathCollection:
    layers = np.broadcast_to(np.arange(flagged.shape[0])[:, None], flagged.shape)
    norm = BoundaryNorm(np.arange(flagged.shape[0] + 1) - 0.5, 256)
    low, high = _limits(kind)
    x, y = (np.maximum(mean, low) for mean in (kind.baseline_mean, kind.treatment_mean))
    axes.plot([low, high], [low, high], color="0.55", linewidth=0.8, zorder=1, gid="diagonal")
    tied = kind.verdict == 0
    axes.scatter(x[tied], y[tied], s=9, marker="x", color="0.5", linewidths=0.6, zorder=2, gid="ties")
    points = axes.scatter(x[~tied], y[~tied], s=_size(x.size), c=layers[~tied], cmap=style.layer_colours(), norm=norm,
                          linewidths=0, zorder=3, gid="heads")  # fmt: skip
    axes.scatter(x[flagged], y[flagged], s=_size(x.size) + 14, facecolors="none", edgecolors=_FLAG_COLOUR,
                 linewidths=0.6, zorder=4, gid="flagged")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set_xlabel(f"baseline, {name} perturbation ({unit})")
    axes.set_ylabel(f"treatment, {name} perturbation ({unit})")
    axes.set_title(_title(kind, name), loc="left")
    axes.grid(visible=True, which="major")
    _note_edge(axes, kind, low)
    return points


def _note_edge(axes: Axes, kind: HeadKind, low: float) -> None:
    """Say how many heads lie below the axes and are drawn on their edge."""
    below = int((np.minimum(kind.baseline_mean, kind.treatment_mean) < low).sum())
    if below:
        note = f"{counted(below, 'head')} below {low:.1g}, drawn on the edge"
        style.note(axes, note)


def _limits(kind: HeadKind) -> tuple[float, float]:
    """Axis limits around the positive values; a few dead heads do not squeeze all others into a corner."""
    both = np.stack([kind.baseline_mean, kind.treatment_mean])
    positive = both[both > 0]
    if positive.size == 0:
        return 0.1, 10.0
    low = max(float(positive.min()), float(np.median(positive)) / _DECADES_BELOW)
    return low / 1.6, float(positive.max()) * 1.6


def _size(heads: int) -> float:
    """Smaller points where there are many."""
    return 14.0 if heads <= 400 else 7.0


def _title(kind: HeadKind, name: str) -> str:
    share = style.percent(kind.better_share, kind.better_share_interval)
    counts = f"{kind.improved_count} better, {kind.worsened_count} worse, {kind.tied_count} tied"
    beyond = f"beyond chance: {kind.decided.better} better, {kind.decided.worse} worse"
    return f"{name}: {share} of heads better\n{counts}\n{beyond}"


def _held(result: HeadComparison) -> str:
    """What both caches hold, baseline first."""
    return " → ".join(style.number(share) for share in result.held)


def _legend(result: HeadComparison) -> list[Line2D]:
    entries = [
        Line2D([], [], color="0.55", linewidth=0.8, label="equal"),
        Line2D([], [], linestyle="", marker="o", markersize=5, markerfacecolor="none", markeredgewidth=0.6,
               markeredgecolor=_FLAG_COLOUR, label=f"σ ≤ 0.5 ({int(result.flagged.sum())} heads)"),
    ]  # fmt: skip
    if result.isolated.tied_count or result.propagated.tied_count:
        entries.append(Line2D([], [], linestyle="", marker="x", markersize=3, color="0.5", label="tied"))
    return entries
