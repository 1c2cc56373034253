"""`perturbkv budget`: the smallest budget at which perturbation or score keep to a limit, and the bytes it saves."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from perturbkv.cli.choices import parse_names
from perturbkv.cli.option_routing import showing, with_options
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.session import open_study
from perturbkv.configs.eviction import EvictionConfig

_BUDGETS = ("0.05", "0.1", "0.2", "0.4", "0.6", "0.8")


@showing(budget=" ".join(_BUDGETS))
@with_options
def budget(
    run: RunOptions,
    look: LookOptions,
    max_kl: Annotated[float | None, Option(metavar="X", help="Mean KL at most, nat, by a lognormal's bound")] = None,
    max_drop: Annotated[float | None, Option(metavar="X", help="Mean drop of the score at most, points of 100")] = None,
    min_top1: Annotated[float | None, Option(metavar="X", help="Mean share of same next tokens at least: 0.99")] = None,
    selection: Annotated[
        list[str] | None,
        Option(metavar="NAMES", help="By commas, or policy:selection", show_default="attention, two-stage"),
    ] = None,
    for_length: Annotated[
        int | None, Option(metavar="N", help="Also the caches' bytes for prompts of so many entries")
    ] = None,
    for_batch: Annotated[int, Option(metavar="N", help="And for so many of them at once")] = 1,
) -> None:
    """Find each selection's smallest safe budget; exit code 1: none, 2: few samples."""
    from perturbkv.analyses.budget.cache_sizes import check_size
    from perturbkv.analyses.budget.criteria import criteria
    from perturbkv.analyses.budget.safe_budget import safe_budget as analyse

    criteria(max_kl, max_drop, min_top1)
    check_size(for_length, for_batch)
    wanted, sides = run.with_budgets(_BUDGETS), parse_names("--selection", selection)
    study = open_study(
        "budget", wanted, look, lambda: _configs(wanted, sides or ["attention", "two-stage"]),
        leave_out_unfit=not run.budget, generate=0 if max_drop is None else None,
    )  # fmt: skip
    if study is None:
        return
    result = analyse(
        study.trace, max_kl=max_kl, max_drop=max_drop, min_top1=min_top1, sides=sides, for_length=for_length,
        for_batch=for_batch,
    )  # fmt: skip
    study.save(result.plot(study.width_mm), result.identity, "budget")
    study.show(result)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _configs(run: RunOptions, selections: list[str]) -> tuple[EvictionConfig, ...]:
    """Every selection at every budget. Raises ConfigError for budgets that have no order."""
    from perturbkv.analyses.budget.budget_axis import check_kind

    configs = run.configs(selections)
    check_kind(configs, "budget")
    return configs
