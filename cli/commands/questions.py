"""`perturbkv measures`: does another distance than L1 change what is concluded.

`perturbkv regret`: how far each method is from the best kept set.

`perturbkv split`: is a head hurt by how much goes or by what goes, and what a correction wins.

`perturbkv stability`: are the heads that suffer the same ones over prompts, data sets, lengths, seeds, models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from perturbkv.analyses.json_values import run_object
from perturbkv.cli import console, dry_run, option_effects, saving
from perturbkv.cli.choices import parse_compare, parse_methods
from perturbkv.cli.option_routing import hiding, showing, telling, with_options
from perturbkv.cli.options import CompareOption, FigureOptions, JsonOption, LookOptions, RunOptions
from perturbkv.cli.planned_run import plan, run_folder
from perturbkv.cli.saving import free_figures, reachable
from perturbkv.cli.session import Leaving, Study, open_study
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import NONE
from perturbkv.errors import ConfigError, FailedRunError

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


_NAME = "regret"
_METHODS = "attention,attention-unpooled,two-stage,random"


@hiding(*option_effects.UNUSED[_NAME])
@with_options
def regret(
    run: RunOptions,
    look: FigureOptions,
    compare: CompareOption = _METHODS,
    heads: Annotated[int, Option(metavar="N", help="Searched of each prompt by swaps, drawn by --seed")] = 64,
    proven: Annotated[int, Option(metavar="N", help="Of its prefix of 64 tokens, 16 kept, by integer programs")] = 8,
    seconds: Annotated[float, Option(metavar="S", help="At most for each head and search")] = 60.0,
) -> None:
    """Tell how far each method is from the best kept set.

    Per head, isolated: against the best set known of its size on the prompt, and the proven best of a short prefix.
    """
    from perturbkv.api.questions import searched
    from perturbkv.optimum.chain import with_references
    from perturbkv.pipeline.run import searching

    asked = searching.Searches(heads, proven, seconds, seed=run.seed)
    configs = with_references(run.configs(parse_methods(compare)))
    option_effects.check(_NAME, run, configs)
    searching.check(configs, asked)
    folder = run_folder(run, run.output)
    place, path = Leaving(_NAME, folder, look, run.overwrite, run.as_json), folder / f"{_NAME}.jsonl"
    if not run.dry_run:
        reachable(path, run.wait)
        place.check_free()
    planned = plan(run, configs)
    if run.dry_run:
        dry_run.show(planned, run.as_json, None)
        return
    with place.held(), console.progress("samples") as bar:
        found = searched(planned, asked, path, bar.at, overwrite=run.overwrite, wait=run.wait)
    place.leave(found, {"run": run_object(planned.run), "file": str(path)})


_COMPARE = "attention,two-stage,attention-unpooled,two-stage-uniform,random"
_CORRECTIONS = ("corrected", "corrected(mass=linear)", "corrected-oracle")
_CORRECTED = 2
"""How many of the sides are corrected too: the first ones."""


@showing(correction=", ".join(_CORRECTIONS))
@telling("correction")
@with_options
def split(
    run: RunOptions,
    look: LookOptions,
    compare: Annotated[
        str | None,
        Option(metavar="NAMES", help="Selections or policies, the baseline first", show_default=_COMPARE),
    ] = None,
) -> None:
    """Tell whether heads are hurt by how much goes or by what goes.

    L = (1 − S) ‖μ_gone − μ_kept‖₁ per head; which methods win by which; what a stored mean of what went wins, without a
    trace in the first two of --compare.
    """
    names = None if compare is None else parse_compare(compare)
    study = open_study("split", run, look, lambda: _configs(run, names or _COMPARE.split(",")))
    if study is None:
        return
    from perturbkv.analyses.questions.split.split import split as analyse

    result = analyse(study.trace, names, look.step)
    study.save(result.plot(study.width_mm), result.identity, "split")
    study.show(result)


def _configs(run: RunOptions, names: list[str]) -> tuple[EvictionConfig, ...]:
    """Every side uncorrected, then the first ones corrected."""
    alone = dataclasses.replace(run, correction=[NONE]).configs(names)
    corrections = [one for one in run.correction or _CORRECTIONS if one != NONE]
    if not corrections:
        return alone
    corrected = dataclasses.replace(run, correction=corrections).configs(names[:_CORRECTED])
    return tuple(dict.fromkeys([*alone, *corrected]))


_STABILITY_NAME = "stability"


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
    study.save(result.plot(study.width_mm), result.identity, _STABILITY_NAME)
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
    free_figures(folder, [_STABILITY_NAME], look.formats, look.overwrite)
    sources = [saving.Source(one.source, one.digest) for one in held]
    saving.check_summary_free(folder / saving.SUMMARY_NAME, sources, _STABILITY_NAME, look.asked, look.overwrite)
    return Study(_STABILITY_NAME, held, folder, look, look.asked, look.as_json, look.overwrite, joined=True)
