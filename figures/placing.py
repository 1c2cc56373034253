"""Labels beside what they name: inside their panel, on no other label, and on as little else as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

_OUTSIDE, _ON_ANOTHER = 1000, 100
"""What a place costs, in points of curves that it lies on."""
_APART, _POINTS = 3, 60
"""Points of print between a label and what it names; points that stand for a line between two."""
_SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
"""Where a label may lie, the best first: right, left, above, below, and in the corners."""

_ACROSS: dict[int, Literal["left", "center", "right"]] = {1: "left", 0: "center", -1: "right"}
_UP: dict[int, Literal["bottom", "center", "top"]] = {1: "bottom", 0: "center", -1: "top"}


@dataclass(frozen=True)
class Label:
    """A few words.

    Attributes:
        text: the words.
        left, right: ends of what they stand beside, in the panel's data.
        height: its height there.
        forward: whether the right is the better side.
    """

    text: str
    left: float
    right: float
    height: float
    forward: bool


def place(axes: Axes, labels: Sequence[Label]) -> None:
    """Write each where it costs least; one that has no place inside the panel or beside the others is left out."""
    drawn = axes.get_figure()
    assert drawn is not None
    drawn.draw_without_rendering()  # type: ignore[union-attr]
    curves, taken = _curves(axes), list[Bbox]()
    for label in labels:
        written = axes.annotate(label.text, (label.right, label.height), (0, 0), textcoords="offset points", fontsize=6,
                                color="0.2", in_layout=False)  # fmt: skip
        costs = [_moved(axes, written, label, side, curves, taken) for side in _SIDES]
        best = int(np.argmin(costs))
        if _moved(axes, written, label, _SIDES[best], curves, taken) >= _ON_ANOTHER:
            written.remove()
        else:
            taken.append(written.get_window_extent())


def _moved(
    axes: Axes, written: Annotation, label: Label, side: tuple[int, int], curves: NDArray[np.float64],
    taken: Sequence[Bbox],
) -> int:  # fmt: skip
    """What the label's place on one side of its thing costs, once it is there."""
    across, up = side[0] if label.forward else -side[0], side[1]
    middle = float(np.sqrt(label.left * label.right))  # of a logarithmic axis
    x = {1: label.right, -1: label.left, 0: middle}[across]
    written.xy = (x, label.height)
    written.set_position((_APART * across, _APART * up))
    written.set_horizontalalignment(_ACROSS[across])
    written.set_verticalalignment(_UP[up])
    box = written.get_window_extent()
    panel = axes.get_window_extent()
    inside = panel.x0 < box.x0 and box.x1 < panel.x1 and panel.y0 < box.y0 and box.y1 < panel.y1
    on_curves = ((curves > (box.x0, box.y0)) & (curves < (box.x1, box.y1))).all(axis=1).sum()
    return int(on_curves) + _OUTSIDE * (not inside) + _ON_ANOTHER * sum(box.overlaps(other) for other in taken)


def _curves(axes: Axes) -> NDArray[np.float64]:
    """(point, 2) the panel's lines as points of the screen."""
    shares, found = np.linspace(0, 1, _POINTS)[:, None], [np.empty((0, 2))]
    for line in axes.get_lines():
        ends = line.get_transform().transform(np.column_stack(line.get_data()))
        found += [first + shares * (second - first) for first, second in zip(ends[:-1], ends[1:], strict=True)]
    points = np.concatenate(found)
    return np.asarray(points[np.isfinite(points).all(axis=1)])
