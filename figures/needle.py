"""Heat maps of retrieval, length × depth, one per method (paper, figure 8)."""

from __future__ import annotations

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perturbkv.analyses.naming import SIDE, apart, common
from perturbkv.analyses.needle.needle import Needle
from perturbkv.analyses.needle.needle_grid import Method
from perturbkv.configs.entry_counts import Budget
from perturbkv.figures import style
from perturbkv.figures.labels import by_held

_MOST, _FLOW, _NARROW = 7, 5, 3
_ROW_MM, _AROUND_MM = 40, 18
TITLES = {"score": "share of numbers found", "digits": "share of leading digits that are right"}


def draw(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """The share of numbers found: the full cache, then every method. Blank where no prompt fell."""
    return _maps(result, width_mm, "score")


def draw_digits(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """The same of leading digits."""
    return _maps(result, width_mm, "digits")


def _maps(result: Needle, width_mm: float, outcome: str) -> Figure:
    with style.use():
        rows = _rows(result, narrow=width_mm < style.WIDE_MM)
        figure = style.figure(width_mm, len(rows) * _ROW_MM + _AROUND_MM)
        axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
        for number, row in enumerate(rows):
            for place, method in enumerate(row):
                if method is None:
                    axes[number, place].set_axis_off()
                    continue
                _panel(axes[number, place], result, method, outcome)
                below = rows[number + 1][place] if number + 1 < len(rows) else None
                axes[number, place].set_xlabel("tokens" if below is None else "")
                first = place == 0 or row[place - 1] is None
                axes[number, place].set_ylabel("depth" if first else "")
                axes[number, place].set_yticklabels(axes[number, place].get_yticklabels() if first else [])
        side = "bottom" if width_mm < style.WIDE_MM else "right"
        bar = figure.colorbar(axes[0, 0].collections[0], ax=list(axes.flat), label=TITLES[outcome], location=side,
                              fraction=0.03, pad=0.02, aspect=25)  # fmt: skip
        bar.outline.set_visible(False)
        settings = common(result.identity.configs)
        style.title(figure, f"Needle in {result.haystack}, {result.scenario}: {settings}")
        held = ", ".join(dict.fromkeys(style.number(method.held) for method in result.methods))
        style.foot(figure, result.identity, f"{style.about(result.identity.samples)} · held / full {held}")
    return figure


def by_budget(result: Needle) -> list[list[Method]]:
    """The methods of each budget, in the run's order; the budget whose caches hold least first."""
    groups: dict[Budget, list[Method]] = {}
    for method in result.methods:
        if method.config is not None:
            groups.setdefault(method.config.budget, []).append(method)
    return by_held(list(groups.values()), lambda group: sum(method.held for method in group) / len(group))


def _rows(result: Needle, narrow: bool) -> list[list[Method | None]]:
    """A row per budget behind the full cache, where that fits; otherwise one panel after the other."""
    groups = by_budget(result)
    widest = max(map(len, groups))
    if not narrow and widest < _MOST:
        firsts: list[Method | None] = [result.full, *[None] * (len(groups) - 1)]
        return [[first, *group, *[None] * (widest - len(group))] for first, group in zip(firsts, groups, strict=True)]
    columns = _NARROW if narrow else _FLOW
    shown = [result.full, *(method for group in groups for method in group)]
    padded = [*shown, *[None] * (-len(shown) % columns)]
    return [padded[start : start + columns] for start in range(0, len(padded), columns)]


def _panel(axes: Axes, result: Needle, method: Method, outcome: str) -> None:
    grid = method.grid if outcome == "score" else method.digits_grid
    scored = (method.score, method.score_interval)
    mean, interval = scored if outcome == "score" else (method.digits, method.digits_interval)
    sns.heatmap(grid, ax=axes, vmin=0, vmax=1, cmap=style.layer_colours(), cbar=False, linewidths=0.4,
                annot=np.vectorize(_hundredths)(grid) if grid.size <= 60 else False, fmt="",
                annot_kws={"fontsize": 4.6},
                xticklabels=[_thousands(length) for length in result.lengths],
                yticklabels=[f"{depth:g}" for depth in result.depths])  # fmt: skip
    axes.collections[0].set_gid("map")
    axes.set_title("\n".join([*_name(result, method), style.percent(mean, interval)]), loc="left", fontsize=6.5)
    axes.tick_params(length=2, rotation=0)


def _name(result: Needle, method: Method) -> list[str]:
    """What tells a method from the others: policy, selection, the rest, a line each."""
    if method.config is None:
        return ["full cache"]
    configs = result.identity.configs
    words = apart(configs)[configs.index(method.config)]
    sides = [words.pop(choice, "") for choice in SIDE]
    return [line for line in (*sides, " ".join(words.values())) if line] or ["evicted"]


def _hundredths(share: float) -> str:
    return "" if np.isnan(share) else f"{share:.2f}"


def _thousands(length: int) -> str:
    return f"{length / 1000:g}k" if length >= 1000 else str(length)
