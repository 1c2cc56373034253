"""Figures of drift: layer by layer (paper, figures 3a and 5), after the last layer (3b and 6), and over budgets (3c).

The figure over budgets has KL and top-1 agreement, too, against the kept share of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.layers.budget_curves import BudgetCurve, BudgetCurves
from perturbkv.analyses.layers.drift import LastLayer, LayerDrift
from perturbkv.analyses.layers.layers import DriftSeries, SampleSeries
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.display import plural
from perturbkv.figures import style
from perturbkv.figures.labels import cache_shares_text, draw_legend, sort_by_cache_share
from perturbkv.figures.panels import label_outer, panel_grid

_ROW_MM, _SMALL_MM, _AROUND_MM = 74, 38, 22
_MOST_IN_A_PANEL = 2
"""Most budgets in one panel; of more, which would hide each other, each has a column of its own."""
_COLUMNS, _NARROW_COLUMNS = 6, 3
"""Budgets side by side, in two columns of a journal and in one."""


def draw_layers(result: DriftSeries, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw drift by layer and the treatment's in per cent of the baseline's; many budgets have a column each."""
    ordered = sort_by_cache_share(result.members, lambda one: sum(one.cache_shares))
    narrow = width_mm < style.WIDE_MM
    figure = (
        _draw_shared_panels(ordered, width_mm)
        if len(ordered) <= _MOST_IN_A_PANEL
        else _draw_budget_columns(ordered, width_mm, narrow)
    )
    tied = "within 2 noise floors, or the same entries kept"
    if not ordered[0].noise_floor_known:
        tied = "equal (no floor in this trace)"
    shares = ", ".join(f"b={one.baseline.budget}: {cache_shares_text(one.cache_shares)}" for one in ordered)
    interval_text = style.interval_note(result.identity.samples, medians=True)
    drifts = f"drift: medians; percent: of the means over samples · {interval_text}"
    note = f"{drifts} · ×: tied, {tied} · cache share of {shares}"
    return style.describe_run(figure, result.identity, note)


def _draw_shared_panels(results: Sequence[LayerDrift], width_mm: float) -> Figure:
    """Draw one or two budgets in one pair of panels, a colour each."""
    figure, (absolute, relative) = panel_grid(2, 1 if width_mm < style.WIDE_MM else 2, width_mm, _ROW_MM, 0)
    colours = style.ordered_colours(len(results))
    for result, colour in zip(results, colours, strict=True):
        _draw_drift(absolute, result, colour)
        _draw_percent(relative, result, colour)
    for axes in (absolute, relative):
        _finish_drift_panel(axes, percent=axes is relative)
        axes.set_xlabel("decoder layer")
    absolute.set(ylabel=_drift_label(results[0]), title="")
    relative.set_ylabel(_percent_label(results[0]))
    absolute.set_title("Drift after each layer, median of samples", loc="left")
    relative.set_title("Ratio of the means: below 100 % is better", loc="left")
    _note_zeros(absolute, results)
    budgets = [
        Line2D([], [], color=colour, label=f"b={result.baseline.budget}")
        for result, colour in zip(results, colours, strict=True)
    ]
    draw_legend(figure, [*_side_entries(results[0]), *budgets])
    return figure


def _draw_budget_columns(results: Sequence[LayerDrift], width_mm: float, narrow: bool) -> Figure:
    """Draw a column per budget, drift above and per cent below, each kind on one scale."""
    columns = min(_NARROW_COLUMNS if narrow else _COLUMNS, len(results))
    chunks = -(-len(results) // columns)
    figure = style.figure(width_mm, 2 * chunks * _SMALL_MM + _AROUND_MM)
    axes = figure.subplots(2 * chunks, columns, squeeze=False, sharex=True)
    colour = style.category_colours(1)[0]
    for index, result in enumerate(results):
        row, column = 2 * (index // columns), index % columns
        pair = (axes[row, column], axes[row + 1, column])
        _draw_drift(pair[0], result, colour)
        _draw_percent(pair[1], result, colour)
        pair[0].set_title(f"b={result.baseline.budget}", loc="left")
        pair[1].set_xlabel("layer" if index + columns >= len(results) else "")
        for panel, label in zip(
            pair, (_drift_label(result, short=True), _percent_label(result, short=True)), strict=True
        ):
            panel.set_ylabel(label if column == 0 else "")
            panel.tick_params(labelleft=column == 0, labelbottom=panel is pair[1] and index + columns >= len(results))
    for index in range(len(results), chunks * columns):
        for row in (0, 1):
            axes[2 * (index // columns) + row, index % columns].set_axis_off()
    _share_scales(axes, len(results))
    _note_zeros(axes[0, 0], results)
    draw_legend(figure, _side_entries(results[0], colour))
    return figure


def _share_scales(axes: np.ndarray, count: int) -> None:
    """Give all drift panels a common y range, and all per-cent panels another; `count`: used panels per kind."""
    for first in (0, 1):
        panels = list(axes[first::2].flat)[:count]
        for panel in panels:
            _finish_drift_panel(panel, percent=first == 1)
        ends = [panel.get_ylim() for panel in panels]
        for panel in panels:
            panel.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))


def _side_entries(result: LayerDrift, colour: Any = "0.3") -> list[Line2D]:
    """Return the legend entries of the baseline (dashed) and the treatment (solid)."""
    first, second = result.sides
    return [Line2D([], [], color=colour, linestyle="--", label=first), Line2D([], [], color=colour, label=second)]


def _drift_label(result: LayerDrift, short: bool = False) -> str:
    """Return the y label of drift with its distance."""
    return f"{'drift' if short else 'drift of the residual stream'} ({DISTANCES[result.distance]})"


def _percent_label(result: LayerDrift, short: bool = False) -> str:
    """Return the y label of the treatment's drift in per cent of the baseline's."""
    first, _ = result.sides
    return f"% of {first}'s, log" if short else f"% of {first}'s drift (log axis)"


def _draw_drift(axes: Axes, result: LayerDrift, colour: object) -> None:
    """Draw both sides' median drift by layer, with bands."""
    layers = np.arange(len(result.ratio))
    both = (
        ("baseline", "--", result.baseline_median_drift, result.baseline_median_drift_interval),
        ("treatment", "-", result.treatment_median_drift, result.treatment_median_drift_interval),
    )
    for side, line, median, interval in both:
        axes.plot(layers, style.mask_nonpositive(median), line, color=colour, marker="o" if len(layers) == 1 else None,
                  markersize=3, gid=f"{side} {result.baseline.label()}")  # fmt: skip
        if interval is not None:
            axes.fill_between(
                layers,
                style.mask_nonpositive(interval.low),
                style.mask_nonpositive(interval.high),
                color=colour,
                alpha=0.1,
                linewidth=0,
            )
    axes.set_xlim(-0.5, len(layers) - 0.5)  # with a usual margin, ticks stand beyond the last of many layers


def _draw_percent(axes: Axes, result: LayerDrift, colour: object) -> None:
    """Draw the ratio by layer on a logarithmic axis, where halving and doubling are equally far from 100 %."""
    layers, percent = np.arange(len(result.ratio)), 100 * style.mask_nonpositive(result.ratio)
    axes.plot(layers, percent, color=colour, marker="o" if len(layers) == 1 else None, markersize=3,
              gid=f"percent {result.baseline.label()}")  # fmt: skip
    ends = result.ratio_interval
    if ends is not None:
        low, high = (100 * style.mask_nonpositive(end) for end in (ends.low, ends.high))
        axes.fill_between(layers, low, high, color=colour, alpha=0.13, linewidth=0)
    tied = result.verdict == 0
    axes.plot(layers[tied], percent[tied], linestyle="", marker="x", markersize=3, color="0.5", gid="ties")
    axes.set_xlim(-0.5, len(layers) - 0.5)


def _finish_drift_panel(axes: Axes, percent: bool) -> None:
    """Make the y axis logarithmic where it has positive values; draw the line of equality where `percent`."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    style.set_log_axes(axes, y=True)
    if percent:
        axes.axhline(100, color="0.55", linewidth=0.8, zorder=1)


def _note_zeros(axes: Axes, results: Sequence[LayerDrift]) -> None:
    """Write in the panel how many drifts are 0, which a log axis cannot show."""
    hidden = sum(
        int((side == 0).sum())
        for result in results
        for side in (result.baseline_median_drift, result.treatment_median_drift)
    )
    if hidden:
        style.draw_note(axes, f"{plural(hidden, 'drift')} of 0 not drawn")


_WIDE, _NARROW, _LAST_LAYER_ROW_MM, _LAST_LAYER_AROUND_MM = 3, 2, 50, 14
_BETTER, _WORSE, _TIED = "#0173b2", "#de8f05", "0.5"


def draw_last_layer(result: SampleSeries, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw a panel per budget on one scale, each sample a line from the baseline's to the treatment's drift.

    The first side is hollow, the second filled; a tie is a grey cross.
    """
    ordered = sort_by_cache_share(result.members, lambda one: sum(one.cache_shares))
    narrow = width_mm < style.WIDE_MM
    figure, panels = panel_grid(len(ordered), _NARROW if narrow else _WIDE, width_mm, _LAST_LAYER_ROW_MM,
                                _LAST_LAYER_AROUND_MM, sharey=True)  # fmt: skip
    for panel, one in zip(panels, ordered, strict=True):
        _draw_samples(panel, one, 6.5 if narrow else 7.5)
    baseline, _ = ordered[0].sides
    distance = DISTANCES[ordered[0].distance]
    label_outer(panels, f"sample, by {baseline}", f"last layer's drift ({distance})")
    hollow, filled = ordered[0].sides
    entries = [
        Line2D([], [], linestyle="", marker="o", markersize=3.5, markerfacecolor="white", color="0.3", label=hollow),
        Line2D([], [], linestyle="", marker="o", markersize=3.5, color="0.3", label=filled),
        Line2D([], [], color=_BETTER, label=f"{filled} drifts less"),
        Line2D([], [], color=_WORSE, label="more"),
    ]
    if any((result.verdict == 0).any() for result in ordered):
        entries.append(Line2D([], [], linestyle="", marker="x", markersize=3.5, color=_TIED, label="tied"))
    draw_legend(figure, entries, 5)
    return style.describe_run(figure, result.identity, _foot_text(ordered[0]))


def _foot_text(result: LastLayer) -> str:
    """Return the foot's text on brackets and ties."""
    first, _ = result.sides
    return (
        f"better: exact 95 % intervals of the share of n = {result.identity.samples} samples · mean ×: drift over "
        f"{first}'s, {style.interval_note(result.identity.samples)}"
    )


def _draw_samples(axes: Axes, result: LastLayer, font: float) -> None:
    """Draw the samples of one budget, titled with the share that improves and the ratio of means."""
    positions, tied = np.arange(1, len(result.sample_ids) + 1), result.verdict == 0
    colours: Any = np.array([{1: _BETTER, 0: _TIED, -1: _WORSE}[int(verdict)] for verdict in result.verdict])
    first, second = style.mask_nonpositive(result.baseline_drift), style.mask_nonpositive(result.treatment_drift)
    axes.vlines(positions, np.fmin(first, second), np.fmax(first, second), colors=colours, linewidth=1.2)
    size = 11 if len(positions) <= 60 else 4
    axes.scatter(positions[~tied], first[~tied], s=size, facecolors="white", edgecolors=colours[~tied], linewidths=0.8,
                 zorder=3, gid="baseline")  # fmt: skip
    axes.scatter(positions[~tied], second[~tied], s=size, c=colours[~tied], linewidths=0, zorder=4, gid="treatment")
    axes.scatter(positions[tied], second[tied], s=size, c=_TIED, marker="x", linewidths=0.8, zorder=4, gid="ties")
    style.set_log_axes(axes, y=True)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    share = text.percent(result.improved_share, result.improved_share_interval)
    ratio = text.decimal(result.mean_ratio, result.mean_ratio_interval)
    budget = f"b={result.baseline.budget}, cache share {cache_shares_text(result.cache_shares)}"
    axes.set_title(f"{budget}\n{share} better\nmean × {ratio}", loc="left", fontsize=style.points(font))
    hidden = int(np.isnan(np.stack([first, second])).sum())
    if hidden:
        style.draw_note(axes, f"{plural(hidden, 'drift')} of 0 not drawn")


_BUDGETS_ROW_MM = 66


def draw_budget_curves(result: BudgetCurves, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw drift, KL and top-1 agreement over cache shares, a panel each and a line per selection."""
    figure, axes = panel_grid(3, 1 if width_mm < style.WIDE_MM else 3, width_mm, _BUDGETS_ROW_MM, 0)
    _draw_quantity(axes[0], result, "drift", f"last layer's drift ({DISTANCES[result.distance]})", "Drift", log=True)
    _draw_quantity(axes[1], result, "kl", "KL(full ‖ evicted) (nat)", "Next token's distribution", log=True)
    _draw_quantity(axes[2], result, "top1", result.agreement_unit, "Same next token", log=False)
    axes[2].set_ylim(-0.03, 1.03)
    style.draw_note(axes[1], f"everything kept: {result.kl_floor:.0e} nat", at="lower left")
    handles = [line for line in axes[0].get_lines() if line.get_gid()]  # by label "_my.py:Score" would be lost
    draw_legend(figure, handles)
    interval_text = style.interval_note(result.identity.samples, medians=True)
    return style.describe_run(
        figure, result.identity, f"drift and KL: medians over samples · {interval_text}{_cache_shares_text(result)}"
    )


def _draw_quantity(axes: Axes, result: BudgetCurves, quantity: str, label: str, title: str, *, log: bool) -> None:
    """Draw the medians of one quantity ("drift", "kl" or "top1") over cache shares, a line per selection.

    With `log` the y axis is logarithmic, and a note says how many values of 0 it cannot show.
    """
    hidden = 0
    colours = style.category_colours(len(result))
    for curve, colour, marker in zip(result, colours, cycle("os^Dv"), strict=False):
        medians, interval = getattr(curve.medians, quantity), getattr(curve.intervals, quantity)
        shown = style.mask_nonpositive(medians) if log else medians
        hidden += int((shown != medians).sum())
        percent = 100 * _x_shares(result, curve)
        axes.plot(percent, shown, color=colour, marker=marker, markersize=3, markerfacecolor="none", label=curve.name,
                  gid=f"{quantity} {curve.name}")  # fmt: skip
        if interval is not None:
            low, high = (style.mask_nonpositive(end) if log else end for end in (interval.low, interval.high))
            axes.fill_between(percent, low, high, color=colour, alpha=0.13, linewidth=0)
    style.set_log_axes(axes, x=True, y=log)
    _set_share_axis(axes, result)
    axes.set_ylabel(label)
    axes.set_title(title, loc="left")
    if hidden:
        style.draw_note(axes, f"{plural(hidden, 'value')} of 0 not drawn")


def _set_share_axis(axes: Axes, result: BudgetCurves) -> None:
    """Give the x axis the label, the ticks and the limits of the curves' shares."""
    shares = np.concatenate([100 * _x_shares(result, curve) for curve in result])
    least, most = float(shares.min()), float(shares.max())
    every = [step * 10.0**power for power in range(-3, 4) for step in (1, 2.5, 5)]
    inside = [tick for tick in every if least / 1.25 <= tick <= most * 1.25]
    fine = [step * 10.0**power for power in range(-3, 4) for step in range(1, 10)]
    marks = inside if len(inside) >= 2 else [tick for tick in fine if least / 1.6 <= tick <= most * 1.6]
    axes.set_xlabel(f"{'cache share' if _cache_shares_known(result) else 'kept share of a head'} (%)")
    axes.xaxis.set_major_locator(FixedLocator(marks))
    axes.set_xlim(min(least, *marks) / 1.15, max(most, *marks) * 1.15)


def _cache_shares_text(result: BudgetCurves) -> str:
    """Return the foot's text with the cache share per budget; empty where the curves' shares differ."""
    shares = {tuple(zip(curve.budgets, map(text.cache_share, _x_shares(result, curve)), strict=True))
             for curve in result}  # fmt: skip
    if len(shares) > 1:
        return ""
    return " · cache share of " + ", ".join(f"b={budget}: {share}" for budget, share in shares.pop())


def _cache_shares_known(result: BudgetCurves) -> bool:
    """Return whether all curves have cache shares; else kept shares are drawn."""
    return not any(np.isnan(curve.cache_shares).any() for curve in result)


def _x_shares(result: BudgetCurves, curve: BudgetCurve) -> NDArray[Any]:
    """Return a curve's x values (budget,): cache shares or, where unknown, kept shares."""
    return curve.cache_shares if _cache_shares_known(result) else curve.kept
