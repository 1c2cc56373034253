"""`perturbkv stability`: are the heads that suffer the same ones over prompts, data sets, lengths, seeds, models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from perturbkv.cli import summary
from perturbkv.cli.figure_options import FigureOptions
from perturbkv.cli.option_routing import with_options
from perturbkv.cli.options import JsonOption
from perturbkv.cli.saving import free_figures
from perturbkv.cli.session import Study
from perturbkv.configs.entry_counts import Budget
from perturbkv.errors import ConfigError, FailedRunError

_NAME = "stability"


@dataclass(frozen=True)
class StabilityOptions(FigureOptions):
    """The traces, where results go and how; `asked` holds the command's own options."""

    traces: Annotated[
        list[Path] | None, Argument(metavar="TRACE", help="Finished traces, one or several", show_default=False)
    ] = None
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="PATH", help="Where results go", show_default="beside the first trace"),
    ] = None
    overwrite: Annotated[bool, Option("--overwrite", help="Replace results of other traces")] = False
    as_json: JsonOption = False
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@with_options
def stability(
    look: StabilityOptions,
    selection: Annotated[
        str, Option(metavar="NAME", help="Whose heads: a selection, a policy, policy:selection")
    ] = "two-stage",
    baseline: Annotated[str, Option(metavar="NAME", help="What its gain is over, likewise")] = "attention",
    budget: Annotated[
        str | None, Option("--budget", "-b", metavar="B", help="Of several", show_default="the one that all hold")
    ] = None,
) -> None:
    """Tell whether the heads that suffer are the same ones everywhere.

    Over prompts and decode steps within a trace, and between traces: of data sets, lengths, seeds; of models over
    depth alone.
    """
    from perturbkv.analyses.questions.stability.stability import stability as analyse

    if budget is not None:
        Budget.parse(budget)
    study = _opened(look)
    result = analyse(study.traces, selection=selection, baseline=baseline, budget=budget)
    study.save(result.plot(study.width_mm), result.identity, _NAME)
    study.show(result)


def _opened(look: StabilityOptions) -> Study:
    """The study of the traces. Raises ConfigError where there is none, FailedRunError for one of no complete sample."""
    from perturbkv.storage.trace.trace_file import read_trace

    if not look.traces:
        msg = (
            "expected traces, got none; make them: perturbkv trace --dataset needle --budget 128 -o a, then with "
            "another --seed, --length or --dataset -o b, and perturbkv stability a/trace.h5 b/trace.h5"
        )
        raise ConfigError(msg)
    folder = look.output or look.traces[0].parent
    held = tuple(read_trace(path) for path in look.traces)
    for one in held:
        if not one.ok.any():
            raise FailedRunError(one.source, one.failures)
    free_figures(folder, [_NAME], look.formats, look.overwrite)
    sources = [summary.Source(one.source, one.digest) for one in held]
    summary.check_free(folder / summary.NAME, sources, _NAME, look.asked, look.overwrite)
    return Study(_NAME, held, folder, look, look.asked, look.as_json, look.overwrite, joined=True)
