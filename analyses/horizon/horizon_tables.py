"""The tables of growth over the decode steps, and which heads grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from perturbkv.analyses import text
from perturbkv.analyses.horizon.growth import ConfigHorizon, Curve
from perturbkv.analyses.horizon.leads import Lead
from perturbkv.analyses.naming import counted, folded, short
from perturbkv.display import Table

_LISTED = 6
Named = Sequence[tuple[str, ConfigHorizon]]
"""What tells a configuration from the others, and its curves."""


def curve_table(named: Named) -> Table:
    """A row per configuration and kind of perturbation."""
    rows = [
        _row(folded(f"{name}, held {text.held(config.held)}") if place == 0 else "", curve)
        for name, config in named
        for place, curve in enumerate(config.curves.values())
    ]
    columns = ["", "", "#first\nthird", "#last\nthird", "#growth", "#heads beyond\nchance + / = / −"]
    return Table("Σ L / Σ ‖o_h‖₁ over all heads", columns, rows)


def lead_tables(contests: Mapping[tuple[str, str], Sequence[Lead]]) -> list[Table]:
    """Of each two sides a row per setting that they share."""
    columns = ["", "#first third", "#last third"]
    return [
        Table(f"{treatment} over {baseline}: Σ L of all heads, propagated", columns, _leads(found))
        for (baseline, treatment), found in contests.items()
    ]


def said_of_heads(named: Named, layer: Callable[[int], int]) -> list[str]:
    """A line per configuration: how many of its heads grow beyond chance, and which grow most."""
    found = ["Heads that grow or shrink (propagated), and those that grow most, as layer-head ×factor:"]
    for name, config in named:
        curve = config.curves["propagated"]
        said = text.about_flips(curve.decided, ("growing", "shrinking"))
        found.append(f"  {name}: {said}. Most: {_most(curve, layer)}")
    return found


def notes(counts: Sequence[int], grown: int, short: int, configs: Sequence[ConfigHorizon], floor: float) -> str:
    """What n, growth and dashes mean; `counts` are samples per step, `floor` is the largest step's."""
    power = text.about_power(configs[0].curves["propagated"].decided)
    return (
        f"{_samples(counts, short)} {text.about_intervals(grown)} Growth: each sample's last third of its steps "
        f"over its first. + / = / −: heads that grow, are undecided, shrink. Beyond chance: {power} A dash: within two "
        f"noise floors. Noise floor: {floor:.1e} of Σ ‖o_h‖₁ (propagated, the largest step's). {text.ABOUT_HELD}"
    )


def _samples(counts: Sequence[int], short: int) -> str:
    """How many samples each step is of, and which have no growth."""
    ends = [step for step in range(1, len(counts)) if counts[step] < counts[step - 1]]
    said = f"Steps from 0 on are of {counted(counts[0], 'sample')}" + "".join(
        f", from {step} on of {counts[step]}" for step in ends
    )
    left = f" {counted(short, 'sample')} of fewer than 3 steps left out of growth." if short else ""
    return f"{said}: a text that ends has no later steps.{left}" if ends or left else f"{said}."


def _leads(found: Sequence[Lead]) -> list[list[str]]:
    names = short([lead.baseline for lead in found])
    return [
        [
            folded(name or f"b={lead.baseline.budget}"),
            text.decimal(lead.first, lead.first_interval),
            text.decimal(lead.last, lead.last_interval),
        ]
        for name, lead in zip(names, found, strict=True)
    ]


def _row(name: str, curve: Curve) -> list[str]:
    return [
        name,
        curve.kind,
        text.significant(curve.first),
        text.significant(curve.last),
        text.decimal(curve.growth, curve.growth_interval, apart="\n"),
        text.verdicts(curve.head_verdict),
    ]


def _most(curve: Curve, named: Callable[[int], int]) -> str:
    """The heads that grow most among those that grow."""
    shown = (curve.head_verdict == 1) & (curve.head_growth > 0)  # a sum over samples may be noise where most grow
    grown = sorted(
        ((float(curve.head_growth[place]), place) for place in zip(*shown.nonzero(), strict=True)), reverse=True
    )
    return " ".join(f"{named(layer)}-{head} ×{growth:.1f}" for growth, (layer, head) in grown[:_LISTED]) or "none"
