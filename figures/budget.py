"""Figures over budgets: savings (paper, figure 1), cliffs, safe budgets, and caches of equal bytes.

Savings: two curves, an arrow from each of the treatment's budgets to the baseline's equal one. Cliffs: KL of the next
token, both axes logarithmic, with the thresholds. Safe budgets: means with one-sided bounds, the limit, and the
smallest safe budget. Equal bytes: perturbation and scores, a line per number of bits, a column per method.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from perturbkv.analyses import text
from perturbkv.analyses.budget.budget_equivalence import MEASURES, Level, MeasuredSavings, Point
from perturbkv.analyses.budget.cliff import Cliff, Cliffs
from perturbkv.analyses.budget.criteria import Verdict
from perturbkv.analyses.budget.equal_bytes import EqualBytes, Row, Setting
from perturbkv.analyses.budget.safe_budget import SafeBudgets
from perturbkv.analyses.budget.savings import PairSavings
from perturbkv.analyses.pairing import common, fold, short_names, side_names
from perturbkv.configs.precision import FULL_BITS
from perturbkv.figures import labels, style
from perturbkv.figures.labels import Label, place_labels

_ROW_MM = 66
_PERCENT = 100
_TITLES = {
    "score": "Score of the answers",
    "propagated": "Propagated perturbation",
    "kl": "Next token's distribution",
}
_LOOKS = (("0.45", "s", "--"), (None, "o", "-"))
"""Colour (None: the first category's), marker and line of baseline and treatment."""


def draw_savings(result: PairSavings, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a panel per measure: both sides over budgets, with an arrow for the saving at each treatment budget."""
    with style.use():
        narrow, count = width_mm < style.WIDE_MM, len(result.measures)
        figure = style.figure(width_mm, _ROW_MM * (count if narrow else 1) + 6)
        shape = (count, 1) if narrow else (1, count)
        panels = list(zip(figure.subplots(*shape, squeeze=False).flat, result.measures, strict=True))
        for axes, one in panels:
            _draw_measure(axes, one, result.along)
        figure.legend(handles=_savings_legend(result.measures[0]), loc="outside upper left", ncols=1 if narrow else 3)
        kl = any(one.measure == "kl" for one in result.measures)
        note = style.interval_legend(result.identity.samples, medians=kl)
        style.draw_foot(figure, result.identity, f"bars on arrows: intervals of b* · {note}")
        figure.last_steps.append(lambda: _label_savings(figure, panels))
    return figure


def _label_savings(figure: Figure, panels: Sequence[tuple[Axes, MeasuredSavings]]) -> None:
    """Write each arrow's saving beside it."""
    figure.draw_without_rendering()
    for axes, one in panels:
        place_labels(axes, [_saving_label(axes, point, one) for point in one.points if point.equivalent.known])


def _draw_measure(axes: Axes, savings: MeasuredSavings, along: str) -> None:
    """Draw one measure over budgets: baseline, treatment, and an arrow per budget of the treatment."""
    for levels, look, name in (
        (savings.baseline, _side_look(0), "baseline"),
        (savings.points, _side_look(1), "treatment"),
    ):
        _draw_levels(axes, levels, savings.measure, look, name)
    if savings.measure == "score":
        axes.axhline(_PERCENT * savings.full, color="0.7", linewidth=0.8, zorder=1, gid="full cache")
    axes.set_title(_TITLES[savings.measure], loc="left")
    axes.set(xlabel=_budget_label(savings, along), ylabel=MEASURES[savings.measure])
    style.log_axes(axes, x=True, y=savings.measure != "score")
    low, high = axes.get_xlim()
    for point in savings.points:
        if not point.equivalent.flat:
            _draw_arrow(axes, point, savings, (low, high))
    axes.set_xlim(low, high)


def _side_look(side: int) -> dict[str, Any]:
    """Return the plot options of baseline (0) or treatment (1)."""
    colour, marker, line = _LOOKS[side]
    return {"color": colour or style.category_colours(1)[0], "marker": marker, "linestyle": line}


def _budget_label(savings: MeasuredSavings, along: str) -> str:
    """Return the x label: cache share, or budget with its unit."""
    if along == "held":
        return "cache share"
    return f"budget, {savings.points[0].config.budget.unit}"


def _draw_levels(axes: Axes, levels: Sequence[Level], measure: str, look: dict[str, Any], name: str) -> None:
    """Draw a side's levels over its budgets, with a band if all levels have intervals."""
    budgets = [level.at for level in levels]
    values = _scaled(np.array([level.level for level in levels]), measure)
    axes.plot(budgets, values, markersize=3, markerfacecolor="none", linewidth=0.9, gid=f"{name} {measure}", **look)
    ends = [level.level_interval for level in levels]
    if all(end is not None for end in ends):
        low, high = (_scaled(np.array([getattr(end, side) for end in ends]), measure) for side in ("low", "high"))
        axes.fill_between(budgets, low, high, color=look["color"], alpha=0.12, linewidth=0)


def _scaled(values: np.ndarray, measure: str) -> np.ndarray:
    """Return scores in per cent; other measures with NaN where not positive, for a log axis."""
    return _PERCENT * values if measure == "score" else style.positive(values)


def _draw_arrow(axes: Axes, point: Point, savings: MeasuredSavings, limits: tuple[float, float]) -> None:
    """Draw an arrow from the treatment's budget to the baseline's equivalent budget, or to the panel's edge."""
    level = float(_scaled(np.array([point.level]), savings.measure)[0])
    end = point.equivalent.value if point.equivalent.known else limits[point.equivalent.value > 0]
    colour, interval = _side_look(1)["color"], point.equivalent.interval
    style_of = {"arrowstyle": "-|>", "color": colour, "linewidth": 0.8, "shrinkA": 2, "shrinkB": 0, "mutation_scale": 6}
    annotation = axes.annotate("", (end, level), (point.at, level), arrowprops=style_of)
    annotation.set_gid(f"arrow {savings.measure}")
    if interval is not None and point.equivalent.known:
        ends = np.clip([interval.low, interval.high], *limits)
        axes.plot(ends, [level, level], color=colour, linewidth=2.4, alpha=0.3, solid_capstyle="butt", zorder=1,
                  gid=f"interval {savings.measure}")  # fmt: skip


def _saving_label(axes: Axes, point: Point, savings: MeasuredSavings) -> Label:
    """Return the label of a saving, to be placed beside the arrow's head and its interval."""
    interval, limits = point.equivalent.interval, axes.get_xlim()
    ends = [point.equivalent.value] if interval is None else [point.equivalent.value, interval.low, interval.high]
    left, right = np.clip([min(ends), max(ends)], *limits)
    height = float(_scaled(np.array([point.level]), savings.measure)[0])
    return Label(
        text.percent(point.saving), float(left), float(right), height, forward=point.equivalent.value >= point.at
    )


def _savings_legend(savings: MeasuredSavings) -> list[Line2D]:
    """Return the legend entries of both sides and of the arrows."""
    names = side_names(savings.baseline[0].config, savings.points[0].config)
    sides = [Line2D([], [], markersize=3.5, markerfacecolor="none", label=name, **_side_look(side))
             for side, name in enumerate(names)]  # fmt: skip
    arrow = Line2D([], [], color=_side_look(1)["color"], marker=">", markersize=3.5, label="budget saved: 1 − b / b*")
    return [*sides, arrow]


_WIDE_MM, _NARROW_MM = 84, 92
_APART, _TOGETHER = 0.022, 0.09
"""Shares of the panel's height: the distance of neighbouring methods' marks on a threshold, and the most that all marks
take together."""
_BANDS = 4
"""Most methods that have bands; of more, the medians alone are drawn, as bands would hide each other."""


def draw_cliff(result: Cliffs, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw each method's median KL over budgets, and where it crosses each threshold, with its interval."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        figure = style.figure(width_mm, _NARROW_MM if narrow else _WIDE_MM)
        axes = figure.subplots()
        handles = [
            _draw_median(axes, one, colour, marker, band=len(result) <= _BANDS)
            for one, colour, marker in zip(result, style.category_colours(len(result)), cycle("os^Dv"), strict=False)
        ]
        style.log_axes(axes, x=True, y=True)
        _draw_thresholds(axes, result)
        unit = result[0].configs[0].budget.unit
        axes.set(xlabel=f"budget, {unit}", ylabel="KL of the next token, nat")
        ticks = sorted({float(budget) for one in result for budget in one.budgets})
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        legend_columns = labels.legend_columns([one.name for one in result], width_mm, 2 if narrow else 4)
        figure.legend(handles=handles, loc="outside upper left", ncols=legend_columns)
        note = style.interval_legend(result.identity.samples, medians=True)
        style.draw_foot(figure, result.identity, f"medians over samples; on dashed lines: where each passes · {note}")
    return figure


def _draw_median(axes: Axes, cliff: Cliff, colour: Any, marker: str, *, band: bool) -> Line2D:
    """Draw one method's median KL over budgets, with its band where `band`; return the line."""
    (line,) = axes.plot(cliff.budgets, style.positive(cliff.median), color=colour, marker=marker, markersize=3,
                        markerfacecolor="none", label=cliff.name, gid=f"median {cliff.name}")  # fmt: skip
    if band and cliff.median_interval is not None:
        low, high = (style.positive(end) for end in (cliff.median_interval.low, cliff.median_interval.high))
        axes.fill_between(cliff.budgets, low, high, color=colour, alpha=0.13, linewidth=0, gid=f"band {cliff.name}")
    return line


def _draw_thresholds(axes: Axes, result: Cliffs) -> None:
    """Draw the thresholds as dashed lines, with each method's crossing at its own height near the line."""
    colours, limits = style.category_colours(len(result)), axes.get_xlim()
    low, high = axes.get_ylim()
    distance = min(_APART, _TOGETHER / len(result))
    step = (high / low) ** distance if axes.get_yscale() == "log" else 1.0
    for index, threshold in enumerate(result.thresholds):
        axes.axhline(threshold, color="0.55", linewidth=0.7, linestyle="--", zorder=1, gid="threshold")
        for shift, (one, colour) in enumerate(zip(result, colours, strict=True)):
            height = threshold * step ** ((len(result) - 1) / 2 - shift)
            _draw_crossing(axes, one, index, (height, colour), limits)
    axes.set(xlim=limits, ylim=(min(low, min(result.thresholds) / 2), max(high, max(result.thresholds) * 2)))


def _draw_crossing(axes: Axes, cliff: Cliff, index: int, look: tuple[float, Any], limits: tuple[float, float]) -> None:
    """Draw a crossing's interval and mark; beyond the panel's edge the interval is cut off and the mark left out."""
    crossing, (height, colour) = cliff.crossings[index], look
    if crossing.interval is not None:
        ends = np.clip([crossing.interval.low, crossing.interval.high], *limits)
        axes.plot(ends, [height] * 2, color=colour, linewidth=1.8, alpha=0.6, solid_capstyle="butt",
                  gid=f"interval {cliff.name}")  # fmt: skip
    if crossing.known:
        axes.plot([crossing.value], [height], color=colour, marker="d", markersize=3.8, linestyle="", zorder=4,
                  gid=f"crossing {cliff.name}")  # fmt: skip


_SAFE_BUDGET_ROW_MM, _LINE_MM = 66, 4
_LABELS = {"kl": "mean KL (nat)", "drop": "mean drop of the score (points)", "top1": "share of the same token"}
_SAFE_BUDGET_TITLES = {"kl": "Next token's distribution", "drop": "Score of the answers", "top1": "Same next token"}
_ASIDE = 1.03
"""Factor between equal selections' budgets, so that each is visible."""
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")


def draw_safe_budget(result: SafeBudgets, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a panel per criterion, a line per selection; filled marks are safe, the ringed one is the smallest."""
    with style.use():
        narrow, count = width_mm < style.WIDE_MM, len(result[0].verdicts)
        handles = _safe_budget_legend(result)
        columns = labels.legend_columns([str(one.get_label()) for one in handles], width_mm, 1 if narrow else 5)
        legend = _LINE_MM * -(-(len(result) + 1) // columns)
        figure = style.figure(width_mm, _SAFE_BUDGET_ROW_MM * (count if narrow else 1) + legend)
        panels = figure.subplots(*((count, 1) if narrow else (1, count)), squeeze=False).flat
        for index, axes in enumerate(panels):
            _draw_criterion(axes, result, index)
        figure.legend(handles=handles, loc="outside upper left", ncols=columns)
        bounds_text = f"whiskers: one-sided 95 % bounds over n = {result.identity.samples} samples"
        style.draw_foot(
            figure,
            result.identity,
            f"full marks: safe, ringed the smallest; side by side at one budget · {bounds_text}",
        )
    return figure


def _draw_criterion(axes: Axes, result: SafeBudgets, index: int) -> None:
    """Draw one criterion's means and bounds over budgets, a line per selection, and its limit."""
    criterion = result[0].verdicts[index].criterion
    scale = 100 if criterion.name == "drop" else 1
    axes.axhline(scale * criterion.limit, color="#b00020", linewidth=0.9, zorder=1, gid="limit")
    looks = zip(result, style.category_colours(len(result)), cycle("os^Dv"), cycle(_DASHES), strict=False)
    for number, (one, colour, marker, dash) in enumerate(looks):
        _draw_verdict(axes, one.verdicts[index], {"color": colour, "marker": marker, "linestyle": dash}, scale,
              _shift_factor(number, len(result)))  # fmt: skip
    axes.set_title(_SAFE_BUDGET_TITLES[criterion.name], loc="left")
    unit = result[0].verdicts[index].budgets[0].config.budget.unit
    axes.set(xlabel=f"budget, {unit}", ylabel=_LABELS[criterion.name])
    style.log_axes(axes, x=True, y=criterion.name == "kl")
    budgets = sorted({tested.config.budget.value for one in result for tested in one.verdicts[index].budgets})
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_minor_locator(NullLocator())


def _shift_factor(number: int, count: int) -> float:
    """Return the factor on x that moves line `number` of `count` aside, on a logarithmic axis."""
    return float(_ASIDE ** (number - (count - 1) / 2))


def _draw_verdict(axes: Axes, verdict: Verdict, look: dict[str, Any], scale: float, shift: float) -> None:
    """Draw means with whiskers to their bounds; hollow where safety is not shown, the smallest safe one ringed."""
    budgets = shift * np.array([one.config.budget.value for one in verdict.budgets], dtype=float)
    means, bounds = (scale * np.array([getattr(one, name) for one in verdict.budgets]) for name in ("mean", "bound"))
    known, colour = np.isfinite(bounds), look["color"]
    axes.plot(budgets, means, linewidth=0.9, gid=f"means {verdict.criterion.name}", **{**look, "marker": ""})
    axes.vlines(budgets[known], means[known], bounds[known], color=colour, linewidth=0.7)
    axes.plot(budgets[known], bounds[known], color=colour, linestyle="", marker="_", markersize=4,
              gid=f"bounds {verdict.criterion.name}")  # fmt: skip
    safe = np.array([one.tested and one.holds for one in verdict.budgets])
    for mask, fill in ((safe, colour), (~safe, "white")):
        axes.plot(budgets[mask], means[mask], color=colour, linestyle="", marker=look["marker"], markersize=3,
                  markerfacecolor=fill, gid="safe" if fill is colour else "not safe")  # fmt: skip
    if safe.any():
        last = np.flatnonzero(safe)[-1]
        axes.plot(budgets[last], means[last], color=colour, linestyle="", marker="o", markersize=7,
                  markerfacecolor="none", gid="smallest")  # fmt: skip


def _safe_budget_legend(result: SafeBudgets) -> list[Line2D]:
    """Return a legend entry per selection, and an entry for the limit."""
    named = zip(result, style.category_colours(len(result)), cycle("os^Dv"), cycle(_DASHES), strict=False)
    entries = [Line2D([], [], color=colour, marker=marker, linestyle=dash, markersize=3, label=one.name)
             for one, colour, marker, dash in named]  # fmt: skip
    return [*entries, Line2D([], [], color="#b00020", linewidth=0.9, label="limit")]


_PANEL_MM, _AROUND_MM = 52, 24
_LETTERS = 34
_EQUAL_BYTES_APART = 0.012
"""Share of a decade of the x axis between lines of different bits at one budget."""
_ALL = "everything"


def draw_equal_bytes(result: EqualBytes, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a column per method over cache bytes; the rows are perturbation and, where scored, the answers' scores."""
    with style.use():
        columns = _settings_by_method(result.settings)
        readings = [("last layer's L1 / ‖o‖₁", "perturbation")]
        readings += [("score × 100", "score")] if result.full_score is not None else []
        figure = style.figure(width_mm, len(readings) * _PANEL_MM + _AROUND_MM)
        panels = figure.subplots(len(readings), len(columns), squeeze=False, sharey="row", sharex=True)
        for line, (name, reading) in zip(panels, readings, strict=True):
            for column, (axes, some) in enumerate(zip(line, columns.values(), strict=True)):
                _draw_bits(axes, some, result, reading, scored=reading == "score")
                axes.set_ylabel("" if column else name)
        for axes, name in zip(panels[0], columns, strict=True):
            axes.set_title(fold(name, _LETTERS), loc="left")
        for axes in panels[-1]:
            axes.set_xlabel("bytes / full cache in 16 bits (%)")
        figure.legend(
            handles=_equal_bytes_legend(result), loc="outside upper left", ncols=3 if width_mm < style.WIDE_MM else 6
        )
        style.draw_foot(figure, result.identity, style.interval_legend(result.identity.samples))
    return figure


def _settings_by_method(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    """Return column title -> settings that differ in the budget alone."""
    names = short_names([one.baseline for one in settings], "budget")
    columns: dict[str, list[Setting]] = {}
    for one, name in zip(settings, names, strict=True):
        columns.setdefault(name or common([one.baseline], "budget"), []).append(one)
    return columns


def _draw_bits(axes: Axes, settings: Sequence[Setting], result: EqualBytes, reading: str, scored: bool) -> None:
    """Draw one reading ("perturbation" or "score") of a method over bytes, a line per number of bits."""
    looks, factor = _looks_by_bits(result), 100 if scored else 1
    for index, bits in enumerate(looks):
        rows = [row for one in settings for row in one.rows if row.config.bits == bits]
        rows.sort(key=lambda row: row.byte_share)
        aside = 10 ** (_EQUAL_BYTES_APART * (index - (len(looks) - 1) / 2))
        _draw_rows(axes, rows, reading, factor, aside, gid=f"{bits} bits", **looks[bits])
        alone = [row for row in result.everything if row.config.bits == bits]
        _draw_rows(axes, alone, reading, factor, aside, gid=f"{bits} bits, {_ALL}",
              **{**looks[bits], "marker": "*", "markersize": 6, "linestyle": ""})  # fmt: skip
    if scored and result.full_score is not None:
        axes.axhline(factor * result.full_score, color="0.35", linestyle="--", linewidth=0.9, zorder=1, gid="full")
    style.log_axes(axes, x=True, y=not scored)
    if scored:
        axes.set_ylim(bottom=0)
    shares = sorted({round(100 * one.rows[0].byte_share, 1) for one in settings})
    axes.set_xticks(shares, [f"{share:g}" for share in shares])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, axis="y")


def _draw_rows(axes: Axes, rows: Sequence[Row], reading: str, factor: float, shift: float, **look: Any) -> None:
    """Draw rows over their bytes with intervals, without rows that lack `reading`."""
    valued_rows = [(row, getattr(row, reading)) for row in rows if getattr(row, reading) is not None]
    if not valued_rows:
        return
    ends = [style.error_bars(value, getattr(row, f"{reading}_interval")) for row, value in valued_rows]
    bars = [bar for bar in ends if bar is not None]
    axes.errorbar(
        [100 * row.byte_share * shift for row, _ in valued_rows], [factor * value for _, value in valued_rows],
        yerr=factor * np.hstack(bars) if len(bars) == len(valued_rows) else None, linewidth=0.9, elinewidth=0.6,
        markerfacecolor="none", **{"markersize": 3.2, **look},
    )  # fmt: skip


def _looks_by_bits(result: EqualBytes) -> dict[int, dict[str, Any]]:
    """Return number of bits -> plot options (colour, marker), most bits first."""
    bits = sorted({row.config.bits for row in result.rows}, reverse=True)
    colours = style.ordered_colours(len(bits))
    return {
        count: {"color": colour, "marker": marker}
        for count, colour, marker in zip(bits, colours, "os^Dvp"[: len(bits)], strict=True)
    }


def _equal_bytes_legend(result: EqualBytes) -> list[Line2D]:
    """Return the legend entries for numbers of bits, everything kept, and the full cache, if drawn."""
    marks = [
        Line2D([], [], markersize=3.2, markerfacecolor="none", label=_bits_label(count), **look)
        for count, look in _looks_by_bits(result).items()
    ]
    if result.everything:
        marks.append(Line2D([], [], linestyle="", marker="*", markersize=6, markerfacecolor="none", color="0.3",
                            label="everything kept"))  # fmt: skip
    if result.full_score is not None:
        marks.append(Line2D([], [], color="0.35", linestyle="--", linewidth=0.9, label="full cache"))
    return marks


def _bits_label(bits: int) -> str:
    """Return the legend's label for a number of bits: '4 bits', '16 bits: evicting alone'."""
    return f"{bits} bits" + (": evicting alone" if bits == FULL_BITS else "")
