"""`perturbkv assumption`: does stage 1 hold more than half of the attention (paper, figure 4)."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from perturbkv.cli.option_routing import showing, with_options
from perturbkv.cli.options import FRACTIONS, LookOptions, RunOptions
from perturbkv.cli.session import open_study


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
