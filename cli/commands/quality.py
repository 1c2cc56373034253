"""`perturbkv quality`: how good the answers from evicted caches are, by data set (paper, tables 1 to 6).

A study of several data sets of one model: a trace of each, made or given, and what is said of all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.cli import console, dry_run, option_effects, planned_run, saving
from perturbkv.cli.choices import apart, parse_methods
from perturbkv.cli.option_routing import showing, with_options
from perturbkv.cli.options import MetricOption, RunOptions, TracesOptions
from perturbkv.cli.planned_run import measure, plan, run_folder, slug
from perturbkv.cli.saving import free_figures, free_text, reachable
from perturbkv.cli.session import Study
from perturbkv.configs.choice import split
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, FailedRunError
from perturbkv.storage.atomic_files import write_whole

if TYPE_CHECKING:
    from perturbkv.analyses.quality.quality import Quality
    from perturbkv.pipeline.run.plan import Plan


_MOST_NAMED = 3


def open_joined(
    name: str,
    run: RunOptions,
    look: TracesOptions,
    configs: Callable[[], Sequence[EvictionConfig]],
    check: Callable[[Path], None],
    leave_out_unfit: bool = False,
    generate: int | None = None,
    metric: str = "",
) -> Study | None:
    """The study of `look.trace`, or of the traces with answers that `run` makes of `configs`; None after a dry run.

    `run.dataset` names data sets, separated by commas; each trace lies in a folder of its data set's name. `check` is
    asked of the folder of the results, before anything is measured. Raises PerturbkvErrors, all that can be known
    before a model is loaded before it is, of all data sets.
    """
    if look.trace:
        option_effects.check_finished(name, run, look.trace[0])
        folder = run.output or look.trace[0].parent
        study = _study(name, look.trace, folder, look, run)
        sources = [saving.Source(trace.source, trace.digest) for trace in study.traces]
        _check_free(name, folder, look, run, sources, check)
        return study
    runs, asked = each(run), tuple(configs())
    option_effects.check_all(name, runs, asked)
    folder = run_folder(_named(run, runs), run.output)
    paths = places(folder, runs)
    if not run.dry_run:
        for path in paths:
            reachable(path, run.wait)
        _check_free(name, folder, look, run, [saving.Source(str(path)) for path in paths], check)
    planned = _planned(runs, asked, leave_out_unfit, generate, metric)
    _say_unshared(planned, name)
    if run.dry_run:
        dry_run.show_all(planned, run.as_json, folder, run.part)
        return None
    return _study(name, _made(runs, planned, paths, folder), folder, look, run)


def each(run: RunOptions) -> list[RunOptions]:
    """The run of each data set. Raises ConfigError for none, and for one that is there twice."""
    whole = Path(run.dataset).is_file()
    names = [run.dataset] if whole else [name.strip() for name in split(run.dataset, ",") if name.strip()]
    if not names:
        msg = f"--dataset takes names of data sets, separated by commas; got '{run.dataset}'"
        raise ConfigError(msg)
    return [dataclasses.replace(run, dataset=name) for name in apart("--dataset", names)]


def places(folder: Path, runs: Sequence[RunOptions]) -> list[Path]:
    """Where the trace of each data set goes. Raises ConfigError where two would go to one place."""
    names = [slug(Path(one.dataset).stem if Path(one.dataset).is_file() else one.dataset) for one in runs]
    for name in names:
        if names.count(name) > 1:
            both = " and ".join(one.dataset for one, own in zip(runs, names, strict=True) if own == name)
            msg = f"expected data sets of different names, got {both}, both for {folder / name}; rename a file"
            raise ConfigError(msg)
    return [folder / name / "trace.h5" for name in names]


def _named(run: RunOptions, runs: Sequence[RunOptions]) -> RunOptions:
    """The run as its folder is named: after its data sets, or after how many there are."""
    names = "-".join(slug(one.dataset) for one in runs) if len(runs) <= _MOST_NAMED else f"{len(runs)}-datasets"
    return dataclasses.replace(run, dataset=names)


def _check_free(
    name: str,
    folder: Path,
    look: TracesOptions,
    run: RunOptions,
    sources: Sequence[saving.Source],
    check: Callable[[Path], None],
) -> None:
    """Raise ConfigError where the folder holds files of others, or numbers of other traces or another question."""
    free_figures(folder, [name], look.formats, run.overwrite)
    check(folder)
    saving.check_summary_free(folder / saving.SUMMARY_NAME, sources, name, look.asked, run.overwrite)


def _planned(
    runs: Sequence[RunOptions],
    configs: Sequence[EvictionConfig],
    leave_out_unfit: bool,
    generate: int | None,
    metric: str,
) -> list[Plan]:
    """The plan of each data set, the model opened once. Raises PerturbkvErrors, of a name before anything is opened."""
    from perturbkv.datasets.dataset_registry import check_name

    for one in runs:
        check_name(one.dataset)
    found: list[Plan] = []
    for one in runs:
        files = found[0].files if found else None
        found.append(plan(one, configs, leave_out_unfit, generate, metric, files=files))
    return found


def _say_unshared(planned: Sequence[Plan], name: str) -> None:
    """Note the budgets that no table will show, and the data sets whose prompts are too short for them."""
    held = [dict.fromkeys(str(config.budget) for config in one.run.configs) for one in planned]
    for budget in dict.fromkeys(budget for budgets in held for budget in budgets):
        lack = [one.run.dataset for one, budgets in zip(planned, held, strict=True) if budget not in budgets]
        if lack:
            console.note(
                f"b={budget} stands in no table of {name}, as not all data sets have it: prompts of {', '.join(lack)} "
                "are too short; give data sets of longer prompts a run of their own, or --budget, or lower --window"
            )


def _made(runs: Sequence[RunOptions], planned: Sequence[Plan], paths: Sequence[Path], folder: Path) -> list[Path]:
    """The traces, one after the other, by one model; with --shard the command ends here unless all are whole."""
    from perturbkv.engines import choosing

    with choosing.engine(runs[0].spread, planned) as engine:
        made = [
            measure(run, one, path, engine=engine, folder=folder)
            for run, one, path in zip(runs, planned, paths, strict=True)
        ]
    return planned_run.whole_or_left(made, runs[0].as_json)


def _study(name: str, paths: Sequence[Path], folder: Path, look: TracesOptions, run: RunOptions) -> Study:
    """Raises FailedRunError where no sample of any trace can be looked at; a trace without is left out, and told."""
    from perturbkv.storage.trace.trace_file import read_trace

    held = tuple(read_trace(path) for path in paths)
    study = Study(name, held, folder, look, look.asked, run.as_json, run.overwrite, joined=True)
    if not study.usable:
        failures = {sample: why for one in held for sample, why in one.failures.items()}
        raise FailedRunError(", ".join(map(str, paths)), failures)
    for one in held:
        if not one.ok.any():
            console.note(f"left out: every sample of {one.run.dataset} failed, see {one.source}")
    return study


_METHODS = ",".join(
    [*(f"{policy}:{own}" for policy in ("snapkv", "adakv") for own in ("attention", "two-stage")), "random"]
)
_BUDGETS = ("0.1", "0.2", "0.4")
_NAME = "quality"


@showing(budget=" ".join(_BUDGETS))
@with_options
def quality(
    run: RunOptions,
    look: TracesOptions,
    compare: Annotated[
        str,
        Option(
            metavar="NAMES",
            help="Methods, separated by commas: policy:selection",
            show_default="attention and two-stage of snapkv and adakv, random",
        ),
    ] = _METHODS,
    max_new_tokens: Annotated[
        int | None, Option(metavar="N", help="Tokens of an answer at most", show_default="the data set's own")
    ] = None,
    metric: MetricOption = "",
) -> None:
    """Score the answers from the full and the evicted caches.

    --dataset takes several, separated by commas; each has a trace in a folder of its name. The tables are left as
    quality.tex, .md and .csv. --trace takes finished traces instead.
    """
    if max_new_tokens is not None and max_new_tokens < 1:
        msg = f"--max-new-tokens must be at least 1, got {max_new_tokens}"
        raise ConfigError(msg)
    wanted = run.with_budgets(_BUDGETS)
    study = open_joined(
        _NAME, wanted, look, lambda: wanted.configs(parse_methods(compare)),
        lambda folder: _check(folder, run.overwrite), not run.budget, max_new_tokens, metric,
    )  # fmt: skip
    if study is None:
        return
    from perturbkv.analyses.quality.quality import quality as analyse

    result = analyse(study.usable)
    study.save(result.plot(study.width_mm), result.identity, _NAME)
    study.show(result, {**result.to_dict(), "tables": _save(result, study.folder, run.overwrite)})


def _check(folder: Path, overwrite: bool) -> None:
    """Raise ConfigError where a table would replace a file of somebody else."""
    from perturbkv.analyses.quality.score_tables import COMMENT, CSV, MARKDOWN

    quoted = ",".join(f'"{name}"' for name in CSV)
    for suffix, begins in (("tex", COMMENT), ("md", MARKDOWN), ("csv", quoted)):
        free_text(folder / f"{_NAME}.{suffix}", begins, overwrite)


def _save(result: Quality, folder: Path, overwrite: bool) -> list[str]:
    """Write the tables; returns their paths."""
    _check(folder, overwrite)
    paths = []
    for suffix, text in (("tex", result.to_latex()), ("md", result.to_markdown()), ("csv", result.to_csv())):
        path = folder / f"{_NAME}.{suffix}"
        write_whole(path, lambda stream, text=text: stream.write(text.encode()))  # type: ignore[misc]
        paths.append(str(path))
    return paths
