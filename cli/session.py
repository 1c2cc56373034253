"""A command's session: open a trace or make it, read answers, save figures and numbers, show the result.

What all analyses share: open a trace or make it, save figures, leave numbers, say what failed.

Where a result that is of no trace is left: figures and one JSON file under its name, and the numbers on stdout.

What commands share that look at a finished file of answers: its place, where results go, what JSON says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from perturbkv.analyses.json_values import run_object
from perturbkv.cli import console, dry_run, option_effects, saving
from perturbkv.cli.commands.trace import say_failures
from perturbkv.cli.options import FigureOptions, JsonOption, LookOptions, RunOptions
from perturbkv.cli.planned_run import make_trace, plan, run_folder
from perturbkv.cli.saving import free, free_figures, reachable, save_figure
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, FailedRunError
from perturbkv.escaping import line
from perturbkv.schema import MEASURED
from perturbkv.storage.atomic_files import write_whole
from perturbkv.storage.output import WAIT_ALONE, Lock
from perturbkv.user_files import FileKind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.identity import RunIdentity
    from perturbkv.analyses.result import Result
    from perturbkv.models.loading import ModelFiles
    from perturbkv.storage.answers_file import WrittenAnswers
    from perturbkv.trace import Trace


@dataclass(frozen=True)
class Study:
    """One analysis of finished traces, of one in most cases.

    Attributes:
        name: of the analysis: its command, its key in summary.json.
        traces: what is looked at.
        folder: where figures and summary go.
        look: how figures come out.
        asked: the analysis' own options.
        as_json: whether the numbers go to stdout instead of tables.
        overwrite: whether files of somebody else are replaced.
        joined: whether it may be of several, so that all that is said of them is a list.
        figures: paths written so far.
    """

    name: str
    traces: tuple[Trace, ...]
    folder: Path
    look: FigureOptions
    asked: Mapping[str, Any]
    as_json: bool
    overwrite: bool = False
    joined: bool = False
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
        """Printed width of the figures."""
        return self.look.width_mm

    @property
    def failures(self) -> dict[str, str]:
        """Failed sample -> why; one of a further trace stands under its data set too."""
        more = {f"{one.run.dataset}: {name}": why for one in self.traces[1:] for name, why in one.failures.items()}
        return {**self.trace.failures, **more}

    def save(self, drawn: Figure, identity: RunIdentity, stem: str) -> None:
        """Write a figure in every format asked for."""
        self.figures.extend(save_figure(drawn, identity, self.folder / stem, self.look.formats, self.overwrite))

    def show(self, results: Result | Sequence[Result], document: dict[str, Any] | None = None) -> None:
        """Write results into summary.json and print them: what to conclude, then the run, tables, and notes once.

        `document` is what JSON holds of them; left out: what the first one says. Exits with 1 where samples failed.
        """
        from perturbkv.analyses.result import Result, once

        held = [results] if isinstance(results, Result) else list(results)

        def shown() -> None:
            for one in held:
                console.say(one.conclusion())
            console.say("")
            self._title()
            for part in [part for one in held for part in one.tables()]:
                console.part(part)
            for part in held[0].stored():
                console.part(part)
            console.say(once(held))

        self._leave(held[0].to_dict() if document is None else document, shown)

    def _leave(self, numbers: dict[str, Any], shown: Callable[[], None]) -> None:
        """The numbers in summary.json, and on stdout as JSON or as `shown` prints them."""
        headers = [saving.summary_header(trace) for trace in self.traces]
        told = {"traces": headers} if self.joined else {**headers[0], "failed": self.failures}
        own = {"asked": dict(self.asked), **numbers, "figures": self.figures}
        saving.write_summary(self.folder / saving.SUMMARY_NAME, told, self.name, own, self.overwrite)
        if self.as_json:
            console.print_json({"analysis": self.name, **told, **own})
        else:
            shown()
            console.say(f"written to {self.folder}")
        say_failures(self.failures)
        if self.failures:
            raise typer.Exit(1)

    def _title(self) -> None:
        from perturbkv.analyses.pairing import counted

        run = self.trace.run
        words = f" · {run.scenario}" if run.scenario != "regular" else ""
        words += " · random weights" if run.random_weights else ""
        samples = counted(sum(int(trace.ok.sum()) for trace in self.traces), "sample")
        datasets = ", ".join(dict.fromkeys(trace.run.dataset for trace in self.traces))
        console.say(line(f"{run.model} · {datasets} · {samples}{words}"), bold=True)
        if measured := self.trace.attrs.get(MEASURED):
            console.say(line(f"layers {measured} are measured; held / full is of their entries"))


def open_study(
    name: str,
    run: RunOptions,
    look: LookOptions,
    configs: Callable[[], Sequence[EvictionConfig]],
    leave_out_unfit: bool = False,
    generate: int | None = 0,
    stems: Sequence[str] = (),
    files: ModelFiles | None = None,
) -> Study | None:
    """The study of `look.trace`, or of the trace that `run` makes of `configs`; None after a dry run.

    `leave_out_unfit` skips budgets that do not exceed the window, for budgets that the user did not choose; `generate`
    tokens are generated from every cache and scored, None: as many as the dataset says; `stems` are names of its
    figures, by default its own; `files` the model, where it was opened already. Raises PerturbkvErrors, all that can be
    known before a model is loaded before it is.
    """
    if look.trace is not None:
        option_effects.check_finished(name, run, look.trace)
        return _of_finished(name, run, look, look.trace, stems or [name])
    asked = tuple(configs())
    option_effects.check(name, run, asked)
    folder = run_folder(run, run.output)
    path = folder / "trace.h5"
    if not run.dry_run:
        reachable(path, run.wait)
        _check_free(folder, name, look, run, path, stems or [name])
    planned = plan(run, asked, leave_out_unfit, generate, files=files)
    if look.step >= run.step_count:
        tokens = max(len(prompt.token_ids) for prompt in planned.prompts)
        fits = tokens + look.step < int(planned.files.config.max_position_embeddings)
        more = f"; --steps {look.step + 1} records it" if fits else ""
        msg = f"expected a step from 0 to {run.step_count - 1}, got {look.step}{more}"
        raise ConfigError(msg)
    if run.dry_run:
        dry_run.show(planned, run.as_json, folder, run.part)
        return None
    return _study(name, make_trace(run, planned, path), folder, look, run)


def _of_finished(name: str, run: RunOptions, look: LookOptions, path: Path, stems: Sequence[str]) -> Study:
    folder = run.output or path.parent
    study = _study(name, path, folder, look, run)
    _check_free(folder, name, look, run, path, stems, study.trace.digest)
    return study


def _study(name: str, path: Path, folder: Path, look: LookOptions, run: RunOptions) -> Study:
    """Raises FailedRunError where no sample of the trace can be looked at."""
    from perturbkv.storage.trace.trace_file import read_trace

    finished = read_trace(path)
    if not finished.ok.any():
        raise FailedRunError(str(path), finished.failures)
    return Study(name, (finished,), folder, look, look.question, run.as_json, run.overwrite)


def _check_free(
    folder: Path, name: str, look: LookOptions, run: RunOptions, trace: Path, stems: Sequence[str], digest: str = ""
) -> None:
    """Raise ConfigError where the folder holds figures and numbers of another trace, or of another question to it."""
    free_figures(folder, stems, look.formats, run.overwrite)
    source = saving.Source(str(trace), digest)
    saving.check_summary_free(folder / saving.SUMMARY_NAME, [source], name, look.question, run.overwrite)


_KIND = FileKind("results of ours", ConfigError)


@dataclass(frozen=True)
class Leaving:
    """A result's place.

    Attributes:
        name: of the analysis, and of its files.
        folder: where they go.
        look: how figures come out.
        overwrite: whether files of somebody else are replaced.
        as_json: whether the numbers go to stdout instead of tables.
    """

    name: str
    folder: Path
    look: FigureOptions
    overwrite: bool
    as_json: bool

    @property
    def path(self) -> Path:
        """The JSON file."""
        return self.folder / f"{self.name}.json"

    def check_free(self) -> None:
        """What an earlier call left there may be replaced.

        Raises OutputError where nothing can be written, ConfigError for a file that is none of ours.
        """
        free_figures(self.folder, [self.name], self.look.formats, self.overwrite)
        free(self.path, self.overwrite or self._is_ours())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the place while the block makes what goes there. Raises as `check_free`."""
        self.check_free()
        with Lock(self.path, advice=WAIT_ALONE):
            yield

    def leave(self, result: Result, about: Mapping[str, Any]) -> None:
        """Figures and JSON as files, `about` before the result's own numbers; and the numbers on stdout."""
        drawn, formats = result.plot(self.look.width_mm), self.look.formats
        figures = save_figure(drawn, result.identity, self.folder / self.name, formats, self.overwrite)
        document = {"analysis": self.name, **about, **result.to_dict(), "figures": figures}
        write_whole(self.path, lambda stream: stream.write(console.as_json(document).encode()))
        if self.as_json:
            console.print_json(document)
            return
        console.result(result, result.identity.lines()[0])
        console.say(f"written to {self.folder}")

    def _is_ours(self) -> bool:
        if not self.path.is_file():
            return False
        try:
            found = _KIND.read_json(self.path)
        except ConfigError:
            return False
        return isinstance(found, dict) and found.get("analysis") == self.name


_REQUIRED: Any = ...
"""What Typer asks for: a field behind others with defaults needs one of its own."""


@dataclass(frozen=True)
class AnswerOptions(FigureOptions):
    """Which answers, and where what is found of them goes."""

    file: Annotated[Path, Argument(help="generation.jsonl of perturbkv generate", show_default=False)] = _REQUIRED
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="PATH", help="Folder", show_default="the file's")
    ] = None
    overwrite: Annotated[bool, Option("--overwrite", help="Replace what is there of the same name")] = False
    as_json: JsonOption = False
    typed: frozenset[str] = frozenset()

    @property
    def folder(self) -> Path:
        """Where results go."""
        return self.output or self.file.parent

    def leaving(self, name: str) -> Leaving:
        """Where what an analysis of this name finds is left."""
        return Leaving(name, self.folder, self, self.overwrite, self.as_json)


def about(answers: WrittenAnswers) -> dict[str, Any]:
    """What JSON says of the answers that were looked at."""
    return {"answers": answers.source, "answers_digest": answers.digest, "run": run_object(answers.run)}
