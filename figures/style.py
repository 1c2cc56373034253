"""One look for every figure: sizes of a journal's columns, a colour-blind-safe map, the run's identity in the foot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files

import matplotlib as mpl
from matplotlib.colors import Colormap
from matplotlib.figure import Figure

from perturbkv.analyses.identity import RunIdentity

COLUMN_MM, WIDE_MM = 84, 174
_INCH_MM = 25.4
_FOOT_POINTS = 5.0
_LINE_MM = 2.4


@contextmanager
def use() -> Iterator[None]:
    """The style, inside the block only."""
    with as_file(files("perturbkv.figures") / "perturbkv.mplstyle") as path, mpl.rc_context(fname=path):
        yield


def figure(width_mm: float, height_mm: float) -> Figure:
    """An empty figure of a printed size, laid out so that nothing is clipped. Call inside `use()`."""
    return Figure(figsize=(width_mm / _INCH_MM, height_mm / _INCH_MM), layout="constrained")


def layer_colours() -> Colormap:
    """Dark to light from the first layer to the last, for every kind of colour vision."""
    return mpl.colormaps["cividis"]


def foot(drawn: Figure, identity: RunIdentity) -> None:
    """Write the run's identity small at the figure's foot, and say it large where the weights are random."""
    lines = [part for line in identity.lines() for part in _wrapped(line, drawn.get_figwidth())]
    height = drawn.get_figheight() * _INCH_MM
    share = (len(lines) * _LINE_MM + 1.5) / height
    engine = drawn.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0, share, 1, 1 - share))  # type: ignore[call-arg]
    drawn.text(0.008, 0.006, "\n".join(lines), fontsize=_FOOT_POINTS, color="0.35", va="bottom", ha="left")
    if identity.random_weights:
        drawn.suptitle("random weights", color="#b00020", fontsize=9, fontweight="bold")


def _wrapped(line: str, width_inches: float) -> list[str]:
    """Break a line between its parts where it would leave the figure."""
    room = int(width_inches * 72 / (_FOOT_POINTS * 0.56))
    if len(line) <= room:
        return [line]
    mark = " | " if " | " in line else " · "
    rows = [""]
    for part in line.split(mark):
        longer = f"{rows[-1]}{mark}{part}" if rows[-1] else part
        if len(longer) <= room or not rows[-1]:
            rows[-1] = longer
        else:
            rows.append(part)
    return rows


def metadata(identity: RunIdentity, suffix: str) -> dict[str, str]:
    """The identity under keys that matplotlib's backend for `suffix` (png, svg, pdf) accepts."""
    description = "; ".join(identity.lines())
    title = f"{identity.model} on {identity.dataset}"
    if suffix == "pdf":
        return {"Title": title, "Subject": description, "Creator": identity.made_with}
    if suffix == "svg":
        return {"Title": title, "Description": description, "Creator": identity.made_with}
    return {"Title": title, "Description": description, "Software": identity.made_with}
