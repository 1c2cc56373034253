"""What all analyses share: open a trace or make it, save figures, leave numbers, say what failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perturbkv.cli import console, dry_run, option_effects, summary
from perturbkv.cli.commands.trace import say_failures
from perturbkv.cli.figure_options import FigureOptions
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.planned_run import make_trace, run_folder
from perturbkv.cli.planning import plan
from perturbkv.cli.saving import free_figures, reachable, save_figure
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, FailedRunError
from perturbkv.schema import MEASURED
from perturbkv.visible import line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.identity import RunIdentity
    from perturbkv.analyses.result import Result
    from perturbkv.models.loading import ModelFiles
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
        from perturbkv.analyses.result import Result
        from perturbkv.analyses.several import once

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
        headers = [summary.header(trace) for trace in self.traces]
        told = {"traces": headers} if self.joined else {**headers[0], "failed": self.failures}
        own = {"asked": dict(self.asked), **numbers, "figures": self.figures}
        summary.write(self.folder / summary.NAME, told, self.name, own, self.overwrite)
        if self.as_json:
            console.print_json({"analysis": self.name, **told, **own})
        else:
            shown()
            console.say(f"written to {self.folder}")
        say_failures(self.failures)
        if self.failures:
            raise typer.Exit(1)

    def _title(self) -> None:
        from perturbkv.analyses.naming import counted

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
    source = summary.Source(str(trace), digest)
    summary.check_free(folder / summary.NAME, [source], name, look.question, run.overwrite)
