"""The points of a head-wise scatter, and axes that a few far heads do not empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from numpy.typing import NDArray

from perturbkv.analyses.heads.head_kind import HeadKind
from perturbkv.figures import style

FLAG_COLOUR = "#c1272d"
_DECADES_BELOW = 1000.0
_FEW, _EMPTY = 0.01, 0.15
"""So few of the heads, one at least, leave the axes where they alone would take so much of them, or more."""
_MARGIN = 0.04


def scatter(
    axes: Axes, kind: HeadKind, flagged: NDArray[np.bool_], ends: tuple[float, float], scale: float = 1.0
) -> None:
    """A point per head: ties as crosses, flagged heads ringed, heads outside the axes as triangles on their edge.

    `scale` is that of the points' areas: small panels take smaller ones.
    """
    layers = np.broadcast_to(np.arange(flagged.shape[0])[:, None], flagged.shape)
    colours: dict[str, Any] = {
        "cmap": style.layer_colours(),
        "norm": BoundaryNorm(np.arange(flagged.shape[0] + 1) - 0.5, 256),
    }
    low, high = ends
    x, y = (np.clip(mean, low, high) for mean in (kind.baseline_mean, kind.treatment_mean))
    beyond, tied, size = outside(kind, ends), kind.verdict == 0, scale * _size(x.size)
    axes.plot([low, high], [low, high], color="0.55", linewidth=0.8, zorder=1, gid="diagonal")
    crossed, shown = tied & ~beyond, ~tied & ~beyond
    axes.scatter(x[crossed], y[crossed], s=9 * scale, marker="x", color="0.5", linewidths=0.6, zorder=2, gid="ties")
    axes.scatter(x[shown], y[shown], s=size, c=layers[shown], linewidths=0, zorder=3, gid="heads", **colours)
    axes.scatter(x[flagged], y[flagged], s=size + 14 * scale, facecolors="none", edgecolors=FLAG_COLOUR, linewidths=0.6,
                 zorder=4, gid="flagged")  # fmt: skip
    for marker, there in _pointing(kind, ends).items():
        axes.scatter(x[there], y[there], s=size + 10 * scale, c=layers[there], marker=marker, linewidths=0, zorder=5,
                     clip_on=False, gid="outside", **colours)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    style.log_axes(axes, x=True, y=True)
    axes.grid(visible=True, which="major")


def outside(kind: HeadKind, ends: tuple[float, float]) -> NDArray[np.bool_]:
    """(layer, head) True where a mean lies beyond the axes."""
    both = np.stack([kind.baseline_mean, kind.treatment_mean])
    return np.asarray(((both < ends[0]) | (both > ends[1])).any(axis=0))


def _pointing(kind: HeadKind, ends: tuple[float, float]) -> dict[str, NDArray[np.bool_]]:
    """Triangle -> (layer, head) whose mean lies beyond the axes on the side that it points to."""
    x, y = kind.baseline_mean, kind.treatment_mean
    sides = {"v": y < ends[0], "^": y > ends[1]}
    sides |= {"<": (x < ends[0]) & ~sides["v"], ">": (x > ends[1]) & ~sides["^"]}
    return {marker: there for marker, there in sides.items() if there.any()}


def limits(kinds: Sequence[HeadKind]) -> tuple[float, float]:
    """Ends that hold all heads of all panels but the few of each that would empty a part of the axes."""
    found = [ends for ends in map(_ends, kinds) if ends]
    if not found:
        return 0.1, 10.0
    low, high = min(low for low, _ in found), max(high for _, high in found)
    margin = _MARGIN * (high - low) + 0.03
    return float(10 ** (low - margin)), float(10 ** (high + margin))


def _ends(kind: HeadKind) -> tuple[float, float] | None:
    """Logarithms of the least and the largest mean that the axes hold; None where all are 0."""
    both = np.stack([kind.baseline_mean, kind.treatment_mean]).reshape(2, -1)
    positive = both[both > 0]
    if not positive.size:
        return None
    held = both.min(axis=0) >= np.median(positive) / _DECADES_BELOW
    lows = np.sort(np.log10(both.min(axis=0)[held])) if held.any() else np.log10(positive[:1])
    highs = np.sort(np.log10(both.max(axis=0)[both.max(axis=0) > 0]))
    most = max(1, int(_FEW * both.shape[1]))
    low = lows[_left_out(lows - lows[0], highs[-1] - lows[0], most)]
    high = highs[-1 - _left_out(highs[-1] - highs[::-1], highs[-1] - low, most)]
    return float(min(low, high)), float(max(low, high))


def _left_out(inwards: NDArray[np.float64], span: float, most: int) -> int:
    """How many of the heads at one end leave, by their distance from it: those before the last wide gap."""
    gaps = np.diff(inwards[: most + 1])
    wide = np.flatnonzero(gaps > _EMPTY * span)
    return int(wide[-1]) + 1 if wide.size else 0


def _size(heads: int) -> float:
    """Smaller points where there are many."""
    return 14.0 if heads <= 400 else 7.0
