"""What all analyses share: open a trace or make it, save figures, write summary.json, say what failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perturbkv.cli import console, dry_run, effects
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.planning import plan
from perturbkv.cli.saving import free_figures, reachable, save_figure
from perturbkv.cli.trace import say_failures
from perturbkv.cli.tracing import make_trace, run_folder
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, FailedRunError
from perturbkv.reading import FileKind
from perturbkv.storage.files import write_whole
from perturbkv.storage.lock import Lock
from perturbkv.storage.places import check_place
from perturbkv.visible import line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.identity import RunIdentity
    from perturbkv.analyses.result import Result
    from perturbkv.trace import Trace

_SUMMARY = FileKind("a summary of ours", ConfigError, hint="move it away or give another --output")


@dataclass(frozen=True)
class Study:
    """One analysis of one finished trace.

    Attributes:
        name: of the analysis: its command, its key in summary.json.
        trace: what is looked at.
        folder: where figures and summary go.
        look: how figures come out.
        as_json: whether the numbers go to stdout instead of tables.
        overwrite: whether files of somebody else are replaced.
        figures: paths written so far.
    """

    name: str
    trace: Trace
    folder: Path
    look: LookOptions
    as_json: bool
    overwrite: bool = False
    figures: list[str] = field(default_factory=list)

    @property
    def width_mm(self) -> int:
        """Printed width of the figures."""
        return self.look.width_mm

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
            console.say(once(held))

        self._leave(held[0].to_dict() if document is None else document, shown)

    def _leave(self, numbers: dict[str, Any], shown: Callable[[], None]) -> None:
        """The numbers in summary.json, and on stdout as JSON or as `shown` prints them."""
        from perturbkv.analyses.objects import run_object

        header = {
            "trace": self.trace.source,
            "trace_digest": self.trace.digest,
            "run": run_object(self.trace.run),
            "failed": dict(self.trace.failures),
        }
        own = {"asked": asked(self.look), **numbers, "figures": self.figures}
        _write_summary(self.folder / "summary.json", header, self.name, own, self.overwrite)
        if self.as_json:
            console.print_json({"analysis": self.name, **header, **own})
        else:
            shown()
            console.say(f"written to {self.folder}")
        say_failures(dict(self.trace.failures))
        if self.trace.failures:
            raise typer.Exit(1)

    def _title(self) -> None:
        from perturbkv.analyses.naming import counted

        run, words = self.trace.run, " · random weights" if self.trace.run.random_weights else ""
        samples = counted(int(self.trace.ok.sum()), "sample")
        console.say(line(f"{run.model} · {run.dataset} · {samples}{words}"), bold=True)


def open_study(
    name: str,
    run: RunOptions,
    look: LookOptions,
    configs: Callable[[], Sequence[EvictionConfig]],
    leave_out_unfit: bool = False,
    generate: int | None = 0,
    stems: Sequence[str] = (),
) -> Study | None:
    """The study of `look.trace`, or of the trace that `run` makes of `configs`; None after a dry run.

    `leave_out_unfit` skips budgets that do not exceed the window, for budgets that the user did not choose; `generate`
    tokens are generated from every cache and scored, with None as many as the dataset says; `stems` are names of its
    figures, by default its own. Raises PerturbkvErrors, all that can be known before a model is loaded before it is.
    """
    if look.trace is not None:
        effects.check_finished(name, run, look.trace)
        return _of_finished(name, run, look, look.trace, stems or [name])
    asked = tuple(configs())
    effects.check(name, run, asked)
    folder = run_folder(run, run.output)
    path = folder / "trace.h5"
    if not run.dry_run:
        reachable(path, run.wait)
        _check_free(folder, name, look, run, path, stems or [name])
    planned = plan(run, asked, leave_out_unfit, generate)
    if look.step >= run.step_count:
        tokens = max(len(prompt.token_ids) for prompt in planned.prompts)
        fits = tokens + look.step < int(planned.files.config.max_position_embeddings)
        more = f"; --steps {look.step + 1} records it" if fits else ""
        msg = f"expected a step from 0 to {run.step_count - 1}, got {look.step}{more}"
        raise ConfigError(msg)
    if run.dry_run:
        dry_run.show(planned, run.as_json)
        return None
    return _study(name, make_trace(run, planned, path), folder, look, run)


def _of_finished(name: str, run: RunOptions, look: LookOptions, path: Path, stems: Sequence[str]) -> Study:
    folder = run.output or path.parent
    study = _study(name, path, folder, look, run)
    _check_free(folder, name, look, run, path, stems, study.trace.digest)
    return study


def _study(name: str, path: Path, folder: Path, look: LookOptions, run: RunOptions) -> Study:
    """Raises FailedRunError where no sample of the trace can be looked at."""
    from perturbkv.storage.trace_file import read_trace

    finished = read_trace(path)
    if not finished.ok.any():
        raise FailedRunError(str(path), finished.failures)
    return Study(name, finished, folder, look, run.as_json, run.overwrite)


def _check_free(
    folder: Path, name: str, look: LookOptions, run: RunOptions, trace: Path, stems: Sequence[str], digest: str = ""
) -> None:
    """Raise ConfigError where the folder holds figures and numbers of another trace, or of another question to it.

    The same question replaces its old answer, and so does one that only adds to it.
    """
    path = folder / "summary.json"
    check_place(path)
    free_figures(folder, stems, look.formats, run.overwrite)
    if run.overwrite or not path.exists():
        return
    before = _read_summary(path)
    if before["trace_digest"] != digest and Path(before["trace"]).resolve() != trace.resolve():
        msg = f"{path} is of another trace, {before['trace']}; give another --output, or --overwrite to replace it"
        raise ConfigError(msg)
    old, new = before["analyses"].get(name, {}).get("asked"), asked(look)
    for option in new if old is not None else ():
        if old.get(option) not in (new[option], False):
            said = f"--{option.replace('_', '-')}"
            msg = (
                f"{path} holds {name} with {said} {old.get(option)}, not {new[option]}; give another --output, or "
                "--overwrite to replace its numbers and figures"
            )
            raise ConfigError(msg)


def asked(look: LookOptions) -> dict[str, Any]:
    """What an analysis was asked, as summary.json keeps it: its own options, and the step."""
    return {**look.asked, "step": look.step}


def _write_summary(path: Path, header: dict[str, Any], name: str, numbers: dict[str, Any], overwrite: bool) -> None:
    """Put one analysis into summary.json; those of the same trace that stand there already stay.

    Analyses that end at the same time wait for each other. Raises ConfigError for a file that is no summary of ours,
    unless `overwrite` allows to replace it.
    """
    with Lock(path, wait=True):
        others: dict[str, Any] = {}
        if path.exists():
            with suppress(*[ConfigError] if overwrite else []):
                before = _read_summary(path)
                others = before["analyses"] if before["trace_digest"] == header["trace_digest"] else {}
        document = {**header, "analyses": {**others, name: numbers}}
        write_whole(path, lambda stream: stream.write(console.as_json(document).encode()))


def _read_summary(path: Path) -> dict[str, Any]:
    """A summary of ours: its trace, its digest, its analyses. Raises ConfigError for any other file."""
    before = _SUMMARY.read_json(path)
    told = {name: before.get(name) for name in ("trace", "trace_digest", "analyses")} if _is_object(before) else {}
    texts, analyses = [told.get("trace"), told.get("trace_digest")], told.get("analyses")
    if not all(isinstance(text, str) for text in texts) or not _is_object(analyses, _is_analysis):
        raise _SUMMARY.refusal(path, "another document")
    return told


def _is_object(value: Any, holds: Callable[[Any], bool] = lambda value: True) -> bool:
    return isinstance(value, dict) and all(map(holds, value.values()))


def _is_analysis(value: Any) -> bool:
    return _is_object(value) and _is_object(value.get("asked", {}))
