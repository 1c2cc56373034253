"""What a figure holds: its artists by name, its words, its bytes."""

from __future__ import annotations

import io
from itertools import combinations
from typing import Any

from matplotlib.figure import Figure

from perturbkv.figures import style


def artists(figure: Figure, panel: int, gid: str) -> list[Any]:
    """Every artist of that name in one panel."""
    return [child for child in figure.axes[panel].get_children() if child.get_gid() == gid]


def artist(figure: Figure, panel: int, gid: str) -> Any:
    """The one artist of that name."""
    (found,) = artists(figure, panel, gid)
    return found


def words(figure: Figure) -> str:
    """Everything written in it."""
    texts = [text.get_text() for text in figure.texts]
    texts += [figure.get_suptitle(), *(text.get_text() for axes in figure.axes for text in axes.texts)]
    texts += [legend.get_title().get_text() for legend in figure.legends]
    for axes in figure.axes:
        texts += [axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()]
    return "\n".join(texts)


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Titles, names of axes, ticks below and legends that lie on one another, or beyond the figure's edge."""
    render(figure)  # lays it out
    shown = [axes for axes in figure.axes if axes.axison]
    texts = [*figure.texts, *(text for one in figure.legends for text in (one.get_title(), *one.get_texts()))]
    for axes in shown:
        texts += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        low, high = sorted(axes.get_xlim())
        ticks = [tick for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        texts += [tick.label1 for tick in ticks if tick.label1.get_visible()]
        texts += axes.get_legend().get_texts() if axes.get_legend() else []
    boxes = [(one.get_text(), one.get_window_extent().padded(-1)) for one in texts if one.get_text().strip()]
    width, height = figure.bbox.width + 2, figure.bbox.height + 2
    beyond = [(text, "edge") for text, box in boxes
              if min(box.x0, box.y0) < -2 or box.x1 > width or box.y1 > height]  # fmt: skip
    pairs = combinations(boxes, 2)
    return beyond + [(one, other) for (one, first), (other, second) in pairs if first.overlaps(second)]


def render(figure: Figure, suffix: str = "png", **more: Any) -> bytes:
    """The figure as a file."""
    target = io.BytesIO()
    with style.use():
        figure.savefig(target, format=suffix, **more)
    return target.getvalue()
