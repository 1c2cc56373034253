"""`perturbkv needle`: is a fact still found from an evicted cache, and does perturbation tell (paper, figure 8)."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from typer import Option

from perturbkv.cli.choices import METHODS, parse_methods
from perturbkv.cli.option_routing import with_options
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.session import open_study
from perturbkv.errors import ConfigError

_LENGTHS, _DEPTHS = ["500,1000,2000"], ["0,0.2,0.4,0.6,0.8,1"]
_STEPS = 8
_STEMS = ["needle", "needle-digits", "needle-depths", "needle-correlation"]


@with_options
def needle(
    run: RunOptions,
    look: LookOptions,
    compare: Annotated[
        str,
        Option(
            metavar="NAMES",
            help="Methods, separated by commas: policy:selection",
            show_default="attention and two-stage of snapkv, pyramidkv, adakv",
        ),
    ] = METHODS,
    max_new_tokens: Annotated[int, Option(metavar="N", help="Tokens of an answer; the number has 7 digits")] = 12,
) -> None:
    """Ask every cache for a number hidden in a long text.

    One prompt per length and depth unless --samples asks for more. What is found is held against the first step's
    perturbation; what is measured over all --steps (8) nearly is the score, and stands apart.
    """
    wanted = _with_defaults(run, max_new_tokens)
    study = open_study(
        "needle", wanted, look, lambda: wanted.configs(parse_methods(compare)), generate=max_new_tokens, stems=_STEMS
    )
    if study is None:
        return
    from perturbkv.analyses.needle.needle import needle as analyse

    result = analyse(study.trace)
    study.save(result.plot(study.width_mm), result.identity, "needle")
    study.save(result.plot_digits(study.width_mm), result.identity, "needle-digits")
    study.save(result.plot_depths(study.width_mm), result.identity, "needle-depths")
    study.save(result.plot_correlation(study.width_mm), result.identity, "needle-correlation")
    study.show(result)


def _with_defaults(run: RunOptions, max_new_tokens: int) -> RunOptions:
    """Needle's own defaults, where the user chose none."""
    if run.dataset != "needle":
        msg = f"needle makes its own prompts; leave --dataset out, got '{run.dataset}'"
        raise ConfigError(msg)
    if max_new_tokens < 1:
        msg = f"--max-new-tokens must be at least 1, got {max_new_tokens}"
        raise ConfigError(msg)
    wanted = dataclasses.replace(
        run, length=run.length or _LENGTHS, depth=run.depth or _DEPTHS, steps=_STEPS if run.steps is None else run.steps
    )
    cells = len(wanted.lengths) * len(wanted.depths)
    if run.samples is not None and run.samples < cells:
        grid = f"{len(wanted.lengths)} lengths × {len(wanted.depths)} depths"
        msg = f"{grid} need {cells} samples, got --samples {run.samples}"
        raise ConfigError(msg)
    return dataclasses.replace(wanted, samples=run.samples or cells)
