"""`perturbkv horizon`: does the error grow while the model decodes on, and in which heads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from perturbkv.analyses import numbers
from perturbkv.cli import console
from perturbkv.cli.choices import DEFAULT_COMPARE, parse_compare
from perturbkv.cli.options import CompareOption, LookOptions, RunOptions
from perturbkv.cli.spreading import with_options
from perturbkv.cli.study import open_study
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from perturbkv.analyses.horizon import Curve, Horizon

_STEPS, _LEAST = 32, 3
_LISTED = 6


@with_options
def horizon(run: RunOptions, look: LookOptions, compare: CompareOption = DEFAULT_COMPARE) -> None:
    """Follow the perturbation over --steps (32) decode steps, teacher-forced on the full cache's own text."""
    names = parse_compare(compare)
    wanted = dataclasses.replace(run, steps=_STEPS if run.steps is None else run.steps)
    if look.trace is None and wanted.step_count < _LEAST:
        msg = f"horizon needs at least {_LEAST} decode steps, got --steps {wanted.step_count}"
        raise ConfigError(msg)
    study = open_study("horizon", wanted, look, lambda: wanted.configs(names))
    if study is None:
        return
    from perturbkv.analyses.horizon import summarise
    from perturbkv.figures.horizon import draw, draw_heads

    result = summarise(study.trace, names)
    study.save(draw(result, study.width_mm), result.identity, "horizon")
    study.save(draw_heads(result, study.width_mm), result.identity, "horizon-heads")
    study.finish(result.to_dict(), lambda: _print(result))


def _print(result: Horizon) -> None:
    from perturbkv.analyses.naming import common, folded, short

    configs = result.identity.configs
    console.say(f"{result.steps} decode steps · {common(configs)}")
    names = [name or "evicted" for name in short(configs)]
    rows = [
        _row(["", folded(f"{name}, held {numbers.held(config.held)}")][place == 0], curve)
        for name, config in zip(names, result.configs, strict=True)
        for place, curve in enumerate(config.curves.values())
    ]
    columns = ["", "", "#first\nthird", "#last\nthird", "#growth", "#heads beyond\nchance + / = / −"]
    console.table("\nΣ L / Σ ‖o_h‖₁ over all heads", columns, rows)
    console.say("Heads that grow or shrink (propagated), and those that grow most, as layer-head ×factor:")
    for name, config in zip(names, result.configs, strict=True):
        curve = config.curves["propagated"]
        console.say(f"  {name}: {numbers.about_flips(curve.decided, ('growing', 'shrinking'))}. Most: {_most(curve)}")
    console.say(_caption(result))


def _caption(result: Horizon) -> str:
    power = numbers.about_power(result.configs[0].curves["propagated"].decided)
    return (
        f"{_samples(result)} {numbers.about_intervals(result.grown)} Growth: each sample's last third of its steps "
        f"over its first. + / = / −: heads that grow, are undecided, shrink. Beyond chance: {power} "
        f"A dash: within two noise floors. Noise floor: {result.noise_floor.max():.1e} of Σ ‖o_h‖₁ (propagated, the "
        f"largest step's). {numbers.ABOUT_HELD}"
    )


def _samples(result: Horizon) -> str:
    """How many samples each step is of, and which have no growth."""
    from perturbkv.analyses.naming import counted

    counts = result.samples_at.tolist()
    ends = [step for step in range(1, len(counts)) if counts[step] < counts[step - 1]]
    said = f"Steps from 0 on are of {counted(counts[0], 'sample')}" + "".join(
        f", from {step} on of {counts[step]}" for step in ends
    )
    short = f" {counted(result.short, 'sample')} of fewer than 3 steps left out of growth." if result.short else ""
    return f"{said}: a text that ends has no later steps.{short}" if ends or short else f"{said}."


def _row(name: str, curve: Curve) -> list[str]:
    return [
        name,
        curve.kind,
        numbers.significant(curve.first),
        numbers.significant(curve.last),
        numbers.decimal(curve.growth, curve.growth_interval, apart="\n"),
        numbers.verdicts(curve.head_verdict),
    ]


def _most(curve: Curve) -> str:
    """The heads that grow most among those that grow."""
    shown = (curve.head_verdict == 1) & (curve.head_growth > 0)  # a sum over samples may be noise where most grow
    grown = sorted(
        ((float(curve.head_growth[place]), place) for place in zip(*shown.nonzero(), strict=True)), reverse=True
    )
    return " ".join(f"{layer}-{head} ×{growth:.1f}" for growth, (layer, head) in grown[:_LISTED]) or "none"
