"""`perturbkv info`: what a trace file holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from typer import Argument

from perturbkv.cli import console
from perturbkv.cli.options import JsonOption


def info(
    trace: Annotated[Path, Argument(help="A trace file.", show_default=False)], as_json: JsonOption = False
) -> None:
    """Show a trace's run, samples, variables, sizes and provenance."""
    from perturbkv.store import describe

    description = describe(trace)
    if as_json:
        document = dataclasses.asdict(description)
        console.print_json({**document, "run": description.run.labels(), "path": str(trace)})
        return
    run = description.run
    states = f"{len(description.sample_ids)} samples, {len(description.failures)} failed"
    console.table(str(trace), ["", ""], [("samples", states), *sorted(description.attrs.items())])
    console.table("configurations", ["config"], [(label,) for label in run.labels()])
    rows = [
        (name, " ".join(variable.dims), "×".join(map(str, variable.shape)), variable.units, f"{variable.nbytes:,}")
        for name, variable in description.variables.items()
    ]
    console.table("variables", ["name", "axes", "shape", "unit", "#bytes"], rows)
    for reason in description.failures.values():
        console.say(f"failed: {reason}")
