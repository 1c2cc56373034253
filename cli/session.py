"""Sessions of commands with a result: open a trace or make it, claim the output folder, save, show.

A command that opens a trace or makes one, analyses it, shows and saves the result is a function that returns an
`Analysis`; `analysis` and `analysis_views` make commands of such functions.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perturbkv.cli import console, dry_run, option_refusals, saving
from perturbkv.cli.command_line import copy_signature, fill_groups, split_parameters, typed_options, with_options
from perturbkv.cli.options import FigureOptions, RunOptions
from perturbkv.cli.planned_run import (
    dataset_paths,
    make_traces,
    plan_all,
    run_folder,
    split_datasets,
    warn_of_missing_budgets,
)
from perturbkv.configs import layer_types
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import plural
from perturbkv.errors import ConfigError, FailedRunError, TraceError
from perturbkv.escaping import escape_line
from perturbkv.schema import MEASURED_LAYERS
from perturbkv.storage.output import Claim, OutputFile, OutputFolder

if TYPE_CHECKING:
    from perturbkv.analyses.result import Result
    from perturbkv.models.loading import ModelFiles
    from perturbkv.trace import Trace

    Results = Result | Sequence[Result]


@dataclass
class Session:
    """The traces of a command, its output folder, and the files that it writes there.

    Attributes:
        name: name of the analysis: its key in summary.json, and the beginning of its file names.
        output: the folder of figures and numbers.
        look: format and width of figures, and the analysis' own options.
        as_json: print JSON instead of tables.
        traces: the analysed traces; without any, the result has a JSON file of its own, `<name>.json`.
        joint: several traces may be analysed together, so that JSON has a list of them.
        options: the options of the analysis, as summary.json keeps them.
        source: the origin of a result without traces, as JSON keeps it.
        figures: paths of the figures written so far.
        stored: the traces as they were read; with --budget `traces` has only their configurations of these budgets.
    """

    name: str
    output: OutputFolder
    look: FigureOptions
    as_json: bool
    traces: tuple[Trace, ...] = ()
    joint: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    figures: list[str] = field(default_factory=list)
    stored: tuple[Trace, ...] = ()

    @property
    def trace(self) -> Trace:
        """The first trace."""
        return self.traces[0]

    @property
    def failures(self) -> dict[str, str]:
        """Failed sample -> reason; samples of the second and later traces are named with their data set."""
        later = {
            f"{trace.run.dataset}: {sample}": reason
            for trace in self.traces[1:]
            for sample, reason in trace.failures.items()
        }
        return {**(self.trace.failures if self.traces else {}), **later}

    @property
    def path(self) -> Path:
        """The path of the JSON file: the folder's summary.json, or `<name>.json` of a result without traces."""
        return self.output.path / (saving.SUMMARY_NAME if self.traces else f"{self.name}.json")

    def claim(self, stems: Sequence[str], sources: Sequence[saving.Source] = (), *files: OutputFile) -> Claim:
        """Claim the figures named `stems`, the JSON file and further output files; `sources` are the analysed traces.

        Raises the errors of `OutputFolder.claim`.
        """
        folder = self.output.path
        figures = saving.figure_files(folder, stems, self.look.formats)
        figures += saving.caption_files(folder, stems) if self.look.style != "screen" else []
        if not sources:  # the JSON file replaces only an earlier result of this analysis
            of_analysis = saving.content_test(f'"analysis": "{self.name}"'.encode())
            result = OutputFile(self.path, f"a result of {self.name}", of_analysis)
            return self.output.claim(*figures, *files, result, writer=self.path)
        return self.output.claim(*figures, *files, saving.summary_file(folder, sources, self.name, self.options))

    def draw(self, result: Result, stem: str, method: str = "plot") -> None:
        """Draw a result and write the figure in every chosen format, as `<stem>.<format>` in the output folder.

        Raises ConfigError where the figure has no room at its width; the result is not written then.
        """
        path = self.output.path / stem
        self.figures.extend(saving.draw_figure(result, path, self.look, self.output.overwrite, method))

    def show(
        self, results: Results, document: dict[str, Any] | None = None, failures: Mapping[str, str] | None = None
    ) -> None:
        """Write results to the JSON file and print them; exit with 1 where samples failed.

        `document` is the JSON of all results, by default that of the first one; `failures` maps the failed samples of
        a result without traces to the reasons.
        """
        listed = [results] if not isinstance(results, Sequence) else list(results)
        header, body = self._write_json(listed[0].to_dict() if document is None else document)
        if self.as_json:
            console.print_json({"analysis": self.name, **header, **body})
        else:
            console.print_results(listed, *self._title(listed[0]), explain=self.look.explain)
            console.say(f"written to {self.output.path}")
        failed = self.failures if failures is None else failures
        print_failures(failed)
        if failed:
            raise typer.Exit(1)

    def show_unsaved(self, result: Result) -> None:
        """Print a result of the first trace, as tables or JSON, without writing a file."""
        if self.as_json:
            source = {"trace": self.trace.source, "trace_digest": self.trace.digest}
            console.print_json({"analysis": self.name, **source, **result.to_dict()})
        else:
            console.print_results([result], result.identity.lines()[0], explain=self.look.explain)

    def _write_json(self, numbers: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write the JSON file; return its header, which names the source, and this analysis's entry."""
        if not self.traces:
            header, body = dict(self.source), {**numbers, "figures": self.figures}
            saving.write_json(self.path, {"analysis": self.name, **header, **body})
            return header, body
        headers = [saving.summary_header(trace) for trace in self.stored or self.traces]
        header = {"traces": headers} if self.joint else {**headers[0], "failed": self.failures}
        body = {"asked": dict(self.options), **numbers, "figures": self.figures}
        saving.write_summary(self.path, header, self.name, body, self.output.overwrite)
        return header, body

    def _title(self, result: Result) -> tuple[str, str]:
        """Return a one-line title of the run, and a line on the measured layers, which is empty if all are measured."""
        if not self.traces:
            return result.identity.lines()[0], ""
        run = self.trace.run
        special = f" · {run.scenario}" if run.scenario != "regular" else ""
        special += " · random weights" if run.random_weights else ""
        samples = plural(sum(int(trace.ok.sum()) for trace in self.traces), "sample")
        datasets = ", ".join(dict.fromkeys(trace.run.dataset for trace in self.traces))
        measured = layer_types.describe_measured(self.trace.attrs.get(MEASURED_LAYERS, ""))
        layers = escape_line(f"{measured}; the cache share counts all layers") if measured else ""
        return escape_line(f"{run.model} · {datasets} · {samples}{special}"), layers


def print_failures(failures: Mapping[str, str]) -> None:
    """Print a line per failed sample on stderr; `failures` maps the samples to the reasons."""
    for reason in failures.values():
        console.note(f"failed: {reason}")


@dataclass(frozen=True)
class Analysis:
    """An analysis of one trace or several, and the run that makes the trace where the user names none.

    Attributes:
        name: key in summary.json, and the beginning of the figures' names.
        run: options of the run that makes the trace.
        configs: function that returns the configurations of that run.
        analyse: function from the opened session to the results, or to the results and their JSON document; it saves
            the figures itself where `stems` names them.
        figures: plotting method of the result -> end of the figure's name.
        stems: names of the figures that `analyse` saves.
        command: the command as it is typed, where that is not the name.
        check: function of a finished trace that raises where it lacks what the user asks for.
        generate: tokens generated from every cache and scored; None: as many as the dataset says.
        leave_out_unfit: skip budgets that do not exceed the window, as the user did not choose them.
        files: the model, where it is open already.
        metric: metric that grades answers in place of the dataset's own.
        by_dataset: `run.dataset` names several data sets, each with a trace in a folder of its name.
        options: the options that summary.json keeps, where they are not those of the command.
        outputs: function from the output folder to the further files that `analyse` writes.
        compares_sums: tell, in a dry run, the smallest effect on a ratio of sums of perturbation.
        margin: δ, where the result tells whether these sums are equivalent.
        exit_code: function from a result to the exit code.
        writes: write figures and numbers to files.
    """

    name: str
    run: RunOptions
    configs: Callable[[], Sequence[EvictionConfig]]
    analyse: Callable[[Session], Results | tuple[Results, dict[str, Any]]]
    figures: Mapping[str, str] = field(default_factory=lambda: {"plot": ""})
    stems: Sequence[str] = ()
    command: str = ""
    check: Callable[[Trace], object] = lambda trace: None
    generate: int | None = 0
    leave_out_unfit: bool = False
    files: ModelFiles | None = None
    metric: str = ""
    by_dataset: bool = False
    options: Mapping[str, Any] | None = None
    outputs: Callable[[Path], Sequence[OutputFile]] = lambda folder: ()
    compares_sums: bool = False
    margin: float | None = None
    exit_code: Callable[[Any], int] = lambda result: 0
    writes: bool = True

    @property
    def command_name(self) -> str:
        """The command's name as typed, without `perturbkv`."""
        return self.command or self.name

    def carry_out(self, look: FigureOptions) -> None:
        """Open or make the trace, analyse it, save and show the result; exit with its code. Raises PerturbkvErrors."""
        options = look.summary_options if self.options is None else self.options
        open_traces = _open_finished_traces if look.paths else _open_new_traces
        session = open_traces(self, look, options)
        if session is None:  # a dry run
            return
        analysed = self.analyse(session)
        results, document = analysed if isinstance(analysed, tuple) else (analysed, None)
        if not self.stems:
            for method, end in self.figures.items():
                session.draw(results, f"{self.name}{end}", method)
        if not self.writes:
            session.show_unsaved(results)
            return
        session.show(results, document)
        if code := self.exit_code(results):
            raise typer.Exit(code)


def _open_finished_traces(analysis: Analysis, look: FigureOptions, options: Mapping[str, Any]) -> Session:
    """Return the session of the traces that the user named, reduced to the budgets of a typed --budget.

    `options` are those of the analysis, as summary.json keeps them. Raises PerturbkvErrors.
    """
    run = analysis.run
    option_refusals.check_trace_options(analysis.command_name, run, look.paths[0])
    output = OutputFolder(run.output or look.paths[0].parent, run.overwrite)
    budgets = [Budget.parse(text) for text in run.budget or ()] if "budget" in run.typed_options else []
    if budgets:
        options = {**options, "budget": ", ".join(map(str, budgets))}
    session = Session(analysis.name, output, look, run.as_json, read_traces(look.paths), analysis.by_dataset, options)
    _check_complete(session)
    session.stored = session.traces
    if budgets:
        session.traces = tuple(_select_budgets(trace, budgets) for trace in session.traces)
    analysis.check(session.trace)
    sources = [saving.Source(trace.source, trace.digest) for trace in session.traces]
    _claim(analysis, session, sources if session.joint else sources[:1])
    return session


def _open_new_traces(analysis: Analysis, look: FigureOptions, options: Mapping[str, Any]) -> Session | None:
    """Return the session of the traces that the analysis' run makes; None after a dry run, which prints the plans.

    `options` are those of the analysis, as summary.json keeps them. Raises PerturbkvErrors.
    """
    run = analysis.run
    run.check_inputs()
    runs = split_datasets(run) if analysis.by_dataset else [run]
    folder = run_folder(run, run.output, [one.dataset for one in runs])
    paths = dataset_paths(folder, runs) if analysis.by_dataset else [folder / "trace.h5"]
    session = Session(
        analysis.name, OutputFolder(folder, run.overwrite), look, run.as_json, (), analysis.by_dataset, options
    )
    if not run.dry_run:
        for path in paths:
            OutputFolder(folder, wait=run.wait).claim(writer=path)
        _claim(analysis, session, [saving.Source(str(path)) for path in paths])
    configs = tuple(analysis.configs())
    option_refusals.check_effects(analysis.command_name, configs, *runs)
    planned = plan_all(
        runs, configs, analysis.leave_out_unfit, analysis.generate, analysis.metric, files=analysis.files
    )
    if (step := getattr(look, "step", None) or 0) >= (recorded := planned[0].run.steps):
        tokens = max(len(prompt.token_ids) for prompt in planned[0].prompts)
        fits = tokens + step < int(planned[0].files.config.max_position_embeddings)
        advice = f"; --steps {step + 1} records it" if fits else ""
        raise ConfigError(f"expected a step from 0 to {recorded - 1}, got {step}{advice}")
    if analysis.by_dataset:
        warn_of_missing_budgets(planned, analysis.name)
    if run.dry_run:
        dry_run.show(
            planned, run.as_json, folder, run.parsed_shard, analysis.by_dataset, analysis.compares_sums, analysis.margin
        )
        return None
    session.traces = read_traces(make_traces(runs, planned, paths, folder if analysis.by_dataset else None))
    _check_complete(session)
    return session


def read_traces(paths: Sequence[Path]) -> tuple[Trace, ...]:
    """Return the traces of several files. Raises TraceError."""
    from perturbkv.storage.trace.trace_file import read_trace

    return tuple(read_trace(path) for path in paths)


def _select_budgets(trace: Trace, budgets: Sequence[Budget]) -> Trace:
    """Return a trace with its configurations of these budgets alone. Raises TraceError for a budget that it lacks."""
    known = dict.fromkeys(config.budget for config in trace.run.configs)
    if missing := [budget for budget in budgets if budget not in known]:
        raise TraceError(
            f"expected a --budget of {trace.source} ({', '.join(map(str, known))}), got {missing[0]}; choose among them"
        )
    chosen = trace.sel(where=lambda config: config.budget in budgets)
    return dataclasses.replace(chosen, source=trace.source, digest=trace.digest)


def _claim(analysis: Analysis, session: Session, sources: Sequence[saving.Source]) -> None:
    """Claim the output files of an analysis, if it writes files; `sources` are the analysed traces."""
    if analysis.writes:
        stems = analysis.stems or [f"{analysis.name}{end}" for end in analysis.figures.values()]
        session.claim(stems, sources, *analysis.outputs(session.output.path))


def _check_complete(session: Session) -> None:
    """Raise FailedRunError if no trace has a complete sample; print a note per joint trace without a complete sample.

    Of traces that are not joint, the first one needs a complete sample.
    """
    traces = session.traces if session.joint else session.traces[:1]
    failed = [trace for trace in traces if not trace.ok.any()]
    if len(failed) == len(traces):
        failures = {sample: reason for trace in traces for sample, reason in trace.failures.items()}
        raise FailedRunError(", ".join(trace.source for trace in traces), failures)
    for trace in failed:
        console.note(f"left out: every sample of {trace.run.dataset} failed, see {trace.source}")


def sides_check(names: Sequence[str]) -> Callable[[Trace], object]:
    """Return a function that raises TraceError for a trace without configurations of one of these sides."""

    def check(trace: Trace) -> object:
        from perturbkv.analyses.sides import side_indices

        return [side_indices(trace.run, name) for name in names]

    return check


def analysis(function: Callable[..., Analysis]) -> Callable[..., None]:
    """Return the command that carries out the `Analysis` which `function` makes of the command's options."""

    @functools.wraps(function)
    def command(look: FigureOptions, **options: Any) -> None:
        function(look=look, **options).carry_out(look)

    return with_options(command)


View = Callable[..., Analysis | None]
"""A function of a command's options: it returns an analysis, or shows its own result and returns None."""


def analysis_views(
    default: View, *, flags: Mapping[str, Any], **views: View
) -> Callable[[Callable[[], None]], Callable[..., None]]:
    """Return a decorator that makes a command with several views, named and documented by the decorated function.

    `default` runs where no other view is chosen. Each other view, of `views` by name, is chosen by the option of its
    name: a flag that `flags` annotates, or a parameter of the view. All views have the same dataclasses of options; of
    their own parameters an option of another view is refused.
    """
    functions: dict[str, View] = {"": default, **views}
    groups, _ = split_parameters(default)
    own = {name: split_parameters(function)[1] for name, function in functions.items()}
    switches = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in flags.items()
    ]
    distinct: dict[str, inspect.Parameter] = {}
    for parameter in (parameter for parameters in own.values() for parameter in parameters):
        distinct.setdefault(parameter.name, parameter)

    def call(context: typer.Context, **values: Any) -> None:
        typed = typed_options(context)
        chosen = [name for name in views if values[name] not in (False, None)]
        if len(chosen) > 1:
            both = " and ".join(map(option_refusals.option_flag, chosen))
            raise ConfigError(f"expected one of {both}, got both; give only one of them")
        view = chosen[0] if chosen else ""
        # views may have an option in common with different defaults, of which `values` holds the first view's
        own_options = {
            option.name: values[option.name] if option.name in typed else option.default for option in own[view]
        }
        option_groups = fill_groups(groups, values, typed, own_options)
        known = {name: {*([name] if name else []), *(option.name for option in own[name])} for name in functions}
        option_refusals.check_view_options(view, option_groups["run"], known)
        result = functions[view](**option_groups, **own_options)
        if result is not None:
            result.carry_out(option_groups["look"])

    return lambda command: copy_signature(command, call, groups, [*switches, *distinct.values()])
