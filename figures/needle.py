"""Heat maps of retrieval, length × depth, one per method (paper, figure 8).

Retrieval by depth: a dot per method and depth, over all lengths, beside the maps of `needle` (paper, figure 8).

Does perturbation tell whether the needle is found? Rank correlations within a prompt, one budget at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.measurements import FIRST_STEP_MEASURES
from perturbkv.analyses.needle.needle import Needle
from perturbkv.analyses.needle.retrieval import CIRCULAR, OUTCOMES, BudgetLink, Correlation, Method
from perturbkv.analyses.pairing import SIDE, apart, common, counted, short_names
from perturbkv.analyses.stats.intervals import LEAST
from perturbkv.configs.entry_counts import Budget
from perturbkv.figures import style
from perturbkv.figures.labels import by_held

_MOST, _FLOW, _NARROW = 7, 5, 3
_ROW_MM, _AROUND_MM = 40, 18
TITLES = {"score": "share of numbers found", "digits": "share of leading digits that are right"}


def draw_needle(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
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


_WIDE, _NEEDLE_DEPTHS_NARROW = 6, 3
_LINE_MM, _NEEDLE_DEPTHS_AROUND_MM, _BELOW_MM = 3.6, 24, 14
_MARKS = {"score": ("o", "whole number"), "digits": ("s", "leading digits")}


def draw_needle_depths(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per depth, a row per method: the share of numbers found, and of their leading digits."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        columns = min(_NEEDLE_DEPTHS_NARROW if narrow else _WIDE, len(result.depths))
        chunks = -(-len(result.depths) // columns)
        methods = [result.full, *(method for group in by_budget(result) for method in group)]
        figure = style.figure(width_mm, chunks * (len(methods) * _LINE_MM + _BELOW_MM) + _NEEDLE_DEPTHS_AROUND_MM)
        axes = figure.subplots(chunks, columns, squeeze=False, sharex=True, sharey=True)
        for place, panel in enumerate(axes.flat):
            if place >= len(result.depths):
                panel.set_axis_off()
                continue
            _needle_depths_panel(panel, methods, place)
            panel.set_title(f"depth {result.depths[place]:g}", loc="left", fontsize=6.5 if narrow else 7.5)
            panel.set_xlabel("share" if place + columns >= len(result.depths) else "")
            panel.tick_params(labelbottom=place + columns >= len(result.depths), labelleft=place % columns == 0)
            panel.tick_params(axis="y", labelsize=5.5 if narrow else 7)
        axes[0, 0].set_yticks(range(len(methods)), _names(result, methods))
        figure.legend(handles=_legend(), loc="outside upper left", ncols=2)
        held = dict.fromkeys(f"b={one.config.budget}: {style.number(one.held)}" for one in result.methods if one.config)
        told = "whole number: exact 95 % intervals over the prompts of a depth · held / full of"
        style.foot(figure, result.identity, f"{told} {', '.join(held)}")
    return figure


def _names(result: Needle, methods: list[Method]) -> list[str]:
    """What tells a method from the others."""
    names = dict(zip(result.identity.configs, short_names(result.identity.configs), strict=True))
    return [names[method.config] or "evicted" if method.config else "full cache" for method in methods]


def _needle_depths_panel(axes: Axes, methods: list[Method], depth: int) -> None:
    """The number found stands at the right with two decimals."""
    colours = style.category_colours(2)
    for row, method in enumerate(methods):
        ends = None if method.by_depth_interval is None else method.by_depth_interval.at(depth)
        found, digits = float(method.by_depth[depth]), float(method.digits_by_depth[depth])
        if np.isnan(found):
            continue
        bars = None if ends is None or np.isnan(ends.low) else style.bars(found, ends)
        axes.errorbar([found], [row - 0.14], xerr=bars, color=colours[0], marker=_MARKS["score"][0], markersize=3,
                      linewidth=0.7, clip_on=False, gid="score")  # fmt: skip
        axes.plot([digits], [row + 0.2], color=colours[1], marker=_MARKS["digits"][0], markersize=2.4, clip_on=False,
                  gid="digits")  # fmt: skip
        axes.text(1.1, row, f"{found:.2f}", transform=axes.get_yaxis_transform(), fontsize=5, va="center")
    axes.set(xlim=(-0.04, 1.04), ylim=(len(methods) - 0.4, -0.6), xticks=[0, 1])
    axes.grid(visible=True, axis="x")


def _legend() -> list[Line2D]:
    return [
        Line2D([], [], linestyle="", marker=marker, markersize=3.2, color=colour, label=label)
        for (marker, label), colour in zip(_MARKS.values(), style.category_colours(2), strict=True)
    ]


_RETRIEVAL_ROW_MM, _RETRIEVAL_AROUND_MM = 66, 14
_GAP = 0.9
"""Room, in rows, for the words above what is circular."""
_RETRIEVAL_MARKS = {"score": ("o", "whole number", -0.14), "digits": ("s", "leading digits", 0.14)}


def draw_retrieval(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """A panel per budget: ρ of each measure with both outcomes; below the line those that nearly are the score."""
    budgets = result.link.budgets
    with style.use():
        columns = 1 if width_mm < style.WIDE_MM else 2
        rows = max(1, -(-len(budgets) // columns))
        figure = style.figure(width_mm, rows * _RETRIEVAL_ROW_MM + _RETRIEVAL_AROUND_MM)
        axes = figure.subplots(rows, columns, squeeze=False)
        for panel, link in zip(axes.flat, budgets, strict=False):
            _retrieval_panel(panel, link)
        for panel in axes.flat[len(budgets) :]:
            panel.set_axis_off()
        for place, panel in enumerate(axes.flat[: len(budgets)]):
            panel.tick_params(labelleft=place % columns == 0)
        if not budgets:
            axes.flat[0].set(xticks=[], yticks=[])
            style.note(axes.flat[0], "no budget of three methods or more: no ranks", middle=True)
        figure.legend(handles=_retrieval_legend(), loc="outside upper left", ncols=2)
        style.foot(figure, result.identity, _told(result.link.samples))
    return figure


def _told(answered: int) -> str:
    """What n and the bars are: each point has an n of its own."""
    return (
        f"n: deciding ones of the {counted(answered, 'prompt')} that the full cache answers · bars: 95 % intervals "
        f"over them, ranges where they are fewer than {LEAST}"
    )


def _retrieval_panel(axes: Axes, link: BudgetLink) -> None:
    names = {**FIRST_STEP_MEASURES, **CIRCULAR}
    places = {name: place + (_GAP if name in CIRCULAR else 0) for place, name in enumerate(names)}
    for one in (*link.correlations, *link.circular):
        _point(axes, places[one.measure], one)
    axes.axvline(0, color="0.55", linewidth=0.8, zorder=1)
    axes.axhline(len(FIRST_STEP_MEASURES) - 0.45, color="0.55", linewidth=0.6, linestyle=":")
    axes.text(0.98, len(FIRST_STEP_MEASURES) - 0.37, "circular: nearly the score", transform=axes.get_yaxis_transform(),
              ha="right", va="top", fontsize=5.5, color="0.35",
              bbox={"facecolor": "white", "linewidth": 0, "pad": 0.8})  # fmt: skip
    axes.set_yticks(list(places.values()), list(names.values()))
    axes.set(
        xlim=(-1.05, 1.05),
        ylim=(max(places.values()) + 0.5, -0.5),
        xticks=[-1, -0.5, 0, 0.5, 1],
        xlabel="Spearman’s ρ within a prompt",
    )
    deciding = {outcome: link.of(outcome)[0].deciding for outcome in OUTCOMES}
    held = " to ".join(dict.fromkeys(map(style.number, link.held_ends)))
    title = (
        f"b={link.name}, {len(link.configs)} methods; held / full {held}"
        f"\nn = {deciding['score']} (number), {deciding['digits']} (digits)"
    )
    reasons = [f"{label}: {_why(link, name)}" for name, (_, label, _) in _RETRIEVAL_MARKS.items() if not deciding[name]]
    if len(reasons) == len(_RETRIEVAL_MARKS):
        axes.text(0, (len(FIRST_STEP_MEASURES) - 1) / 2, "\n".join(reasons), ha="center", va="center", fontsize=6.5,
                  color="0.35", backgroundcolor="white")  # fmt: skip
    elif reasons:
        title += f"\n{reasons[0]}"
    axes.set_title(title, loc="left", fontsize=6.5)


def _why(link: BudgetLink, outcome: str) -> str:
    """Why no prompt has ranks in an outcome: there is nothing to tell apart within a prompt."""
    found = getattr(link, outcome)
    if not len(found):
        return "the full cache finds none"
    if not found.any():
        return "every method lost all"
    if (found == 1).all():
        return "no method lost any"
    return "all methods alike"


def _point(axes: Axes, place: float, one: Correlation) -> None:
    if np.isnan(one.rho):
        return
    marker, _, offset = _RETRIEVAL_MARKS[one.outcome]
    axes.errorbar([one.rho], [place + offset], xerr=style.bars(one.rho, one.interval), color=_colours()[one.outcome],
                  marker=marker, markersize=3.2, linewidth=0.9, gid=f"{one.measure} {one.outcome}")  # fmt: skip


def _colours() -> dict[str, Any]:
    return dict(zip(_RETRIEVAL_MARKS, style.category_colours(2), strict=True))


def _retrieval_legend() -> list[Line2D]:
    return [
        Line2D([], [], linestyle="", marker=marker, markersize=3.5, color=_colours()[outcome], label=label)
        for outcome, (marker, label, _) in _RETRIEVAL_MARKS.items()
    ]
