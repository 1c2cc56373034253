"""Perturbation over the decode steps, and how much it grows in each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from perturbkv.analyses import text
from perturbkv.analyses.horizon.growth import KINDS, ConfigHorizon
from perturbkv.analyses.horizon.horizon import Horizon
from perturbkv.analyses.names import SIDE, budget_names, distinct_choices, setting_name, short_names
from perturbkv.figures import panels as heatmaps
from perturbkv.figures import style
from perturbkv.figures.labels import draw_legend, sort_by_cache_share
from perturbkv.figures.style import symbols_to_tex, typeset

_PANEL_MM, _NARROW_MM, _AROUND_MM = 46, 42, 22
_STEPS_MM, _SHOWN_SHARE = 34, 0.99
"""Height of a panel of layers and steps, and the share of their values that the colour scale covers."""
_DASHES: tuple[Any, ...] = ("-", "--", ":")
"""Dashes of budgets; where there are more budgets, each has a row of panels."""
_TITLES = {"propagated": "Propagated", "isolated": "Isolated", "kl": "Next token's distribution"}
_MOST = 2.0
"""Largest growth or shrinkage on the colour scale, in powers of two."""


def draw(result: Horizon, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw the relative L1 of all heads per decode step, propagated and isolated, and KL, with bands.

    A colour per selection; a dash per budget, or, for many budgets, a row of panels each.
    """
    configs = sort_by_cache_share(result.configs, lambda config: config.cache_share)
    groups = _group_by_setting(configs)
    narrow = width_mm < style.WIDE_MM
    rows = [configs] if len(groups) <= len(_DASHES) else list(groups.values())
    stacked = narrow and len(rows) == 1
    height = _NARROW_MM * 3 if stacked else _PANEL_MM * len(rows)
    figure = style.figure(width_mm, height + _AROUND_MM)
    shape = (3, 1) if stacked else (len(rows), 3)
    axes = figure.subplots(*shape, squeeze=False, sharex=True).reshape(len(rows), 3)
    names = list(dict.fromkeys(_selection_name(config, configs) for config in configs))
    colours = dict(zip(names, style.category_colours(len(names)), strict=True))
    dashes = dict(zip(groups, _DASHES * len(groups), strict=False))
    for panels, shown in zip(axes, rows, strict=True):
        for config in shown:
            line = dashes[setting_name(config.config)] if len(rows) == 1 else "-"
            _draw_config(panels, config, colours[_selection_name(config, configs)], line)
    _finish_panels(axes, result, rows, stacked=stacked)
    handles = _legend(configs, colours, dashes if len(rows) == 1 else {})
    draw_legend(figure, handles)
    shares = dict.fromkeys(f"b={one.config.budget}: {text.cache_share(one.cache_share)}" for one in configs)
    return style.describe_run(figure, result.identity, f"{_samples_text(result)} · cache share of {', '.join(shares)}")


def _group_by_setting(configs: Sequence[ConfigHorizon]) -> dict[str, list[ConfigHorizon]]:
    """Return setting's name -> its configurations, which differ in policy and selection alone."""
    groups: dict[str, list[ConfigHorizon]] = {}
    for config in configs:
        groups.setdefault(setting_name(config.config), []).append(config)
    return groups


def _selection_name(config: ConfigHorizon, configs: Sequence[ConfigHorizon]) -> str:
    """Return policy and selection, each only if it differs among the configurations."""
    words = distinct_choices([one.config for one in configs])[list(configs).index(config)]
    return " ".join(word for choice, word in words.items() if choice in SIDE) or "evicted"


def _draw_config(panels: Any, config: ConfigHorizon, colour: Any, line: str) -> None:
    """Draw a configuration's curves over decode steps, a panel each for propagated, isolated and KL."""
    curves = {kind: (config.curves[kind].relative, config.curves[kind].relative_interval) for kind in KINDS}
    for axes, (kind, (values, band)) in zip(panels, {**curves, "kl": (config.kl, config.kl_interval)}.items(),
                                            strict=True):  # fmt: skip
        steps = np.flatnonzero(~np.isnan(values))  # isolated ones may be known at some steps alone
        axes.plot(steps, values[steps], line, color=colour, gid=kind)
        if band is not None:
            low, high = band.low[steps], band.high[steps]
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0, gid=f"{kind} band")


def _finish_panels(axes: Any, result: Horizon, rows: Sequence[Sequence[ConfigHorizon]], stacked: bool) -> None:
    """Set titles, units and integer steps, and a common y range per quantity, from 0.

    `axes` is (row, quantity); `stacked` panels are one below the other, so that the last alone names the x axis.
    """
    names = [" ".join(parts) for parts in budget_names([row[0].config for row in rows], *SIDE)]
    for row, panels in enumerate(axes):
        for panel, (kind, title) in zip(panels, _TITLES.items(), strict=True):
            panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
            panel.set_xlabel("decode step" if row == len(axes) - 1 and (not stacked or kind == "kl") else "")
            typeset([panel.set_ylabel("KL, nat" if kind == "kl" else symbols_to_tex("Σ L / Σ ‖o_h‖₁"))])
            panel.set_title(f"b={names[row]}: {title}" if len(rows) > 1 else title, loc="left")
    for column in axes.T:
        top = max(panel.get_ylim()[1] for panel in column)
        for panel in column:
            panel.set_ylim(0, top)
    style.draw_note(axes[0, 0], f"everything kept: {np.max(result.noise_floor):.1e}")


def _legend(configs: Sequence[ConfigHorizon], colours: dict[str, Any], dashes: dict[str, Any]) -> list[Line2D]:
    """Return a legend entry per selection, and per budget if there are several line styles."""
    handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    if len(dashes) < 2:
        return handles
    firsts = [group[0].config for group in _group_by_setting(configs).values()]
    names = [" ".join(parts) for parts in budget_names(firsts, *SIDE)]
    return [*handles, *(Line2D([], [], color="0.3", linestyle=dash, label=f"b={name}")
                      for name, dash in zip(names, dashes.values(), strict=True))]  # fmt: skip


def draw_heads(result: Horizon, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw maps of growth by head in powers of two, propagated; a dot where a head grows beyond chance."""
    columns = 2 if width_mm < style.WIDE_MM else 4
    configs = sort_by_cache_share(result.configs, lambda config: config.cache_share)
    names = short_names([one.config for one in configs])
    maps = [_growth_map(name or "evicted", config) for name, config in zip(names, configs, strict=True)]
    rows = [maps[start : start + columns] for start in range(0, len(maps), columns)]
    grown = np.concatenate([config.curves["propagated"].head_growth.ravel() for config in result.configs])
    ends = ((grown < 2.0**-_MOST).any(), (grown > 2.0**_MOST).any())
    extend = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[ends]
    label = "log₂ of last third of steps\nover first; dot: grows"
    figure = heatmaps.draw_maps(
        rows,
        width_mm,
        heatmaps.Scale(-_MOST, _MOST, label, style.signed_colours(), extend),
        f"Growth of the propagated perturbation, {result.configs[0].curves['propagated'].head_growth.size} heads",
        result.identity.layer,
    )
    flips = result.configs[0].curves["propagated"].sign_flips.flips
    note = f"decided by {flips:,} flips of samples' signs, Benjamini–Hochberg at 5 %"
    return style.describe_run(figure, result.identity, f"{_samples_text(result)} · {note}")


def draw_steps(result: Horizon, width_mm: float = style.WIDE_MM) -> Figure:
    """Draw the propagated relative L1 of every layer along the text, steps across, a panel per configuration.

    Ticks above a panel mark the steps before which the cache of at least half of the samples is compressed again.
    """
    configs = sort_by_cache_share(result.configs, lambda config: config.cache_share)
    names = short_names([one.config for one in configs])
    highest = max(float(np.nanquantile(one.by_layer, _SHOWN_SHARE)) for one in configs)
    figure = style.figure(width_mm, _STEPS_MM * len(configs) + _AROUND_MM)
    axes = figure.subplots(len(configs), 1, squeeze=False, sharex=True)[:, 0]
    for panel, name, config in zip(axes, names, configs, strict=True):
        heatmaps.draw_heatmap(panel, config.by_layer, 0, highest, style.layer_colours())
        panel.set_yticklabels([str(result.identity.layer(int(tick.get_text()))) for tick in panel.get_yticklabels()])
        panel.set_title(name or "evicted", loc="left", pad=6)
        panel.set_ylabel("layer")
        if config.compressions is not None:
            places = np.flatnonzero(config.compressions.share >= 0.5)
            panel.scatter(places + 0.5, np.zeros(len(places)), marker="v", s=8, color="0.2", linewidths=0,
                          clip_on=False, zorder=3, gid="compressions")  # fmt: skip
    axes[-1].set_xlabel("decode step" + ("; ▾ the cache is compressed" if result.identity.compressed_again else ""))
    beyond = max(float(np.nanmax(one.by_layer)) for one in configs) > highest
    bar = figure.colorbar(
        axes[0].collections[0], ax=list(axes), extend="max" if beyond else "neither", fraction=0.04, pad=0.02
    )
    bar.outline.set_visible(False)
    typeset([bar.ax.set_ylabel(symbols_to_tex("Σ L / Σ ‖o_h‖₁"))])
    style.set_title(figure, "Propagated perturbation along the text")
    return style.describe_run(figure, result.identity, _samples_text(result))


def _samples_text(result: Horizon) -> str:
    """Return the foot's text on bands, and the numbers of samples by step and too short for growth."""
    first, last = int(result.samples_at_step[0]), int(result.samples_at_step[-1])
    ending = "" if first == last else f" at the first step, {last} at the last"
    short = (
        f" ({result.samples_too_short_for_growth} of fewer than 3 steps without growth)"
        if result.samples_too_short_for_growth
        else ""
    )
    return f"{style.interval_note(first)}{ending}{short}"


def _growth_map(name: str, config: ConfigHorizon) -> heatmaps.Map:
    """Return a configuration's map of log₂ growth by head, titled with the numbers of heads that grow and shrink."""
    curve = config.curves["propagated"]
    grows, shrinks = int((curve.head_verdict == 1).sum()), int((curve.head_verdict == -1).sum())
    with np.errstate(divide="ignore"):
        shown = np.log2(curve.head_growth)
    title = f"{name}\ngrows {grows}, shrinks {shrinks}"
    return heatmaps.Map(title, np.clip(shown, -_MOST, _MOST), curve.head_verdict == 1)
