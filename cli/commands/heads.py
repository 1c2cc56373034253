"""`perturbkv heads`: which heads does a selection help, and by how much (paper, figure 2)."""

from __future__ import annotations

import re
from typing import Annotated

from typer import Option

from perturbkv.cli.choices import DEFAULT_COMPARE, check_choice, named, parse_compare
from perturbkv.cli.option_routing import with_options
from perturbkv.cli.options import CompareOption, LookOptions, RunOptions
from perturbkv.cli.session import open_study

_LONGEST = 150
"""Characters of a figure's name, which file systems bound."""


@with_options
def heads(
    run: RunOptions,
    look: LookOptions,
    compare: CompareOption = DEFAULT_COMPARE,
    distance: Annotated[str, Option(metavar="NAME", help="l1, l2 or cosine")] = "l1",
) -> None:
    """Compare selections head by head, isolated and propagated.

    Which heads are better, tied or worse than with the baseline, and what the sum over them does (paper, figure 2).
    """
    from perturbkv.analyses.heads.heads import compare_heads
    from perturbkv.analyses.verdicts import DISTANCES

    names, distance = parse_compare(compare), check_choice("distance", distance, tuple(DISTANCES))
    study = open_study(named("heads", distance), run, look, lambda: run.configs(names))
    if study is None:
        return
    result = compare_heads(study.trace, names[0], names[1:], step=look.step, distance=distance)
    stem = study.name if len(result) == 1 else re.sub("[:/]", "-", "-".join([study.name, *names]))[:_LONGEST]
    study.save(result.plot(study.width_mm), result.identity, stem)
    study.show(result)
