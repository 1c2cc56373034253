"""Ratios of two configurations as points with their intervals: perturbation of all heads and the median one, drift."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from perturbkv.analyses.heads.head_kind import HeadKind
from perturbkv.analyses.outcomes import Outcome
from perturbkv.figures import style

_DRIFT, _DRIFT_COLOUR = 0.36, "0.25"
_MARKS = {"isolated": ("o", -0.16), "propagated": ("s", 0.16)}


def point(axes: Axes, place: int, kind: str, measured: HeadKind, without: str) -> None:
    """One kind of perturbation on the line `place`; `without` says why it has none."""
    marker, offset = _MARKS[kind]
    ratio = measured.sum_ratio
    if np.isnan(ratio) or ratio <= 0:
        axes.text(1, place + offset, f" {kind}: {without}", fontsize=5.5, color="0.5", va="center")
        return
    colour = style.category_colours(2)[list(_MARKS).index(kind)]
    axes.plot([measured.median_ratio], [place + offset], linestyle="", color=colour, marker="|", markersize=4.5,
              markeredgewidth=0.9, gid=f"median {kind}")  # fmt: skip
    axes.errorbar([ratio], [place + offset], xerr=style.bars(ratio, measured.sum_ratio_interval), color=colour,
                  marker=marker, markersize=3.2, linewidth=0.9, gid=kind)  # fmt: skip


def drift(axes: Axes, place: int, row: Outcome) -> None:
    """The last layer's drift on the line `place`, beneath the heads; nothing where there is none."""
    if np.isnan(row.drift_ratio) or row.drift_ratio <= 0:
        return
    axes.errorbar([row.drift_ratio], [place + _DRIFT], xerr=style.bars(row.drift_ratio, row.drift_ratio_interval),
                  color=_DRIFT_COLOUR, marker="D", markersize=2.6, linewidth=0.9, gid="drift")  # fmt: skip


def drift_mark() -> Line2D:
    """What `drift` draws, for a legend."""
    return Line2D([], [], linestyle="", marker="D", markersize=3, color=_DRIFT_COLOUR, label="last layer's drift")


def legend() -> list[Line2D]:
    """What the points are."""
    sums = [
        Line2D(
            [], [], linestyle="", marker=_MARKS[kind][0], markersize=3.5, color=colour, label=f"{kind}, sum of heads"
        )
        for kind, colour in zip(_MARKS, style.category_colours(2), strict=True)
    ]
    middle = Line2D([], [], linestyle="", marker="|", markersize=5, color="0.3", label="the median head")
    return [*sums, middle]
