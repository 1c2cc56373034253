"""What a judge thinks: mean scores of every cache, or wins, ties and losses against the full cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perturbkv.analyses.naming import counted, folded, short
from perturbkv.analyses.quality.judge import Judged
from perturbkv.analyses.quality.preferred import OUTCOMES, Preferences
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.figures import style
from perturbkv.figures.labels import by_held

_ROW_MM, _AROUND_MM, _LETTERS_MM = 6.5, 30, 2.6
_COLOURS = {"win": "#0173b2", "tie": "0.75", "loss": "#de8f05"}


def draw(result: Judged, width_mm: float = style.WIDE_MM) -> Figure:
    """A dot per configuration with its interval, and the full cache's as a line with its own."""
    with style.use():
        configs = by_held(result.configs, lambda one: one.held)
        named = [(one.config, one.held) for one in configs if one.config]
        figure, axes = _rows(_names(named, result.compress_every, width_mm), width_mm)
        full = float(result.full.scores.mean())
        axes.axvline(full, color="0.35", linewidth=0.9, gid="full")
        if result.full.interval is not None:
            axes.axvspan(result.full.interval.low, result.full.interval.high, color="0.35", alpha=0.12, linewidth=0)
        for row, one in enumerate(configs):
            mean = float(one.scores.mean())
            axes.errorbar([mean], [row], xerr=style.bars(mean, one.interval), color=_COLOURS["win"], marker="o",
                          markersize=3.2, linewidth=0.9, gid="mean")  # fmt: skip
        axes.set_xlabel(f"mean score (line: full cache, {style.number(full)})")
        style.title(figure, "What the judge gives")
        style.foot(figure, result.identity, style.about(len(result.samples)))
    return figure


def draw_pairs(result: Preferences, width_mm: float = style.WIDE_MM) -> Figure:
    """A bar per configuration: shares of samples won, tied and lost; the exact interval of the losses."""
    with style.use():
        configs = by_held(result.configs, lambda one: one.held)
        named = [(one.config, one.held) for one in configs]
        figure, axes = _rows(_names(named, result.compress_every, width_mm), width_mm)
        for row, one in enumerate(configs):
            left = 0.0
            for outcome in reversed(OUTCOMES):
                axes.barh(row, one.shares[outcome], left=left, height=0.62, color=_COLOURS[outcome], gid=outcome,
                          label=f"{outcome} of the evicted cache" if row == 0 else None)  # fmt: skip
                left += one.shares[outcome]
            loss = one.shares["loss"]
            axes.errorbar([loss], [row], xerr=style.bars(loss, one.intervals["loss"]), color="0.15", linewidth=0.8,
                          capsize=1.5, gid="interval")  # fmt: skip
        axes.set(xlim=(0, 1), xlabel="share of samples")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left",
                      ncols=1 if width_mm < style.WIDE_MM else 3)  # fmt: skip
        first = f"the answer shown first won {style.number(result.first)} of {counted(result.pairs, 'decided pair')}"
        samples = len(result.samples)
        kind = "bars: exact 95 % intervals of losses" if samples > 1 else "no intervals"
        style.foot(figure, result.identity, f"{kind}, n = {counted(samples, 'sample')} · {first}")
    return figure


def _rows(names: Sequence[str], width_mm: float) -> tuple[Figure, Axes]:
    """One panel with a named row per configuration, the first one on top."""
    lines = np.array([name.count("\n") + 1 for name in names])
    figure = style.figure(width_mm, float(np.maximum(_ROW_MM, lines * _LETTERS_MM).sum()) + _AROUND_MM)
    axes = figure.subplots()
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    return figure, axes


def _names(configs: Sequence[tuple[EvictionConfig, float]], limit: int | None, width_mm: float) -> list[str]:
    """What tells each from the others, and what its cache holds; `limit`: above it caches were compressed again."""
    room, start = 24 if width_mm < style.WIDE_MM else 48, " at the start" if limit else ""
    names = short([config for config, _ in configs])
    return [
        folded(f"{name or 'evicted'} (held {style.number(share)}{start})", room)
        for name, (_, share) in zip(names, configs, strict=True)
    ]
