"""The paper's open questions: distances, and optimality gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.analyses.json_values import run_object
from perturbkv.cli import console, dry_run, option_refusals
from perturbkv.cli.choices import parse_compare, parse_methods
from perturbkv.cli.command_line import hide_options, with_options
from perturbkv.cli.options import CompareOption, FigureOptions, LookOptions, RunOptions
from perturbkv.cli.planned_run import plan, run_folder
from perturbkv.cli.session import Analysis, Session, analysis
from perturbkv.storage.output import OutputFolder, resumable

if TYPE_CHECKING:
    from perturbkv.analyses.result import Result

_BASELINE = "attention"


@analysis
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
) -> Analysis:
    """Ask whether L2 or cosine leads to the conclusions of L1.

    As the measured distance: verdicts, order of methods, correlation with KL and scores. As the distance that selects
    entries: norm=l2 of a selection.
    """
    from perturbkv.analyses.questions.measures.measures import TREATMENTS

    baseline, *treatments = [_BASELINE] if compare is None else parse_compare(compare)

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.questions.measures.measures import measures

        return measures(session.trace, baseline, treatments or None, step=look.step)

    return Analysis(
        "measures", run, lambda: run.configs([baseline, *(treatments or TREATMENTS)]), analyse,
        command="question measures",
    )  # fmt: skip


_REGRET = "question regret"
_METHODS = "attention,attention-unpooled,two-stage,random"


@hide_options(*option_refusals.UNUSED[_REGRET])
@with_options
def regret(
    run: RunOptions,
    look: FigureOptions,
    compare: CompareOption = _METHODS,
    heads: Annotated[int, Option(metavar="N", help="Heads searched per prompt, drawn by --seed")] = 64,
    proven: Annotated[int, Option(metavar="N", help="Heads solved by integer programs: 16 of 64 tokens")] = 8,
    seconds: Annotated[float, Option(metavar="S", help="Limit for each head and search")] = 60.0,
) -> None:
    """Measure how far each method is from the best kept set.

    Per head, by isolated perturbation: against the best known set of the same size on the prompt, and against the
    proven best set on a short prefix.
    """
    run.check_names()
    from perturbkv.api.questions import run_search
    from perturbkv.optimum.chain import with_references
    from perturbkv.pipeline.run import searching

    searches = searching.SearchSettings(heads, proven, seconds, seed=run.seed)
    configs = with_references(run.configs(parse_methods(compare)))
    option_refusals.check(_REGRET, configs, run)
    searching.check(configs, searches)
    folder = run_folder(run, run.output)
    session = Session("regret", OutputFolder(folder, run.overwrite), look, run.as_json)
    path = folder / "regret.jsonl"
    if not run.dry_run:
        OutputFolder(folder, wait=run.wait).claim(resumable(path), writer=path)
        session.claim([session.name])
    planned = plan(run, configs)
    if run.dry_run:
        dry_run.show([planned], run.as_json, None)
        return
    with session.claim([session.name]):
        with console.progress("samples") as bar:
            result = run_search(planned, searches, path, bar.update, overwrite=run.overwrite, wait=run.wait)
        session.source = {"run": run_object(planned.run), "file": str(path)}
        session.draw(result, session.name)
        session.show(result)
