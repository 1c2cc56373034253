"""Free answers that have not left the full cache's yet, and KL over the full cache's answer, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from perturbkv.analyses.naming import SIDE, apart, counted, short
from perturbkv.analyses.quality.divergence import Divergence
from perturbkv.analyses.quality.divergence_point import Parting
from perturbkv.analyses.stats.intervals import LEAST, Band, median_level
from perturbkv.figures import style
from perturbkv.figures.labels import by_held

_PANEL_MM, _AROUND_MM, _LEGEND_MM = 52, 22, 3.4
_BANDS = 4
"""More bands than these hide one another: of more configurations the lines alone are drawn."""
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")
_WIDEST, _WIDTH = 2.6, 1.0


def draw(result: Divergence, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel of shares of answers that are still alike, and where KL was measured one of KL, with bands.

    A colour per policy and selection, a dash per what else tells the configurations apart.
    """
    with style.use():
        configs = by_held(result.configs, lambda one: one.held)
        narrow, panels = width_mm < style.WIDE_MM, 2 if result.noise_floor.size else 1
        columns = 1 if narrow else 2
        legend = _LEGEND_MM * -(-len(configs) // columns)
        figure = style.figure(width_mm, _PANEL_MM * (panels if narrow else 1) + _AROUND_MM + legend)
        axes = list(figure.subplots(*((panels, 1) if narrow else (1, panels)), squeeze=False).flat)
        handles = [
            _config(axes, result, one, name, look, bands=len(configs) <= _BANDS)
            for one, name, look in zip(configs, _names(result, configs), _looks(configs), strict=True)
        ]
        _finish(axes, result)
        figure.legend(handles=handles, loc="outside upper left", ncols=columns)
        style.foot(figure, result.identity, _told(result, len(configs)))
    return figure


def _names(result: Divergence, configs: Sequence[Parting]) -> list[str]:
    """What tells each from the others, and what its cache holds."""
    names = [name or "evicted" for name in short([one.config for one in configs])]
    start = " at the start" if result.compress_every else ""
    return [f"{name} (held {style.number(one.held)}{start})" for name, one in zip(names, configs, strict=True)]


def _looks(configs: Sequence[Parting]) -> list[dict[str, Any]]:
    """Colour, dash and width of each: what is drawn first is the widest, so that it is seen under its equals."""
    told = apart([one.config for one in configs])
    sides, others = (
        [" ".join(word for choice, word in words.items() if (choice in SIDE) == of_side) for words in told]
        for of_side in (True, False)
    )
    colours = dict(zip(dict.fromkeys(sides), style.category_colours(len(set(sides))), strict=True))
    dashes = dict(zip(dict.fromkeys(others), cycle(_DASHES), strict=False))
    widths = np.linspace(_WIDEST if 1 < len(configs) <= _BANDS else _WIDTH, _WIDTH, len(configs))
    return [
        {"color": colours[side], "linestyle": dashes[other], "linewidth": float(width)}
        for side, other, width in zip(sides, others, widths, strict=True)
    ]


def _config(
    axes: Sequence[Axes], result: Divergence, one: Parting, name: str, look: dict[str, Any], *, bands: bool
) -> Line2D:
    alike, band = one.free.alike_after(max(result.lengths))
    curves: list[tuple[Axes, Any, Any, Band, str]] = [(axes[0], np.arange(len(alike)), alike, band, "alike")]
    if one.forced is not None:
        middles = (np.arange(len(one.forced.curve)) + 0.5) * result.span - 0.5
        curves.append((axes[1], middles, one.forced.curve, one.forced.curve_interval, "kl"))
    for panel, places, values, ends, kind in curves:
        panel.plot(places, values, gid=f"{kind} {one.config.label()}",
                   drawstyle="steps-post" if kind == "alike" else "default", **look)  # fmt: skip
        if ends is not None and bands:
            panel.fill_between(places, ends.low, ends.high, color=look["color"], alpha=0.13, linewidth=0,
                               gid=f"{kind} band", step="post" if kind == "alike" else None)  # fmt: skip
    return Line2D([], [], label=name, **look)


def _finish(axes: Sequence[Axes], result: Divergence) -> None:
    axes[0].set(ylim=(-0.03, 1.03), ylabel="share of samples", xlabel="tokens of the answer")
    axes[0].set_title("Own answers: no token differs yet", loc="left")
    if len(axes) > 1:
        axes[1].set(ylim=(0, None), ylabel="KL, nat", xlabel="token of the full cache's answer")
        axes[1].set_title("Next token's distribution", loc="left")
        style.note(axes[1], f"everything kept: {np.nanmax(result.noise_floor):.1e}")
    for panel in axes:
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        panel.set_xlim(0, max(1, *result.lengths))


def _told(result: Divergence, configs: int) -> str:
    """n, what the bands are, and how many steps make a point."""
    samples = len(result.samples)
    means = f", each one's means over {result.span} tokens" if result.span > 1 else ""
    points = f" · KL: medians over samples{means}" if result.noise_floor.size else ""
    if configs > _BANDS or samples < 2:
        return f"n = {counted(samples, 'sample')}{points}"
    level = f"{100 * median_level(samples):.0f} % intervals" if samples >= LEAST else ""
    kind = level or "ranges of single samples"
    return f"bands: shares have exact 95 % intervals, KL {kind}, over n = {samples} samples{points}"
