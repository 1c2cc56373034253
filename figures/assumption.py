"""Heat maps of σ, layer × head, three readings, one row of maps each, per budget and α (paper, figure 4)."""

from __future__ import annotations

from matplotlib.figure import Figure

from perturbkv.analyses.assumption import READINGS, Assumption, ConfigAssumption
from perturbkv.analyses.naming import budgets, folded
from perturbkv.figures import heatmaps, style

_WIDE, _NAME = 5, 20


def draw(result: Assumption, width_mm: float = style.WIDE_MM) -> Figure:
    """σ from 0 to 1; heads whose mean σ is at most 0.5 carry a dot."""
    with style.use():
        figure = heatmaps.draw(
            _rows(result, width_mm < style.WIDE_MM),
            width_mm,
            (0.0, 1.0),
            "Assumption 1: share of heads with σ (or S) > 0.5, mean of samples",
            "σ or S (attention mass), mean over samples\ndot: ≤ 0.5",
        )
        style.foot(figure, result.identity, style.about(result.identity.samples))
    return figure


def _rows(result: Assumption, narrow: bool) -> list[list[heatmaps.Map]]:
    """One column: the readings side by side, a row per configuration. Two columns: the other way round."""
    names = [" ".join(parts) for parts in budgets([one.config for one in result.configs])]
    named = list(zip(names, result.configs, strict=True))
    if narrow:
        return [[_map(name, config, reading) for reading in READINGS] for name, config in named]
    chunks = [named[start : start + _WIDE] for start in range(0, len(named), _WIDE)]
    return [[_map(name, config, reading) for name, config in chunk] for chunk in chunks for reading in READINGS]


def _map(name: str, config: ConfigAssumption, variable: str) -> heatmaps.Map:
    reading = config.readings[variable]
    share = style.percent(reading.share, reading.share_interval)
    shown = folded(f"b={name}, held / full {style.number(config.held)}", _NAME)
    return heatmaps.Map(f"{shown}\n{READINGS[variable]}\n{share}", reading.mean, reading.failing)
