"""`perturbkv link`: does the first step's perturbation tell what an answer will be worth."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from typer import Option

from perturbkv.cli.choices import METHODS, parse_methods
from perturbkv.cli.option_routing import showing, with_options
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.session import open_study
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError

_BUDGETS = ("0.1", "0.2", "0.4")


@showing(budget=" ".join(_BUDGETS))
@with_options
def link(
    run: RunOptions,
    look: LookOptions,
    traces: Annotated[
        list[Path] | None, Option("--trace", metavar="PATH", help="A finished trace; again: its prompts too")
    ] = None,
    compare: Annotated[
        str | None,
        Option(metavar="NAMES", help="Methods: policy:selection,…", show_default="the trace's; else six"),
    ] = None,
    right: Annotated[float, Option(metavar="X", help="Full score above which a prompt counts")] = 0.0,
    lost: Annotated[float, Option(metavar="X", help="Share of it below which an answer is lost")] = 0.5,
    max_new_tokens: Annotated[
        int | None, Option(metavar="N", help="Tokens of an answer at most", show_default="the dataset's, else 64")
    ] = None,
    everything: Annotated[bool, Option("--all", help="All tables: controls, contrasts, curves, …")] = False,
) -> None:
    """Tell whether perturbation tells a lost answer.

    Its first step against its score, one budget at a time.
    """
    from perturbkv.analyses.correlation.correlation import link as analyse
    from perturbkv.analyses.correlation.lost_answers import Rule
    from perturbkv.storage.trace.trace_file import read_trace

    Rule(right, lost)
    given = [path for path in (look.trace, *(traces or [])) if path is not None]
    names = None if compare is None else parse_methods(compare)
    wanted = run.with_budgets(_BUDGETS)
    study = open_study(
        "link",
        wanted,
        _looking(look, given),
        lambda: _configs(wanted, names, max_new_tokens),
        leave_out_unfit=not run.budget,
        generate=max_new_tokens,
    )
    if study is None:
        return
    study = dataclasses.replace(study, traces=(study.trace, *map(read_trace, given[1:])))
    result = analyse(study.traces, only=names or (), right=right, lost=lost, everything=everything)
    study.save(result.plot(study.width_mm), result.identity, "link")
    study.show(result)


def _looking(look: LookOptions, given: list[Path]) -> LookOptions:
    """At the first trace; the others are part of what is asked of it, and how much is shown is not."""
    asked = {name: value for name, value in look.asked.items() if name not in ("traces", "everything")}
    more = list(map(str, given[1:]))
    return dataclasses.replace(look, trace=given[0] if given else None, asked={**asked, "trace": more})


def _configs(run: RunOptions, names: list[str] | None, max_new_tokens: int | None) -> tuple[EvictionConfig, ...]:
    """The methods at every budget. Raises ConfigError where no budget has enough of them to rank."""
    from perturbkv.analyses.pairing import LEAST_CONFIGS, ranked_together
    from perturbkv.pipeline.answers.generation import check_asked

    configs = run.configs(names or parse_methods(METHODS))
    check_asked(configs, max_new_tokens, None)
    most = max(map(len, ranked_together(configs).values()))
    if most < LEAST_CONFIGS:
        msg = f"link ranks at least {LEAST_CONFIGS} methods of one budget, got --compare of {most}; name more"
        raise ConfigError(msg)
    return configs
