"""Perturbation over α with every choice's level (paper, figure 7), and a map of the α that heads choose."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses import text
from perturbkv.analyses.pairing import common
from perturbkv.analyses.questions.alpha.alpha import Alpha
from perturbkv.analyses.questions.alpha.alpha_choice import PAPER
from perturbkv.analyses.questions.alpha.alpha_rows import NAMES, OTHERS
from perturbkv.configs.alpha_table import GLOBAL, HEAD, LAYER
from perturbkv.figures import panels, style

_HEIGHT_MM, _AROUND_MM = 56, 26
_DASHES = {GLOBAL: "-", LAYER: "--", HEAD: ":"}
_OF = {HEAD: "heads", LAYER: "layers"}


def draw(result: Alpha, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw perturbation over α and a map of α by head, side by side or in one column."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        figure = style.figure(width_mm, (2 if narrow else 1) * _HEIGHT_MM + _AROUND_MM)
        curve, shown = figure.subplots(2, 1) if narrow else figure.subplots(1, 2, width_ratios=(1.15, 1))
        handles = [_draw_curve(curve, result), *_draw_choice_levels(curve, result)]
        _draw_alpha_map(figure, shown, result)
        figure.legend(handles=handles, loc="outside upper left", ncols=1 if narrow else 2)
        note = f"lines: what was chosen, judged on other samples · {style.interval_legend(result.identity.samples)}"
        style.draw_foot(figure, result.identity, note)
    return figure


def _draw_curve(axes: Axes, result: Alpha) -> Line2D:
    """Draw the curve of one α for all heads with its interval over samples; return it for the legend."""
    alphas, ratios = result.sweep.alphas, np.array([one.ratio for one in result.curve])
    colour = style.category_colours(1)[0]
    bounds = [one.interval for one in result.curve]
    if all(bounds):
        low, high = ([getattr(one, end) for one in bounds] for end in ("low", "high"))
        axes.fill_between(alphas, low, high, color=colour, alpha=0.15, linewidth=0, gid="band")
    (line,) = axes.plot(alphas, ratios, "o-", color=colour, markersize=2.6, gid="curve", label="one α for all heads")
    axes.axhline(1, color="0.55", linewidth=0.6)
    setting = common(result.sweep.configs, "policy", "selection", "alpha")
    axes.set(xlabel="α, the share of stage 1", ylabel=f"Σ L over that of α = {PAPER}, isolated")
    axes.set_title(setting, loc="left")
    return line


def _draw_choice_levels(axes: Axes, result: Alpha) -> list[Line2D]:
    """Draw the level of each choice of α (global, by layer, by head), judged on other samples; return the lines."""
    lines = []
    for by in result.chosen:
        kind = result.row(by, OTHERS).over_paper
        ratio = text.decimal(kind.sum_ratio, kind.sum_ratio_interval)
        label = f"chosen {'for all' if by == GLOBAL else NAMES[by]}: {ratio}"
        lines.append(
            axes.axhline(kind.sum_ratio, color="0.25", linewidth=0.9, linestyle=_DASHES[by], gid=by, label=label)
        )
    return lines


def _draw_alpha_map(figure: Figure, axes: Axes, result: Alpha) -> None:
    """Draw the map (layer, head) of the α chosen on all samples, with its colour bar."""
    chosen = result.sweep.alphas[result.chosen[result.finest]]
    panels.draw_heatmap(axes, chosen, 0, 1, mpl.colormaps["viridis"])
    axes.set_yticklabels([str(result.identity.layer(int(tick.get_text()))) for tick in axes.get_yticklabels()])
    axes.tick_params(length=2, rotation=0)
    axes.set(xlabel="head", ylabel="layer")
    axes.set_title(f"α that {_OF[result.finest]} choose, on all samples", loc="left")
    figure.colorbar(axes.collections[0], ax=axes, label="α", aspect=25).outline.set_visible(False)
