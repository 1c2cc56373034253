"""`perturbkv budget`: the smallest budget at which perturbation or score keep to a limit, and the bytes it saves."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.spreading import with_options
from perturbkv.cli.study import open_study
from perturbkv.configs.eviction import EvictionConfig

_BUDGETS = ("0.05", "0.1", "0.2", "0.4", "0.6", "0.8")


@with_options
def budget(
    run: RunOptions,
    look: LookOptions,
    max_kl: Annotated[float | None, Option(metavar="X", help="Mean KL of the next token, at most, nat")] = None,
    max_drop: Annotated[
        float | None, Option(metavar="X", help="Mean drop of the answers' score, at most, points of 100")
    ] = None,
    min_top1: Annotated[
        float | None, Option(metavar="X", help="Mean share of steps with the same likeliest token, at least: 0.99")
    ] = None,
    selection: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Selections, or policy:selection", show_default="attention, two-stage; a trace's"),
    ] = None,
    for_length: Annotated[
        int | None, Option(metavar="N", help="Also the caches' bytes for prompts of so many entries")
    ] = None,
    for_batch: Annotated[int, Option(metavar="N", help="And for so many of them at once")] = 1,
) -> None:
    """Find the smallest safe budget of each selection.

    Tested from the largest budget down, up to the first at which the one-sided 95 % bound of a mean breaks a limit; of
    several limits all hold. Exit code 1: a selection has none; 2: there are too few samples to tell. Without --budget
    at 0.05 to 0.8 of the prompt.
    """
    from perturbkv.analyses.cache_sizes import check_size
    from perturbkv.analyses.criteria import criteria
    from perturbkv.analyses.safe_budget import safe_budget as analyse

    criteria(max_kl, max_drop, min_top1)
    check_size(for_length, for_batch)
    wanted = run.with_budgets(_BUDGETS)
    study = open_study(
        "budget", wanted, look, lambda: _configs(wanted, selection or ["attention", "two-stage"]),
        leave_out_unfit=not run.budget, generate=0 if max_drop is None else None,
    )  # fmt: skip
    if study is None:
        return
    result = analyse(
        study.trace, max_kl=max_kl, max_drop=max_drop, min_top1=min_top1, sides=selection, for_length=for_length,
        for_batch=for_batch,
    )  # fmt: skip
    study.save(result.plot(study.width_mm), result.identity, "budget")
    study.show(result)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _configs(run: RunOptions, selections: list[str]) -> tuple[EvictionConfig, ...]:
    """Every selection at every budget. Raises ConfigError for budgets that have no order."""
    from perturbkv.analyses.budget_axis import check_kind

    configs = run.configs(selections)
    check_kind(configs, "budget")
    return configs
