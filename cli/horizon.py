"""`perturbkv horizon`: does the error grow while the model decodes on, and in which heads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from perturbkv.cli import console, numbers
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
    from perturbkv.analyses.naming import common, short

    labels = [config.label for config in result.configs]
    console.say(f"{result.steps} decode steps · {common(labels)}")
    rows = [
        _row(name if kind == "propagated" else "", curve)
        for name, config in zip(short(labels), result.configs, strict=True)
        for kind, curve in config.curves.items()
    ]
    first, last = f"#first\n{result.third} steps", f"#last\n{result.third} steps"
    console.table("\nΣ L / Σ ‖o_h‖₁ over all heads", ["", "", first, last, "#growth", "#heads\n+ / = / −"], rows)
    console.say("Heads that grow most (propagated), as layer-head ×factor:")
    for name, config in zip(short(labels), result.configs, strict=True):
        console.say(f"  {name or 'evicted'}: {_most(config.curves['propagated'])}")
    about = numbers.about_intervals(result.identity.samples)
    console.say(
        f"Growth: the last {result.third} steps over the first. + / = / −: heads that grow, that their interval does "
        f"not decide, that shrink. {about}"
    )


def _row(name: str, curve: Curve) -> list[str]:
    third = len(curve.relative) // 3
    return [
        name or ("evicted" if curve.kind == "propagated" else ""),
        curve.kind,
        numbers.significant(float(curve.relative[:third].mean())),
        numbers.significant(float(curve.relative[-third:].mean())),
        numbers.decimal(curve.growth, curve.growth_interval),
        numbers.verdicts(curve.head_verdict),
    ]


def _most(curve: Curve) -> str:
    """The heads that grow most among those that grow."""
    grown = sorted(
        ((float(curve.head_growth[place]), place) for place in zip(*(curve.head_verdict == 1).nonzero(), strict=True)),
        reverse=True,
    )
    return " ".join(f"{layer}-{head} ×{growth:.1f}" for growth, (layer, head) in grown[:_LISTED]) or "none"
