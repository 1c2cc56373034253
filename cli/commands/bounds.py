"""`perturbkv bound-tightness`: how tight are θ, θ̂ and θ̂_relax, and do they order selections as L does.

`perturbkv assumption`: does stage 1 hold more than half of the attention (paper, figure 4).
"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from perturbkv.cli.choices import parse_compare
from perturbkv.cli.option_routing import showing, with_options
from perturbkv.cli.options import FRACTIONS, LookOptions, RunOptions
from perturbkv.cli.session import open_study

_SELECTIONS = "attention,attention-unpooled,two-stage-uniform,two-stage,value,random,hindsight"
_STEMS = ["bound-tightness", "bound-tightness-heads"]


@showing(budget=" ".join(FRACTIONS))
@with_options
def bound_tightness(
    run: RunOptions,
    look: LookOptions,
    selection: Annotated[str, Option(metavar="NAME", help="Whose bounds table and figures show")] = "two-stage",
    compare: Annotated[
        str,
        Option(
            metavar="NAMES",
            help="Selections to rank, separated by commas; a finished trace has its own",
            show_default="all but hindsight-attention, position",
        ),
    ] = _SELECTIONS,
) -> None:
    """Measure how tight the bounds are and whether they rank.

    L/θ, L/θ̂, θ/θ̂, θ̂/θ̂_relax, violations, and whether lower bounds mean lower L.
    """
    wanted, names = run.with_budgets(FRACTIONS), parse_compare(compare)
    sides = names if selection in names else [*names, selection]
    study = open_study(
        "bound-tightness", wanted, look, lambda: wanted.configs(sides), leave_out_unfit=not run.budget, stems=_STEMS
    )
    if study is None:
        return
    from perturbkv.analyses.bounds.bound_tightness import bound_tightness as analyse

    result = analyse(study.trace, selection, look.step)
    study.save(result.plot(study.width_mm), result.identity, "bound-tightness")
    study.save(result.plot_heads(study.width_mm), result.identity, "bound-tightness-heads")
    study.show(result)


@showing(budget=" ".join(FRACTIONS))
@with_options
def assumption(
    run: RunOptions,
    look: LookOptions,
    selection: Annotated[str, Option(metavar="NAME", help="Whose stage 1 is looked at")] = "two-stage",
) -> None:
    """Check Assumption 1 per head, in three readings of σ.

    As the paper states it, as stage 1 holds it, and S (its figure 4).
    """
    wanted = run.with_budgets(FRACTIONS)
    study = open_study("assumption", wanted, look, lambda: wanted.configs([selection]), leave_out_unfit=not run.budget)
    if study is None:
        return
    from perturbkv.analyses.bounds.assumption import assumption as analyse

    result = analyse(study.trace, selection, look.step)
    study.save(result.plot(study.width_mm), result.identity, "assumption")
    study.show(result)
