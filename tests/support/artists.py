"""What a figure holds: its artists by name, its words, its bytes."""

from __future__ import annotations

import io
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
    for axes in figure.axes:
        texts += [axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()]
    return "\n".join(texts)


def render(figure: Figure, suffix: str = "png", **more: Any) -> bytes:
    """The figure as a file."""
    target = io.BytesIO()
    with style.use():
        figure.savefig(target, format=suffix, **more)
    return target.getvalue()
