"""Perturbation over α with every choice's level (paper, figure 7), and a map of the α that heads choose."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.pairing import common
from perturbkv.analyses.questions.alpha.alpha import Choices
from perturbkv.analyses.questions.alpha.alpha_choice import PAPER
from perturbkv.analyses.questions.alpha.alpha_rows import NAMES, OTHERS
from perturbkv.configs.alpha_table import GLOBAL, HEAD, LAYER
from perturbkv.figures import style

_HEIGHT_MM, _AROUND_MM = 56, 26
_DASHES = {GLOBAL: "-", LAYER: "--", HEAD: ":"}
_OF = {HEAD: "heads", LAYER: "layers"}


def draw(result: Choices, width_mm: float = style.WIDE_MM) -> Figure:
    """Side by side, in one column one above the other; lines are choices judged on other samples."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        figure = style.figure(width_mm, (2 if narrow else 1) * _HEIGHT_MM + _AROUND_MM)
        curve, shown = figure.subplots(2, 1) if narrow else figure.subplots(1, 2, width_ratios=(1.15, 1))
        handles = [_curve(curve, result), *_lines(curve, result)]
        _map(figure, shown, result)
        figure.legend(handles=handles, loc="outside upper left", ncols=1 if narrow else 2)
        said = f"lines: what was chosen, judged on other samples · {style.about(result.identity.samples)}"
        style.foot(figure, result.identity, said)
    return figure


def _curve(axes: Axes, result: Choices) -> Line2D:
    """One α for all heads, with its interval over samples."""
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


def _lines(axes: Axes, result: Choices) -> list[Line2D]:
    """The level of every choice, judged on other samples."""
    found = []
    for by in result.chosen:
        kind = result.row(by, OTHERS).over_paper
        told = (
            f"chosen {'for all' if by == GLOBAL else NAMES[by]}: {style.ratio(kind.sum_ratio, kind.sum_ratio_interval)}"
        )
        found.append(
            axes.axhline(kind.sum_ratio, color="0.25", linewidth=0.9, linestyle=_DASHES[by], gid=by, label=told)
        )
    return found


def _map(figure: Figure, axes: Axes, result: Choices) -> None:
    """(layer, head) α chosen on all samples."""
    chosen = result.sweep.alphas[result.chosen[result.finest]]
    layers, heads = chosen.shape
    every = [max(1, -(-count // 8)) for count in (heads, layers)]
    sns.heatmap(chosen, ax=axes, vmin=0, vmax=1, cmap=mpl.colormaps["viridis"], cbar=False, xticklabels=every[0],
                yticklabels=every[1], rasterized=layers * heads > 4000)  # fmt: skip
    axes.collections[0].set_gid("map")
    axes.set_yticklabels([str(result.identity.layer(int(tick.get_text()))) for tick in axes.get_yticklabels()])
    axes.tick_params(length=2, rotation=0)
    axes.set(xlabel="head", ylabel="layer")
    axes.set_title(f"α that {_OF[result.finest]} choose, on all samples", loc="left")
    figure.colorbar(axes.collections[0], ax=axes, label="α", aspect=25).outline.set_visible(False)
