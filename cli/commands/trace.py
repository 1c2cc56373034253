"""`perturbkv trace`: measure, and leave a trace file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from perturbkv.cli import console, dry_run, option_effects
from perturbkv.cli.commands.sweeping import resolve
from perturbkv.cli.option_routing import telling, with_options
from perturbkv.cli.options import HIDDEN, RunOptions
from perturbkv.cli.planned_run import make_trace, run_folder
from perturbkv.cli.planning import plan
from perturbkv.cli.saving import reachable

if TYPE_CHECKING:
    from perturbkv.pipeline.run.plan import Plan

HDF5 = (".h5", ".hdf5")
"""How the --output ends that is a trace itself, and not its folder."""


@telling(*HIDDEN)
@with_options
def trace(
    run: RunOptions,
    config: Annotated[
        Path | None,
        Option(
            "--config",
            metavar="PATH",
            help="Sweep file (YAML); what is typed replaces its key",
        ),
    ] = None,
    selection: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="How entries are selected", show_default="attention, two-stage"),
    ] = None,
) -> None:
    """Run a model with full and evicted caches; write a trace.

    Every configuration is measured from one prefill per sample, into one HDF5 file. A killed run goes on where it
    stopped when the same command is given the same --output.
    """
    selections = selection or ["attention", "two-stage"]
    if config is None:
        configs = run.configs(selections)
        option_effects.check("trace", run, configs)
        planning: Callable[[], Plan] = partial(plan, run, configs)
    else:
        sweep = resolve(config, run, selections, run.typed)
        option_effects.check("trace", sweep.run, sweep.configs)
        run, planning = sweep.run, sweep.plan
    if run.dry_run:
        dry_run.show(planning(), run.as_json, run_folder(run, run.output), run.part)
        return
    target = run_folder(run, run.output)
    path = reachable(target if target.suffix in HDF5 else target / "trace.h5", run.wait)
    made = make_trace(run, planning(), path)
    if run.as_json:
        console.print_json(describe(made))
    if report(made, run.as_json):
        raise typer.Exit(1)


def report(path: Path, as_json: bool) -> int:
    """Say what a finished trace holds, on stdout unless that is for JSON; returns how many samples failed."""
    from perturbkv.storage.trace.trace_file import read_trace

    finished = read_trace(path)
    if not as_json:
        console.say(f"{path}: {len(finished.sample_ids)} samples, {len(finished.run.configs)} configurations")
    say_failures(dict(finished.failures))
    return len(finished.failures)


def describe(path: Path) -> dict[str, Any]:
    """The same as JSON has it."""
    from perturbkv.analyses.json_values import config_object
    from perturbkv.storage.trace.trace_file import read_trace

    finished = read_trace(path)
    return {
        "trace": str(path),
        "digest": finished.digest,
        "samples": list(finished.sample_ids),
        "failed": dict(finished.failures),
        "configs": [config_object(config) for config in finished.run.configs],
    }


def say_failures(failures: dict[str, str]) -> None:
    """One line per failed sample on stderr."""
    for reason in failures.values():
        console.note(f"failed: {reason}")
