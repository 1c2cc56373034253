"""`perturbkv measures`: does another distance than L1 change what is concluded."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from perturbkv.cli.choices import parse_compare
from perturbkv.cli.option_routing import with_options
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.session import open_study

_BASELINE = "attention"


@with_options
def measures(
    run: RunOptions,
    look: LookOptions,
    compare: Annotated[
        str | None,
        Option(
            metavar="NAMES",
            help="Baseline and treatments, separated by commas",
            show_default="attention; two-stage and hindsight by both norms, attention-unpooled, random",
        ),
    ] = None,
) -> None:
    """Tell whether L2 or cosine would conclude what L1 does.

    As what is measured: verdicts, methods' order, links with KL and scores. As what selects: norm=l2 of a selection.
    """
    from perturbkv.analyses.questions.measures.measure_settings import TREATMENTS

    baseline, *named = [_BASELINE] if compare is None else parse_compare(compare)
    study = open_study("measures", run, look, lambda: run.configs([baseline, *(named or TREATMENTS)]))
    if study is None:
        return
    from perturbkv.analyses.questions.measures.measures import measures as analyse

    result = analyse(study.trace, baseline, named or None, step=look.step)
    study.save(result.plot(study.width_mm), result.identity, "measures")
    study.show(result)
