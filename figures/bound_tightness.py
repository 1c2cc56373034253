"""How tight the bounds are: ratios per budget, tightness against retained mass, rank agreement; heat maps per head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from perturbkv.analyses.bound_tightness import MASS_EDGES, OVER_SAMPLES, RATIOS, BoundTightness, Tightness
from perturbkv.analyses.intervals import LEAST
from perturbkv.analyses.naming import budgets
from perturbkv.analyses.rank_agreement import BOUNDS, CONTENDERS, RankAgreement, RankCorrelation
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.figures import heatmaps, style

_ROW_MM = 72
_MEDIAN = OVER_SAMPLES.index(0.5)
_LEAST_IN_BIN = 10
"""A bin with fewer values says nothing of a distribution."""
_WIDE = 5


def draw(result: BoundTightness, agreements: Sequence[RankAgreement], width_mm: float = style.WIDE_MM) -> Figure:
    """Three panels, by budget; `result` holds the configurations of one selection."""
    with style.use():
        narrow = width_mm < style.WIDE_MM
        figure = style.figure(width_mm, _ROW_MM * (3 if narrow else 1))
        axes = figure.subplots(3, 1) if narrow else figure.subplots(1, 3)
        _ratios(axes[0], result.configs)
        _against_mass(axes[1], result.configs)
        _agreement(axes[2], agreements)
        style.foot(figure, result.identity, f"{_held(result)} · {_bars(result.identity.samples)}")
    return figure


def _bars(samples: int) -> str:
    """What each panel's bars are: the first two are spreads over samples and heads, the last one intervals."""
    spreads = "first panel: median, quartiles (thick), 5–95 % (thin) over samples and heads · second: median, quartiles"
    return f"{spreads} · third: {style.about(samples)}"


def draw_heads(result: BoundTightness, width_mm: float = style.WIDE_MM) -> Figure:
    """L/θ, median over samples, layer × head, a panel per budget; heads flagged in most samples carry a dot."""
    with style.use():
        wide = 2 if width_mm < style.WIDE_MM else _WIDE
        maps = [_map(name, config) for name, config in zip(_names(result.configs), result.configs, strict=True)]
        largest = max(float(shown.values[~np.isnan(shown.values)].max(initial=0)) for shown in maps)
        figure = heatmaps.draw(
            [maps[start : start + wide] for start in range(0, len(maps), wide)],
            width_mm,
            (0.0, largest or 1.0),
            "Tightness of Theorem 2 by head",
            "L/θ, median over samples\ndot: σ ≤ 0.5 in most",
        )
        style.foot(figure, result.identity, f"{_held(result)} · n = {result.identity.samples} samples")
    return figure


def _held(result: BoundTightness) -> str:
    """What the caches hold, by budget."""
    shares = (f"{shown.config.budget}: {style.number(shown.held)}" for shown in result.configs)
    return f"held / full of b={', '.join(shares)}"


def _map(name: str, config: Tightness) -> heatmaps.Map:
    spread = config.spreads[RATIOS[0]]
    median = f"median {style.number(float(spread.evidence[2]))}"
    return heatmaps.Map(f"b={name}\n{median}", spread.by_head[_MEDIAN], config.flagged_heads > 0.5)


def _names(configs: Sequence[Tightness]) -> list[str]:
    return _lines([shown.config for shown in configs])


def _lines(configs: Sequence[EvictionConfig], *without: str) -> list[str]:
    """Names of budgets, each part on a line of its own: ticks stand close together."""
    return ["\n".join(parts) for parts in budgets(configs, *without)]


def _budget_axis(configs: Sequence[EvictionConfig]) -> str:
    """The budgets' unit: fractions are shares of the prompt, whole numbers are entries."""
    units = dict.fromkeys(config.budget.unit for config in configs)
    return f"budget b ({' or '.join(units)})" if units else "budget b"


def _ratios(axes: Axes, configs: Sequence[Tightness]) -> None:
    """Median, half and nine tenths of each ratio; grey beside it where σ ≤ 0.5."""
    colours = style.category_colours(len(RATIOS))
    for place, config in enumerate(configs):
        for number, (name, colour) in enumerate(zip(RATIOS, colours, strict=True)):
            x = place + (number - (len(RATIOS) - 1) / 2) * 0.2
            spread = config.spreads[name]
            _bar(axes, x + 0.035, spread.flagged, "0.72", f"flagged {name}")
            _bar(axes, x - 0.035, spread.evidence, colour, name)
    axes.axhline(1, color="0.55", linewidth=0.8, zorder=1)
    axes.set_xticks(range(len(configs)), _names(configs))
    axes.set(xlabel=_budget_axis([shown.config for shown in configs]), ylabel="ratio of bounds (1 = tight)")
    style.log_axes(axes, y=True)
    axes.set_title("Ratios over samples and heads", loc="left")
    if len(axes.get_lines()) == 1:
        style.note(axes, "no ratio: nothing went, or the bounds are 0")
    handles = [
        Line2D([], [], color=colour, marker="o", markersize=3, label=name)
        for name, colour in zip(RATIOS, colours, strict=True)
    ]
    handles.append(Line2D([], [], color="0.72", marker="o", markersize=3, label="σ ≤ 0.5: no evidence"))
    style.legend_below(axes, handles, 2)


def _bar(axes: Axes, x: float, quantiles: np.ndarray, colour: object, gid: str) -> None:
    """5–95 % thin, 25–75 % thick, the median a dot; nothing where there is no positive value."""
    shown = np.where(quantiles > 0, quantiles, np.nan)
    if np.isnan(shown[2]):
        return
    low, first, middle, third, high = np.where(np.isnan(shown), shown[2], shown)
    axes.plot([x, x], [low, high], color=colour, linewidth=0.7)
    axes.plot([x, x], [first, third], color=colour, linewidth=2.2, solid_capstyle="butt")
    axes.plot([x], [middle], color=colour, marker="o", markersize=3.2, gid=gid)


def _against_mass(axes: Axes, configs: Sequence[Tightness]) -> None:
    centres = (MASS_EDGES[:-1] + MASS_EDGES[1:]) / 2
    colours = style.ordered_colours(len(configs))
    for name, config, colour in zip(_names(configs), configs, colours, strict=True):
        held = config.mass.count >= _LEAST_IN_BIN
        low, median, high = (np.where(held, config.mass.quantiles[level], np.nan) for level in (1, 2, 3))
        axes.fill_between(centres, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(centres, median, color=colour, marker="o", markersize=2.2, gid=f"mass {config.config.label()}",
                  label=name)  # fmt: skip
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="retained mass S (attention)", ylabel="L/θ, median and quartiles")
    axes.set_title("Tightness against what is kept", loc="left")
    if not any((config.mass.count >= _LEAST_IN_BIN).any() for config in configs):
        style.note(axes, f"no bin of S holds {_LEAST_IN_BIN} values")
    handles, _ = axes.get_legend_handles_labels()
    style.legend_below(axes, handles, 3)


def _agreement(axes: Axes, agreements: Sequence[RankAgreement]) -> None:
    """Spearman's ρ of each bound with L where σ > 0.5: the contenders filled, all selections hollow.

    No point where fewer than five samples have such heads.
    """
    ranked = [agreement for agreement in agreements if agreement.correlations]
    firsts = [agreement.configs[0] for agreement in ranked]
    for place, agreement in enumerate(ranked):
        for correlation in agreement.correlations:
            if correlation.evidence_samples >= LEAST:
                _correlation(axes, place, correlation)
    axes.axhline(0, color="0.55", linewidth=0.8, zorder=1)
    axes.set_xticks(range(len(ranked)), _lines(firsts, "selection"))
    axes.set(xlabel=_budget_axis(firsts), ylabel="Spearman's ρ with L")
    bottom = min(axes.get_ylim()[0], -0.05)
    axes.set_ylim(bottom - 0.2 * (1.02 - bottom), 1.02)  # room for n
    axes.set_title("Order of selections, σ > 0.5", loc="left")
    if not ranked:
        style.note(axes, "needs three or more selections per budget")
    elif not axes.containers:
        style.note(axes, f"fewer than {LEAST} samples have a head\nwith σ > 0.5 in every selection")
    for place, agreement in enumerate(ranked):
        axes.text(place, 0.02 if axes.containers else 0.2, _told(agreement), transform=axes.get_xaxis_transform(),
                  ha="center", va="bottom", fontsize=5, color="0.35")  # fmt: skip
    handles = [_dot(colour, colour, name) for name, colour in _colours().items()]
    style.legend_below(axes, [*handles, _dot("0.3", "white", "controls included")], 2)


def _told(agreement: RankAgreement) -> str:
    """How many heads of all samples the first bound's ρ is of, and in how many samples: θ's, of the contenders."""
    one = agreement.correlations[0]
    return f"n={one.evidence_values:,}\nin {one.evidence_samples}"


def _correlation(axes: Axes, place: int, correlation: RankCorrelation) -> None:
    filled = set(correlation.selections) <= set(CONTENDERS)
    colour = _colours()[correlation.bound]
    axes.errorbar(
        [place + (BOUNDS.index(correlation.bound) - 1) * 0.2],
        [correlation.evidence_mean],
        yerr=style.bars(correlation.evidence_mean, correlation.evidence_interval),
        color=colour,
        marker="o",
        markersize=3.6,
        markerfacecolor=colour if filled else "white",
        linewidth=0.8,
        gid=f"{'contenders' if filled else 'all'} {correlation.bound}",
    )


def _colours() -> dict[str, Any]:
    return dict(zip(BOUNDS, style.category_colours(len(BOUNDS)), strict=True))


def _dot(edge: Any, face: Any, label: str) -> Line2D:
    return Line2D([], [], linestyle="", marker="o", markersize=3.6, color=edge, markerfacecolor=face, label=label)
