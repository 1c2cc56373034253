"""The paper's open questions: evicted share against choice, stability of heads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from perturbkv.cli import saving
from perturbkv.cli.choices import parse_compare
from perturbkv.cli.command_line import show_defaults, show_options, with_options
from perturbkv.cli.options import FigureOptions, JsonOption, LookOptions, RunOptions
from perturbkv.cli.session import Analysis, Session, analysis, read_traces
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import NONE
from perturbkv.errors import ConfigError, FailedRunError
from perturbkv.storage.output import OutputFolder

if TYPE_CHECKING:
    from perturbkv.analyses.result import Result

_BASELINE = "attention"


_COMPARE = "attention,two-stage,attention-unpooled,two-stage-uniform,random"
_CORRECTIONS = ("corrected", "corrected(mass=linear)", "corrected-oracle")
_CORRECTED_METHODS = 2
"""Number of methods, the first of --compare, that are measured with corrections too."""


@show_defaults(correction=", ".join(_CORRECTIONS))
@show_options("correction")
@analysis
def split(
    run: RunOptions,
    look: LookOptions,
    compare: Annotated[
        str | None,
        Option(metavar="NAMES", help="Selections or policies, the baseline first", show_default=_COMPARE),
    ] = None,
) -> Analysis:
    """Separate the effects of how much and what is evicted.

    L = (1 − S) ‖μ_gone − μ_kept‖₁ per head: by which factor a method wins, and what a stored mean of the evicted
    values gains (the first two of --compare).
    """
    names = None if compare is None else parse_compare(compare)

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.questions.split.split import split

        return split(session.trace, names, look.step)

    return Analysis(
        "split", run, lambda: _split_configs(run, names or _COMPARE.split(",")), analyse, command="question split"
    )


def _split_configs(run: RunOptions, names: list[str]) -> tuple[EvictionConfig, ...]:
    """Return all methods without correction, then the first two methods with every correction."""
    uncorrected = dataclasses.replace(run, correction=[NONE]).configs(names)
    corrections = [one for one in run.correction or _CORRECTIONS if one != NONE]
    if not corrections:
        return uncorrected
    corrected = dataclasses.replace(run, correction=corrections).configs(names[:_CORRECTED_METHODS])
    return tuple(dict.fromkeys([*uncorrected, *corrected]))


@dataclass(frozen=True)
class StabilityOptions(FigureOptions):
    """The options of figures, the traces, and the folder of the results."""

    traces: Annotated[
        list[Path] | None, Argument(metavar="TRACE", help="Finished traces, one or several", show_default=False)
    ] = None
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="PATH", help="Folder of the results", show_default="the first trace's"),
    ] = None
    overwrite: Annotated[bool, Option("--overwrite", help="Replace results of other traces")] = False
    as_json: JsonOption = False


@with_options
def stability(
    look: StabilityOptions,
    selection: Annotated[
        str, Option(metavar="NAME", help="Selection, policy or policy:selection with the heads")
    ] = "two-stage",
    baseline: Annotated[str, Option(metavar="NAME", help="Baseline of its gain, likewise")] = "attention",
    budget: Annotated[
        str | None,
        Option("--budget", "-b", metavar="B", help="One of several budgets", show_default="the one that all hold"),
    ] = None,
) -> None:
    """Ask whether eviction hits the same heads everywhere.

    Across the prompts and decode steps of a trace, and across traces: of other data sets, lengths or seeds; other
    models are compared by depth alone.
    """
    from perturbkv.analyses.questions.stability.stability import stability as compare_heads

    if budget is not None:
        Budget.parse(budget)
    session = _open_traces(look)
    result = compare_heads(session.traces, selection=selection, baseline=baseline, budget=budget)
    session.draw(result, session.name)
    session.show(result)


def _open_traces(look: StabilityOptions) -> Session:
    """Return the session of the traces that the user named.

    Raises ConfigError where the user named no trace, FailedRunError for a trace without a complete sample.
    """
    if not look.traces:
        raise ConfigError(
            "expected traces, got none; make them: perturbkv trace --dataset needle --budget 128 -o a, then with "
            "another --seed, --length or --dataset -o b, and perturbkv question stability a/trace.h5 b/trace.h5"
        )
    traces = read_traces(look.traces)
    for one in traces:
        if not one.ok.any():
            raise FailedRunError(one.source, one.failures)
    output = OutputFolder(look.output or look.traces[0].parent, look.overwrite)
    session = Session("stability", output, look, look.as_json, traces, joint=True, options=look.own_options)
    session.claim([session.name], [saving.Source(one.source, one.digest) for one in traces])
    return session
