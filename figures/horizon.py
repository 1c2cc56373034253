"""Perturbation over the decode steps, and how much it grows in each head."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from perturbkv.analyses.horizon import ConfigHorizon, Horizon
from perturbkv.analyses.naming import short
from perturbkv.figures import heatmaps, style

_HEIGHT_MM, _LEGEND_MM = 62, 3.6
_STYLES: dict[str, Any] = {"propagated": "-", "isolated": "--"}
_MOST = 2.0


def draw(result: Horizon, width_mm: float = style.WIDE_MM) -> Figure:
    """Relative L1 of all heads per step with its interval, and KL. One colour per configuration."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        colours = style.category_colours(len(result.configs))
        handles = _legend(result, colours)
        rows = len(handles) if narrow else -(-len(handles) // 2)
        figure = style.figure(width_mm, _HEIGHT_MM * (2 if narrow else 1) + rows * _LEGEND_MM)
        left, right = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
        for config, colour in zip(result.configs, colours, strict=True):
            _curves(left, config, colour)
            right.plot(range(result.steps), config.kl, color=colour, gid="kl")
        style.note(left, f"everything kept: {np.max(result.noise_floor):.1e}")
        for axes, label in ((left, "Σ L / Σ ‖o_h‖₁"), (right, "KL, nat")):
            axes.set(xlabel="decode step", ylabel=label)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.set_ylim(bottom=0)
        figure.legend(handles=handles, loc="outside upper left", ncols=1 if narrow else 2)
        left.set_title("Perturbation over the decode steps", loc="left")
        style.foot(figure, result.identity, f"{_samples(result)} · KL: mean over samples, no interval")
    return figure


def draw_heads(result: Horizon, width_mm: float = style.WIDE_MM) -> Figure:
    """Growth per head as a power of two, propagated; a dot where it grows beyond chance."""
    with style.use():
        columns = 2 if width_mm < style.WIDE_MM else 4
        names = short([one.config for one in result.configs])
        maps = [_map(name or "evicted", config) for name, config in zip(names, result.configs, strict=True)]
        rows = [maps[start : start + columns] for start in range(0, len(maps), columns)]
        figure = heatmaps.draw(
            rows,
            width_mm,
            (-_MOST, _MOST),
            f"Growth of the propagated perturbation, {result.configs[0].curves['propagated'].head_growth.size} heads",
            "log₂ of the last third of the steps\nover the first; dot: grows",
        )
        flips = result.configs[0].curves["propagated"].decided.flips
        style.foot(figure, result.identity, f"{_samples(result)} · decided by {flips:,} flips of samples' signs, "
                   "Benjamini–Hochberg at 5 %")  # fmt: skip
    return figure


def _samples(result: Horizon) -> str:
    """How many samples the first and the last step are of, and what the band is."""
    first, last = int(result.samples_at[0]), int(result.samples_at[-1])
    ending = "" if first == last else f" at the first step, {last} at the last"
    short = f" ({result.short} of fewer than 3 steps without growth)" if result.short else ""
    return f"{style.about(first)}{ending}{short}"


def _map(name: str, config: ConfigHorizon) -> heatmaps.Map:
    curve = config.curves["propagated"]
    grows, shrinks = int((curve.head_verdict == 1).sum()), int((curve.head_verdict == -1).sum())
    with np.errstate(divide="ignore"):
        shown = np.log2(curve.head_growth)
    title = f"{name}\ngrows {grows}, shrinks {shrinks}"
    return heatmaps.Map(title, np.clip(shown, -_MOST, _MOST), curve.head_verdict == 1)


def _curves(axes: Axes, config: ConfigHorizon, colour: Any) -> None:
    for kind, line in _STYLES.items():
        curve = config.curves[kind]
        steps = np.arange(len(curve.relative))
        axes.plot(steps, curve.relative, line, color=colour, gid=kind)
        if curve.relative_interval is not None and kind == "propagated":
            ends = curve.relative_interval
            axes.fill_between(steps, ends.low, ends.high, color=colour, alpha=0.15, linewidth=0)


def _legend(result: Horizon, colours: list[Any]) -> list[Line2D]:
    names = short([one.config for one in result.configs])
    found = [
        Line2D([], [], color=colour, label=f"{name or 'evicted'}, held {style.number(config.held)}")
        for name, config, colour in zip(names, result.configs, colours, strict=True)
    ]
    kinds = [Line2D([], [], color="0.3", linestyle=line, label=kind) for kind, line in _STYLES.items()]
    return [*found, *kinds]
