"""`perturbkv horizon`: does the error grow while the model decodes on, and in which heads."""

from __future__ import annotations

import dataclasses

from perturbkv.cli.choices import DEFAULT_COMPARE, parse_compare
from perturbkv.cli.option_routing import with_options
from perturbkv.cli.options import CompareOption, LookOptions, RunOptions
from perturbkv.cli.session import open_study
from perturbkv.errors import ConfigError

_STEPS, _LEAST = 32, 3
_STEMS = ["horizon", "horizon-heads"]


@with_options
def horizon(run: RunOptions, look: LookOptions, compare: CompareOption = DEFAULT_COMPARE) -> None:
    """Follow the perturbation over --steps (32) decode steps.

    Teacher-forced on the full cache's own text; does the error grow, and does one selection's lead last?
    """
    names = parse_compare(compare)
    wanted = dataclasses.replace(run, steps=_STEPS if run.steps is None else run.steps)
    if look.trace is None and wanted.step_count < _LEAST:
        msg = f"horizon needs at least {_LEAST} decode steps, got --steps {wanted.step_count}"
        raise ConfigError(msg)
    study = open_study("horizon", wanted, look, lambda: wanted.configs(names), stems=_STEMS)
    if study is None:
        return
    from perturbkv.analyses.horizon.horizon import horizon as analyse

    result = analyse(study.trace, names)
    study.save(result.plot(study.width_mm), result.identity, "horizon")
    study.save(result.plot_heads(study.width_mm), result.identity, "horizon-heads")
    study.show(result)
