"""Heat maps of σ, layer × head, three readings, one row of maps each, per budget and α (paper, figure 4)."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from perturbkv.analyses.bounds.assumption import Assumption
from perturbkv.analyses.bounds.sigma import READINGS, ConfigAssumption
from perturbkv.analyses.naming import budgets, folded
from perturbkv.figures import panels, style
from perturbkv.figures.labels import by_held

_WIDE, _NAME = 5, 18
_Named = tuple[str, ConfigAssumption]


def draw(result: Assumption, width_mm: float = style.WIDE_MM) -> Figure:
    """σ from 0 to 1 on colours that part at 0.5; heads whose mean σ is at most 0.5 carry a dot."""
    with style.use():
        label = "σ or S (attention mass), mean over samples\norange, with a dot: ≤ 0.5"
        figure = panels.draw(
            _rows(result, width_mm < style.WIDE_MM),
            width_mm,
            panels.Scale(0.0, 1.0, label, style.signed_colours()),
            "Assumption 1: share of heads with σ (or S) > 0.5, mean of samples",
            result.identity.layer,
        )
        style.foot(figure, result.identity, style.about(result.identity.samples))
    return figure


def _rows(result: Assumption, narrow: bool) -> list[list[panels.Map]]:
    """One column: the readings side by side, a row per configuration. Two columns: the other way round.

    Configurations in order of what their caches hold; a name that a row or a column shares stands once.
    """
    configs = by_held(result.configs, lambda config: config.held)
    names = [_name(name, config) for name, config in zip(_names(configs), configs, strict=True)]
    named = list(zip(names, configs, strict=True))
    if narrow:
        return [
            [_map(READINGS[reading] if place == 0 else "", config, reading, name) for reading in READINGS]
            for place, (name, config) in enumerate(named)
        ]
    return [row for start in range(0, len(named), _WIDE) for row in _chunk(named[start : start + _WIDE])]


def _chunk(named: Sequence[_Named]) -> list[list[panels.Map]]:
    """A row per reading, the configurations named above the first."""
    return [
        [_map(name if place == 0 else "", config, reading, READINGS[reading]) for name, config in named]
        for place, reading in enumerate(READINGS)
    ]


def _names(configs: Sequence[ConfigAssumption]) -> list[str]:
    return [" ".join(parts) for parts in budgets([shown.config for shown in configs])]


def _name(name: str, config: ConfigAssumption) -> str:
    return f"{folded(f'b={name}', _NAME)}\nheld / full {style.number(config.held)}"


def _map(above: str, config: ConfigAssumption, variable: str, row: str) -> panels.Map:
    reading = config.readings[variable]
    share = style.percent(reading.share, reading.share_interval)
    return panels.Map("\n".join(filter(None, (above, share))), reading.mean, reading.failing, row)
