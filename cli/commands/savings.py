"""`perturbkv savings`: at which budget does a baseline do as well as a treatment (paper, figure 1)."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from perturbkv.cli.choices import DEFAULT_COMPARE, parse_compare
from perturbkv.cli.option_routing import showing, with_options
from perturbkv.cli.options import CompareOption, LookOptions, RunOptions
from perturbkv.cli.session import open_study
from perturbkv.configs.eviction import EvictionConfig

_BUDGETS = ("0.05", "0.1", "0.2", "0.3", "0.4", "0.6", "0.8")


@showing(budget=" ".join(_BUDGETS))
@with_options
def savings(
    run: RunOptions,
    look: LookOptions,
    compare: CompareOption = DEFAULT_COMPARE,
    by: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="score (generates answers), propagated, kl",
            show_default="a trace's",
        ),
    ] = None,
) -> None:
    """Tell how much budget a selection saves.

    At which budget does the baseline do as well (paper, figure 1)? Over five budgets or more.
    """
    from perturbkv.analyses.budget.losses import checked
    from perturbkv.analyses.budget.savings import savings as analyse

    names, wanted = parse_compare(compare), run.with_budgets(_BUDGETS)
    measures = None if by is None else checked(by)
    stems = ["savings", *[f"savings-{place}" for place in range(1, len(names))]]
    study = open_study(
        "savings", wanted, look, lambda: _configs(wanted, names), leave_out_unfit=not run.budget,
        generate=None if "score" in (measures or ()) else 0, stems=stems,
    )  # fmt: skip
    if study is None:
        return
    result = analyse(study.trace, names[0], names[1:], by=measures, step=look.step)
    for place, one in enumerate(result, 1):
        stem = "savings" if len(result) == 1 else f"savings-{place}"
        study.save(one.plot(study.width_mm), one.identity, stem)
    study.show(result)


def _configs(run: RunOptions, names: list[str]) -> tuple[EvictionConfig, ...]:
    """Both sides at every budget. Raises ConfigError for budgets that make no curve."""
    from perturbkv.analyses.budget.savings import check_budgets

    configs = run.configs(names)
    check_budgets(configs)
    return configs
