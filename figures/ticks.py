"""Ticks of logarithmic axes: plain numbers, and always enough of them to read a scale."""

from __future__ import annotations

import numpy as np
from matplotlib.axis import Axis
from matplotlib.ticker import Formatter, Locator, MaxNLocator, NullFormatter

_STEPS: tuple[tuple[float, ...], ...] = (
    (1,),
    (1, 3),
    (1, 2, 5),
    (1, 1.5, 2, 3, 5, 7),
    (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9),
)
"""Multiples of each power of ten, from coarse to fine."""
_LEAST, _MOST = 3, 8
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class PlainLog(Locator):
    """The coarsest steps that give at least three ticks; on a short axis evenly spaced ones."""

    def __call__(self) -> list[float]:
        """Those of the axis as it is."""
        low, high = sorted(self.axis.get_view_interval())  # type: ignore[union-attr]
        return self.tick_values(float(low), float(high))

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        """Those from one end to the other."""
        low, high = sorted((vmin, vmax))
        if low <= 0:
            return []
        powers = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
        for steps in _STEPS:
            found = [step * 10.0**power for power in powers for step in steps]
            inside = [tick for tick in found if low <= tick <= high]
            if len(inside) >= _LEAST:
                return inside[:: -(-len(inside) // _MOST)]
        return [float(tick) for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]


class Plain(Formatter):
    """'0.05', '2', '4,000'; powers of ten where a number would have many zeros."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """One tick's label; empty where a log axis has none."""
        if x <= 0:
            return ""
        if 1e-3 <= x < 1e5:
            return f"{x:,.10g}" if x < 1000 else f"{x:,.0f}"
        power = int(np.floor(np.log10(x) + 1e-9))
        times = f"{x / 10.0**power:.3g}"
        raised = str(power).translate(_RAISED)  # letters, as nothing in a figure is read as TeX but our symbols
        return f"10{raised}" if times == "1" else f"{times}×10{raised}"


def plain(axis: Axis) -> None:
    """Give a logarithmic axis these ticks."""
    axis.set_major_locator(PlainLog())
    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(NullFormatter())
