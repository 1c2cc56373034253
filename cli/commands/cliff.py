"""`perturbkv cliff`: the budget at which KL of the next token passes a threshold, method by method."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.cli import console
from perturbkv.cli.choices import numbers, parse_names
from perturbkv.cli.option_routing import showing, with_options
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.session import open_study
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from perturbkv.models.loading import ModelFiles

_BUDGETS = ("0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.4")
_METHODS = "attention,two-stage,attention-unpooled,random"


@showing(budget=" ".join(_BUDGETS), window="the largest that fits")
@with_options
def cliff(
    run: RunOptions,
    look: LookOptions,
    compare: Annotated[
        str | None,
        Option(metavar="NAMES", help="By commas, or policy:selection", show_default=f"a trace's; else {_METHODS}"),
    ] = None,
    kl: Annotated[str, Option(metavar="X", help="Thresholds of KL, nat, by commas")] = "0.1,1",
) -> None:
    """Find the budget at which each method falls off its cliff.

    From which budget on the next token's KL stays below --kl. The window is the largest of 32, 16, 8, 4, 2, 1 that
    fits the smallest budget.
    """
    from perturbkv.analyses.budget.cliff import checked_thresholds
    from perturbkv.analyses.budget.cliff import cliff as analyse

    thresholds = checked_thresholds(numbers("--kl", [kl]))
    named = None if compare is None else parse_names("--compare", [compare])
    if named == []:
        msg = f"--compare takes methods such as {_METHODS}, got none"
        raise ConfigError(msg)
    wanted, files = run.with_budgets(_BUDGETS), None
    methods = named or _METHODS.split(",")
    if look.trace is None:
        _check(wanted, methods)
        wanted, files = _with_window(wanted)
    study = open_study("cliff", wanted, look, lambda: _configs(wanted, methods), files=files)
    if study is None:
        return
    result = analyse(study.trace, sides=named, kl=thresholds)
    study.save(result.plot(study.width_mm), result.identity, "cliff")
    study.show(result)


def _configs(run: RunOptions, methods: list[str]) -> tuple[EvictionConfig, ...]:
    """Every method at every budget. Raises ConfigError for budgets that have no order, and for fewer than three."""
    from perturbkv.analyses.budget.budget_axis import check_kind
    from perturbkv.analyses.budget.cliff import LEAST_BUDGETS
    from perturbkv.analyses.budget.method_cliff import ANALYSIS

    configs = run.configs(methods)
    check_kind(configs, ANALYSIS)
    if len(run.budget or ()) < LEAST_BUDGETS:
        msg = f"{ANALYSIS} needs at least {LEAST_BUDGETS} budgets, got --budget {' '.join(run.budget or ())}; give more"
        raise ConfigError(msg)
    return configs


def _check(run: RunOptions, methods: list[str]) -> None:
    """Raise ConfigErrors for what is wrong whatever the window is, before a model is opened."""
    _configs(run if "window" in run.typed else dataclasses.replace(run, window=1), methods)


def _with_window(run: RunOptions) -> tuple[RunOptions, ModelFiles | None]:
    """The run with the largest window that fits, where the user chose none, and the model that it was found with."""
    if run.window is not None:
        return run, None
    from perturbkv.cli.commands.widest_window import widest_window
    from perturbkv.cli.planning import encode_prompts
    from perturbkv.configs.entry_counts import Budget
    from perturbkv.datasets.dataset_registry import check_name
    from perturbkv.models.loading import open_model

    check_name(run.dataset)
    files = open_model(run.model, run.seed, run.revision or "")
    prompts = encode_prompts(run, files.tokenizer, int(files.config.max_position_embeddings))
    window, said = widest_window([Budget.parse(text) for text in run.budget or ()], prompts, run.scenario)
    console.note(said)
    return dataclasses.replace(run, window=window), files
