"""What all analyses share: open a trace or make it, save figures, write summary.json, say what failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perturbkv.cli import console, dry_run
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.planning import plan
from perturbkv.cli.saving import save_figure
from perturbkv.cli.trace import say_failures
from perturbkv.cli.tracing import make_trace, run_folder
from perturbkv.config import EvictionConfig
from perturbkv.errors import ConfigError
from perturbkv.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.identity import RunIdentity
    from perturbkv.trace import Trace


@dataclass(frozen=True)
class Study:
    """One analysis of one finished trace.

    Attributes:
        name: of the analysis: its command, its key in summary.json.
        trace: what is looked at.
        folder: where figures and summary go.
        look: how figures come out.
        as_json: whether the numbers go to stdout instead of tables.
        figures: paths written so far.
    """

    name: str
    trace: Trace
    folder: Path
    look: LookOptions
    as_json: bool
    figures: list[str] = field(default_factory=list)

    @property
    def width_mm(self) -> int:
        """Printed width of the figures."""
        from perturbkv.figures import style

        return style.COLUMN_MM if self.look.columns == 1 else style.WIDE_MM

    def save(self, drawn: Figure, identity: RunIdentity, stem: str) -> None:
        """Write a figure in every format asked for."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.figures.extend(save_figure(drawn, identity, self.folder / stem, self.look.formats))

    def finish(self, numbers: dict[str, Any], tables: Callable[[], None]) -> None:
        """Write the numbers into summary.json and print them; exit with 1 where samples failed."""
        header = {
            "trace": self.trace.source,
            "trace_digest": self.trace.digest,
            "run": json.loads(self.trace.run.to_json()),
            "failed": dict(self.trace.failures),
        }
        own = {**numbers, "figures": self.figures}
        _write_summary(self.folder / "summary.json", header, self.name, own)
        if self.as_json:
            console.print_json({"analysis": self.name, **header, **own})
        else:
            self._title()
            tables()
            console.say(f"written to {self.folder}")
        say_failures(dict(self.trace.failures))
        if self.trace.failures:
            raise typer.Exit(1)

    def _title(self) -> None:
        from perturbkv.analyses.naming import counted

        run, words = self.trace.run, " · random weights" if self.trace.run.random_weights else ""
        samples = counted(int(self.trace.ok.sum()), "sample")
        console.say(f"{run.model} · {run.dataset} · {samples}{words}", bold=True)


def open_study(
    name: str,
    run: RunOptions,
    look: LookOptions,
    configs: Callable[[], Sequence[EvictionConfig]],
    leave_out_unfit: bool = False,
    generate: int = 0,
) -> Study | None:
    """The study of `look.trace`, or of the trace that `run` makes of `configs`; None after a dry run.

    `leave_out_unfit` skips budgets that do not exceed the window, for budgets that the user did not choose; `generate`
    tokens are generated from every cache and scored. Raises PerturbkvErrors.
    """
    from perturbkv.store import read_trace

    if look.trace is not None:
        return Study(name, read_trace(look.trace), run.output or look.trace.parent, look, run.as_json)
    planned = plan(run, configs(), leave_out_unfit, generate)
    if look.step >= run.step_count:
        msg = f"expected a step from 0 to {run.step_count - 1}, got {look.step}; --steps {look.step + 1} records it"
        raise ConfigError(msg)
    if run.dry_run:
        dry_run.show(planned, run.as_json)
        return None
    folder = run_folder(run)
    finished = read_trace(make_trace(run, planned, folder / "trace.h5"))
    return Study(name, finished, folder, look, run.as_json)


def _write_summary(path: Path, header: dict[str, Any], name: str, numbers: dict[str, Any]) -> None:
    """Put one analysis into summary.json; those of the same trace that stand there already stay."""
    others: dict[str, Any] = {}
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["trace_digest"] == header["trace_digest"]:
                others = dict(before.get("analyses", {}))
        except (ValueError, KeyError, TypeError):
            msg = f"expected a summary of ours at {path}, got another file; move it away or give another --output"
            raise ConfigError(msg) from None
    document = {**header, "analyses": {**others, name: numbers}}
    write_whole(path, lambda stream: stream.write(console.as_json(document).encode()))
