"""Analyses of answers: scores, correlation with perturbation, and divergence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from perturbkv.analyses.json_values import run_object
from perturbkv.cli import option_refusals
from perturbkv.cli.choices import METHODS, check_choice, parse_methods
from perturbkv.cli.command_line import hide_options, show_defaults, show_options
from perturbkv.cli.options import DEFAULT_SELECTIONS, MaxNewTokensOption, RunOptions, TracesOptions
from perturbkv.cli.planned_run import split_datasets
from perturbkv.cli.saving import text_file
from perturbkv.cli.session import Analysis, Session, analysis, analysis_views
from perturbkv.configs.cache_contents import DEFAULT_STEPS
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.datasets.metrics import CHOICES, DEFAULT
from perturbkv.errors import ConfigError
from perturbkv.storage.atomic_files import write_atomically
from perturbkv.storage.output import OutputFile, OutputFolder

if TYPE_CHECKING:
    from perturbkv.analyses.quality.perplexity import Perplexity
    from perturbkv.analyses.quality.quality import Quality
    from perturbkv.analyses.result import Result

PERPLEXITY = "perplexity"
"""Metric of a text that is read, in place of one of answers that are generated."""
_BUDGETS = ("0.1", "0.2", "0.4")
_METHODS = ",".join(
    [*(f"{policy}:{selection}" for policy in ("snapkv", "adakv") for selection in DEFAULT_SELECTIONS), "random"]
)


def _scores(
    run: RunOptions,
    look: TracesOptions,
    compare: Annotated[
        str,
        Option(
            metavar="NAMES",
            help="Methods: policy:selection,…",
            show_default="attention and two-stage of snapkv, adakv; random",
        ),
    ] = _METHODS,
    max_new_tokens: MaxNewTokensOption = None,
    metric: Annotated[
        str,
        Option(
            metavar="NAME",
            help=f"Grades answers: {', '.join(CHOICES)}; or {PERPLEXITY} of --text",
            show_default=f"the dataset's, else {DEFAULT}",
        ),
    ] = "",
) -> Analysis:
    """Score the answers, one table per data set and budget."""
    if metric:
        check_choice("metric", metric, (*CHOICES, PERPLEXITY))
    if metric == PERPLEXITY:
        return _perplexity(run, look, compare, max_new_tokens)
    if answers := [path for path in look.paths if path.suffix == ".jsonl"]:
        raise ConfigError(f"expected traces, got {answers[0]}; --divergence looks at a file of answers")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    wanted = run.with_budgets(_BUDGETS)

    def analyse(session: Session) -> tuple[Result, dict[str, Any]]:
        from perturbkv.analyses.quality.quality import quality

        result = quality([trace for trace in session.traces if trace.ok.any()])
        session.draw(result, "quality")
        return result, {**result.to_dict(), "tables": _save_tables(result, session)}

    return Analysis(
        "quality", wanted, lambda: wanted.configs(parse_methods(compare)), analyse, stems=["quality"],
        leave_out_unfit=not run.budget, generate=max_new_tokens, metric=metric, by_dataset=True,
        outputs=lambda folder: _table_files(folder, "quality"),
    )  # fmt: skip


def _perplexity(run: RunOptions, look: TracesOptions, compare: str, max_new_tokens: int | None) -> Analysis:
    """Compare the perplexity of a text under every cache.

    Raises ConfigError for several traces or data sets, and for answers.
    """
    if len(look.paths) > 1:
        raise ConfigError(f"expected one trace for --metric {PERPLEXITY}, got {len(look.paths)}; give them singly")
    if len(names := [one.dataset for one in split_datasets(run)]) > 1:
        raise ConfigError(f"expected one data set for --metric {PERPLEXITY}, got {', '.join(names)}; give them singly")
    if max_new_tokens is not None:
        raise ConfigError(
            f"--max-new-tokens has no effect with --metric {PERPLEXITY}, which generates nothing: --steps says how far "
            "a text is read; leave it out"
        )
    wanted = dataclasses.replace(run.with_budgets(_BUDGETS), reads_whole_text=True)

    def analyse(session: Session) -> tuple[Result, dict[str, Any]]:
        from perturbkv.analyses.quality.perplexity import perplexity

        result = perplexity(session.trace)
        session.draw(result, session.name)
        return result, {**result.to_dict(), "tables": _save_tables(result, session)}

    name = f"quality-{PERPLEXITY}"
    return Analysis(
        name, wanted, lambda: wanted.configs(parse_methods(compare)), analyse, stems=[name],
        command=f"quality --metric {PERPLEXITY}", leave_out_unfit=not run.budget,
        options={"metric": PERPLEXITY}, outputs=lambda folder: _table_files(folder, name),
    )  # fmt: skip


def _table_files(folder: Path, name: str) -> list[OutputFile]:
    """Return the output files of the tables of an analysis: LaTeX, Markdown, CSV."""
    from perturbkv.analyses.quality.score_tables import COMMENT, CSV, MARKDOWN

    quoted = ",".join(f'"{name}"' for name in CSV)
    begins = {"tex": COMMENT, "md": MARKDOWN, "csv": quoted}
    return [text_file(folder / f"{name}.{suffix}", text) for suffix, text in begins.items()]


def _save_tables(result: Quality | Perplexity, session: Session) -> list[str]:
    """Write a result's tables; return their paths."""
    files = _table_files(session.output.path, session.name)
    session.output.claim(*files)
    for file, text in zip(files, (result.to_latex(), result.to_markdown(), result.to_csv()), strict=True):
        write_atomically(file.path, lambda stream, text=text: stream.write(text.encode()))  # type: ignore[misc]
    return [str(file.path) for file in files]


def _divergence(run: RunOptions, look: TracesOptions) -> None:
    """Find where each evicted answer diverges from the full cache's.

    Raises ConfigError where the user named no file or several, and for options without effect on one.
    """
    from perturbkv.analyses.quality.divergence import divergence as analyse
    from perturbkv.storage.answers_file import read_answers

    if len(look.paths) != 1:
        raise ConfigError(
            f"expected one file of answers for quality --divergence, got {len(look.paths) or 'none'}; perturbkv "
            "generate writes generation.jsonl"
        )
    (path,) = look.paths
    option_refusals.check_known("quality --divergence", run, str(path), {"divergence", *_ANSWERS_OPTIONS})
    output = OutputFolder(run.output or path.parent, run.overwrite)
    session, answers = Session("quality-divergence", output, look, run.as_json), read_answers(path)
    with session.claim([session.name]):
        result, of_run = analyse(answers), run_object(answers.run)
        session.source = {"answers": answers.source, "answers_digest": answers.digest, "run": of_run}
        session.draw(result, session.name)
        session.show(result)


_ANSWERS_OPTIONS = ("traces", "output", "overwrite", "as_json", "figure_format", "columns", "style", "explain")


_HIDDEN = ("preset", "alpha", "precision", "scenario", "dtype", "max_tokens")
"""Options of measuring that the help of `quality` leaves out."""


@show_defaults(
    budget=" ".join(_BUDGETS), policy="by --compare", steps=f"{DEFAULT_STEPS}; perplexity: to the text's end"
)
@show_options("text")
@hide_options(*_HIDDEN)
@analysis_views(
    _scores,
    divergence=_divergence,
    flags={
        "divergence": Annotated[bool, Option("--divergence", help="Where answers of a file leave the full cache's")]
    },
)
def quality() -> None:
    """Score the answers from the full and the evicted caches.

    --dataset takes several, separated by commas, each with a trace of its own; tables: .tex, .md and .csv.
    --metric perplexity reads a text (--text own, answer, given) to its end, or for --steps tokens.
    --divergence looks at a file of answers that perturbkv generate wrote.
    """


@show_defaults(budget=" ".join(_BUDGETS))
@analysis
def correlation(
    run: RunOptions,
    look: TracesOptions,
    compare: Annotated[
        str | None,
        Option(metavar="NAMES", help="Methods: policy:selection,…", show_default="the trace's; else six"),
    ] = None,
    right: Annotated[float, Option(metavar="X", help="Full score above which a prompt counts")] = 0.0,
    lost: Annotated[float, Option(metavar="X", help="Share of it below which an answer is lost")] = 0.5,
    max_new_tokens: MaxNewTokensOption = None,
) -> Analysis:
    """Ask whether perturbation predicts a lost answer.

    The first step's perturbation, or with --text answer the accepted answer's, against the free answer's score, one
    budget at a time; prompts of several traces are pooled.
    """
    from perturbkv.analyses.correlation.lost_answers import Rule

    Rule(right, lost)
    names = None if compare is None else parse_methods(compare)
    wanted = run.with_budgets(_BUDGETS)

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.correlation.correlation import correlation

        return correlation(session.traces, only=names or (), right=right, lost=lost)

    return Analysis(
        "correlation", wanted, lambda: _correlation_configs(wanted, names, max_new_tokens), analyse,
        leave_out_unfit=not run.budget, generate=max_new_tokens,
        options={**look.own_options, "trace": list(map(str, look.paths[1:])), "step": 0},
    )  # fmt: skip


def _correlation_configs(
    run: RunOptions, names: list[str] | None, max_new_tokens: int | None
) -> tuple[EvictionConfig, ...]:
    """Return the methods at every budget. Raises ConfigError if no budget has enough methods to rank."""
    from perturbkv.analyses.sides import LEAST_CONFIGS, comparable_groups
    from perturbkv.pipeline.answers.generation import check_answer_options

    configs = run.configs(names or parse_methods(METHODS))
    check_answer_options(configs, max_new_tokens)
    most = max(map(len, comparable_groups(configs).values()))
    if most < LEAST_CONFIGS:
        raise ConfigError(
            f"correlation ranks at least {LEAST_CONFIGS} methods of one budget, got --compare of {most}; name more"
        )
    return configs
