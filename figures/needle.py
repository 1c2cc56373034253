"""Heat maps of retrieval, length × depth, one per method (paper, figure 8)."""

from __future__ import annotations

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perturbkv.analyses.naming import common, short
from perturbkv.analyses.needle import Method, Needle
from perturbkv.figures import style

_WIDE, _NARROW = 4, 2
_ROW_MM, _AROUND_MM = 38, 24


def draw(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """The share of prompts whose number was found, the full cache first; blank where no prompt fell."""
    with style.use():
        names = [_wrapped(name) for name in short([method.label for method in result.methods])]
        shown = [("full cache", result.full), *zip(names, result.methods, strict=True)]
        columns = min(_NARROW if width_mm < style.WIDE_MM else _WIDE, len(shown))
        rows = -(-len(shown) // columns)
        figure = style.figure(width_mm, rows * _ROW_MM + _AROUND_MM)
        axes = figure.subplots(rows, columns, squeeze=False)
        for place, panel in enumerate(axes.flat):
            if place >= len(shown):
                panel.set_axis_off()
                continue
            _panel(panel, result, *shown[place])
            panel.set_xlabel("prompt tokens" if place + columns >= len(shown) else "")
            panel.set_ylabel("depth" if place % columns == 0 else "")
        bar = figure.colorbar(
            axes.flat[0].collections[0], ax=list(axes.flat), label="share found", fraction=0.03, pad=0.02
        )
        bar.outline.set_visible(False)
        settings = common([method.label for method in result.methods])
        style.title(figure, f"Needle in {result.haystack}, {result.scenario}: {settings}")
        style.foot(figure, result.identity)
    return figure


def _wrapped(name: str) -> str:
    """Policy and selection on one line, the rest on the next."""
    words = name.split()
    return "\n".join(filter(None, (" ".join(words[:2]), " ".join(words[2:])))) or "evicted"


def _panel(axes: Axes, result: Needle, name: str, method: Method) -> None:
    written = method.grid.size <= 60
    sns.heatmap(method.grid, ax=axes, vmin=0, vmax=1, cmap=style.layer_colours(), cbar=False, linewidths=0.4,
                annot=written, fmt=".1g", annot_kws={"fontsize": 5.5},
                xticklabels=[f"{length:,}" for length in result.lengths],
                yticklabels=[f"{depth:g}" for depth in result.depths])  # fmt: skip
    axes.collections[0].set_gid("map")
    axes.set_title(f"{name}\n{style.percent(method.score, method.score_interval)}", loc="left")
    axes.tick_params(length=2, rotation=0)
