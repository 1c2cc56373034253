"""Figures of retrieval: maps of length × depth (paper, figure 8), shares by depth, and correlations with perturbation.

Correlations are ranks within a prompt, one budget at a time.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perturbkv.analyses import text
from perturbkv.analyses.names import SIDE, common_text, distinct_choices, short_names
from perturbkv.analyses.needle.needle import Needle
from perturbkv.analyses.needle.retrieval import (
    CIRCULAR,
    FIRST_STEP_MEASURES,
    OUTCOMES,
    RankedBudget,
    Retrieval,
    RetrievalCorrelation,
)
from perturbkv.analyses.stats.intervals import MIN_SAMPLES
from perturbkv.configs.entry_counts import Budget
from perturbkv.display import plural
from perturbkv.figures import style
from perturbkv.figures.labels import draw_legend, sort_by_cache_share
from perturbkv.figures.panels import draw_heatmap, label_outer, marker_entries, panel_grid

_COLUMNS, _NARROW = 5, 3
"""Maps per row, in two columns of a journal and in one."""
_ROW_MM, _AROUND_MM = 40, 18
_NUMBER_POINTS, _NUMBER_MM = 4.6, 1.2
"""Size of a number in a cell, and the width of a cell for one, in mm per point of that size."""
TITLES = {"score": "share of numbers found", "digits": "share of leading digits that are right"}


def draw_needle(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw the share of numbers found: the full cache, then every method. Cells without a prompt are blank."""
    return _draw_maps(result, width_mm, "score")


def draw_digits(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw the share of leading digits that are right: the full cache, then every method."""
    return _draw_maps(result, width_mm, "digits")


def _draw_maps(result: Needle, width_mm: float, outcome: str) -> Figure:
    """Draw the maps of an outcome, "score" or "digits": depth by length, a panel per method."""
    methods = [result.full, *methods_by_budget(result)]
    columns = min(_NARROW if width_mm < style.WIDE_MM else _COLUMNS, len(methods))
    figure, panels = panel_grid(len(methods), columns, width_mm, _ROW_MM, _AROUND_MM)
    has_numbers = width_mm / columns / len(result.lengths) > _NUMBER_MM * style.points(_NUMBER_POINTS)
    for panel, method in zip(panels, methods, strict=True):
        _draw_map(panel, result, method, outcome, has_numbers)
    label_outer(panels, "tokens", "depth")
    side = "bottom" if width_mm < style.WIDE_MM else "right"
    bar = figure.colorbar(panels[0].collections[0], ax=panels, label=TITLES[outcome], location=side,
                          fraction=0.03, pad=0.02, aspect=25)  # fmt: skip
    bar.outline.set_visible(False)
    where = f"Needle in {result.haystack}, {result.scenario}"
    style.set_title(figure, f"{where}: {common_text(result.identity.configs)}", where)
    shares = ", ".join(dict.fromkeys(text.decimal(method.cache_share) for method in result.methods))
    return style.describe_run(
        figure, result.identity, f"{style.interval_note(result.identity.samples)} · cache share {shares}"
    )


def methods_by_budget(result: Needle) -> list[Retrieval]:
    """Return the methods, those of a budget together, smallest caches first."""
    groups: dict[Budget, list[Retrieval]] = {}
    for method in result.methods:
        if method.config is not None:
            groups.setdefault(method.config.budget, []).append(method)
    ordered = sort_by_cache_share(
        list(groups.values()), lambda group: sum(method.cache_share for method in group) / len(group)
    )
    return [method for group in ordered for method in group]


def _draw_map(axes: Axes, result: Needle, method: Retrieval, outcome: str, has_numbers: bool) -> None:
    """Draw one method's map of an outcome, titled with its name and mean; with numbers where the cells have room."""
    grid = method.grid if outcome == "score" else method.digits_grid
    mean, interval = getattr(method, outcome), getattr(method, f"{outcome}_interval")
    draw_heatmap(axes, grid, 0, 1, style.layer_colours())
    axes.set_xticks(np.arange(len(result.lengths)) + 0.5, [f"{each / 1000:g}k" if each >= 1000 else str(each)
                                                           for each in result.lengths])  # fmt: skip
    axes.set_yticks(np.arange(len(result.depths)) + 0.5, [f"{depth:g}" for depth in result.depths])
    for (depth, length), share in np.ndenumerate(grid) if has_numbers else ():
        axes.text(length + 0.5, depth + 0.5, "" if np.isnan(share) else f"{share:.2f}", ha="center", va="center",
                  fontsize=style.points(_NUMBER_POINTS), color="white" if share < 0.5 else "0.15")  # fmt: skip
    axes.set_title(
        "\n".join([*_title_lines(result, method), text.percent(mean, interval)]), loc="left", fontsize=style.points(6.5)
    )
    axes.tick_params(length=2, rotation=0)


def _title_lines(result: Needle, method: Retrieval) -> list[str]:
    """Return a method's distinct name in lines: policy, selection, remaining choices."""
    if method.config is None:
        return ["full cache"]
    configs = result.identity.configs
    words = distinct_choices(configs)[configs.index(method.config)]
    sides = [words.pop(choice, "") for choice in SIDE]
    return [line for line in (*sides, " ".join(words.values())) if line] or ["evicted"]


_WIDE, _NEEDLE_DEPTHS_NARROW = 6, 3
_LINE_MM, _NEEDLE_DEPTHS_AROUND_MM, _BELOW_MM = 3.6, 24, 14
_MARKS = {"score": ("o", "whole number"), "digits": ("s", "leading digits")}


def draw_needle_depths(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a panel per depth, a row per method: shares of numbers found and of leading digits that are right."""
    narrow = width_mm < style.WIDE_MM
    methods = [result.full, *methods_by_budget(result)]
    figure, panels = panel_grid(len(result.depths), _NEEDLE_DEPTHS_NARROW if narrow else _WIDE, width_mm,
                                len(methods) * _LINE_MM + _BELOW_MM, _NEEDLE_DEPTHS_AROUND_MM, sharex=True,
                                sharey=True)  # fmt: skip
    for index, panel in enumerate(panels):
        _draw_depth(panel, methods, index)
        panel.set_title(f"depth {result.depths[index]:g}", loc="left", fontsize=style.points(6.5 if narrow else 7.5))
        panel.tick_params(axis="y", labelsize=style.points(5.5 if narrow else 7))
    names = dict(zip(result.identity.configs, short_names(result.identity.configs), strict=True))
    shown = [names[method.config] or "evicted" if method.config else "full cache" for method in methods]
    panels[0].set_yticks(range(len(methods)), shown)
    label_outer(panels, "share", "")
    draw_legend(figure, marker_entries(_MARKS.values(), 3.2))
    shares = dict.fromkeys(
        f"b={one.config.budget}: {text.decimal(one.cache_share)}" for one in result.methods if one.config
    )
    note = "whole number: exact 95 % intervals over the prompts of a depth · cache share of"
    return style.describe_run(figure, result.identity, f"{note} {', '.join(shares)}")


def _draw_depth(axes: Axes, methods: list[Retrieval], depth_index: int) -> None:
    """Draw one depth, a row per method, with the share of numbers found as a number at the right.

    A method without a prompt of this depth has an empty row.
    """
    colours = style.category_colours(2)
    for row, method in enumerate(methods):
        ends = None if method.by_depth_interval is None else method.by_depth_interval.at(depth_index)
        score, digits = float(method.by_depth[depth_index]), float(method.digits_by_depth[depth_index])
        if np.isnan(score):
            continue
        bars = None if ends is None or np.isnan(ends.low) else style.error_bars(score, ends)
        axes.errorbar([score], [row - 0.14], xerr=bars, color=colours[0], marker=_MARKS["score"][0], markersize=3,
                      linewidth=0.7, clip_on=False, gid="score")  # fmt: skip
        axes.plot([digits], [row + 0.2], color=colours[1], marker=_MARKS["digits"][0], markersize=2.4, clip_on=False,
                  gid="digits")  # fmt: skip
        axes.text(1.1, row, f"{score:.2f}", transform=axes.get_yaxis_transform(), fontsize=style.points(5), va="center")
    axes.set(xlim=(-0.04, 1.04), ylim=(len(methods) - 0.4, -0.6), xticks=[0, 1])
    axes.grid(visible=True, axis="x")


_RETRIEVAL_ROW_MM, _RETRIEVAL_AROUND_MM = 66, 14
_GAP = 0.9
"""Height, in rows, of the heading above the circular measures."""
_RETRIEVAL_MARKS = {"score": ("o", "whole number", -0.14), "digits": ("s", "leading digits", 0.14)}


def draw_retrieval(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw ρ of each measure with both outcomes, a panel per budget; measures close to the score at the bottom."""
    budgets = result.correlation.budgets
    columns = 1 if width_mm < style.WIDE_MM else 2
    figure, panels = panel_grid(max(1, len(budgets)), columns, width_mm, _RETRIEVAL_ROW_MM, _RETRIEVAL_AROUND_MM)
    for index, (panel, budget) in enumerate(zip(panels, budgets, strict=False)):
        _draw_budget(panel, budget)
        panel.tick_params(labelleft=index % columns == 0)
    if not budgets:
        panels[0].set(xticks=[], yticks=[])
        style.draw_note(panels[0], "no budget of three methods or more: no ranks", at="middle")
    draw_legend(figure, marker_entries((marker, label) for marker, label, _ in _RETRIEVAL_MARKS.values()))
    prompts = plural(result.correlation.samples, "prompt")
    foot = (
        f"n: deciding ones of the {prompts} that the full cache answers · bars: 95 % intervals over them, ranges "
        f"where they are fewer than {MIN_SAMPLES}"
    )
    return style.describe_run(figure, result.identity, foot)


def _draw_budget(axes: Axes, budget: RankedBudget) -> None:
    """Draw one budget's ρ of each measure with both outcomes, or the reasons why there is none."""
    names = {**FIRST_STEP_MEASURES, **CIRCULAR}
    positions = {name: row + (_GAP if name in CIRCULAR else 0) for row, name in enumerate(names)}
    for one in (*budget.correlations, *budget.circular):
        _draw_correlation(axes, positions[one.measure], one)
    axes.axvline(0, color="0.55", linewidth=0.8, zorder=1)
    axes.axhline(len(FIRST_STEP_MEASURES) - 0.45, color="0.55", linewidth=0.6, linestyle=":")
    axes.text(0.98, len(FIRST_STEP_MEASURES) - 0.37, "circular: nearly the score", transform=axes.get_yaxis_transform(),
              ha="right", va="top", fontsize=style.points(5.5), color="0.35",
              bbox={"facecolor": "white", "linewidth": 0, "pad": 0.8})  # fmt: skip
    axes.set_yticks(list(positions.values()), list(names.values()))
    axes.set(
        xlim=(-1.05, 1.05),
        ylim=(max(positions.values()) + 0.5, -0.5),
        xticks=[-1, -0.5, 0, 0.5, 1],
        xlabel="Spearman’s ρ within a prompt",
    )
    deciding = {outcome: budget.by_outcome(outcome)[0].deciding for outcome in OUTCOMES}
    shares = " to ".join(dict.fromkeys(map(text.decimal, budget.cache_share_range)))
    title = (
        f"b={budget.name}, {len(budget.configs)} methods; cache share {shares}"
        f"\nn = {deciding['score']} (number), {deciding['digits']} (digits)"
    )
    reasons = [
        f"{label}: {_undecided_reason(budget, name)}"
        for name, (_, label, _) in _RETRIEVAL_MARKS.items()
        if not deciding[name]
    ]
    if len(reasons) == len(_RETRIEVAL_MARKS):
        axes.text(0, (len(FIRST_STEP_MEASURES) - 1) / 2, "\n".join(reasons), ha="center", va="center",
                  fontsize=style.points(6.5), color="0.35", backgroundcolor="white")  # fmt: skip
    elif reasons:
        title += f"\n{reasons[0]}"
    axes.set_title(title, loc="left", fontsize=style.points(6.5))


def _undecided_reason(budget: RankedBudget, outcome: str) -> str:
    """Return the reason why no prompt ranks the methods by an outcome."""
    answers = getattr(budget, outcome)
    if not len(answers):
        return "the full cache finds none"
    if not answers.any():
        return "every method lost all"
    if (answers == 1).all():
        return "no method lost any"
    return "all methods alike"


def _draw_correlation(axes: Axes, y: float, one: RetrievalCorrelation) -> None:
    """Draw one measure's ρ with its interval; nothing where it is NaN."""
    if np.isnan(one.rho):
        return
    marker, _, offset = _RETRIEVAL_MARKS[one.outcome]
    bars = style.error_bars(one.rho, one.rho_interval)
    colour = style.category_colours(2)[list(_RETRIEVAL_MARKS).index(one.outcome)]
    axes.errorbar([one.rho], [y + offset], xerr=bars, color=colour, marker=marker,
                  markersize=3.2, linewidth=0.9, gid=f"{one.measure} {one.outcome}")  # fmt: skip
