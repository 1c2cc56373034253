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
from perturbkv.figures.labels import sort_by_cache_share
from perturbkv.figures.panels import marker_entries

_MOST, _FLOW, _NARROW = 7, 5, 3
"""Methods at one budget from which maps are drawn in sequence instead of by budget; maps per row then, in two columns
of a journal and in one."""
_ROW_MM, _AROUND_MM = 40, 18
TITLES = {"score": "share of numbers found", "digits": "share of leading digits that are right"}


def draw_needle(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw the share of numbers found: the full cache, then every method. Cells without a prompt are blank."""
    return _draw_maps(result, width_mm, "score")


def draw_digits(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw the share of leading digits that are right: the full cache, then every method."""
    return _draw_maps(result, width_mm, "digits")


def _draw_maps(result: Needle, width_mm: float, outcome: str) -> Figure:
    """Draw the maps of an outcome, "score" or "digits": depth by length, a panel per method."""
    with style.use():
        rows = _panel_rows(result, narrow=width_mm < style.WIDE_MM)
        figure = style.figure(width_mm, len(rows) * _ROW_MM + _AROUND_MM)
        axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
        for number, (row, panels) in enumerate(zip(rows, axes, strict=True)):
            for index, (method, panel) in enumerate(zip(row, panels, strict=True)):
                if method is None:
                    panel.set_axis_off()
                    continue
                _draw_map(panel, result, method, outcome)
                below = rows[number + 1][index] if number + 1 < len(rows) else None
                is_first = index == 0 or row[index - 1] is None
                panel.set_xlabel("tokens" if below is None else "")
                panel.set_ylabel("depth" if is_first else "")
                panel.set_yticklabels(panel.get_yticklabels() if is_first else [])
        side = "bottom" if width_mm < style.WIDE_MM else "right"
        bar = figure.colorbar(axes[0, 0].collections[0], ax=list(axes.flat), label=TITLES[outcome], location=side,
                              fraction=0.03, pad=0.02, aspect=25)  # fmt: skip
        bar.outline.set_visible(False)
        where = f"Needle in {result.haystack}, {result.scenario}"
        style.set_title(figure, f"{where}: {common_text(result.identity.configs)}", where)
        shares = ", ".join(dict.fromkeys(text.decimal(method.cache_share) for method in result.methods))
        style.describe_run(
            figure, result.identity, f"{style.interval_note(result.identity.samples)} · cache share {shares}"
        )
    return figure


def group_by_budget(result: Needle) -> list[list[Retrieval]]:
    """Return the methods grouped by budget, smallest caches first."""
    groups: dict[Budget, list[Retrieval]] = {}
    for method in result.methods:
        if method.config is not None:
            groups.setdefault(method.config.budget, []).append(method)
    return sort_by_cache_share(
        list(groups.values()), lambda group: sum(method.cache_share for method in group) / len(group)
    )


def _panel_rows(result: Needle, narrow: bool) -> list[list[Retrieval | None]]:
    """Return rows of panels, None for blanks: full cache and budgets by row or, if that is too wide, in sequence."""
    groups = group_by_budget(result)
    widest = max(map(len, groups))
    if not narrow and widest < _MOST:
        firsts: list[Retrieval | None] = [result.full, *[None] * (len(groups) - 1)]
        return [[first, *group, *[None] * (widest - len(group))] for first, group in zip(firsts, groups, strict=True)]
    columns = _NARROW if narrow else _FLOW
    shown = [result.full, *(method for group in groups for method in group)]
    padded = [*shown, *[None] * (-len(shown) % columns)]
    return [padded[start : start + columns] for start in range(0, len(padded), columns)]


def _draw_map(axes: Axes, result: Needle, method: Retrieval, outcome: str) -> None:
    """Draw one method's map of an outcome, titled with its name and mean."""
    grid = method.grid if outcome == "score" else method.digits_grid
    mean, interval = getattr(method, outcome), getattr(method, f"{outcome}_interval")
    import seaborn as sns

    sns.heatmap(grid, ax=axes, vmin=0, vmax=1, cmap=style.layer_colours(), cbar=False, linewidths=0.4,
                annot=np.vectorize(_hundredths)(grid) if grid.size <= 60 else False, fmt="",
                annot_kws={"fontsize": style.points(4.6)},
                xticklabels=[f"{each / 1000:g}k" if each >= 1000 else str(each) for each in result.lengths],
                yticklabels=[f"{depth:g}" for depth in result.depths])  # fmt: skip
    axes.collections[0].set_gid("map")
    for number in axes.texts:
        number.set_gid(style.NUMBERS)
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


def _hundredths(share: float) -> str:
    """Return a share with two decimals, '0.25'; empty for NaN."""
    return "" if np.isnan(share) else f"{share:.2f}"


_WIDE, _NEEDLE_DEPTHS_NARROW = 6, 3
_LINE_MM, _NEEDLE_DEPTHS_AROUND_MM, _BELOW_MM = 3.6, 24, 14
_MARKS = {"score": ("o", "whole number"), "digits": ("s", "leading digits")}


def draw_needle_depths(result: Needle, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a panel per depth, a row per method: shares of numbers found and of leading digits that are right."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        columns = min(_NEEDLE_DEPTHS_NARROW if narrow else _WIDE, len(result.depths))
        chunks = -(-len(result.depths) // columns)
        methods = [result.full, *(method for group in group_by_budget(result) for method in group)]
        figure = style.figure(width_mm, chunks * (len(methods) * _LINE_MM + _BELOW_MM) + _NEEDLE_DEPTHS_AROUND_MM)
        axes = figure.subplots(chunks, columns, squeeze=False, sharex=True, sharey=True)
        for index, panel in enumerate(axes.flat):
            if index >= len(result.depths):
                panel.set_axis_off()
                continue
            _draw_depth(panel, methods, index)
            panel.set_title(
                f"depth {result.depths[index]:g}", loc="left", fontsize=style.points(6.5 if narrow else 7.5)
            )
            panel.set_xlabel("share" if index + columns >= len(result.depths) else "")
            panel.tick_params(labelbottom=index + columns >= len(result.depths), labelleft=index % columns == 0)
            panel.tick_params(axis="y", labelsize=style.points(5.5 if narrow else 7))
        axes[0, 0].set_yticks(range(len(methods)), _method_names(result, methods))
        figure.legend(handles=marker_entries(_MARKS.values(), 3.2), loc="outside upper left", ncols=2)
        shares = dict.fromkeys(
            f"b={one.config.budget}: {text.decimal(one.cache_share)}" for one in result.methods if one.config
        )
        note = "whole number: exact 95 % intervals over the prompts of a depth · cache share of"
        style.describe_run(figure, result.identity, f"{note} {', '.join(shares)}")
    return figure


def _method_names(result: Needle, methods: list[Retrieval]) -> list[str]:
    """Return the methods' distinct names, each on one line."""
    names = dict(zip(result.identity.configs, short_names(result.identity.configs), strict=True))
    return [names[method.config] or "evicted" if method.config else "full cache" for method in methods]


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
    with style.use():
        columns = 1 if width_mm < style.WIDE_MM else 2
        rows = max(1, -(-len(budgets) // columns))
        figure = style.figure(width_mm, rows * _RETRIEVAL_ROW_MM + _RETRIEVAL_AROUND_MM)
        axes = figure.subplots(rows, columns, squeeze=False)
        for panel, budget in zip(axes.flat, budgets, strict=False):
            _draw_budget(panel, budget)
        for panel in axes.flat[len(budgets) :]:
            panel.set_axis_off()
        for index, panel in enumerate(axes.flat[: len(budgets)]):
            panel.tick_params(labelleft=index % columns == 0)
        if not budgets:
            axes.flat[0].set(xticks=[], yticks=[])
            style.draw_note(axes.flat[0], "no budget of three methods or more: no ranks", at="middle")
        handles = marker_entries((marker, label) for marker, label, _ in _RETRIEVAL_MARKS.values())
        figure.legend(handles=handles, loc="outside upper left", ncols=2)
        prompts = plural(result.correlation.samples, "prompt")
        foot = (
            f"n: deciding ones of the {prompts} that the full cache answers · bars: 95 % intervals over them, ranges "
            f"where they are fewer than {MIN_SAMPLES}"
        )
        style.describe_run(figure, result.identity, foot)
    return figure


def _draw_budget(axes: Axes, budget: RankedBudget) -> None:
    """Draw one budget's ρ of each measure with both outcomes, or the reasons why there is none."""
    names = {**FIRST_STEP_MEASURES, **CIRCULAR}
    positions = {name: row + (_GAP if name in CIRCULAR else 0) for row, name in enumerate(names)}
    for one in (*budget.correlations, *budget.circular):
        _draw_correlation(axes, positions[one.measure], one)
    _frame_correlations(axes, positions, names)
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


def _frame_correlations(axes: Axes, positions: dict[str, float], names: dict[str, str]) -> None:
    """Draw the line of no association and the border above circular measures; label the axes.

    `positions` and `names`: height and label of each measure's row.
    """
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
