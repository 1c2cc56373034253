"""One session for every command with a result: open a trace or make it, claim the output folder, save, show.

A command of the shape "a trace in or measured, analyse, show, save" is a function that returns an `Analysis`;
`analysis` and `analysis_views` make commands of such functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perturbkv.cli import console, dry_run, option_refusals, saving
from perturbkv.cli.command_line import copy_signature, fill_groups, split_parameters, typed_options
from perturbkv.cli.options import FigureOptions, RunOptions
from perturbkv.cli.planned_run import dataset_paths, each_dataset, make_traces, plan_all, run_folder, warn_of_gaps
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, FailedRunError
from perturbkv.escaping import escape_line
from perturbkv.schema import MEASURED_LAYERS
from perturbkv.storage.output import Claim, OutputFile, OutputFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.identity import RunIdentity
    from perturbkv.analyses.result import Result
    from perturbkv.models.loading import ModelFiles
    from perturbkv.pipeline.run.plan import Plan
    from perturbkv.trace import Trace

    Results = Result | Sequence[Result]


@dataclass
class Session:
    """The traces of a command, its output folder, and the files that it writes there.

    Attributes:
        name: name of the analysis: its key in summary.json, and the beginning of its file names.
        output: the folder of figures and numbers.
        look: format and width of figures, and the analysis' own options.
        as_json: whether the numbers go to stdout instead of tables.
        traces: the analysed traces; without any, the result has a JSON file of its own, `<name>.json`.
        joint: whether several traces may be analysed together, so that JSON has a list of them.
        options: the options of the analysis, as summary.json keeps them.
        source: where a result without traces comes from, as JSON keeps it.
        figures: paths written so far.
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

    @property
    def trace(self) -> Trace:
        """The only trace, or the first."""
        return self.traces[0]

    @property
    def usable(self) -> tuple[Trace, ...]:
        """The traces that hold a complete sample."""
        return tuple(trace for trace in self.traces if trace.ok.any())

    @property
    def width_mm(self) -> int:
        """Printed width of the figures, mm."""
        return self.look.width_mm

    @property
    def failures(self) -> dict[str, str]:
        """Failed sample -> why; samples of a second and later trace are named with their data set."""
        more = {f"{one.run.dataset}: {name}": why for one in self.traces[1:] for name, why in one.failures.items()}
        return {**(self.trace.failures if self.traces else {}), **more}

    @property
    def path(self) -> Path:
        """The JSON file."""
        return self.output.path / (saving.SUMMARY_NAME if self.traces else f"{self.name}.json")

    def claim(self, stems: Sequence[str], sources: Sequence[saving.Source] = (), *more: OutputFile) -> Claim:
        """Claim the output files of figures, numbers and more; `sources` are the analysed traces.

        Raises the errors of `OutputFolder.claim`.
        """
        folder = self.output.path
        figures = saving.figure_files(folder, stems, self.look.formats)
        if not sources:
            path = folder / f"{self.name}.json"
            return self.output.claim(*figures, *more, saving.result_file(path, self.name), writer=path)
        return self.output.claim(*figures, *more, saving.summary_file(folder, sources, self.name, self.options))

    def save(self, figure: Figure, identity: RunIdentity, stem: str) -> None:
        """Write a figure in every chosen format."""
        path = self.output.path / stem
        self.figures.extend(saving.save_figure(figure, identity, path, self.look.formats, self.output.overwrite))

    def show(
        self, results: Results, document: dict[str, Any] | None = None, failures: Mapping[str, str] | None = None
    ) -> None:
        """Write results to the JSON file and print them; exit with 1 where samples failed.

        `document` is their content in JSON, by default that of the first one; `failures` are the failed samples of a
        result without traces.
        """
        listed = [results] if not isinstance(results, Sequence) else list(results)
        header, body = self._write(listed[0].to_dict() if document is None else document)
        if self.as_json:
            console.print_json({"analysis": self.name, **header, **body})
        else:
            console.result(listed, *self._title(listed[0]), explain=self.look.explain)
            console.say(f"written to {self.output.path}")
        failed = self.failures if failures is None else failures
        say_failures(failed)
        if failed:
            raise typer.Exit(1)

    def show_alone(self, result: Result) -> None:
        """Print a result of one trace without writing a file."""
        if self.as_json:
            source = {"trace": self.trace.source, "trace_digest": self.trace.digest}
            console.print_json({"analysis": self.name, **source, **result.to_dict()})
        else:
            console.result([result], result.identity.lines()[0], explain=self.look.explain)

    def _write(self, numbers: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write the JSON file; return its header on the source and its numbers of the analysis."""
        if not self.traces:
            header, body = dict(self.source), {**numbers, "figures": self.figures}
            saving.write_json(self.path, {"analysis": self.name, **header, **body})
            return header, body
        headers = [saving.summary_header(trace) for trace in self.traces]
        header = {"traces": headers} if self.joint else {**headers[0], "failed": self.failures}
        body = {"asked": dict(self.options), **numbers, "figures": self.figures}
        saving.write_summary(self.path, header, self.name, body, self.output.overwrite)
        return header, body

    def _title(self, result: Result) -> tuple[str, str]:
        """Return the run in one line, and a line on the measured layers where they are not all."""
        from perturbkv.analyses.pairing import plural

        if not self.traces:
            return result.identity.lines()[0], ""
        run = self.trace.run
        words = f" · {run.scenario}" if run.scenario != "regular" else ""
        words += " · random weights" if run.random_weights else ""
        samples = plural(sum(int(trace.ok.sum()) for trace in self.traces), "sample")
        datasets = ", ".join(dict.fromkeys(trace.run.dataset for trace in self.traces))
        measured = self.trace.attrs.get(MEASURED_LAYERS)
        layers = escape_line(f"layers {measured} are measured; held / full is of their entries") if measured else ""
        return escape_line(f"{run.model} · {datasets} · {samples}{words}"), layers


def say_failures(failures: Mapping[str, str]) -> None:
    """Print one line per failed sample on stderr."""
    for reason in failures.values():
        console.note(f"failed: {reason}")


@dataclass(frozen=True)
class Analysis:
    """An analysis of one trace or several, and the run that makes the trace where none is given.

    Attributes:
        name: key in summary.json, and the beginning of the figures' names.
        run: options of the run that makes the trace.
        configs: returns the configurations of that run.
        answer: maps the opened session to the results; it saves figures itself where `stems` names them.
        figures: method of the result that draws -> end of the figure's name.
        stems: names of figures that `answer` saves.
        command: the command as it is typed, where that is not the name.
        generate: tokens generated from every cache and scored; None: as many as the dataset says.
        leave_out_unfit: whether budgets that do not exceed the window are skipped, which the user did not choose.
        files: the model, where it was opened already.
        metric: grades answers instead of the dataset's own.
        by_dataset: whether `run.dataset` names several data sets, each with a trace in a folder of its name.
        options: the options that summary.json keeps, where they are not those of the command.
        outputs: returns further files that `answer` writes into a folder.
        dry_note: a note of a dry run, beside the plan.
        exit_code: returns the exit code of a result.
        writes: whether figures and numbers are written to files.
    """

    name: str
    run: RunOptions
    configs: Callable[[], Sequence[EvictionConfig]]
    answer: Callable[[Session], Results | tuple[Results, dict[str, Any]]]
    figures: Mapping[str, str] = field(default_factory=lambda: {"plot": ""})
    stems: Sequence[str] = ()
    command: str = ""
    generate: int | None = 0
    leave_out_unfit: bool = False
    files: ModelFiles | None = None
    metric: str = ""
    by_dataset: bool = False
    options: Mapping[str, Any] | None = None
    outputs: Callable[[Path], Sequence[OutputFile]] = lambda folder: ()
    dry_note: str = ""
    exit_code: Callable[[Any], int] = lambda result: 0
    writes: bool = True

    @property
    def command_name(self) -> str:
        """The command as it is typed."""
        return self.command or self.name

    @property
    def all_stems(self) -> list[str]:
        """The names of all figures, without the format."""
        return list(self.stems) or [f"{self.name}{end}" for end in self.figures.values()]

    def carry_out(self, look: FigureOptions) -> None:
        """Open or make the trace, analyse, save, show; exit with the code of `exit_code`. Raises PerturbkvErrors."""
        session = open_session(self, look)
        if session is None:
            return
        answer = self.answer(session)
        results, document = answer if isinstance(answer, tuple) else (answer, None)
        if not self.stems:
            for method, end in self.figures.items():
                figure = getattr(results, method)(session.width_mm)
                session.save(figure, results.identity, f"{self.name}{end}")
        if not self.writes:
            session.show_alone(results)
            return
        session.show(results, document)
        if code := self.exit_code(results):
            raise typer.Exit(code)


def open_session(analysis: Analysis, look: FigureOptions) -> Session | None:
    """Return the session of finished traces, or of the traces that the run of the analysis makes; None after a dry run.

    Raises PerturbkvErrors, before a model is loaded wherever possible.
    """
    run, options = analysis.run, look.summary_options if analysis.options is None else analysis.options
    if look.paths:
        option_refusals.check_finished(analysis.command_name, run, look.paths[0])
        output = OutputFolder(run.output or look.paths[0].parent, run.overwrite)
        session = Session(
            analysis.name, output, look, run.as_json, read_traces(look.paths), analysis.by_dataset, options
        )
        _check_complete(session)
        sources = [saving.Source(trace.source, trace.digest) for trace in session.traces]
        _claim(analysis, session, sources if session.joint else sources[:1])
        return session
    configs = tuple(analysis.configs())
    runs = each_dataset(run) if analysis.by_dataset else [run]
    option_refusals.check_all(analysis.command_name, runs, configs)
    folder = run_folder(run, run.output, [one.dataset for one in runs])
    paths = dataset_paths(folder, runs) if analysis.by_dataset else [folder / "trace.h5"]
    session = Session(
        analysis.name, OutputFolder(folder, run.overwrite), look, run.as_json, (), analysis.by_dataset, options
    )
    if not run.dry_run:
        for path in paths:
            OutputFolder(folder, wait=run.wait).claim(writer=path)
        _claim(analysis, session, [saving.Source(str(path)) for path in paths])
    planned = plan_all(
        runs, configs, analysis.leave_out_unfit, analysis.generate, analysis.metric, files=analysis.files
    )
    _check_step(getattr(look, "step", 0), run, planned[0])
    if analysis.by_dataset:
        warn_of_gaps(planned, analysis.name)
    if run.dry_run:
        _show_plans(analysis, planned, folder)
        return None
    session.traces = read_traces(make_traces(runs, planned, paths, folder if analysis.by_dataset else None))
    _check_complete(session)
    return session


def read_traces(paths: Sequence[Path]) -> tuple[Trace, ...]:
    """Return finished traces. Raises TraceError."""
    from perturbkv.storage.trace.trace_file import read_trace

    return tuple(read_trace(path) for path in paths)


def _claim(analysis: Analysis, session: Session, sources: Sequence[saving.Source]) -> None:
    if analysis.writes:
        session.claim(analysis.all_stems, sources, *analysis.outputs(session.output.path))


def _check_complete(session: Session) -> None:
    """Raise FailedRunError where no sample is complete; note each of several traces that has none."""
    if not session.usable or not (session.joint or session.trace.ok.any()):
        traces = session.traces if session.joint else session.traces[:1]
        failures = {sample: why for one in traces for sample, why in one.failures.items()}
        raise FailedRunError(", ".join(one.source for one in traces), failures)
    if session.joint:
        for one in session.traces:
            if not one.ok.any():
                console.note(f"left out: every sample of {one.run.dataset} failed, see {one.source}")


def _check_step(step: int, run: RunOptions, planned: Plan) -> None:
    """Raise ConfigError for a decode step that the run does not measure."""
    if step < run.step_count:
        return
    tokens = max(len(prompt.token_ids) for prompt in planned.prompts)
    fits = tokens + step < int(planned.files.config.max_position_embeddings)
    more = f"; --steps {step + 1} records it" if fits else ""
    msg = f"expected a step from 0 to {run.step_count - 1}, got {step}{more}"
    raise ConfigError(msg)


def _show_plans(analysis: Analysis, planned: Sequence[Plan], folder: Path) -> None:
    run = analysis.run
    if analysis.by_dataset:
        dry_run.show_all(planned, run.as_json, folder, run.parsed_shard)
    else:
        dry_run.show(planned[0], run.as_json, folder, run.parsed_shard)
    if analysis.dry_note:
        console.note(analysis.dry_note)


def analysis(function: Callable[..., Analysis]) -> Callable[..., None]:
    """Return the command of a function that maps `run`, `look` and its own options to an `Analysis`."""
    groups, own = split_parameters(function)

    def call(context: typer.Context, **values: Any) -> None:
        own_options = {parameter.name: values[parameter.name] for parameter in own}
        chosen = fill_groups(groups, values, typed_options(context), own_options)
        function(**chosen, **own_options).carry_out(chosen["look"])

    return copy_signature(function, call, groups, own)


View = Callable[..., Analysis | None]


def analysis_views(
    default: View, *, flags: Mapping[str, Any], help: Callable[[], None], **views: View
) -> Callable[..., None]:
    """Return a command with several views, each a function as `analysis` takes it, or one that shows its own result.

    Each view but the default is chosen by the option of its name: a flag that `flags` annotates, or a parameter of the
    view. An option of another view is refused. `help` has the name and the docstring of the command.
    """
    functions: dict[str, View] = {"": default, **views}
    groups, _ = split_parameters(default)
    own = {name: split_parameters(function)[1] for name, function in functions.items()}
    switches = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in flags.items()
    ]
    merged = {one.name: one for parameters in reversed(list(own.values())) for one in parameters}
    names = dict.fromkeys(one.name for parameters in own.values() for one in parameters)
    parameters = [*switches, *(merged[name] for name in names)]

    def call(context: typer.Context, **values: Any) -> None:
        typed = typed_options(context)
        view = _chosen_view([name for name in views if values[name] not in (False, None)])
        own_options = {one.name: values[one.name] if one.name in typed else one.default for one in own[view]}
        chosen = fill_groups(groups, values, typed, own_options)
        known = {name: {*([name] if name else []), *(one.name for one in own[name])} for name in functions}
        option_refusals.check_view(view, chosen["run"], known)
        result = functions[view](**chosen, **own_options)
        if result is not None:
            result.carry_out(chosen["look"])

    return copy_signature(help, call, groups, parameters)


def _chosen_view(chosen: Sequence[str]) -> str:
    """Return the view of a command line, '' where none is chosen. Raises ConfigError for two."""
    if len(chosen) > 1:
        msg = (
            f"expected one of {' and '.join(map(option_refusals.option_flag, chosen))}, got both; give only one of them"
        )
        raise ConfigError(msg)
    return chosen[0] if chosen else ""
