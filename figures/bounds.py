"""Figures of the bounds: ratios per budget, tightness against retained mass, order of selections, maps per head.

The maps of σ are layer × head, three readings, a row each, per budget and α (paper, figure 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses import text
from perturbkv.analyses.bounds.assumption import READINGS, Assumption, ConfigAssumption
from perturbkv.analyses.bounds.bound_tightness import BoundTightness
from perturbkv.analyses.bounds.rank_agreement import BOUNDS, Concordance, RankAgreement
from perturbkv.analyses.bounds.ratios import LEVELS, MASS_EDGES, OVER_SAMPLES, RATIOS, Tightness
from perturbkv.analyses.names import budget_names, fold
from perturbkv.analyses.stats.intervals import MIN_SAMPLES
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.figures import panels, style
from perturbkv.figures.labels import sort_by_cache_share
from perturbkv.figures.panels import panel_grid
from perturbkv.figures.style import symbols_to_tex

_ROW_MM, _NARROW_MM = 76, 52
_MEDIAN_OF_HEAD = OVER_SAMPLES.index(0.5)
_LOW, _MEDIAN, _HIGH = (LEVELS.index(level) for level in (0.25, 0.5, 0.75))
"""Indices of the quartiles along the `level` axis of quantiles."""
_LEAST_IN_BIN = 10
"""A bin with fewer values is not drawn."""
_BANDS = 2
"""Most curves that have bands; of more, the bands would hide each other."""
_WIDE, _LETTERS = 5, 16
"""Maps per row, and letters per line above one."""


def draw_bound_tightness(result: BoundTightness, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw by budget: ratios of bounds, tightness over retained mass, and how often a bound picks the better of two."""
    narrow = width_mm < style.WIDE_MM
    configs = sort_by_cache_share(result.shown, lambda config: config.cache_share)
    shares = {shown.config: shown.cache_share for shown in configs}
    ranked = sort_by_cache_share(
        [one for one in result.agreements if one.shown],
        lambda agreement: max((shares.get(each, -1.0) for each in agreement.configs), default=-1.0),
    )
    own, settings, key = _axis_names(configs, ranked)
    figure, axes = panel_grid(3, 1 if narrow else 3, width_mm, _NARROW_MM if narrow else _ROW_MM, 0)
    columns = 3 if narrow else 2
    style.draw_legend_below(axes[0], _draw_ratios(axes[0], configs, own), columns)
    style.draw_legend_below(axes[1], _draw_by_mass(axes[1], configs, own), 3)
    style.draw_legend_below(axes[2], _draw_agreement(axes[2], ranked, settings), columns)
    for panel in (axes[0], axes[2]) if key else ():
        panel.set_xlabel("configuration, named below")
    band = ", quartiles" if len(configs) <= _BANDS else ""
    spreads = f"first panel: median, quartiles (bars) over samples and heads · second: median{band}"
    third = f"third: {style.interval_note(result.identity.samples)}; below: heads that count, in how many samples"
    note = f"{_cache_shares_text(configs)} · {spreads} · {third}"
    return style.describe_run(figure, result.identity, note, key=key)


def _axis_names(
    configs: Sequence[Tightness], ranked: Sequence[RankAgreement]
) -> tuple[list[str], list[str], list[str]]:
    """Return the first panel's tick names, the last panel's, and a key where both are numbers, as names do not fit.

    A setting under the last panel has the number of the first of its configurations that the first panel shows, or else
    a number of its own.
    """
    shown = [config.config for config in configs]
    settings = budget_names([agreement.most_specific_config for agreement in ranked], "selection")
    own = budget_names(shown)
    if _names_fit(own) and _names_fit(settings):
        return ["\n".join(parts) for parts in own], ["\n".join(parts) for parts in settings], []
    key, ticks = [" ".join(parts) for parts in own], []
    for agreement, parts in zip(ranked, settings, strict=True):
        number = next((shown.index(one) + 1 for one in agreement.configs if one in shown), len(key) + 1)
        if number > len(key):
            key.append(" ".join(parts))
        ticks.append(str(number))
    return [str(number) for number in range(1, len(own) + 1)], ticks, key


_ROOM, _NAME_LINES = 34, 2
"""Letters per line and lines that fit under a panel of a third of a page; longer names are replaced by numbers."""
_GAP = 1.5
"""Letters of the gap between two names."""


def _names_fit(names: Sequence[Sequence[str]]) -> bool:
    """Return whether tick names, each a list of lines, fit under a panel."""
    widths = [max(map(len, parts), default=0) + _GAP for parts in names]
    return sum(widths) <= _ROOM and max(map(len, names), default=0) <= _NAME_LINES


def draw_heads(result: BoundTightness, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw maps of L/θ by head, the median over samples, a panel per budget; a dot where most samples are flagged."""
    wide = 2 if width_mm < style.WIDE_MM else _WIDE
    configs = sort_by_cache_share(result.shown, lambda config: config.cache_share)
    maps = []
    for parts, config in zip(budget_names([shown.config for shown in configs]), configs, strict=True):
        spread, name = config.spreads["L/θ"], "\n".join(fold(part, _LETTERS) for part in parts)
        title = f"b={name}\nmedian {text.decimal(float(spread.evidence[_MEDIAN]))}"
        maps.append(panels.Map(title, spread.by_head[_MEDIAN_OF_HEAD], config.flagged_heads > 0.5))
    largest = max(float(shown.values[~np.isnan(shown.values)].max(initial=0)) for shown in maps)
    figure = panels.draw_maps(
        [maps[start : start + wide] for start in range(0, len(maps), wide)],
        width_mm,
        panels.Scale(0.0, largest or 1.0, "L/θ, median over samples\ndot: σ ≤ 0.5 in most", style.layer_colours()),
        "Tightness of Theorem 2 by head",
        result.identity.layer,
    )
    return style.describe_run(
        figure, result.identity, f"{_cache_shares_text(configs)} · n = {result.identity.samples} samples"
    )


def _cache_shares_text(configs: Sequence[Tightness]) -> str:
    """Return the foot's text with the cache share per budget."""
    shares = dict.fromkeys(f"{shown.config.budget}: {text.cache_share(shown.cache_share)}" for shown in configs)
    return f"cache share of b={', '.join(shares)}"


def _set_budget_label(axes: Axes, configs: Sequence[EvictionConfig]) -> None:
    """Set the x label of budgets with their units."""
    units = dict.fromkeys(config.budget.unit for config in configs)
    axes.set_xlabel(f"budget b ({' or '.join(units)})" if units else "budget b")


def _draw_ratios(axes: Axes, configs: Sequence[Tightness], names: Sequence[str]) -> list[Line2D]:
    """Draw median and quartiles of each ratio by configuration; hollow medians where σ ≤ 0.5. Return the legend."""
    colours = style.category_colours(len(RATIOS))
    for index, config in enumerate(configs):
        for number, (name, colour) in enumerate(zip(RATIOS, colours, strict=True)):
            x = index + (number - (len(RATIOS) - 1) / 2) * 0.2  # side by side around the configuration's tick
            spread = config.spreads[name]
            _draw_quartiles(axes, x, spread.evidence, colour, name)
            flagged = style.mask_nonpositive(spread.flagged)[_MEDIAN]
            if np.isfinite(flagged):
                axes.plot([x + 0.08], [flagged], color="0.6", marker="o", markersize=2.4, markerfacecolor="white",
                          markeredgewidth=0.7, gid=f"flagged {name}")  # fmt: skip
    axes.axhline(1, color="0.55", linewidth=0.8, zorder=1)
    axes.set_xticks(range(len(configs)), names)
    _set_budget_label(axes, [shown.config for shown in configs])
    axes.set_ylabel("ratio (1 = tight)")
    style.set_log_axes(axes, y=True)
    axes.set_title("Ratios over samples and heads", loc="left")
    if len(axes.get_lines()) == 1:
        style.draw_note(axes, "no ratio: nothing went, or the bounds are 0")
    handles = [
        Line2D([], [], color=colour, marker="o", markersize=3, label=symbols_to_tex(name))
        for name, colour in zip(RATIOS, colours, strict=True)
    ]
    return [*handles, _dot_entry("0.6", "white", "σ ≤ 0.5: no evidence")]


def _draw_quartiles(axes: Axes, x: float, quantiles: np.ndarray, colour: object, gid: str) -> None:
    """Draw the quartiles as a bar and the median as a dot; nothing where the median is NaN or not positive.

    `quantiles` (level,); the bar ends at the median where a quartile is not positive.
    """
    shown = style.mask_nonpositive(quantiles)
    median = shown[_MEDIAN]
    if np.isnan(median):
        return
    low, high = (median if np.isnan(shown[level]) else shown[level] for level in (_LOW, _HIGH))
    axes.plot([x, x], [low, high], color=colour, linewidth=1.6, solid_capstyle="butt")
    axes.plot([x], [median], color=colour, marker="o", markersize=3.2, gid=gid)


def _draw_by_mass(axes: Axes, configs: Sequence[Tightness], names: Sequence[str]) -> list[Artist]:
    """Draw L/θ by retained mass, a curve per budget, with bands where they are few. Return the legend."""
    centres = (MASS_EDGES[:-1] + MASS_EDGES[1:]) / 2
    colours, top = style.ordered_colours(len(configs)), 0.0
    for name, config, colour in zip(names, configs, colours, strict=True):
        filled = config.mass.count >= _LEAST_IN_BIN
        low, median, high = (np.where(filled, config.mass.quantiles[level], np.nan) for level in (_LOW, _MEDIAN, _HIGH))
        if len(configs) <= _BANDS:
            axes.fill_between(centres, low, high, color=colour, alpha=0.15, linewidth=0)
        top = max(top, float(np.nanmax(high, initial=0)))
        axes.plot(centres, median, color=colour, marker="o", markersize=2.2, gid=f"mass {config.config.label()}",
                  label=name)  # fmt: skip
    axes.set(xlim=(0, 1), ylim=(0, min(1, 1.1 * top) or 1), xlabel="retained mass S (attention)")
    axes.set_ylabel("L/θ, median" + (" and quartiles" if len(configs) <= _BANDS else ""))
    axes.set_title("Tightness against what is kept", loc="left")
    if not any((config.mass.count >= _LEAST_IN_BIN).any() for config in configs):
        style.draw_note(axes, f"no bin of S holds {_LEAST_IN_BIN} values")
    return list(axes.get_legend_handles_labels()[0])


def _draw_agreement(axes: Axes, compared: Sequence[RankAgreement], names: Sequence[str]) -> list[Line2D]:
    """Draw the share of heads in which the lower bound has the lower L: at one stage 1 filled, of others hollow.

    No point where fewer than five samples have heads that count. Return the legend.
    """
    for index, agreement in enumerate(compared):
        for pair in agreement.shown:
            if pair.samples >= MIN_SAMPLES:
                _draw_concordance(axes, index, pair)
    axes.axhline(0.5, color="0.55", linewidth=0.8, zorder=1)
    axes.set_xticks(range(len(compared)), names)
    _set_budget_label(axes, [agreement.most_specific_config for agreement in compared])
    axes.set_ylabel("share of heads (%)")
    axes.set_xlim(-0.6, max(len(compared), 1) - 0.4)
    _set_agreement_limits(axes)
    axes.set_title("Lower bound, lower L?", loc="left")
    if not compared:
        style.draw_note(axes, "needs two-stage beside attention\nor two-stage-uniform", at="middle")
    elif not axes.containers:
        style.draw_note(axes, f"fewer than {MIN_SAMPLES} samples\nhave heads that count", at="middle")
    for index, agreement in enumerate(compared):
        last = agreement.shown[-1]  # the pair of one stage 1, where there is one
        axes.text(index, 0.02, f"{last.values:,}\nin {last.samples}", transform=axes.get_xaxis_transform(),
                  ha="center", va="bottom", fontsize=style.points(5), color="0.35", linespacing=0.95)  # fmt: skip
    handles = [_dot_entry(colour, colour, symbols_to_tex(name)) for name, colour in _bound_colours().items()]
    return [*handles, _dot_entry("0.3", "0.3", "against ν ≡ 1"), _dot_entry("0.3", "white", "against attention")]


def _set_agreement_limits(axes: Axes) -> None:
    """Let the y axis of shares begin below its points, or below 50 %, with room for counts; ticks are in per cent."""
    bottom = max(0.0, min(axes.get_ylim()[0], 0.48)) if axes.containers else 0.48
    axes.set_ylim(bottom - 0.34 * (1.02 - bottom), 1.03)
    ticks = [tick for tick in (0, 0.25, 0.5, 0.75, 1) if tick >= bottom]
    axes.set_yticks(ticks, [f"{100 * tick:.0f}" for tick in ticks])


def _draw_concordance(axes: Axes, index: int, pair: Concordance) -> None:
    """Draw one bound's share of right picks with its interval, filled where both selections have one stage 1."""
    colour = _bound_colours()[pair.bound]
    axes.errorbar(
        [index + (BOUNDS.index(pair.bound) - 1) * 0.2],
        [pair.share],
        yerr=style.error_bars(pair.share, pair.share_interval),
        color=colour,
        marker="o",
        markersize=3.6,
        markerfacecolor=colour if pair.same_stage1 else "white",
        linewidth=0.8,
        gid=f"{'one stage 1' if pair.same_stage1 else 'attention'} {pair.bound}",
    )


def _bound_colours() -> dict[str, Any]:
    """Return the colour per bound."""
    return dict(zip(BOUNDS, style.category_colours(len(BOUNDS)), strict=True))


def _dot_entry(edge: Any, face: Any, label: str) -> Line2D:
    """Return a legend entry that is a dot."""
    return Line2D([], [], linestyle="", marker="o", markersize=3.6, color=edge, markerfacecolor=face, label=label)


_ASSUMPTION_WIDE, _NAME = 5, 18
"""Maps per row, and letters per line of a configuration's name."""


def draw_assumption(result: Assumption, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw maps of σ from 0 to 1, the colours centred at 0.5; heads whose mean σ is at most 0.5 have a dot."""
    label = "σ or S (attention mass), mean over samples\norange, with a dot: ≤ 0.5"
    figure = panels.draw_maps(
        _assumption_rows(result, width_mm < style.WIDE_MM),
        width_mm,
        panels.Scale(0.0, 1.0, label, style.signed_colours()),
        "Assumption 1: share of heads with σ (or S) > 0.5, mean of samples",
        result.identity.layer,
    )
    return style.describe_run(figure, result.identity, style.interval_note(result.identity.samples))


def _assumption_rows(result: Assumption, narrow: bool) -> list[list[panels.Map]]:
    """Return rows of maps: a row per configuration if `narrow`, else a row per reading of σ.

    Configurations are sorted by cache share; a name that a row or a column shares is written once.
    """
    configs = sort_by_cache_share(result.configs, lambda config: config.cache_share)
    budgets = budget_names([shown.config for shown in configs])
    names = [_config_title(" ".join(parts), config) for parts, config in zip(budgets, configs, strict=True)]
    named = list(zip(names, configs, strict=True))
    if narrow:
        return [
            [_assumption_map(READINGS[reading] if index == 0 else "", config, reading, name) for reading in READINGS]
            for index, (name, config) in enumerate(named)
        ]
    return [
        [
            _assumption_map(name if index == 0 else "", config, reading, READINGS[reading])
            for name, config in named[start : start + _ASSUMPTION_WIDE]
        ]
        for start in range(0, len(named), _ASSUMPTION_WIDE)
        for index, reading in enumerate(READINGS)
    ]


def _config_title(name: str, config: ConfigAssumption) -> str:
    """Return the title of a configuration's map: its budget, folded, and its cache share."""
    return f"{fold(f'b={name}', _NAME)}\ncache share {text.cache_share(config.cache_share)}"


def _assumption_map(heading: str, config: ConfigAssumption, reading_name: str, row_label: str) -> panels.Map:
    """Return a configuration's map of one reading of σ, titled with the share of heads that meet the assumption."""
    reading = config.readings[reading_name]
    share = text.percent(reading.share, reading.share_interval)
    return panels.Map("\n".join(filter(None, (heading, share))), reading.mean, reading.is_weak, row_label)
