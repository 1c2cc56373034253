"""`perturbkv split`: is a head hurt by how much goes or by what goes, and what a correction wins."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from typer import Option

from perturbkv.cli.choices import parse_compare
from perturbkv.cli.option_routing import showing, telling, with_options
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.session import open_study
from perturbkv.configs.correction import NONE
from perturbkv.configs.eviction import EvictionConfig

_COMPARE = "attention,two-stage,attention-unpooled,two-stage-uniform,random"
_CORRECTIONS = ("corrected", "corrected(mass=linear)", "corrected-oracle")
_CORRECTED = 2
"""How many of the sides are corrected too: the first ones."""


@showing(correction=", ".join(_CORRECTIONS))
@telling("correction")
@with_options
def split(
    run: RunOptions,
    look: LookOptions,
    compare: Annotated[
        str | None,
        Option(metavar="NAMES", help="Selections or policies, the baseline first", show_default=_COMPARE),
    ] = None,
) -> None:
    """Tell whether heads are hurt by how much goes or by what goes.

    L = (1 − S) ‖μ_gone − μ_kept‖₁ per head; which methods win by which; what a stored mean of what went wins, without a
    trace in the first two of --compare.
    """
    names = None if compare is None else parse_compare(compare)
    study = open_study("split", run, look, lambda: _configs(run, names or _COMPARE.split(",")))
    if study is None:
        return
    from perturbkv.analyses.questions.split.split import split as analyse

    result = analyse(study.trace, names, look.step)
    study.save(result.plot(study.width_mm), result.identity, "split")
    study.show(result)


def _configs(run: RunOptions, names: list[str]) -> tuple[EvictionConfig, ...]:
    """Every side uncorrected, then the first ones corrected."""
    alone = dataclasses.replace(run, correction=[NONE]).configs(names)
    corrections = [one for one in run.correction or _CORRECTIONS if one != NONE]
    if not corrections:
        return alone
    corrected = dataclasses.replace(run, correction=corrections).configs(names[:_CORRECTED])
    return tuple(dict.fromkeys([*alone, *corrected]))
